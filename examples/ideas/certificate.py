"""Bounds on the exact score, rank by rank, beside the exact score itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import control
import look
import torch
from torch import Tensor

from scodkit import Monitor
from scodkit.sketch import Exact

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

RANKS = (10, 20, 50, 100, 200, 350, 500)


@dataclass(frozen=True)
class Found:
    """Bounds of every rank on the scores of the same inputs, all in nats.

    Args:
        ranks: Directions kept.
        lower: Lower bounds, ``(ranks, B)``.
        score: Scores, ``(ranks, B)``.
        upper: Upper bounds, ``(ranks, B)``.
        exact: Scores with the whole Fisher information, ``(B,)``.
        captured: Share of the curvature that each rank holds.
    """

    ranks: tuple[int, ...]
    lower: Tensor
    score: Tensor
    upper: Tensor
    exact: Tensor
    captured: list[float]


def find() -> Found:
    """Fit once with all ranks, certify with each; fit without a sketch for the exact scores."""
    made = control.trained()
    x = torch.cat([made.heldout, made.far])
    exact = Monitor(made.net, control.LIKELIHOOD, rank=10**6, sketch=Exact())
    exact.fit(made.x.split(250), progress=False)
    found, captured = [], []
    for rank in RANKS:
        monitor = Monitor(made.net, control.LIKELIHOOD, rank=rank)
        monitor.fit(made.x.split(250), progress=False)
        found.append(monitor.certify(x))
        captured.append(monitor.basis.captured)
    lower, score, upper = (
        torch.stack([getattr(bounds, name) for bounds in found])
        for name in ("lower", "score", "upper")
    )
    return Found(RANKS, lower, score, upper, exact.score(x), captured)


def draw(found: Found) -> Figure:
    """Draw the bounds of two inputs, and how wide they are for all."""
    figure, (above, below) = look.panels((3.1, 2.5))
    half = found.exact.shape[0] // 2
    middle = found.exact[:half].argsort()[half // 2]
    middle_far = half + found.exact[half:].argsort()[half // 2]
    for i, colour, name in (
        (middle_far, look.RED, "an input three times as large"),
        (middle, look.BLUE, "a held-out input"),
    ):
        _bounds(above, found, int(i), colour, name)
    look.name_axes(above, "", "score, nats", xscale="log", yscale="log")
    look.title(above, "Certified bounds (bands) and exact score (dashed)")
    look.key(above, loc="lower left")
    wide = found.upper / found.lower
    for at, colour, name in (
        (slice(half, None), look.RED, "three times as large"),
        (slice(half), look.BLUE, "held out"),
    ):
        low, mid, high = torch.quantile(
            wide[:, at], torch.tensor([0.05, 0.5, 0.95]).double(), dim=1
        )
        below.fill_between(found.ranks, low, high, color=colour, alpha=0.25, lw=0)
        below.plot(found.ranks, mid, color=colour, marker="o", ms=3, label=name)
    look.name_axes(below, "rank (directions kept)", "upper / lower", xscale="log", yscale="log")
    look.title(below, "Width: median of 200 inputs, band: 90 % of them")
    look.key(below, loc="lower left")
    for axes in (above, below):
        axes.set_xticks(found.ranks, [str(rank) for rank in found.ranks])
        axes.minorticks_off()
    return figure


def _bounds(axes: Axes, found: Found, i: int, colour: str, name: str) -> None:
    lower, upper = found.lower[:, i], found.upper[:, i]
    axes.fill_between(found.ranks, lower, upper, color=colour, alpha=0.3, lw=0)
    axes.plot(found.ranks, found.score[:, i], color=colour, marker="o", ms=3, label=name)
    axes.axhline(float(found.exact[i]), color=colour, ls="--", lw=1.2)
