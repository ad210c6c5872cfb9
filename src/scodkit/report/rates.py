"""Shares with their counts and exact intervals, and how often chance alone explains them.

All of it for scores that are exchangeable: new inputs of the same kind as the held-out ones.
A threshold with ``k - 1`` of ``n`` held-out scores above it has a false-alarm rate that is
Beta(k, n + 1 - k) distributed over held-out draws (Vovk 2012), at most, where scores are tied;
the alarms among ``m`` new inputs are beta-binomial. Tests compare with scipy.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt
import torch

from scodkit.metrics import Array

PERCENT = "\N{NO-BREAK SPACE}%"
MISSES = 0.05  # share of intervals that may miss
_STEPS = 100  # were all of them halves of a bracket, more than a float64 has bits
_TINY = 1e-300
_DIRECT = 10**7  # products above which sums are made by Fourier transforms, exact to 1e-15
_STEP = 1.05  # of numbers of inputs that are tried
_MOST_ALARMS, _MOST_INPUTS = 100, 200_000  # new inputs are tried until so many are expected


def percent(share: float, digits: int = 1) -> str:
    """Return a share as a percentage, with a no-break space before the sign.

    Args:
        share: In [0, 1], as a rule.
        digits: After the point.
    """
    return f"{100 * share:.{digits}f}{PERCENT}"


def asked(rate: float) -> str:
    """Return a rate of false alarms as it was asked for: 5 %, not 5.0 %."""
    return f"{100 * rate:.3g}{PERCENT}"


@dataclass(frozen=True)
class Rate:
    """A share with its counts and its exact (Clopper-Pearson) interval of 95 %.

    Args:
        count: How many.
        total: Of how many, at least one.

    Examples:
        >>> Rate(14, 201).words.replace(chr(0xA0), " ")
        '7.0 % (14 of 201, 3.9 to 11.4 %)'
    """

    count: int
    total: int

    @property
    def share(self) -> float:
        """In [0, 1]."""
        return self.count / self.total

    @functools.cached_property
    def ends(self) -> tuple[float, float]:
        """Ends of the interval."""
        low, high = exact_intervals(np.array([self.count]), self.total)
        return float(low[0]), float(high[0])

    @property
    def detail(self) -> str:
        """Its counts and its interval."""
        low, high = self.ends
        return f"{self.count} of {self.total}, {100 * low:.1f} to {percent(high)}"

    @property
    def words(self) -> str:
        """The share, its counts and its interval."""
        return f"{percent(self.share)} ({self.detail})"


def _log_gamma(values: Array) -> Array:
    found: Array = torch.lgamma(torch.from_numpy(np.asarray(values, np.float64))).numpy()
    return found


def _log_beta(a: Array, b: Array) -> Array:
    together: Array = _log_gamma(a) + _log_gamma(b) - _log_gamma(a + b)
    return together


def beta_share(a: Array, b: Array, x: Array) -> Array:
    """Return the share of Beta(a, b) below ``x``, by Lentz's continued fraction.

    Args:
        a: ``(n,)``, > 0.
        b: ``(n,)``, > 0.
        x: ``(n,)`` in (0, 1).
    """
    turned = x > (a + 1) / (a + b + 2)  # where the fraction of the other tail is faster
    p, q = np.where(turned, b, a), np.where(turned, a, b)
    y = np.where(turned, 1 - x, x)
    c, d = np.ones_like(y), 1 / (1 - (p + q) * y / (p + 1))
    fraction = d.copy()
    for m in range(1, 10_000):
        for term in (
            m * (q - m) * y / ((p + 2 * m - 1) * (p + 2 * m)),
            -(p + m) * (p + q + m) * y / ((p + 2 * m) * (p + 2 * m + 1)),
        ):
            d, c = 1 + term * d, 1 + term / c
            d = 1 / np.where(np.abs(d) < _TINY, _TINY, d)
            c = np.where(np.abs(c) < _TINY, _TINY, c)
            fraction = fraction * d * c
        if np.all(np.abs(d * c - 1) < 1e-13):
            break
    front = np.exp(p * np.log(y) + q * np.log1p(-y) - _log_beta(p, q))
    tail = front * fraction / p
    share: Array = np.where(turned, 1 - tail, tail)
    return share


def beta_quantile(level: float, a: Array, b: Array) -> Array:
    """Return where Beta(a, b) has a share ``level`` below, by Newton's steps within brackets.

    Args:
        level: In (0, 1).
        a: ``(n,)``, > 0.
        b: ``(n,)``, > 0.
    """
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    low, high, x = np.zeros_like(a), np.ones_like(a), a / (a + b)
    whole = _log_beta(a, b)
    for _ in range(_STEPS):
        gap = beta_share(a, b, x) - level
        low, high = np.where(gap < 0, x, low), np.where(gap < 0, high, x)
        density = np.exp((a - 1) * np.log(x) + (b - 1) * np.log1p(-x) - whole)
        step = x - gap / np.maximum(density, _TINY)
        before, x = x, np.where((step > low) & (step < high), step, (low + high) / 2)
        if np.all(np.abs(x - before) <= 1e-13 * x):
            break
    return x


def exact_intervals(
    counts: npt.ArrayLike, totals: npt.ArrayLike, misses: float = MISSES
) -> tuple[Array, Array]:
    """Return ends of Clopper-Pearson intervals of shares.

    Args:
        counts: ``(n,)``, from 0 to the total.
        totals: Of how many each is, ``(n,)``, or one number for all.
        misses: Share of intervals that may miss.
    """
    counts, total = np.array(counts, np.float64), np.array(totals, np.float64)
    low = beta_quantile(misses / 2, np.maximum(counts, 1), total - np.maximum(counts, 1) + 1)
    most = np.minimum(counts, total - 1)
    high = beta_quantile(1 - misses / 2, most + 1, total - most)
    return np.where(counts > 0, low, 0.0), np.where(counts < total, high, 1.0)


def places(rate: float, held_out: int) -> int:
    """Return ``k``, how many of the ``n + 1`` p-values there can be are at most a rate."""
    steps = round(rate * (held_out + 1))
    return steps if steps / (held_out + 1) <= rate else steps - 1


def alarms_by_chance(rate: float, groups: Sequence[tuple[int, int]]) -> Array:
    """Return how likely each number of alarms is among new inputs, ``(m + 1,)``.

    Args:
        rate: Accepted share of false alarms.
        groups: Held-out inputs and new inputs of each group; a single pair without groups.

    Examples:
        >>> alarms_by_chance(0.5, [(1, 2)]).round(3).tolist()
        [0.333, 0.333, 0.333]
    """
    total: Array = np.ones(1)
    for held_out, new in groups:
        k = places(rate, held_out)
        counts = np.arange(new + 1.0)
        if k == 0 or k > held_out:
            alone = (counts == (0 if k == 0 else new)).astype(np.float64)
        else:
            ways = -_log_beta(counts + 1, new - counts + 1) - math.log(new + 1)
            beta = _log_beta(counts + k, new - counts + held_out + 1 - k)
            alone = np.exp(ways + beta - _log_beta(np.array(k), np.array(held_out + 1 - k)))
        total = _of_sum(total, alone)
    chances: Array = total / total.sum()
    return chances


def _of_sum(one: Array, other: Array) -> Array:
    """Return how likely each sum of two independent counts is."""
    if len(one) * len(other) < _DIRECT:
        return np.convolve(one, other)
    size = len(one) + len(other) - 1
    product = np.fft.rfft(one, size) * np.fft.rfft(other, size)
    chances: Array = np.maximum(np.fft.irfft(product, size), 0.0)
    return chances


def at_least(chances: Array, count: int) -> float:
    """Return the probability of at least so many."""
    return float(min(1.0, chances[count:].sum()))


def within(chances: Array, misses: float = MISSES) -> tuple[int, int]:
    """Return the smallest and the largest number that are no surprise at a level."""
    sums = np.cumsum(chances)
    low = int(np.searchsorted(sums, misses / 2, side="right"))
    high = int(np.searchsorted(sums, 1 - misses / 2 - 1e-12))
    return min(low, len(chances) - 1), min(high, len(chances) - 1)


def most_by_chance(chances: Array, level: float) -> int:
    """Return the largest number that is reached with at least this probability."""
    tails = np.cumsum(chances[::-1])[::-1]
    return int(np.nonzero(tails >= level)[0][-1])


def fewest_to_judge(
    rate: float, groups: Sequence[tuple[int, int]], level: float, times: float
) -> int | None:
    """Return how many new inputs it takes to notice ``times`` the rate of false alarms.

    A share of ``times`` the rate must have a probability below the level. The number of alarms
    that chance explains never falls as inputs are added, so that no number is skipped that
    would do, until steps of 5 % are the larger ones.

    Args:
        rate: Accepted share of false alarms.
        groups: Held-out inputs and new inputs of each group, whose proportions are kept.
        level: Of `most_by_chance`.
        times: What must be noticed, in units of the rate.

    Returns:
        Their number; None if there are too few held-out inputs, or it is very large.
    """
    total, needed = sum(new for _, new in groups), 1
    while needed <= min(_MOST_ALARMS / rate, _MOST_INPUTS):
        sizes = [(held_out, -(-new * needed // total)) for held_out, new in groups]
        noticed = most_by_chance(alarms_by_chance(rate, sizes), level) + 1
        fewest = math.ceil(noticed / min(1.0, times * rate) - 1e-9)
        if fewest <= needed:
            return needed
        needed = max(fewest, math.ceil(needed * _STEP))
    return None


def unlike(held_out: Array, new: Array) -> tuple[float, float]:
    """Return how far two samples differ (Kolmogorov and Smirnov), and how often chance does so.

    Args:
        held_out: Scores ``(n,)``.
        new: Scores ``(m,)``.

    Returns:
        The largest difference of their distribution functions, > 0 where new scores are
        higher; and a bound on its probability, ``e exp(-2 D^2 nm/(n + m))`` (Wei and Dudley
        2012), which holds for small samples and with ties, too.
    """
    held_out, new = np.sort(held_out), np.sort(new)
    values = np.concatenate([held_out, new])
    below = [np.searchsorted(one, values, side="right") / len(one) for one in (held_out, new)]
    gaps = below[0] - below[1]
    farthest = float(gaps[np.abs(gaps).argmax()])
    size = len(held_out) * len(new) / (len(held_out) + len(new))
    return farthest, min(1.0, math.e * math.exp(-2 * farthest**2 * size))


def unlike_by_chance(held_out: int, new: int, level: float) -> float:
    """Return the difference that `unlike` gives this probability; 1 if there is none.

    Args:
        held_out: Number of held-out inputs.
        new: Of new ones.
        level: The probability.
    """
    size = held_out * new / (held_out + new)
    return min(1.0, math.sqrt((1 - math.log(level)) / (2 * size)))


def fewest_to_tell(held_out: int, level: float, gap: float) -> int | None:
    """Return how many new inputs it takes until `unlike_by_chance` is at most a difference.

    Args:
        held_out: Number of held-out inputs.
        level: The probability.
        gap: The difference.

    Returns:
        Their number; None if there are too few held-out inputs for any.
    """
    size = (1 - math.log(level)) / (2 * gap**2)
    return math.ceil(size * held_out / (held_out - size)) if held_out > size else None


def most_of_one(alarms: Array, sizes: Array, raised: int) -> Array:
    """Return for each class how often chance gives it at least so many of all alarms.

    Args:
        alarms: ``(c,)``, of each class.
        sizes: ``(c,)``, inputs of each class; where rates do not depend on the class, alarms
            are spread over inputs at random (hypergeometric).
        raised: Number of all alarms.
    """
    total = int(sizes.sum())
    chances = []
    for own, size in zip(alarms.tolist(), sizes.tolist(), strict=True):
        counts = np.arange(own, min(size, raised) + 1.0)
        counts = counts[raised - counts <= total - size]
        logs = (
            _log_choose(size, counts)
            + _log_choose(total - size, raised - counts)
            - _log_choose(total, np.array(float(raised)))
        )
        chances.append(min(1.0, float(np.exp(logs).sum())))
    return np.array(chances)


def _log_choose(n: float, k: Array) -> Array:
    ways: Array = -_log_beta(k + 1, n - k + 1) - math.log(n + 1)
    return ways


def lower_by_chance(known: Array, unknown: Array) -> float:
    """Return how often chance makes an AUROC of 0.5 or more look as low as this one.

    The normal approximation, with the larger of two variances: of equal distributions, and of
    these (DeLong, DeLong and Clarke-Pearson 1988).

    Args:
        known: Scores ``(n,)``.
        unknown: Scores ``(m,)``.
    """
    n, m = len(known), len(unknown)
    shares = []
    for one, other in ((unknown, known), (known, unknown)):
        sorted_other = np.sort(other)
        ends = [np.searchsorted(sorted_other, one, side=side) for side in ("left", "right")]
        shares.append((ends[0] + ends[1]) / (2 * len(other)))
    auroc = float(shares[0].mean())
    own = sum(float(part.var(ddof=1)) / len(part) for part in shares if len(part) > 1)
    spread = math.sqrt(max(own, (n + m + 1) / (12 * n * m)))
    return NormalDist().cdf((auroc - 0.5) / spread)
