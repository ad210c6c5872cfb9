"""The whole Fisher information, for small problems and as the oracle of the sketches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from scodkit.factors import Factors
from scodkit.sketch.base import (
    FlatFactors,
    Sketch,
    SketchState,
    empty_state,
    flat_rows,
    own_transpose,
    refuse_parts,
)
from scodkit.sketch.eigenbasis import Eigenbasis
from scodkit.sketch.tall import tall_svd

# rows there is room for at first; and how much more there is, each time it runs out: little,
# as plans know of the rows alone
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

    def solve_columns(self, num_parameters: int, columns: int) -> int:
        """See `Sketch.solve_columns`.

        Returns:
            A copy of the rows; none of the dense matrix, but for those in float64.
        """
        return 0 if columns == num_parameters else columns

    def solve_scratch_bytes(
        self, num_parameters: int, columns: int, device: torch.device
    ) -> int:
        """See `Sketch.solve_scratch_bytes`.

        Returns:
            For the dense matrix two like it, in float64.
        """
        if columns == num_parameters:
            return 2 * columns**2 * torch.float64.itemsize
        return super().solve_scratch_bytes(num_parameters, columns, device)

    def zero(
        self,
        num_parameters: int,
        rank: int,
        dtype: torch.dtype,
        device: torch.device | str,
        held: range | None = None,
    ) -> SketchState:
        """See `Sketch.zero`.

        Returns:
            A state with room for a few rows, which grows.
        """
        refuse_parts(self, held)
        capacity = min(_FIRST_CAPACITY, num_parameters)
        rows = torch.zeros(capacity, num_parameters, dtype=dtype, device=device)
        state = empty_state(self, (num_parameters, num_parameters), {"rows": rows})
        state.numbers = {"filled": 0}
        return state

    def can_have(self, state: SketchState) -> bool:
        """Return whether a state has rows, and knows how many, or the dense matrix alone."""
        size = state.num_parameters
        if "rows" not in state.tensors:
            return state.shapes == {"fisher": (size, size)}
        count = state.tensors["rows"].numel() // size
        return state.shapes == {"rows": (count, size)} and state.has_whole("filled", 0, count)

    def absorb(self, state: SketchState, factors: Factors) -> None:
        """Append rows, or add their Gram matrix once that is the smaller thing to hold."""
        held = next(iter(state.tensors.values()))
        fresh = held.new_empty(factors.num_rows, state.num_parameters)
        for columns, rows in factors.blocks():
            fresh[:, columns] = flat_rows(rows, held)
        if "rows" in state.tensors:
            needed = int(state.numbers["filled"]) + fresh.shape[0]
            if needed <= state.num_parameters:
                self._append(state, fresh, needed)
                return
            self._to_dense(state)
        state.tensors["fisher"].addmm_(fresh.mT, fresh)

    @staticmethod
    def _append(state: SketchState, fresh: Tensor, needed: int) -> None:
        rows, filled = state.tensors["rows"], int(state.numbers["filled"])
        if needed > rows.shape[0]:
            capacity = min(max(needed, int(_GROWTH * rows.shape[0])), state.num_parameters)
            rows = rows.new_zeros(capacity, rows.shape[1])
            rows[:filled] = state.tensors["rows"][:filled]
            state.tensors["rows"] = rows
        rows[filled:needed] = fresh
        state.numbers["filled"] = needed

    @staticmethod
    def _to_dense(state: SketchState) -> None:
        rows = state.tensors["rows"][: int(state.numbers["filled"])]
        state.tensors = {"fisher": rows.mT @ rows}
        state.numbers = {}

    def _merge_tensors(self, state: SketchState, other: SketchState) -> None:
        if "rows" in other.tensors:
            rows = other.tensors["rows"][: int(other.numbers["filled"])]
            if rows.shape[0]:
                self.absorb(state, FlatFactors(rows))
            return
        if "rows" in state.tensors:
            self._to_dense(state)
        fisher = state.tensors["fisher"]
        fisher += other.tensors["fisher"].to(fisher.device)

    def eigenbasis(self, state: SketchState, rank: int) -> Eigenbasis:
        """See `Sketch.eigenbasis`.

        Returns:
            The true top eigenpairs; certified.
        """
        clamped = 0
        if "rows" in state.tensors:
            held = state.tensors["rows"][: int(state.numbers["filled"])]
            vectors, singular, _ = tall_svd(own_transpose(held))
            values = singular.square()
        else:
            held = state.tensors["fisher"]
            values, vectors = torch.linalg.eigh(held.double())
            values, vectors = values.flip(0), vectors.flip(1)
            clamped = int((values < 0).sum())
            kept = values > torch.finfo(torch.float64).eps * len(values) * values[:1]
            values, vectors = values[kept], vectors[:, kept]
        basis = self._basis(
            state,
            values,
            vectors.to(held.dtype).contiguous(),
            residual_norm=0.0,
            residual_rank=0,
            slack=state.rounding,
            clamped=clamped,
        )
        return basis.truncate(rank)
