"""The whole Fisher information, for small problems and as the oracle of the sketches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from scodkit.factors.engine import Factors
from scodkit.sketch.base import (
    FlatFactors,
    Sketch,
    SketchMemory,
    SketchState,
    eigenpairs_of_rows,
)
from scodkit.sketch.eigenbasis import Eigenbasis

# rows there is room for at first, and the factor by which it grows each time it runs out: a
# small one, as planned memory counts the rows alone
_FIRST_CAPACITY = 64
_GROWTH = 1.125


@dataclass(frozen=True)
class Exact(Sketch):
    """Every row while there are fewer than ``N``, the dense ``N x N`` matrix after that.

    Examples:
        >>> Exact().columns(num_parameters=500, rank=10, num_rows=60)
        60
    """

    certified: ClassVar[bool] = True
    linear: ClassVar[bool] = True

    def columns(self, num_parameters: int, rank: int, num_rows: int | None = None) -> int:
        """See `Sketch.columns`.

        Returns:
            The number of rows that will come, at most ``N``.
        """
        return num_parameters if num_rows is None else min(num_parameters, num_rows)

    def _shapes(self, num_weights: int, columns: int) -> dict[str, tuple[int, int]]:
        """Return the first capacity for rows; it grows with them."""
        return {"rows": (min(_FIRST_CAPACITY, num_weights), num_weights)}

    def _numbers(self, rank: int) -> dict[str, float]:
        """Return how many of the rows are in use."""
        return {"filled": 0}

    def memory(self, num_parameters: int, columns: int, device: torch.device) -> SketchMemory:
        """See `Sketch.memory`.

        Returns:
            A copy of the rows; for the dense matrix two like it, in float64.
        """
        if columns < num_parameters:
            return super().memory(num_parameters, columns, device)
        dense = 2 * columns**2 * torch.float64.itemsize
        return SketchMemory(0, 0, solve_columns=0, solve_bytes=dense)

    def can_have(self, state: SketchState) -> bool:
        """Return whether a state has rows, and how many, or the dense matrix alone."""
        size = state.num_parameters
        if "rows" not in state.tensors:
            return state.shapes == {"fisher": (size, size)}
        count = state.tensors["rows"].numel() // size
        fits = state.numbers.get("filled") in range(count + 1)
        return fits and state.shapes == {"rows": (count, size)}

    def absorb(self, state: SketchState, factors: Factors) -> None:
        """Append rows, or add their Gram matrix once that is the smaller thing to hold."""
        like = next(iter(state.tensors.values()))
        fresh = like.new_empty(factors.num_rows, state.num_parameters)
        for columns, rows in factors.blocks():
            fresh[:, columns] = rows.flatten(0, 1)
        filled = int(state.numbers.get("filled", 0))
        needed = filled + len(fresh)
        if "fisher" in state.tensors or needed > state.num_parameters:
            self._dense(state).addmm_(fresh.mT, fresh)
            return
        buffer = state.tensors["rows"]
        if needed > len(buffer):
            capacity = min(max(needed, int(_GROWTH * len(buffer))), state.num_parameters)
            buffer = buffer.new_zeros(capacity, state.num_parameters)
            buffer[:filled] = state.filled("rows")
            state.tensors["rows"] = buffer
        buffer[filled:needed] = fresh
        state.numbers["filled"] = needed

    @staticmethod
    def _dense(state: SketchState) -> Tensor:
        """Return the dense matrix, which takes the place of the rows."""
        if "rows" in state.tensors:
            rows = state.filled("rows")
            state.tensors = {"fisher": rows.mT @ rows}
            state.numbers = {}
        return state.tensors["fisher"]

    def _merge_tensors(self, state: SketchState, other: SketchState) -> None:
        if "rows" in other.tensors:
            self.absorb(state, FlatFactors(other.filled("rows")))
        else:
            fisher = self._dense(state)
            fisher += other.tensors["fisher"].to(fisher.device)

    def eigenbasis(self, state: SketchState, rank: int) -> Eigenbasis:
        """See `Sketch.eigenbasis`.

        Returns:
            The true top eigenpairs; certified.
        """
        clamped = 0
        if "rows" in state.tensors:
            values, vectors = eigenpairs_of_rows(state.filled("rows"))
        else:
            values, vectors = torch.linalg.eigh(state.tensors["fisher"].double())
            values, vectors = values.flip(0), vectors.flip(1)
            clamped = int((values < 0).sum())
            significant = values > torch.finfo(torch.float64).eps * len(values) * values[:1]
            values, vectors = values[significant], vectors[:, significant]
        return self._basis(
            state,
            rank,
            values,
            vectors.to(state.dtype).contiguous(),
            residual_norm=0.0,
            residual_rank=0,
            slack=state.rounding,
            clamped=clamped,
        )
