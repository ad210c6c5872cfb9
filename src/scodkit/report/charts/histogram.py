"""Histograms of the scores of all sets, with the threshold of the alarm."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from scodkit.report.charts.canvas import (
    Chart,
    Key,
    add_hover,
    colours_of,
    mark,
    new_plot,
    paint,
)
from scodkit.report.scored_set import ScoredSet
from scodkit.report.table import number, plain

_BINS = 36


def histogram(
    sets: Sequence[ScoredSet], threshold: float | None, false_alarm: float
) -> Chart | None:
    """Return histograms of all sets, each as shares of its own; None without finite scores.

    Args:
        sets: Scored inputs.
        threshold: Score of the alarm; None for no line.
        false_alarm: The rate it is for.
    """
    edges, is_log = _edges(sets, threshold)
    if edges is None:
        return None
    heights = [shares(one, edges) for one in sets]
    top = 1.12 * max(float(height.max()) for height in heights)
    ends = (float(edges[0]), float(edges[-1]))
    plot = new_plot("score, nats", "% of the set", ends, (0.0, top), x_log=is_log)
    keys = []
    for one, height, colour in zip(sets, heights, colours_of(sets), strict=True):
        drawn = plot.quad(
            left="left",
            right="right",
            top="share",
            bottom=0,
            fill_alpha=0.45,
            line_width=1.5,
            source={
                "left": edges[:-1].tolist(),
                "right": edges[1:].tolist(),
                "share": height.tolist(),
                "set": [one.name] * len(height),
            },
        )
        paint(drawn, fill=colour, line=colour)
        tips = [("set", "@set"), ("scores", "@left{0.0000} to @right{0.0000}")]
        add_hover(plot, [drawn], [*tips, ("share", "@share{0.0} %")])
        keys.append(Key(one.name, colour, "area"))
    if threshold is not None:
        mark(plot, (threshold, threshold), (0.0, top))
        keys.append(
            Key(
                f"alarm, {number(100 * false_alarm).text} % false alarms accepted",
                "ink",
                "dashed",
            )
        )
    rows = [
        [float(low), float(high), *(float(height[i]) for height in heights)]
        for i, (low, high) in enumerate(itertools.pairwise(edges))
    ]
    titles = ["from", "to", *(f"{one.name}, %" for one in sets)]
    numbers = plain("Shares of the sets between scores", titles, rows)
    title = "Scores of known and unknown inputs"
    return Chart("histogram", title, _says(sets, threshold), plot, tuple(keys), numbers)


def shares(one: ScoredSet, edges: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return how many of a hundred scores of a set lie between edges, the last one included.

    Args:
        one: The set; infinite scores count as a part of it that is not drawn.
        edges: ``(bins + 1,)``, ascending.
    """
    counts, _ = np.histogram(one.scores.numpy(), edges)
    return np.asarray(counts * (100 / len(one)), dtype=np.float64)


def _edges(
    sets: Sequence[ScoredSet], threshold: float | None
) -> tuple[npt.NDArray[np.float64] | None, bool]:
    """Return edges of bins over all finite scores, and whether they are logarithmic."""
    scores = torch.cat([one.scores for one in sets])
    finite = scores[scores.isfinite()]
    if threshold is not None:
        finite = torch.cat([finite, torch.tensor([threshold], dtype=finite.dtype)])
    if not len(finite):
        return None, False
    low, high = float(finite.min()), float(finite.max())
    if low > 0 and high > low:
        edges = np.geomspace(low, high, _BINS + 1)
    else:
        high = high if high > low else low + 1.0
        edges = np.linspace(low, high, _BINS + 1)
    edges[0], edges[-1] = low, high  # rounding must not lose the ends
    return edges, low > 0 and high > low


def _says(sets: Sequence[ScoredSet], threshold: float | None) -> str:
    parts = [f"{one.name}: median {float(one.scores.median()):.3g} nats" for one in sets]
    infinite = sum(int(one.scores.isinf().sum()) for one in sets)
    said = "; ".join(parts) + "."
    if threshold is not None:
        said += f" The alarm rises above {threshold:.3g} nats."
    if infinite:
        said += f" {infinite} infinite scores lie beyond the right end."
    return said
