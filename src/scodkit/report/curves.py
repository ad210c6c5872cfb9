"""ROC and precision-recall curves, with bands over samples drawn anew."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from scodkit.report.separation import (
    Array,
    Roc,
    areas_with,
    bootstrapped,
    ends_of,
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
    # one curve at a time: there may be tens of thousands of scores
    each = [
        ((one.auroc, _caught(one)), (one.aupr, _precision(one)))
        for one in bootstrapped(known, unknown, resamples, seed)
    ]
    bounds = areas_with(unseen_share(known, unknown))
    found = []
    for ((area, y), *drawn), bound in zip(zip(*each, strict=True), bounds, strict=True):
        area_low, area_high = ends_of([own for own, _ in drawn])
        low, high = ends_of([own for _, own in drawn])
        ends = (min(float(area_low), bound), float(area_high))
        found.append(Curve(_GRID, y, low, high, area, *ends))
    return Curves(*found)


def _caught(roc: Roc) -> Array:
    """Return the share of unknown inputs caught at each share of false alarms of the grid."""
    # as many false alarms as are allowed: the last of the points above one another
    last = np.append(np.diff(roc.false) > 0, True)
    caught: Array = np.interp(_GRID, roc.false[last], roc.true[last])
    return caught


def _precision(roc: Roc) -> Array:
    """Return the precision at each recall of the grid: it holds from the recall before."""
    precision, recall = roc.precision_recall
    step = np.searchsorted(recall, _GRID - 1e-12).clip(max=len(recall) - 1)
    held: Array = precision[step]
    return held
