"""Adds up the rows of parameters that a network uses more than once, or in parts."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from scodkit.factors.rules import Place, Rows
from scodkit.factors.rules.rows import Factored, Several, dense
from scodkit.model.parameters import ParameterSet
from scodkit.model.projected import Pair, sides_of
from scodkit.numerics.matmul import sum_dtype


class Uses(Protocol):
    """Adds up the rows of parameters with several uses."""

    def add(self, place: Place, rows: Rows) -> None:
        """Add rows of a use of a parameter, or of a part of it."""
        ...

    def pop(self, columns: slice) -> Rows:
        """Return the rows of a parameter, and forget them; zeros if none were added."""
        ...


class Totals:
    """Adds up rows as tensors of all of the parameter's columns.

    Args:
        rows: At the output, ``(b, q, d)``.
    """

    def __init__(self, rows: Tensor) -> None:
        self._rows = rows
        self._sums: dict[int, Tensor] = {}

    def add(self, place: Place, rows: Rows) -> None:
        """See `Uses.add`."""
        start, own = place.block.start, dense(rows)
        if start not in self._sums and place.columns == place.block:
            self._sums[start] = own.to(self._rows.dtype, copy=True)
            return
        if start not in self._sums:
            self._sums[start] = self._zeros(place.block)
        part = slice(place.columns.start - start, place.columns.stop - start)
        self._sums[start][:, :, part] += own

    def pop(self, columns: slice) -> Rows:
        """Return what `Uses.pop` describes."""
        rows = self._sums.pop(columns.start, None)
        return self._zeros(columns) if rows is None else rows

    def _zeros(self, columns: slice) -> Tensor:
        return self._rows.new_zeros(*self._rows.shape[:2], columns.stop - columns.start)


class InFactors:
    """Adds up the uses of parameters without materialising them.

    Args:
        parameters: The weights themselves.
        rows: At the output, ``(b, q, d)``.
    """

    def __init__(self, parameters: ParameterSet, rows: Tensor) -> None:
        self._sides = {
            b.columns.start: sides_of(b.shape) or (b.columns.stop - b.columns.start, 1)
            for b in parameters.blocks
        }
        self._rows = rows
        self._uses: dict[int, list[tuple[slice, Rows]]] = {}

    def add(self, place: Place, rows: Rows) -> None:
        """See `Uses.add`."""
        start = place.block.start
        which = slice(place.columns.start - start, place.columns.stop - start)
        self._uses.setdefault(start, []).append((which, rows))

    def pop(self, columns: slice) -> Rows:
        """Return what `Uses.pop` describes."""
        sides = self._sides[columns.start]
        uses = self._uses.pop(columns.start, None)
        return Several(uses, sides) if uses else _Nothing(self._rows, sides)


class _Nothing(Factored):
    """Rows of a parameter that does not affect the output: zeros.

    Args:
        rows: At the output, ``(b, q, d)``.
        sides: Of the parameter.
    """

    nbytes = 0

    def __init__(self, rows: Tensor, sides: tuple[int, int]) -> None:
        self._rows, self.sides = rows, sides

    def dense(self) -> Tensor:
        """Return what `Factored.dense` describes."""
        return self._rows.new_zeros(*self._rows.shape[:2], self.sides[0] * self.sides[1])

    def compressed(self, pair: Pair) -> tuple[Tensor, Tensor]:
        """Return what `Factored.compressed` describes."""
        shape, size = self._rows.shape[:2], pair.shape[0] * pair.shape[1]
        rows = self._rows.new_zeros(*shape, size, dtype=sum_dtype(self._rows))
        return rows, rows.new_zeros(shape, dtype=torch.float64)
