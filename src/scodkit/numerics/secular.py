"""Leading eigenpairs of ``diag(q) - q q^T`` for probabilities ``q``, without that matrix.

Its eigenvalues but for 0 are the roots of the secular equation
``sum_i q_i / (q_i - value) = 0``: one between any two neighbours of the sorted ``q``, which are
its poles. (That of a rank-one update, ``sum_i q_i^2 / (q_i - value) = 1``, less the root 0 that
it has as ``q`` sums to one.) The vector of a value has the entries ``q_i / (q_i - value)``.

A root is known by its distances to the poles around it, and distances to other poles are sums
of positive numbers, so nothing is lost to cancellation. Moreover the slope of the equation is
at least ``S^2 / Q``, where ``S`` is the sum of its terms of one sign, whose rounding limits the
root, and ``Q`` the probability of all classes below. So distances have a relative error of
about ``C`` roundings at most, and vectors of values however close are orthogonal to that.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# poles are kept from zero, where vectors are not defined: roots of them are 0 in float32
_LEAST = 1e-100
# and apart from each other: neighbours are moved by a few roundings
_APART = 2.0**-51

# steps to the roots; six is the most that any of 10**6 random and near-tied ones has taken
_STEPS = 8


class _Poles(NamedTuple):
    """The poles on one side of each root, ``(..., k, n)``.

    Args:
        weights: Numerators; 0 for poles of the other side.
        distances: From the pole next to the root, >= 0.
    """

    weights: Tensor
    distances: Tensor

    def terms(self, offset: Tensor) -> Tensor:
        """Return the terms of the equation, >= 0, by the distance of the root ``(..., k)``."""
        return self.weights / (self.distances + offset[..., None])

    def sums(self, offset: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sum of the terms and its slope towards the poles."""
        inverse = (self.distances + offset[..., None]).reciprocal()
        terms = self.weights * inverse
        return terms.sum(-1), (terms * inverse).sum(-1)


def leading_rows(q: Tensor, count: int) -> Tensor:
    """Return ``sqrt(value) vector^T`` of the largest eigenpairs, ``(..., count, C)``.

    In a fixed number of steps of ``O(count C)`` that read no value on the way: they can be
    recorded. Can be differentiated, where probabilities differ.

    Args:
        q: Probabilities ``(..., C)``, in float64.
        count: How many, at most ``C - 2``.

    Returns:
        Rows by rising value. A row is positive at the classes above its value.

    Examples:
        >>> rows = leading_rows(torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64), 1)
        >>> rows.square().sum()
        tensor(0.3881, dtype=torch.float64)
    """
    q = q.clamp_min(_LEAST)
    top, places = q.topk(count + 1, -1)
    lifts = torch.arange(count + 1, 0, -1, dtype=q.dtype, device=q.device)
    top = top * (1 + _APART * lifts)
    first, second = top[..., :-1], top[..., 1:]  # the poles around each root
    among = top[..., None, :]
    is_above = torch.ones(count, count + 1, dtype=torch.bool, device=q.device).tril()
    above = _Poles(among * is_above, (among - first[..., None]).clamp_min(0))
    others = torch.cat([top, q.scatter(-1, places, 0.0)], -1)[..., None, :]
    at = torch.cat([top, q], -1)[..., None, :]
    is_below = torch.nn.functional.pad(~is_above, (0, q.shape[-1]), value=True)
    below = _Poles(others * is_below, (second[..., None] - at).clamp_min(0))
    to_first, to_second = _roots(above, below, first - second)
    if q.requires_grad:
        to_first, to_second = _with_slopes(above, below, (first, second), (to_first, to_second))
    negative = below.terms(to_second)
    ends = above.terms(to_first) - negative[..., : count + 1]
    where = places[..., None, :].expand(ends.shape)
    vectors = (-negative[..., count + 1 :]).scatter(-1, where, ends)
    sizes = (second + to_second).sqrt() / torch.linalg.vector_norm(vectors, dim=-1)
    rows: Tensor = (sizes[..., None] * vectors).flip(-2)
    return rows


@torch.no_grad()
def _roots(above: _Poles, below: _Poles, gap: Tensor) -> tuple[Tensor, Tensor]:
    """Return the distances of each root to the pole above and to the one below it.

    Each step puts ``a + b / (distance to the next pole)`` in the place of the terms of either
    side, with the same value and slope, and solves the quadratic equation that is left; its
    root lies between the poles. Converges quadratically.
    """
    to_first = to_second = gap / 2
    for _ in range(_STEPS):
        high, high_slope = above.sums(to_first)
        low, low_slope = below.sums(to_second)
        bent = (high - high_slope * to_first) - (low - low_slope * to_second)
        high_weight, low_weight = high_slope * to_first**2, low_slope * to_second**2
        both = high_weight + low_weight
        to_high, to_low = both - bent * gap, both + bent * gap
        root = (to_low**2 - 4 * bent * low_weight * gap).clamp_min(0).sqrt()
        # of two forms of a root the one without a difference
        from_first = 2 * high_weight * gap / (to_high + root)
        from_second = 2 * low_weight * gap / (to_low + root)
        to_first = torch.where(to_high > 0, from_first, gap - from_second)
        to_second = torch.where(to_low > 0, from_second, gap - from_first)
    return to_first, to_second


def _with_slopes(
    above: _Poles,
    below: _Poles,
    around: tuple[Tensor, Tensor],
    found: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor]:
    """Return the same distances, with slopes by the implicit function theorem."""
    first, second = around
    to_first = found[0] + (first - first.detach())
    to_second = found[1] - (second - second.detach())
    (high, high_slope), (low, low_slope) = above.sums(to_first), below.sums(to_second)
    step = (low - high) / (high_slope + low_slope).detach()
    step = step - step.detach()
    return to_first - step, to_second + step
