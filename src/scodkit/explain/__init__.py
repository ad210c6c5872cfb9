"""Why a score is what it is: its shares, its slopes, and known samples that are alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from scodkit.explain import plots
from scodkit.explain.references import Nearest, References
from scodkit.explain.saliency import Saliency, differentiable_score, saliency_of
from scodkit.explain.shares import Shares, Split, shares_of
from scodkit.factors import FactorSource
from scodkit.model.network import Inputs
from scodkit.sketch.eigenbasis import Eigenbasis

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "Explanation",
    "Nearest",
    "References",
    "Saliency",
    "Shares",
    "Split",
    "differentiable_score",
    "explain",
    "saliency_of",
    "shares_of",
]

# shares shown in a figure with other things in it
_TOP = 8


@dataclass(frozen=True)
class Explanation:
    """What the scores of a batch are made of.

    Args:
        score: ``(B,)`` in float64, nats (squared units), >= 0, larger = more atypical;
            infinite for samples with a NaN or an infinity.
        parameters: Shares of the parameters; for each sample they sum to its score.
        layers: Shares of the layers; likewise.
        directions: Shares of the directions of the output; likewise.
        saliency: The score's slopes in the input; None if not asked for.
        nearest: The nearest references; None where none were given.
    """

    score: Tensor
    parameters: Shares
    layers: Shares
    directions: Shares
    saliency: Saliency | None = None
    nearest: Nearest | None = None

    def plot(self, sample: int = 0) -> Figure:
        """Return all of it in one figure, with layers for parameters.

        Args:
            sample: Which sample of the batch. Slopes are shown for vectors and images.
        """
        shares = {"by layer": self.layers, "by direction of the output": self.directions}
        below = self._below(sample)
        tallest = min(_TOP + 1, max(len(part.names) for part in shares.values()))
        heights = [1.1 + 0.25 * tallest, 2.5] if below else [1.1 + 0.25 * tallest]
        figure = plots.new_figure(8.0, sum(heights))
        parts = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False).flat
        parts[0].suptitle(f"score {float(plots.row(self.score, sample)):.3g} nats", fontsize=10)
        for axes, (title, part) in zip(parts[0].subplots(1, 2), shares.items(), strict=True):
            plots.shares(part.names, part.values, sample, _TOP)(axes)
            axes.set_title(title, fontsize=9)
        if below:
            plots.draw_beside(parts[1], below)
        return figure

    def _below(self, sample: int) -> list[plots.Panel]:
        """Return what is to be drawn below the shares."""
        panels: list[plots.Panel] = []
        if self.saliency is not None and 2 <= self.saliency.gradient.ndim <= 4:
            panels += self.saliency.panels(sample)
        if self.nearest is not None:
            index, distance = self.nearest.index, self.nearest.distance
            panels.append(
                plots.distances(plots.row(index, sample), plots.row(distance, sample))
            )
        return panels


def explain(
    source: FactorSource,
    call: Inputs,
    basis: Eigenbasis,
    prior_scale: float,
    *,
    saliency: bool = False,
    references: References | None = None,
    count: int = 3,
) -> Explanation:
    """Explain the scores of a batch.

    Args:
        source: Turns batches into Fisher factors.
        call: The batch.
        basis: The eigenbasis, on the model's device.
        prior_scale: ``eps``, the standard deviation of the prior of a weight.
        saliency: Whether to differentiate the scores by the input, which must be one
            floating-point tensor. Takes several times as long as all the rest.
        references: Samples to look for the nearest among.
        count: How many of them to name for each sample.

    Returns:
        The explanation.
    """
    split = shares_of(source, call, basis, prior_scale)
    return Explanation(
        split.score,
        split.parameters,
        split.layers,
        split.directions,
        saliency_of(source, call, basis, prior_scale) if saliency else None,
        None if references is None else references.nearest(split.features, count),
    )
