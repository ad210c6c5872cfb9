"""The summary of a fit, with plain words where something looks wrong."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from scodkit.explain import plots
from scodkit.scoring import score as scoring
from scodkit.scoring.certificate import certificate
from scodkit.scoring.energies import Energies
from scodkit.sketch.eigenbasis import Eigenbasis

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# captured curvature below which the rank is called small
_LITTLE = 0.5
# spread of scores over their mean below which they are called constant
_CONSTANT = 1e-3
# layers that are listed by name
_NAMED = 6


@dataclass(frozen=True)
class Summary:
    """The summary of a fit. Print it, or look at it with `plot`.

    Args:
        num_data: ``M``, samples in the fit.
        skipped: Samples left out of it because they were not finite.
        num_parameters: ``N``, how many weights were chosen.
        layers: How many of them each layer has, by its name.
        captured: Share of the curvature in the basis, in [0, 1].
        effective_rank: How many directions that curvature is spread over: the exponential of
            the entropy of the eigenvalues.
        values: The spectrum, ``(k,)``, descending; nats per squared weight.
        determined: How far data rather than the prior decides along each direction, ``(k,)``
            in [0, 1).
        certified: Whether scores are known to be upper bounds of those that all of the
            curvature would give.
        scores: Scores of samples that were not fitted, ``(n,)`` ascending; nats, larger = more
            atypical. None if there were none.
        explained: Mean share of ``|L|^2`` of such samples that lies in the basis, in [0, 1];
            None if there were none with an ``L``.
        bounds: Medians of their certificates' lower and upper bounds, nats; None if there were
            none, or there is no certificate.
        notes: What looks wrong, and what to do about it.
    """

    num_data: int
    skipped: int
    num_parameters: int
    layers: Mapping[str, int]
    captured: float
    effective_rank: float
    values: Tensor
    determined: Tensor
    certified: bool
    scores: Tensor | None
    explained: float | None
    bounds: tuple[float, float] | None
    notes: tuple[str, ...]

    def __str__(self) -> str:
        lines = [
            f"fitted on            {self.num_data} samples"
            + (f", {self.skipped} skipped" if self.skipped else ""),
            f"weights              {self.chosen}",
            f"captured curvature   {self.captured:.3f} with rank {len(self.values)}, "
            f"{'certified' if self.certified else 'scores not certified'}",
            f"effective rank       {self.effective_rank:.1f}",
        ]
        if len(self.determined):
            first, last = float(self.determined[0]), float(self.determined[-1])
            lines.append(f"determined by data   {first:.3f} (first) to {last:.3f} (last)")
        if self.scores is not None and len(self.scores):
            low, middle, high = _quantiles(self.scores)
            lines += [
                f"scores               {middle:.3g} ({low:.3g} to {high:.3g})",
                f"                     {'upper bounds, ' if self.certified else ''}comparable "
                "within one monitor, not across ranks",
            ]
        if self.bounds is not None:
            lower, upper = self.bounds
            apart = (
                f"bounds {upper / lower:.2g} times apart" if lower > 0 else "nothing from below"
            )
            lines.append(f"certificate          {lower:.3g} to {upper:.3g} (medians), {apart}")
        if self.explained is not None:
            lines.append(f"explained            {self.explained:.3f} of |L|^2 in the basis")
        lines += [f"! {note}" for note in self.notes] or ["nothing looks wrong"]
        return "\n".join(lines)

    @property
    def chosen(self) -> str:
        """How many weights were chosen, and of which layers, in words."""
        named = [f"{layer} ({count})" for layer, count in list(self.layers.items())[:_NAMED]]
        if len(self.layers) > _NAMED:
            named.append(f"{len(self.layers) - _NAMED} more")
        return f"{self.num_parameters}, by layer: {', '.join(named)}"

    def plot(self) -> Figure:
        """Return a figure: the spectrum, how far data decides, and scores if there are some."""
        panels = 2 if self.scores is None else 3
        figure = plots.new_figure(panels * 4.2, 3.2)
        axes = figure.subplots(1, panels)
        directions = range(1, len(self.values) + 1)
        axes[0].semilogy(directions, self.values.clamp_min(1e-300), ".-", color=plots.LOWERS)
        axes[0].set(title=f"spectrum: {self.captured:.1%} captured", xlabel="direction")
        axes[0].set_ylabel("eigenvalue, nats per squared weight")
        axes[1].plot(directions, self.determined, ".-", color=plots.GREEN)
        axes[1].set(
            title="determined by data, not the prior", xlabel="direction", ylim=(0, 1.05)
        )
        if self.scores is not None:
            positive = self.scores[self.scores.isfinite() & (self.scores > 0)]
            axes[2].hist(positive.log10().numpy(), bins=40, color=plots.YELLOW)
            axes[2].set(title="samples not fitted", ylabel="samples")
            axes[2].set_xlabel("score, nats, as powers of ten")
        for panel in axes:
            panel.grid(alpha=0.3)
        return figure


def summarise(
    basis: Eigenbasis,
    prior_scale: float,
    weights: Mapping[str, int],
    skipped: int,
    scores: Tensor | None,
    parts: Energies | None,
) -> Summary:
    """Return the summary of a fit.

    Args:
        basis: Its basis.
        prior_scale: ``eps``.
        weights: How many weights each chosen parameter has, by its name.
        skipped: Samples it left out because they were not finite.
        scores: Scores of samples that were not fitted, ``(n,)``, if there are any.
        parts: The energies of such samples, if known.
    """
    values = basis.values.double().cpu()
    spread = torch.special.entr(values / values.sum()).sum()
    determined = scoring.determined(basis, prior_scale).cpu()
    if scores is not None:
        scores = scores.detach().double().cpu().sort().values
    explained = bounds = None
    if parts is not None:
        finite = parts.total.isfinite()
        parts = Energies(parts.total[finite], parts.along[finite])
        # the L of a confident classifier may underflow to 0, while its parts do not
        positive = parts.total > 0
        if bool(positive.any()):
            shares = parts.along[positive].sum(1) / parts.total[positive]
            explained = float(shares.clamp_max(1).mean())
        if basis.over_estimates and bool(finite.any()):
            bounded = certificate(parts, basis, prior_scale)
            bounds = _quantiles(bounded.lower)[1], _quantiles(bounded.upper)[1]
    layers: dict[str, int] = {}
    for name, count in weights.items():
        layer = name.rpartition(".")[0] or "the model itself"
        layers[layer] = layers.get(layer, 0) + count
    return Summary(
        num_data=basis.num_data,
        skipped=skipped,
        num_parameters=basis.vectors.shape[0],
        layers=layers,
        captured=basis.captured,
        effective_rank=float(spread.exp()) if values.any() else 0.0,
        values=values,
        determined=determined,
        certified=basis.over_estimates,
        scores=scores,
        explained=explained,
        bounds=bounds,
        notes=tuple(_notes(basis, determined, scores)),
    )


def _quantiles(scores: Tensor) -> list[float]:
    levels = torch.tensor([0.05, 0.5, 0.95], dtype=scores.dtype, device=scores.device)
    # between two infinities there is no number
    return torch.quantile(scores, levels, interpolation="nearest").tolist()


def _notes(basis: Eigenbasis, determined: Tensor, scores: Tensor | None) -> list[str]:
    notes = []
    if basis.trace == 0.0:
        notes.append(
            "no output depends on the chosen weights: every score is 0; choose other "
            "parameters=..."
        )
    elif len(determined) and float(determined[0]) < _LITTLE:
        notes.append(
            "the prior dominates: even along the best-known direction the data decides less "
            f"than half ({float(determined[0]):.2f}); raise prior_scale, or fit on more data"
        )
    elif basis.inside < _LITTLE:
        notes.append(
            f"the projections are too narrow: {basis.inside:.0%} of the curvature is in their "
            "space; type Projected(rank=...) with twice the rank, or more samples="
        )
    elif basis.captured < _LITTLE:
        notes.append(
            f"the rank is too small: {basis.rank} directions hold {basis.captured:.0%} of the "
            f"curvature; type Monitor(..., rank={2 * basis.rank}) or more"
        )
    if scores is not None and len(scores) > 1:
        finite = scores[scores.isfinite()]
        if len(finite) > 1 and float(finite.std()) <= _CONSTANT * float(finite.mean().abs()):
            notes.append(
                "the scores are constant: they do not tell inputs apart; choose parameters "
                "whose gradients depend on the input (not the last bias alone), and for a "
                "single output Bernoulli() or Gaussian(): with Categorical() it cannot be right"
            )
    return notes
