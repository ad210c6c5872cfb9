"""The range of the inputs of a fit."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import chain

import torch
from torch import Tensor

from scodkit.model.network import Inputs

# smallest and largest value of each floating input, by its place or keyword in the call
Ranges = dict[str, tuple[float, float]]

_FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def widen(seen: dict[str, Tensor], call: Inputs) -> None:
    """Take a batch into the ranges seen so far, without waiting for a GPU.

    Args:
        seen: By input, its smallest value (negated) and its largest, ``(2,)``; changed.
        call: The batch; values that are not finite are left out.
    """
    for name, value in floating_inputs(call):
        found = extremes(value)
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


def floating_inputs(call: Inputs) -> Iterator[tuple[str, Tensor]]:
    """Yield the inputs that have a range, by name; token ids and boolean masks have none."""
    for name, value in chain(enumerate(call.args), call.kwargs.items()):
        is_tensor = isinstance(value, Tensor) and value.layout is torch.strided
        if is_tensor and value.dtype in _FLOATING and value.numel():
            yield str(name), value.detach()


def extremes(value: Tensor) -> Tensor:
    """Return the smallest finite value (negated) and the largest; minus infinity for none."""
    finite = value.isfinite()
    low = torch.where(finite, value, math.inf).amin()
    return torch.stack([-low, torch.where(finite, value, -math.inf).amax()]).double()
