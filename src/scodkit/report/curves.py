"""ROC and precision-recall curves, with bands over samples drawn anew."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

_Array = npt.NDArray[np.float64]
_Places = npt.NDArray[np.intp]

_MISSES = 0.05  # share of bands and intervals that may miss
# where curves are looked at: closer where few false alarms are
_GRID: _Array = np.unique(
    np.append(np.linspace(0, 1, 201), np.geomspace(1e-4, 0.05, 25)).round(6)
)


@dataclass(frozen=True)
class Curve:
    """A curve in the unit square, with a band of 95 %, point by point.

    Args:
        x: ``(points,)``, ascending from 0 to 1.
        y: ``(points,)``, the curve.
        low: ``(points,)``, lower end of the band.
        high: ``(points,)``, upper end.
        area: Under the whole curve, not only at these points.
        area_low: Lower end of its interval of 95 %.
        area_high: Upper end.
    """

    x: _Array
    y: _Array
    low: _Array
    high: _Array
    area: float
    area_low: float
    area_high: float

    def at(self, x: float) -> tuple[float, float, float]:
        """Return the curve and the ends of its band at the point nearest to ``x``."""
        place = int(np.abs(self.x - x).argmin())
        return float(self.y[place]), float(self.low[place]), float(self.high[place])


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


def curves(known: Tensor, unknown: Tensor, *, resamples: int = 300, seed: int = 0) -> Curves:
    """Return both curves, with bands.

    Args:
        known: Scores ``(n,)`` of known inputs, larger = more atypical; infinite is fine.
        unknown: Scores ``(m,)`` of unknown inputs.
        resamples: Of the bootstrap, in which both sets are drawn anew with replacement.
        seed: Of the bootstrap.

    Returns:
        The curves. Their areas are the AUROC and the average precision.

    Examples:
        >>> import torch
        >>> found = curves(torch.tensor([1.0, 2.0]), torch.tensor([2.0, 3.0]))
        >>> found.roc.area
        0.875
        >>> found.roc.at(0.5)[0]
        1.0
    """
    places = _places(known, unknown)
    values = max(int(own.max()) for own in places) + 1
    whole = _looked_at(*(_counts(own, values) for own in places))
    generator = np.random.default_rng(seed)
    drawn = []
    for _ in range(resamples):  # one at a time: there may be tens of thousands of values
        again = [own[generator.integers(len(own), size=len(own))] for own in places]
        drawn.append(_looked_at(*(_counts(own, values) for own in again)))
    # Sets that do not overlap do so in no resample either. But a share p of known inputs could
    # lie above all unknown ones and n of them not show it with probability (1 - p)^n: it is
    # taken for possible up to where that is 5 %, and likewise among the unknown ones.
    p = 1 - _MISSES ** (1 / min(len(own) for own in places))
    at_most = (1 - p, 1 - p * math.log1p(1 / p))
    found = []
    for i, bound in enumerate(at_most):
        area, y = whole[i]
        ends = _ends(np.array([one[i][0] for one in drawn]))
        low, high = _ends(np.stack([one[i][1] for one in drawn]))
        area_low, area_high = min(float(ends[0]), bound), float(ends[1])
        found.append(Curve(_GRID, y, low, high, area, area_low, area_high))
    return Curves(*found)


def _places(known: Tensor, unknown: Tensor) -> tuple[_Places, _Places]:
    """Return each score's place among all distinct ones, lowest first."""
    a, b = (scores.detach().cpu().double().numpy() for scores in (known, unknown))
    _, places = np.unique(np.concatenate([a, b]), return_inverse=True)
    return places[: len(a)], places[len(a) :]


def _counts(places: _Places, values: int) -> _Array:
    return np.bincount(places, minlength=values).astype(np.float64)


def _ends(drawn: _Array) -> tuple[_Array, _Array]:
    low, high = np.quantile(drawn, [_MISSES / 2, 1 - _MISSES / 2], axis=0)
    return low, high


def _looked_at(
    known: _Array, unknown: _Array
) -> tuple[tuple[float, _Array], tuple[float, _Array]]:
    """Return area and height on the grid of both curves, from counts at each place."""
    n, m = known.sum(), unknown.sum()
    alarms = np.append(0.0, np.cumsum(known[::-1])) / n
    caught = np.append(0.0, np.cumsum(unknown[::-1])) / m
    auroc = float(np.sum(np.diff(alarms) * (caught[1:] + caught[:-1])) / 2)
    # as many false alarms as are allowed: the last of the points above one another
    last = np.append(np.diff(alarms) > 0, True)
    roc = np.interp(_GRID, alarms[last], caught[last])
    at = unknown[::-1] > 0
    recall = caught[1:][at]
    precision = recall / (recall + alarms[1:][at])
    aupr = float(np.diff(recall, prepend=0.0) @ precision)
    # precision holds from the recall before up to its own
    step = np.searchsorted(recall, _GRID - 1e-12).clip(max=len(recall) - 1)
    return (auroc, roc), (aupr, precision[step])
