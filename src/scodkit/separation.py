"""How well scores tell unknown inputs from known ones, with honest intervals."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from scodkit.errors import OptionError

Array = np.ndarray[tuple[int, ...], np.dtype[np.float64]]
Places = np.ndarray[tuple[int, ...], np.dtype[np.intp]]

_MISSES = 0.05  # share of intervals that may miss


@dataclass(frozen=True)
class Separation:
    """How well scores separate two sets; unknown inputs are the positives.

    None of the figures depends on how many inputs of either kind there are. Intervals are of
    95 %, over samples drawn anew.

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


def separation(
    known: Tensor, unknown: Tensor, *, resamples: int = 1000, seed: int = 0
) -> Separation:
    """Return how well scores separate two sets.

    Args:
        known: Scores ``(n,)`` of known inputs, larger = more atypical; infinite is fine.
        unknown: Scores ``(m,)`` of unknown inputs.
        resamples: Of the bootstrap, in which both sets are drawn anew with replacement. It
            says nothing of other trained networks: that is what seeds are for.
        seed: Of the bootstrap.

    Raises:
        OptionError: If a set is empty, or a score is not a number.

    Examples:
        >>> found = separation(torch.tensor([1.0, 2.0]), torch.tensor([2.0, 3.0]))
        >>> found.auroc, found.fpr95
        (0.875, 0.5)
    """
    places = places_of(known, unknown)
    figures = _figures(*counts_of(places))
    low, high = _interval(places, resamples, seed)
    # the ends are no better than such a share allows; for the AUROC this is a bound, whatever
    # the scores: min(n, m) pairs are independent, and each is in order with a probability of
    # the AUROC
    p = unseen_share(places)
    low[:2] = np.minimum(low[:2], areas_with(p))
    high[2] = max(high[2], p)
    return Separation(*figures, *np.stack([low, high], axis=1).flatten().tolist())


def roc(known: Tensor, unknown: Tensor, points: int = 101) -> tuple[list[float], list[float]]:
    """Return the ROC curve, thinned out evenly along its way.

    Args:
        known: Scores ``(n,)``, larger = more atypical.
        unknown: Scores ``(m,)``.
        points: How many, both ends included.

    Returns:
        Shares of known and of unknown inputs above falling thresholds.

    Examples:
        >>> roc(torch.tensor([1.0, 2.0]), torch.tensor([2.0, 3.0]), points=3)
        ([0.0, 0.25, 1.0], [0.0, 0.75, 1.0])
    """
    rates = [
        np.cumsum(np.append(0.0, counts[::-1])) / counts.sum()
        for counts in counts_of(places_of(known, unknown))
    ]
    # their sum only grows along the curve
    where = np.linspace(0, 2, points)
    false, true = (np.interp(where, rates[0] + rates[1], rate).round(5) for rate in rates)
    return false.tolist(), true.tolist()


def places_of(known: Tensor, unknown: Tensor) -> tuple[Places, Places]:
    """Return each score's place among all distinct ones, lowest first."""
    a, b = (_checked(scores) for scores in (known, unknown))
    _, places = np.unique(np.concatenate([a, b]), return_inverse=True)
    return places[: len(a)], places[len(a) :]


def _checked(scores: Tensor) -> Array:
    array: Array = scores.detach().to("cpu", torch.float64).flatten().numpy()
    if not len(array) or np.isnan(array).any():
        raise OptionError(
            f"expected scores that are numbers, got {len(array)} of which "
            f"{int(np.isnan(array).sum())} are NaN"
        )
    return array


def num_values(places: tuple[Places, Places]) -> int:
    """Return how many distinct scores there are."""
    return max(int(own.max()) for own in places) + 1


def counts_of(places: tuple[Places, Places], values: int | None = None) -> tuple[Array, Array]:
    """Return how many scores of each set are at each place.

    Args:
        places: Of the scores.
        values: How many places there are; as many as these take by default.

    Returns:
        Counts ``(values,)`` of known and of unknown inputs.
    """
    values = num_values(places) if values is None else values
    known, unknown = (np.bincount(p, minlength=values).astype(np.float64) for p in places)
    return known, unknown


def _figures(known: Array, unknown: Array) -> tuple[float, float, float]:
    """Return AUROC, AUPR and FPR95 from the counts of scores at each place."""
    n, m = known.sum(), unknown.sum()
    auroc = unknown @ (np.cumsum(known) - 0.5 * known) / (n * m)
    # inputs that score at a place or above it
    caught, alarms = np.cumsum(unknown[::-1]), np.cumsum(known[::-1])
    at = unknown[::-1] > 0
    precision = caught[at] / (caught[at] + alarms[at] * (m / n))
    aupr = unknown[::-1][at] @ precision / m
    place = np.searchsorted(caught, 0.95 * m - 1e-9)
    return float(auroc), float(aupr), float(alarms[place] / n)


def _interval(places: tuple[Places, Places], resamples: int, seed: int) -> tuple[Array, Array]:
    """Return the lower and the upper end of the three figures."""
    return ends_of([_figures(*counts) for counts in redrawn(places, resamples, seed)])


def redrawn(
    places: tuple[Places, Places], resamples: int, seed: int
) -> Iterator[tuple[Array, Array]]:
    """Yield counts as of `counts_of`, of both sets drawn anew with replacement.

    Args:
        places: Of the scores.
        resamples: How often.
        seed: Of the draws.
    """
    values = num_values(places)
    generator = np.random.default_rng(seed)
    for _ in range(resamples):  # one at a time: there may be tens of thousands of values
        a, b = (own[generator.integers(len(own), size=len(own))] for own in places)
        yield counts_of((a, b), values)


def ends_of(drawn: ArrayLike) -> tuple[Array, Array]:
    """Return the ends of intervals of 95 %, from what resamples gave along the first axis."""
    low, high = np.quantile(
        np.asarray(drawn, dtype=np.float64), [_MISSES / 2, 1 - _MISSES / 2], axis=0
    )
    return low, high


def unseen_share(places: tuple[Places, Places]) -> float:
    """Return how many inputs may be on the wrong side without one of these showing it.

    Sets that do not overlap do so in no resample either, and would get an interval of no
    width. But a share p of known inputs could lie above all unknown ones, and n of them not
    show it with probability (1 - p)^n: so p is taken for possible up to where that is 5 %,
    and likewise among m unknown ones.
    """
    share: float = 1 - _MISSES ** (1 / min(len(own) for own in places))
    return share


def areas_with(share: float) -> tuple[float, float]:
    """Return the AUROC and the AUPR if such a share of known inputs is above all unknown."""
    return 1 - share, 1 - share * math.log1p(1 / share)
