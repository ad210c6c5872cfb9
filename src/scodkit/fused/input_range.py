"""Where training inputs lie, and how far outside of that an input is.

Features and logits can be bounded, or saturated: what is absurd about an input may not reach
them. The input itself shows it, for the price of a look at its values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from scodkit.model.inputs import Inputs

# inputs (B, d) of up to so many columns are tables: columns are told apart
_COLUMNS = 64

# of the standard deviation of all values: a summary of samples that varies less has this spread
_LEAST = 0.01

# of a column's largest value: one that varies less is constant but for rounding
_ROUNDING = 1e-6


class InputRange:
    """Smallest and largest numbers of training inputs, and their spreads.

    The numbers of a table, ``(B, d)`` with at most 64 columns, are its columns; those of any
    other floating input the smallest value, largest value, mean and standard deviation of each
    sample. Token ids and boolean masks have none.

    Args:
        seen: As `pack` returns it.

    Examples:
        >>> ranges = InputRange()
        >>> ranges.add(Inputs((torch.tensor([[1.0], [3.0]]),), {}))
        >>> ranges.excess(Inputs((torch.tensor([[2.0], [5.0]]),), {}))
        tensor([0., 2.], dtype=torch.float64)
    """

    def __init__(self, seen: Mapping[str, Tensor] | None = None) -> None:
        self._seen = dict(seen or {})
        self._bounds: dict[str, tuple[Tensor, Tensor, Tensor]] = {}

    def add(self, call: Inputs) -> None:
        """Add a batch of training inputs; samples that are not finite are left out."""
        for name, numbers in _numbers(call):
            finite = numbers[numbers.isfinite().all(1)]
            if len(finite):
                self._join(name, _summary(finite))

    def merged(self, other: InputRange) -> InputRange:
        """Return the range of the inputs of both."""
        both = InputRange(self._seen)
        for name, summary in other._seen.items():
            both._join(name, summary)
        return both

    def _join(self, name: str, summary: Tensor) -> None:
        own = self._seen.get(name)
        self._seen[name] = summary if own is None else _joined(own, summary.to(own.device))
        self._bounds = {}

    def excess(self, call: Inputs) -> Tensor:
        """Return how far samples are outside the range, ``(B,)`` in float64, 0 inside.

        In standard deviations of training inputs, summed over the numbers of a sample.

        Args:
            call: The batch. An input that was not there in training, or a table with as many
                columns as none had, counts as inside.
        """
        device = call.tensors()[0].device  # never another one: a recording copies from none
        total = torch.zeros(call.batch_size, dtype=torch.float64, device=device)
        for name, numbers in _numbers(call):
            if name in self._seen:
                low, high, spread = self._bounds_of(name, numbers.device)
                outside = torch.maximum(low - numbers, numbers - high).clamp_min(0)
                total = total + (outside / spread).sum(1).to(device)
        return total

    def _bounds_of(self, name: str, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        if name not in self._bounds or self._bounds[name][0].device != device:
            count, mean, scatter, low, high = self._seen[name].to(device)
            spread = (scatter / count).sqrt()
            if _is_table(name):
                instead = torch.maximum(low.abs(), high.abs())
                least = _ROUNDING * instead
            else:  # of the smallest value, largest value, mean and deviation of samples
                overall = (spread[2:].square().sum() + mean[3].square()).sqrt()
                least = instead = (_LEAST * overall).expand_as(mean)
            spread = torch.where(spread > least, spread, instead)
            spread = torch.where(spread > 0, spread, 1.0)
            self._bounds[name] = low, high, spread
        return self._bounds[name]

    def pack(self) -> dict[str, Tensor]:
        """Return what is kept, ``(5, S)`` in float64 by the name of each input."""
        return dict(self._seen)


def _is_table(name: str) -> bool:
    return ":" in name


def _numbers(call: Inputs) -> Iterator[tuple[str, Tensor]]:
    """Yield the numbers of each floating input, ``(B, S)`` in float64, and its name.

    The name of a table says how many columns it has: each such number has a range of its own.
    """
    for name, value in call.floating():
        values = value.flatten(1) if value.ndim > 1 else value[:, None]
        if value.ndim <= 2 and values.shape[1] <= _COLUMNS:
            yield f"{name}:{values.shape[1]}", values.double()
        else:
            wide = values.float() if values.dtype.itemsize < 4 else values
            variance, mean = torch.var_mean(wide, dim=1, correction=0)
            each = [wide.amin(1), wide.amax(1), mean, variance.sqrt()]
            yield name, torch.stack(each, dim=1).double()


def _summary(numbers: Tensor) -> Tensor:
    """Return count, mean, scatter, smallest and largest of numbers ``(n, S)``: ``(5, S)``."""
    mean = numbers.mean(0)
    scatter = (numbers - mean).square().sum(0)
    ends = numbers.amin(0), numbers.amax(0)
    return torch.stack([torch.full_like(mean, len(numbers)), mean, scatter, *ends])


def _joined(one: Tensor, other: Tensor) -> Tensor:
    """Return the summary of the numbers of both, without loss (Chan et al. 1983)."""
    total, shift = one[0] + other[0], other[1] - one[1]
    between = shift.square() * one[0] * other[0] / total
    return torch.stack(
        [
            total,
            one[1] + shift * other[0] / total,
            one[2] + other[2] + between,
            one[3].minimum(other[3]),
            one[4].maximum(other[4]),
        ]
    )
