"""Frequent Directions: a deterministic sketch that never lies above ``F``.

Liberty (2013), "Simple and deterministic matrix sketching"; Ghashami, Liberty, Phillips,
Woodruff (2016), "Frequent Directions: simple and deterministic matrix sketching".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from scodkit.errors import OptionError
from scodkit.factors.engine import Factors
from scodkit.numerics.matmul import tall_gram, tall_times
from scodkit.sketch.base import FlatFactors, Sketch, SketchState, eigenpairs_of_rows
from scodkit.sketch.eigenbasis import Eigenbasis

# where rows are short a longer buffer costs nothing and saves shrinkings
_ROOMY_ROWS = 128
_ROOMY_NUMBERS = 1 << 22


@dataclass(frozen=True)
class FrequentDirections(Sketch):
    """A buffer of at least ``2 size`` rows, shrunk to ``size`` whenever it is full.

    Each shrinking takes the same amount off every squared singular value; the total taken
    off, ``delta``, bounds the error: ``0 <= F - F_hat <= (delta / M) I``.

    Args:
        size: Rows kept by a shrinking, ``l``; the rank by default. Twice that is held, or
            more where ``N`` is small.
        shrink: False only drops the small directions instead of shrinking all (incremental
            SVD): more accurate on most streams, still never above ``F``, but without the
            bound that holds on every stream.

    Examples:
        >>> FrequentDirections(size=40).columns(num_parameters=1_000_000, rank=20)
        80
    """

    certified: ClassVar[bool] = True
    linear: ClassVar[bool] = False

    size: int | None = None
    shrink: bool = True

    def columns(self, num_parameters: int, rank: int, num_rows: int | None = None) -> int:
        """See `Sketch.columns`.

        Returns:
            The rows of the buffer, ``2 l`` or more.

        Raises:
            OptionError: If the size is below the rank.
        """
        size = self._size(rank)
        if size < rank:
            raise OptionError(
                f"expected size >= rank, got size={size}, rank={rank}; "
                f"type FrequentDirections(size={rank})"
            )
        return max(2 * size, min(_ROOMY_ROWS, _ROOMY_NUMBERS // num_parameters))

    def _size(self, rank: int) -> int:
        return rank if self.size is None else self.size

    def _shapes(self, num_weights: int, columns: int) -> dict[str, tuple[int, int]]:
        """Return a buffer of ``T`` rows."""
        return {"buffer": (columns, num_weights)}

    def _numbers(self, rank: int) -> dict[str, float]:
        """Return the rows in use, the total shrinkage, and the rows a shrinking leaves."""
        return {"filled": 0, "delta": 0.0, "kept": self._size(rank)}

    def can_have(self, state: SketchState) -> bool:
        """Return whether a state has a buffer alone, and numbers that fit it."""
        return (
            super().can_have(state)
            and state.numbers.get("filled") in range(state.columns + 1)
            and state.numbers.get("kept") in range(1, state.columns // 2 + 1)
            and "delta" in state.numbers
        )

    def absorb(self, state: SketchState, factors: Factors) -> None:
        """Copy rows into the buffer, as many at a time as there is room for."""
        buffer = state.tensors["buffer"]
        blocks = [(columns, rows.flatten(0, 1)) for columns, rows in factors.blocks()]
        done = 0
        while done < factors.num_rows:
            if state.numbers["filled"] == len(buffer):
                self._shrink(state)
            filled = int(state.numbers["filled"])
            count = min(len(buffer) - filled, factors.num_rows - done)
            for columns, rows in blocks:
                buffer[filled : filled + count, columns] = rows[done : done + count]
            state.numbers["filled"] = filled + count
            done += count

    def _shrink(self, state: SketchState) -> None:
        buffer = state.tensors["buffer"]
        size = int(state.numbers["kept"])
        # the eigenvectors of the small Gram matrix say how to mix rows into directions; on the
        # CPU, which has them sooner than a GPU
        squared, mix = torch.linalg.eigh(tall_gram(buffer.mT).cpu())
        squared, mix = squared.flip(0).clamp_min(0), mix.flip(1)
        taken = float(squared[size])
        left = squared[:size] - taken if self.shrink else squared[:size]
        scale = (left / squared[:size]).nan_to_num(0.0).sqrt()
        tall_times(buffer.mT, (mix[:, :size] * scale).to(buffer.device), overwrite=True)
        buffer[size:] = 0
        state.numbers["filled"] = size
        # dropping without shrinking loses at most the largest dropped value each time
        state.numbers["delta"] += taken

    def _merge_tensors(self, state: SketchState, other: SketchState) -> None:
        self.absorb(state, FlatFactors(other.filled("buffer")))
        state.numbers["delta"] += other.numbers["delta"]

    def eigenbasis(self, state: SketchState, rank: int) -> Eigenbasis:
        """See `Sketch.eigenbasis`.

        Returns:
            A certified basis whose ``residual_norm`` is the accumulated shrinkage.
        """
        values, vectors = eigenpairs_of_rows(state.filled("buffer"))
        return self._basis(
            state,
            rank,
            values,
            vectors,
            residual_norm=state.numbers["delta"],
            residual_rank=min(state.num_parameters, state.num_rows),
            slack=state.rounding,
        )
