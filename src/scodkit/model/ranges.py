"""The range of the inputs of a fit, and a warning where later ones are far outside of it.

A classifier that is sure of everything has no gradients left: inputs that somebody forgot to
scale then get scores near 0. A look at their range notices most of that.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from itertools import chain

import torch
from torch import Tensor

from scodkit.errors import SuspiciousInputWarning
from scodkit.model.network import Inputs

# smallest and largest value of each floating input, by its place or keyword in the call
Ranges = dict[str, tuple[float, float]]

_FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# how many widths of its range outside of it a value is far. With n values seen, and tails that
# fall exponentially, a new one gets there with probability n^-4, with normal tails hardly ever;
# values of [0, 1] that were multiplied by 16 or 255 do
_FAR = 3
# calls on a GPU of which one is looked at, as looking means to wait for it
_CALLS = 32


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
