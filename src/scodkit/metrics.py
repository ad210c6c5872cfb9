"""How well scores tell unknown inputs from known ones: figures and curves, with intervals.

Scores are tensors, arrays or lists of numbers ``(n,)``, larger = more atypical, of any method.
Unknown inputs are the positives, and both sets weigh the same, so that every figure follows
from the ROC curve. Tests compare the figures with scikit-learn's, which takes 4 to 13 times
longer for each curve of a bootstrap.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from scodkit.errors import OptionError

Array = np.ndarray[tuple[int, ...], np.dtype[np.float64]]
# of any method: a tensor, an array or a list (n,), larger = more atypical
Scores: TypeAlias = ArrayLike | Tensor

_MISSES = 0.05  # share of intervals that may miss


@dataclass(frozen=True)
class Separation:
    """How well scores separate two sets; unknown inputs are the positives.

    None of the figures depends on how many inputs of either kind there are. Intervals are of
    95 %, by the bootstrap.

    Args:
        auroc: Probability that an unknown input scores higher than a known one, ties half.
        aupr: Average precision of the unknown inputs, both sets weighing the same: 0.5 for a
            score that tells nothing. The SCOD paper has the trapezoidal rule instead, which
            gives such a score 0.75.
        fpr95: Share of known inputs above the threshold that catches 95 % of the unknown.
        auroc_low: Lower end of the interval of the AUROC.
        auroc_high: Upper end.
        aupr_low: Lower end of the interval of the AUPR.
        aupr_high: Upper end.
        fpr95_low: Lower end of the interval of the FPR95.
        fpr95_high: Upper end.
    """

    auroc: float
    aupr: float
    fpr95: float
    auroc_low: float
    auroc_high: float
    aupr_low: float
    aupr_high: float
    fpr95_low: float
    fpr95_high: float


@dataclass(frozen=True)
class Roc:
    """The ROC curve of two sets of scores, at every distinct score.

    Args:
        false: Shares of known inputs above falling thresholds, ``(points,)`` from 0 to 1.
        true: Shares of unknown inputs, likewise.
    """

    false: Array
    true: Array

    @property
    def auroc(self) -> float:
        """Area under the curve."""
        return float(np.sum(np.diff(self.false) * (self.true[1:] + self.true[:-1])) / 2)

    @property
    def precision_recall(self) -> tuple[Array, Array]:
        """Shares of unknown inputs among alarms, and caught: where one more is caught."""
        caught = np.diff(self.true, prepend=0.0) > 0
        recall = self.true[caught]
        return recall / (recall + self.false[caught]), recall

    @property
    def aupr(self) -> float:
        """Average precision."""
        precision, recall = self.precision_recall
        return float(np.diff(recall, prepend=0.0) @ precision)

    @property
    def fpr95(self) -> float:
        """Share of known inputs above the threshold that catches 95 % of the unknown."""
        return float(self.false[np.argmax(self.true >= 0.95 - 1e-12)])


def separation(
    known: Scores, unknown: Scores, *, resamples: int = 1000, seed: int = 0
) -> Separation:
    """Return how well scores separate two sets.

    Args:
        known: Scores ``(n,)`` of known inputs, larger = more atypical; infinite is fine. A
            tensor, an array or a list of numbers.
        unknown: Scores ``(m,)`` of unknown inputs.
        resamples: Of the bootstrap, in which both sets are resampled with replacement. It
            says nothing of other trained networks: that is what seeds are for.
        seed: Of the bootstrap.

    Examples:
        >>> apart = separation([1.0, 2.0], [2.0, 3.0])
        >>> apart.auroc, apart.fpr95
        (0.875, 0.5)
    """
    # one curve at a time: there may be tens of thousands of scores
    known, unknown = checked(known), checked(unknown)
    drawn = bootstrapped(known, unknown, resamples, seed)
    figures = [(roc.auroc, roc.aupr, roc.fpr95) for roc in drawn]
    # the first is of the sets themselves, and where scores are tied in many ways all resamples
    # may lie on one side of it
    (auroc, aupr, fpr95), low, high = figures[0], *_interval_95(figures[1:])
    low, high = np.fmin(low, figures[0]).tolist(), np.fmax(high, figures[0]).tolist()
    # sets that do not overlap, in either order, do so in no resample: their interval has this
    # width still
    auroc_bound, aupr_bound, fpr95_bound = _bounds(known, unknown)
    return Separation(
        auroc=auroc,
        aupr=aupr,
        fpr95=fpr95,
        auroc_low=min(low[0], auroc_bound),
        auroc_high=max(high[0], 1 - auroc_bound),
        aupr_low=min(low[1], aupr_bound),
        aupr_high=high[1],
        fpr95_low=low[2],
        fpr95_high=max(high[2], fpr95_bound),
    )


def bootstrapped(known: Scores, unknown: Scores, resamples: int, seed: int) -> Iterator[Roc]:
    """Yield the ROC curve, then those of both sets resampled with replacement.

    Args:
        known: Scores ``(n,)``, larger = more atypical.
        unknown: Scores ``(m,)``.
        resamples: How many.
        seed: Of the bootstrap.
    """
    known, unknown = checked(known), checked(unknown)
    both = np.concatenate([known, unknown])
    values, ranks = np.unique(-both, return_inverse=True)  # highest scores first
    sets = sample = np.split(ranks, [len(known)])
    generator = np.random.default_rng(seed)
    for _ in range(resamples + 1):
        counts = [np.bincount(part, minlength=len(values)) for part in sample]
        false, true = (np.append(0, np.cumsum(count)) / count.sum() for count in counts)
        yield Roc(false, true)
        sample = [part[generator.integers(len(part), size=len(part))] for part in sets]


def checked(scores: Scores) -> Array:
    """Return scores as an array ``(n,)`` in float64; infinite ones are fine.

    Args:
        scores: One real number for each input.

    Raises:
        OptionError: If there are none, or something else is among them.
    """
    if isinstance(scores, Tensor):
        # numpy has no bfloat16
        scores = scores.detach().to(
            "cpu", torch.float64 if scores.is_floating_point() else None
        )
    array = np.asarray(scores)
    if array.ndim != 1 or array.dtype.kind not in "fiub" or not len(array):
        raise OptionError(
            f"expected scores (n,), real numbers, one for each of at least one input, got "
            f"{array.dtype} of shape {array.shape}; reduce outputs to a score an input first, "
            "and leave empty sets out"
        )
    bad = np.isnan(array)
    if bad.any():
        raise OptionError(
            f"expected scores that are numbers, got {len(array)} of which {int(bad.sum())} are "
            f"NaN, the first at {int(bad.argmax())}; leave those inputs out, or score them "
            "infinity, the most atypical"
        )
    return array.astype(np.float64)


def _interval_95(resampled: ArrayLike) -> Array:
    """Return the lower and the upper ends ``(2, ...)`` over resamples, the first axis."""
    levels = [_MISSES / 2, 1 - _MISSES / 2]
    return np.quantile(np.asarray(resampled, dtype=np.float64), levels, axis=0)


def _bounds(known: Array, unknown: Array) -> tuple[float, float, float]:
    """Return the worst AUROC, AUPR and FPR95 that these samples may well not show.

    Sets that do not overlap do so in no resample either, and would get an interval of no
    width. But a share p of known inputs could lie above all unknown ones, and n of them not
    show it with probability (1 - p)^n: p counts as possible up to where that is 5 %, and
    likewise among m unknown ones.

    For the AUROC this is a lower bound whatever the scores: min(n, m) pairs are independent,
    and each is in order with a probability of the AUROC. One minus it is an upper bound.
    """
    share = 1 - _MISSES ** (1 / min(len(known), len(unknown)))
    return 1 - share, 1 - share * math.log1p(1 / share), share


# where curves are evaluated: denser where there are few false alarms
_GRID: Array = np.unique(
    np.append(np.linspace(0, 1, 201), np.geomspace(1e-4, 0.05, 25)).round(6)
)


@dataclass(frozen=True)
class Curve:
    """A curve in the unit square, with a pointwise band of 95 %.

    Args:
        x: ``(points,)``, ascending from 0 to 1.
        y: ``(points,)``, the curve.
        low: ``(points,)``, lower end of the band.
        high: ``(points,)``, upper end.
        area: Under the whole curve, not only at these points.
        area_low: Lower end of its interval of 95 %.
        area_high: Upper end.
    """

    x: Array
    y: Array
    low: Array
    high: Array
    area: float
    area_low: float
    area_high: float

    def at(self, x: float) -> tuple[float, float, float]:
        """Return the curve and the ends of its band at the point nearest to ``x``."""
        nearest = int(np.abs(self.x - x).argmin())
        return float(self.y[nearest]), float(self.low[nearest]), float(self.high[nearest])


@dataclass(frozen=True)
class Curves:
    """How well scores tell unknown inputs, the positives, from known ones.

    Args:
        roc: Share of unknown inputs caught, over the share of known ones that raise an alarm.
        precision_recall: Share of alarms that are unknown inputs, both sets weighing the
            same, over the share of unknown inputs caught.
    """

    roc: Curve
    precision_recall: Curve


def curves(known: Scores, unknown: Scores, *, resamples: int = 300, seed: int = 0) -> Curves:
    """Return both curves, with bands.

    Args:
        known: Scores ``(n,)`` of known inputs, larger = more atypical; infinite is fine.
        unknown: Scores ``(m,)`` of unknown inputs.
        resamples: Of the bootstrap, in which both sets are resampled with replacement.
        seed: Of the bootstrap.

    Returns:
        The curves. Their areas are the AUROC and the average precision.

    Examples:
        >>> drawn = curves(torch.tensor([1.0, 2.0]), torch.tensor([2.0, 3.0]))
        >>> drawn.roc.area
        0.875
        >>> drawn.roc.at(0.5)[0]
        1.0
    """
    known, unknown = checked(known), checked(unknown)
    rocs, precisions = [], []
    for roc in bootstrapped(known, unknown, resamples, seed):
        rocs.append((roc.auroc, _caught_on_grid(roc)))
        precisions.append((roc.aupr, _precision_on_grid(roc)))
    auroc_bound, aupr_bound, _ = _bounds(known, unknown)
    return Curves(
        _with_band(rocs, auroc_bound, 1 - auroc_bound), _with_band(precisions, aupr_bound, 0.0)
    )


def _with_band(drawn: list[tuple[float, Array]], lowest: float, highest: float) -> Curve:
    """Return the first of some curves, each an area and heights, with the band of the others.

    Args:
        drawn: The curve, then those of resamples.
        lowest: Where the area's interval begins at the latest.
        highest: Where it ends at the earliest.
    """
    (area, y), *resampled = drawn
    area_low, area_high = _interval_95([area for area, _ in resampled]).tolist()
    low, high = _interval_95([heights for _, heights in resampled])
    ends = min(area_low, area, lowest), max(area_high, area, highest)
    return Curve(_GRID, y, low, high, area, *ends)


def _caught_on_grid(roc: Roc) -> Array:
    """Return the share of unknown inputs caught at each share of false alarms of the grid."""
    # as many false alarms as are allowed: the last of the points above one another
    last = np.append(np.diff(roc.false) > 0, True)
    caught: Array = np.interp(_GRID, roc.false[last], roc.true[last])
    return caught


def _precision_on_grid(roc: Roc) -> Array:
    """Return the precision at each recall of the grid: it holds from the recall before."""
    precision, recall = roc.precision_recall
    step = np.searchsorted(recall, _GRID - 1e-12).clip(max=len(recall) - 1)
    heights: Array = precision[step]
    return heights
