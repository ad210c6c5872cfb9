"""Where training inputs lie, and how far outside of that an input is.

Features and logits can be bounded, or saturated: what is absurd about an input may not reach
them. The input itself shows it, for the price of a look at its values.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from scodkit.model.inputs import Inputs
from scodkit.numerics import artifact

# inputs (B, d) of up to so many columns are tables: columns are told apart
_COLUMNS = 64

# of the standard deviation of all values: a summary of samples that varies less has this spread
_LEAST = 0.01

# of a column's largest value: one that varies less is constant but for rounding
_ROUNDING = 1e-6

_TABLE = re.compile(r"\w+:[1-9]\d?")


class Bounds(NamedTuple):
    """What is known of numbers of training inputs, each ``(S,)`` in float64.

    Args:
        low: The smallest values.
        high: The largest.
        mean: The means.
        spread: The standard deviations, > 0: of what never varied a size it could have.
    """

    low: Tensor
    high: Tensor
    mean: Tensor
    spread: Tensor

    def outside(self, numbers: Tensor) -> Tensor:
        """Return how many spreads numbers are above the largest or (< 0) below the smallest.

        Args:
            numbers: ``(B, S)``.
        """
        beyond = (numbers - self.high).clamp_min(0) - (self.low - numbers).clamp_min(0)
        return beyond / self.spread


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
        self._bounds: dict[str, Bounds] = {}

    @staticmethod
    def unpack(seen: Mapping[str, Tensor]) -> InputRange:
        """Return the range that a file holds, as `pack` returned it, checked."""
        for name, summary in seen.items():
            width = int(name.partition(":")[2]) if _TABLE.fullmatch(name) else 4
            artifact.tensor((5, width), {torch.float64}, _is_summary, "a range")(name, summary)
        return InputRange(seen)

    def add(self, call: Inputs, *, tables_only: bool = False) -> None:
        """Add a batch of training inputs, without synchronising with a GPU.

        Args:
            call: The batch; samples that are not finite are left out.
            tables_only: Leave out all inputs but tables.
        """
        for name, numbers in _tables(call) if tables_only else _numbers(call):
            self._join(name, _summary(numbers))

    def merged(self, other: InputRange) -> InputRange:
        """Return the range of the inputs of both."""
        both = InputRange(self._seen)
        for name, summary in other._seen.items():
            both._join(name, summary)
        return both

    def in_both(self, other: InputRange) -> InputRange:
        """Return the range of the inputs of both, of those that both know."""
        both = self.merged(other)._seen
        return InputRange({name: both[name] for name in self._seen.keys() & other._seen})

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
                outside = self._bounds_of(name, numbers.device).outside(numbers)
                total = total + outside.abs().sum(1).to(device)
        return total

    def tables(self, call: Inputs) -> Iterator[tuple[Tensor, Bounds | None]]:
        """Yield the columns of each table of a call, ``(B, d)`` in float64, and their bounds.

        Args:
            call: A batch.

        Yields:
            The columns, and what is known of them; None if nothing is.
        """
        for name, columns in _tables(call):
            known = name in self._seen
            yield columns, self._bounds_of(name, columns.device) if known else None

    def _bounds_of(self, name: str, device: torch.device) -> Bounds:
        if name not in self._bounds or self._bounds[name].low.device != device:
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
            self._bounds[name] = Bounds(low, high, mean, spread)
        return self._bounds[name]

    def pack(self) -> dict[str, Tensor]:
        """Return what is kept, on the CPU: ``(5, S)`` in float64 by the name of each input."""
        return {name: own.cpu() for name, own in self._seen.items() if float(own[0, 0])}


def _is_table(name: str) -> bool:
    return ":" in name


def _columns(value: Tensor) -> Tensor | None:
    """Return the columns of a table, ``(B, d)`` in float64; None of any other input."""
    columns = value if value.ndim > 1 else value[:, None]
    return columns.double() if columns.ndim == 2 and columns.shape[1] <= _COLUMNS else None


def _tables(call: Inputs) -> Iterator[tuple[str, Tensor]]:
    """Yield the columns of each table, and its name.

    The name says how many columns there are: each has a range of its own.
    """
    for name, value in call.floating():
        columns = _columns(value)
        if columns is not None:
            yield f"{name}:{columns.shape[1]}", columns


def _numbers(call: Inputs) -> Iterator[tuple[str, Tensor]]:
    """Yield the numbers of each floating input, ``(B, S)`` in float64, and its name."""
    yield from _tables(call)
    for name, value in call.floating():
        if _columns(value) is None:
            wide = value.flatten(1).float() if value.dtype.itemsize < 4 else value.flatten(1)
            variance, mean = torch.var_mean(wide, dim=1, correction=0)
            each = [wide.amin(1), wide.amax(1), mean, variance.sqrt()]
            yield name, torch.stack(each, dim=1).double()


def _summary(numbers: Tensor) -> Tensor:
    """Return count, mean, scatter, smallest and largest of numbers ``(n, S)``: ``(5, S)``.

    Of the finite samples; without one the smallest is infinite, and the largest minus that.
    """
    finite = numbers.isfinite().all(1, keepdim=True)
    count = finite.sum(0).double().expand(numbers.shape[1])
    mean = torch.where(finite, numbers, 0.0).sum(0) / count.clamp_min(1)
    scatter = torch.where(finite, numbers - mean, 0.0).square().sum(0)
    low = torch.where(finite, numbers, torch.inf).amin(0)
    high = torch.where(finite, numbers, -torch.inf).amax(0)
    return torch.stack([count, mean, scatter, low, high])


def _is_summary(summary: Tensor) -> bool:
    count, _, scatter, low, high = summary
    ordered = (count >= 1) & (scatter >= 0) & (low <= high)
    return bool(ordered.all()) and bool(summary.isfinite().all())


def _joined(one: Tensor, other: Tensor) -> Tensor:
    """Return the summary of the numbers of both, without loss (Chan et al. 1983)."""
    total, shift = (one[0] + other[0]).clamp_min(1), other[1] - one[1]
    between = shift.square() * one[0] * other[0] / total
    return torch.stack(
        [
            one[0] + other[0],
            one[1] + shift * other[0] / total,
            one[2] + other[2] + between,
            one[3].minimum(other[3]),
            one[4].maximum(other[4]),
        ]
    )
