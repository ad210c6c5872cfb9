"""ROC and precision-recall curves, with bands over samples drawn anew."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from scodkit.separation import (
    Array,
    areas_with,
    counts_of,
    ends_of,
    places_of,
    redrawn,
    unseen_share,
)

# where curves are looked at: closer where few false alarms are
_GRID: Array = np.unique(
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

    x: Array
    y: Array
    low: Array
    high: Array
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
    places = places_of(known, unknown)
    whole = _looked_at(*counts_of(places))
    drawn = [_looked_at(*counts) for counts in redrawn(places, resamples, seed)]
    at_most = areas_with(unseen_share(places))
    found = []
    for i, bound in enumerate(at_most):
        area, y = whole[i]
        ends = ends_of([one[i][0] for one in drawn])
        low, high = ends_of([one[i][1] for one in drawn])
        area_low, area_high = min(float(ends[0]), bound), float(ends[1])
        found.append(Curve(_GRID, y, low, high, area, area_low, area_high))
    return Curves(*found)


def _looked_at(known: Array, unknown: Array) -> tuple[tuple[float, Array], tuple[float, Array]]:
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
