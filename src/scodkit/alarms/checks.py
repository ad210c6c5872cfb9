"""Scores that every alarm accepts: numbers or infinity, not NaN."""

from __future__ import annotations

import torch
from torch import Tensor

from scodkit.errors import CalibrationError


def one_number(value: float | Tensor) -> float:
    """Return a number as such.

    Args:
        value: A number, or a tensor that holds one.

    Raises:
        CalibrationError: If it is a tensor of none or several.
    """
    if isinstance(value, Tensor) and value.numel() != 1:
        raise CalibrationError(
            f"expected one number at a time, got a tensor of shape {tuple(value.shape)}; type "
            "push(numbers[i])"
        )
    return float(value)


def one_score(score: float | Tensor) -> float:
    """Return a score as a number.

    Args:
        score: A number, or a tensor that holds one; infinity is the most atypical.

    Raises:
        CalibrationError: If it is NaN, minus infinity or not a single number.
    """
    number = one_number(score)
    # NaN is not above anything
    if not number > -torch.inf:
        raise CalibrationError(
            f"expected a score that is a number or infinity, got {number}; to have it count as "
            'most atypical, type push(float("inf"))'
        )
    return number


def many_scores(scores: Tensor) -> list[float]:
    """Return scores as numbers, in their order.

    Args:
        scores: ``(T,)``; infinity is the most atypical.

    Raises:
        CalibrationError: If there is another shape, a NaN or a minus infinity.
    """
    if scores.dim() != 1:
        raise CalibrationError(
            f"expected scores of shape (T,), got {tuple(scores.shape)}; type scores.flatten()"
        )
    numbers = scores.detach().cpu().double()
    bad = int((~(numbers > -torch.inf)).sum())
    if bad:
        raise CalibrationError(
            f"expected scores that are numbers or infinity, got {bad} of {len(numbers)} that "
            "are not; to have NaN count as most atypical, type "
            'scores.masked_fill(scores.isnan(), float("inf"))'
        )
    listed: list[float] = numbers.tolist()
    return listed
