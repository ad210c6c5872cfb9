"""How a score adds up, direction by direction of the training data's curvature."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import control
import look
import torch
from torch import Tensor

from scodkit import Monitor

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RANK = 200


@dataclass(frozen=True)
class Found:
    """The directions of a fit, and what each adds to the scores of two kinds of input.

    Args:
        values: Eigenvalues, ``(k,)``, descending.
        prior: ``c``, the curvature that the prior stands for.
        held: Parts of the scores of held-out inputs: of each direction kept, and last of all
            that is left out, ``(B, k + 1)``, nats.
        far: The same of inputs three times as large.
        sensitivity: The scores of both kinds if there were no data, ``(2, B)``.
        scores: The scores of both kinds, as the monitor returns them, ``(2, B)``.
    """

    values: Tensor
    prior: float
    held: Tensor
    far: Tensor
    sensitivity: Tensor
    scores: Tensor

    @property
    def open(self) -> Tensor:
        """Share of each direction that the data leaves open, ``(k,)``."""
        return self.prior / (self.values + self.prior)


def find() -> Found:
    """Fit the control network, take scores of both kinds apart."""
    made = control.trained()
    monitor = Monitor(made.net, control.LIKELIHOOD, rank=RANK)
    monitor.fit(made.x.split(250), progress=False)
    values = monitor.basis.values
    prior = 1 / (2 * monitor.basis.num_data * monitor.prior_scale**2)
    parts, totals, scores = [], [], []
    for x in (made.heldout, made.far):
        along = monitor.features(x).square().sum(1)  # of each direction, (B, k)
        scored = monitor.evidence(x)
        total = scored.score / scored.unexplained_share  # eps^2 |L|^2
        outside = (total - along.sum(1))[:, None]
        parts.append(torch.cat([along * prior / (values + prior), outside], 1))
        totals.append(total)
        scores.append(scored.score)
    return Found(values, prior, *parts, torch.stack(totals), torch.stack(scores))


def draw(found: Found) -> Figure:
    """Draw eigenvalues, shares left open, and how scores add up."""
    figure, (values, shares, sums) = look.panels((2.0, 1.5, 2.5))
    order = range(1, len(found.values) + 1)
    values.semilogy(order, found.values, color=look.BLUE, lw=1.8)
    values.axhline(found.prior, color="black", ls="--", lw=1)
    values.text(RANK, 2 * found.prior, "c, what the prior stands for", ha="right", **look.SMALL)
    look.name_axes(values, "", "eigenvalue", ylim=(found.prior / 3, None))
    look.title(values, "Curvature of the training data")
    shares.semilogy(order, found.open, color=look.GREEN, lw=1.8)
    look.name_axes(shares, "", "share", ylim=(1e-8, 1))
    look.title(shares, "Left open by the data: c / (eigenvalue + c)")
    for parts, total, colour, name in (
        (found.far, found.sensitivity[1], look.RED, "three times as large"),
        (found.held, found.sensitivity[0], look.BLUE, "held out"),
    ):
        i = parts.sum(1).argsort()[len(parts) // 2]  # the median one
        along = parts[i, :-1] / found.open  # without the shares
        left = total[i] - along.cumsum(0)
        sums.semilogy(order, left, color=colour, lw=1.8, label=name)
        sums.semilogy(order, parts[i, :-1].cumsum(0), color=colour, ls=":", lw=1.4)
    look.name_axes(sums, "directions kept, from the largest eigenvalue on", "nats")
    sums.set_ylim(1e-6, 3e4)
    look.title(sums, "The score: outside of them (line), inside (dotted)")
    look.key(sums, loc="lower right")
    return figure
