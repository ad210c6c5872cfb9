"""What gives inputs away where a score may not: values never seen, scores that are too low.

A classifier that is sure of everything has no gradients left: inputs that somebody forgot to
scale then get scores near 0, and p-values of 1. Two cheap looks notice most of that.
"""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Iterator, Mapping
from itertools import chain

import torch
from torch import Tensor

from scodkit.calibration import Calibration
from scodkit.errors import SuspiciousInputWarning
from scodkit.network import Inputs

# smallest and largest value of each floating input, by its place or keyword in the call
Ranges = dict[str, tuple[float, float]]

_FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# how many widths of its range outside of it a value is far. With n values seen, and tails that
# fall exponentially, a new one gets there with probability n^-4, with normal tails hardly ever;
# values of [0, 1] that were multiplied by 16 or 255 do
_FAR = 3
# calls on a GPU of which one is looked at, as looking means to wait for it
_CALLS = 32

# samples looked back at, and how many it takes to tell
_LAST, _FEWEST = 64, 8
# scores are low up to the one that has this share of the held-out ones below it
_LOW = 0.01
# accepted probability that so many are low by chance
_CHANCE = 1e-6


def widen(seen: dict[str, Tensor], call: Inputs) -> None:
    """Take a batch into the ranges seen so far, without waiting for a GPU.

    Args:
        seen: By input, its smallest value (negated) and its largest, ``(2,)``; changed.
        call: The batch; values that are not finite are left out.
    """
    for name, value in _floating(call):
        found = _extremes(value)
        seen[name] = found.maximum(seen[name]) if name in seen else found


def ranges_of(seen: Mapping[str, Tensor]) -> Ranges:
    """Return the ranges that `widen` found, without inputs that never were finite."""
    listed = {name: found.tolist() for name, found in seen.items()}
    return {name: (-low, high) for name, (low, high) in listed.items() if high > -math.inf}


def seen_in(ranges: Ranges, device: torch.device) -> dict[str, Tensor]:
    """Return ranges as `widen` takes them further, the reverse of `ranges_of`."""
    both = {name: (-low, high) for name, (low, high) in ranges.items()}
    return {
        name: torch.tensor(own, dtype=torch.float64, device=device)
        for name, own in both.items()
    }


def joined(one: Ranges | None, other: Ranges | None) -> Ranges | None:
    """Return the ranges of two sets of data together; None where one is not known."""
    if one is None or other is None:
        return None
    both = dict(one)
    for name, (low, high) in other.items():
        first, last = both.get(name, (low, high))
        both[name] = min(low, first), max(high, last)
    return both


class RangeWatch:
    """Warns, once, of inputs that are far outside the range of the fit.

    On a GPU the first call and every 32nd after it are looked at: a scaling that was forgotten
    is forgotten every time, and waiting for the values would idle the GPU.

    Args:
        seen: The ranges of the fit; None where they are not known.
    """

    def __init__(self, seen: Ranges | None) -> None:
        self.seen = seen
        # a single value has no width to measure with
        self._left = {name: own for name, own in (seen or {}).items() if own[0] < own[1]}
        self._calls = 0

    def look(self, call: Inputs) -> None:
        """Look at a batch.

        Args:
            call: The batch.
        """
        if not self._left:
            return
        self._calls += 1
        if call.tensors()[0].is_cuda and self._calls % _CALLS != 1:
            return
        for name, value in _floating(call):
            if name in self._left:
                self._compare(name, value)

    def _compare(self, name: str, value: Tensor) -> None:
        low, high = (float(end) for end in torch.aminmax(value))
        if not math.isfinite(low + high):  # such samples score infinity: look at the others
            low, high = (-1, 1) * _extremes(value).cpu().numpy()
        first, last = self._left[name]
        if min(low - first, last - high) < -_FAR * (last - first):
            self._left = {}
            warnings.warn(
                f"expected inputs like those of the fit, where input {name} was from "
                f"{first:.4g} to {last:.4g}, got some from {low:.4g} to {high:.4g}: scores so "
                "far away from all data mean little, and a classifier's may be the lowest "
                "there are; look how the inputs are scaled (forgot to divide by 255?)",
                SuspiciousInputWarning,
                stacklevel=6,
            )


class CrowdWatch:
    """Warns, once, if scores crowd below nearly all held-out ones, where p-values are 1.

    At least half of the last samples, 8 to 64 of them, must be as low as the lowest 1 % of the
    held-out ones, and the chance of that at most 1e-6. Of ``n`` held-out scores let ``m`` be
    that low, ties included; of ``w`` new ones like them so many are low as a beta-binomial with
    ``w``, ``m + 1`` and ``n - m`` says, or fewer: its luck is that of both draws, so that
    looking at one stream again and again adds little to it.

    Args:
        calibration: The held-out scores.
    """

    def __init__(self, calibration: Calibration) -> None:
        self.calibration = calibration
        held = calibration.pooled
        place = math.ceil(_LOW * (len(held) + 1)) - 1
        self._limit = float(held[place])
        self._num_low = int((held <= self._limit).sum())
        self._last: deque[bool] = deque(maxlen=_LAST)
        self._warned = self._num_low == len(held)  # scores that are all alike tell nothing

    def look(self, scores: Tensor) -> None:
        """Look at the scores of a batch.

        Args:
            scores: ``(B,)``, on the CPU.
        """
        if self._warned:
            return
        self._last.extend((scores[-_LAST:] <= self._limit).tolist())
        count, low = len(self._last), sum(self._last)
        if count < _FEWEST or 2 * low < count or self._chance(low, count) > _CHANCE:
            return
        self._warned = True
        warnings.warn(
            f"expected scores like the held-out ones, got {low} of the last {count} as low as "
            f"their lowest {_LOW:.0%} (at most {self._limit:.3g}), with p-values near 1: a "
            "classifier that is sure of everything scores so, whatever it is given; look how "
            "the inputs are scaled (forgot to divide by 255?), and at a few of the outputs",
            SuspiciousInputWarning,
            stacklevel=4,
        )

    def _chance(self, low: int, count: int) -> float:
        """Return the probability of at least so many low scores among new held-out ones."""
        a, b = self._num_low + 1, len(self.calibration.pooled) - self._num_low
        logs = (
            math.lgamma(count + 1) - math.lgamma(k + 1) - math.lgamma(count - k + 1)
            + _log_beta(a + k, b + count - k) - _log_beta(a, b)
            for k in range(low, count + 1)
        )  # fmt: skip
        return math.fsum(map(math.exp, logs))


def _log_beta(a: int, b: int) -> float:
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)


def _floating(call: Inputs) -> Iterator[tuple[str, Tensor]]:
    """Yield the inputs that have a range, by name; token ids and boolean masks have none."""
    for name, value in chain(enumerate(call.args), call.kwargs.items()):
        is_tensor = isinstance(value, Tensor) and value.layout is torch.strided
        if is_tensor and value.dtype in _FLOATING and value.numel():
            yield str(name), value.detach()


def _extremes(value: Tensor) -> Tensor:
    """Return the smallest finite value (negated) and the largest; minus infinity for none."""
    finite = value.isfinite()
    low = torch.where(finite, value, math.inf).amin()
    return torch.stack([-low, torch.where(finite, value, -math.inf).amax()]).double()
