"""How well scores tell unknown inputs from known ones, with honest intervals."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from scodkit.errors import OptionError

_Array = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


@dataclass(frozen=True)
class Separation:
    """How well scores separate two sets; unknown inputs are the positives.

    Args:
        auroc: Probability that an unknown input scores higher than a known one, ties half.
        aupr: Average precision of the unknown inputs.
        fpr95: Share of known inputs above the threshold that catches 95 % of the unknown.
        auroc_low: Lower end of the 95 % interval of the AUROC over samples drawn anew.
        auroc_high: Upper end.
    """

    auroc: float
    aupr: float
    fpr95: float
    auroc_low: float
    auroc_high: float


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
    a, b = (_checked(scores) for scores in (known, unknown))
    values, inverse = np.unique(np.concatenate([a, b]), return_inverse=True)
    counts_a = np.bincount(inverse[: len(a)], minlength=len(values)).astype(np.float64)
    counts_b = np.bincount(inverse[len(a) :], minlength=len(values)).astype(np.float64)
    low, high = _interval(counts_a, counts_b, resamples, seed)
    return Separation(
        float(_auroc(counts_a, counts_b)),
        _average_precision(counts_a, counts_b),
        _false_positives(counts_a, counts_b, 0.95),
        low,
        high,
    )


def _checked(scores: Tensor) -> _Array:
    array: _Array = scores.detach().to("cpu", torch.float64).flatten().numpy()
    if not len(array) or np.isnan(array).any():
        raise OptionError(
            f"expected scores that are numbers, got {len(array)} of which "
            f"{int(np.isnan(array).sum())} are NaN"
        )
    return array


def _auroc(known: _Array, unknown: _Array) -> _Array:
    """Return the AUROC from how often each distinct score occurs, ``(..., values)``."""
    below = np.cumsum(known, axis=-1) - 0.5 * known
    area: _Array = (unknown * below).sum(-1) / (known.sum(-1) * unknown.sum(-1))
    return area


def _interval(known: _Array, unknown: _Array, resamples: int, seed: int) -> tuple[float, float]:
    generator = np.random.default_rng(seed)
    found = []
    for _ in range(resamples):  # one at a time: there may be tens of thousands of values
        again = [
            generator.multinomial(int(c.sum()), c / c.sum()).astype(np.float64)
            for c in (known, unknown)
        ]
        found.append(float(_auroc(*again)))
    low, high = np.quantile(found, [0.025, 0.975])
    return float(low), float(high)


def _average_precision(known: _Array, unknown: _Array) -> float:
    """Return the mean precision over unknown inputs, each at the threshold it just passes."""
    caught = np.cumsum(unknown[::-1])
    alarms = caught + np.cumsum(known[::-1])
    return float((unknown[::-1] * caught / alarms).sum() / unknown.sum())


def _false_positives(known: _Array, unknown: _Array, rate: float) -> float:
    """Return the share of known inputs at or above the highest threshold with that rate."""
    caught = np.cumsum(unknown[::-1]) / unknown.sum()
    place = int(np.searchsorted(caught, rate - 1e-12))
    return float(np.cumsum(known[::-1])[place] / known.sum())
