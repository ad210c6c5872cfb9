"""The contract of every sketch: zero, update, merge, eigenbasis.

A sketch object holds options only. What it has seen lives in a `SketchState`: named tensors
and two sums, so that saving, moving and (for linear sketches) merging need no special cases.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from scodkit.errors import MergeError, OptionError
from scodkit.factors import Curvature, Factors
from scodkit.sketch.eigenbasis import Eigenbasis
from scodkit.sketch.maps import SeededMatrix
from scodkit.sketch.tall import AddUp, alone, tall_bytes

# where a state keeps of how many samples it has no exact norms
_ESTIMATED = "estimated"


@dataclass
class SketchState:
    """What a sketch has seen so far. Sums, never means: nothing depends on knowing ``M`` ahead.

    Args:
        sketch: The options it was made with.
        num_parameters: ``N``.
        columns: ``T``, the vectors of ``N`` numbers it holds or may come to hold.
        tensors: The sketch's own numbers.
        squared_norm: Sum of ``|L_i|_F^2``, a float64 scalar on the sketch's device.
        num_data: Samples seen.
        num_rows: Rows seen (samples times directions).
        num_updates: Additions made to the sums, each of which rounded them.
        numbers: Further plain numbers a sketch keeps.
        held: Which of the ``N`` weights it is about, where several processes divide them.
        add_up: Adds up what is a sum over weights, over those processes; no part of the state.
        matrices: Test matrices, by seed, from the first use to the next basis; no part of the
            state.
    """

    sketch: Sketch
    num_parameters: int
    columns: int
    tensors: dict[str, Tensor]
    squared_norm: Tensor
    num_data: int = 0
    num_rows: int = 0
    num_updates: int = 0
    numbers: dict[str, float] = field(default_factory=dict)
    held: range | None = None
    add_up: AddUp = field(default=alone, repr=False, compare=False)
    matrices: dict[int, SeededMatrix] = field(default_factory=dict, repr=False, compare=False)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of its tensors, by name."""
        return {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}

    @property
    def num_held(self) -> int:
        """How many of the ``N`` weights it is about."""
        return self.num_parameters if self.held is None else len(self.held)

    def has_whole(self, name: str, least: int, most: int) -> bool:
        """Return whether a number is there, whole and in a range."""
        number = self.numbers.get(name, math.nan)
        return least <= number <= most and number == int(number)

    @property
    def num_estimated(self) -> int:
        """Of how many samples ``|L_i|_F^2`` is an estimate: of those seen in products only."""
        return int(self.numbers.get(_ESTIMATED, 0))

    @num_estimated.setter
    def num_estimated(self, count: int) -> None:
        if count:  # states of rows alone stay without a mark
            self.numbers[_ESTIMATED] = count

    @property
    def rounding(self) -> float:
        """A bound on what rounding has added to the sum of ``L_i L_i^T``, in spectral norm.

        In the usual model of rounding as independent noise: each update adds an error of at
        most ``eps`` times the sum so far, and errors add up like a random walk. The constant
        covers the products within an update and the rounding of the result.
        """
        eps = torch.finfo(next(iter(self.tensors.values())).dtype).eps
        return eps * (4 + math.sqrt(self.num_updates)) * float(self.squared_norm)

    def copy(self) -> SketchState:
        """Return the same state in memory of its own."""
        return replace(
            self,
            tensors={name: tensor.clone() for name, tensor in self.tensors.items()},
            squared_norm=self.squared_norm.clone(),
            numbers=dict(self.numbers),
            matrices={},
        )

    def to(self, device: torch.device | str) -> SketchState:
        """Return the state itself, its tensors moved."""
        self.tensors = {name: tensor.to(device) for name, tensor in self.tensors.items()}
        self.squared_norm = self.squared_norm.to(device)
        self.matrices = {}
        return self


class Sketch(ABC):
    """A way to summarise ``F = (1/M) sum_i L_i L_i^T`` while the ``L_i`` stream past.

    Attributes:
        certified: Whether the result satisfies ``F_hat <= F``.
        linear: Whether merging is adding: then order, batches and machines do not matter.
        takes_products: Whether products with the curvature will do instead of rows.
    """

    certified: ClassVar[bool]
    linear: ClassVar[bool]
    takes_products: ClassVar[bool] = False

    @abstractmethod
    def columns(self, num_parameters: int, rank: int, num_rows: int | None = None) -> int:
        """Return how many vectors of ``N`` numbers the state will hold.

        Args:
            num_parameters: ``N``.
            rank: ``k``, the rank that will be asked for.
            num_rows: How many rows will stream past, where that is known.

        Raises:
            OptionError: If the options cannot give that rank.
        """

    def scratch_bytes(self, num_parameters: int, columns: int) -> int:
        """Return what is held beside the state while data streams past."""
        return 0

    def making_bytes(self, num_parameters: int, columns: int, device: torch.device) -> int:
        """Return what making parts of a test matrix takes, where it is not held."""
        return 0

    def solve_columns(self, num_parameters: int, columns: int) -> int:
        """Return how many vectors of ``N`` numbers finding a basis takes beside the state.

        Args:
            num_parameters: ``N``.
            columns: ``T``; a copy of these by default.
        """
        return columns

    def solve_scratch_bytes(
        self, num_parameters: int, columns: int, device: torch.device
    ) -> int:
        """Return what that takes beside them: parts, and small matrices, in float64.

        Args:
            num_parameters: ``N``.
            columns: ``T``.
            device: Where the state is.
        """
        return tall_bytes(num_parameters, columns, device)

    @abstractmethod
    def zero(
        self,
        num_parameters: int,
        rank: int,
        dtype: torch.dtype,
        device: torch.device | str,
        held: range | None = None,
    ) -> SketchState:
        """Return the state that has seen nothing.

        Args:
            num_parameters: ``N``.
            rank: ``k``, the rank that will be asked for.
            dtype: Of the sums; float32 or float64.
            device: Where they live.
            held: Which of the ``N`` weights it is about; all by default.

        Raises:
            OptionError: If the sketch cannot be divided.
        """

    @abstractmethod
    def absorb(self, state: SketchState, factors: Factors) -> None:
        """Add rows to the sketch's own tensors, in place."""

    @abstractmethod
    def eigenbasis(self, state: SketchState, rank: int) -> Eigenbasis:
        """Return the top eigenpairs of ``F_hat``; the state stays usable.

        Args:
            state: What was seen.
            rank: How many pairs to keep; fewer come back where there are fewer.
        """

    def can_have(self, state: SketchState) -> bool:
        """Return whether a state is one of this sketch, to go by its form; it is from a file.

        Args:
            state: Of finite numbers.
        """
        return True

    def update(
        self, state: SketchState, factors: Factors, squared_norm: Tensor, num_data: int
    ) -> None:
        """Let rows stream past, in place.

        Args:
            state: Changed in place.
            factors: Rows in weight space, all finite.
            squared_norm: Their sum of squares, a scalar (`Factors.squared_norms`, summed).
            num_data: How many samples these rows complete (a sample's directions may come in
                several pieces; it counts once).
        """
        if factors.num_rows == 0:
            return
        self.absorb(state, factors)
        state.squared_norm += squared_norm.to(state.squared_norm)
        state.num_data += num_data
        state.num_rows += factors.num_rows
        state.num_updates += 1

    def test_matrices(self, state: SketchState) -> dict[str, SeededMatrix]:
        """Return the matrices whose products with the curvature a state holds, by tensor."""
        return {}

    def update_by_products(self, state: SketchState, curvature: Curvature) -> None:
        """Let samples stream past of which only products are at hand, in place.

        The test matrices are those that rows are multiplied with, so the sums are the same.
        Not so the norms: ``|L_i|_F^2`` is estimated as ``N / T`` times the squares of ``L_i^T``
        along the ``T`` columns. The standard error of their sum is at most ``sqrt(2 / T)``
        times the Frobenius norm of the curvature.

        Args:
            state: Changed in place; of a sketch that takes products.
            curvature: Of the samples.
        """
        trace = torch.zeros_like(state.squared_norm)
        for name, matrix in self.test_matrices(state).items():
            total = state.tensors[name]
            for first in range(0, total.shape[1], curvature.columns_at_once):
                which = slice(first, min(first + curvature.columns_at_once, total.shape[1]))
                some = matrix.columns(which, total)
                trace += curvature.add_times(some, total[:, which]).to(trace)
        state.squared_norm += trace * state.num_parameters / state.columns
        state.num_data += curvature.num_data
        state.num_rows += curvature.num_rows
        state.num_updates += 1
        state.num_estimated += curvature.num_data

    def merge(self, state: SketchState, other: SketchState) -> SketchState:
        """Return the state of one pass over both streams, reusing the memory of ``state``.

        Args:
            state: One part; changed in place.
            other: The other part; left alone.

        Raises:
            MergeError: If they were made with different options, maps, seeds or sizes.
        """
        mine, theirs = self._identity(state), self._identity(other)
        differences = [
            f"{what}: {mine[what]} and {theirs.get(what)}"
            for what in mine
            if mine[what] != theirs.get(what)
        ]
        if differences:
            raise MergeError(
                "expected two parts of one sketch, got different ones ("
                + "; ".join(differences)
                + "); fit every part with the same sketch, rank, parameters and model"
            )
        self._merge_tensors(state, other)
        state.squared_norm += other.squared_norm.to(state.squared_norm.device)
        state.num_data += other.num_data
        state.num_rows += other.num_rows
        state.num_updates += other.num_updates + 1
        state.num_estimated += other.num_estimated
        return state

    def _identity(self, state: SketchState) -> dict[str, object]:
        """Return what two states must agree on to be merged."""
        return {
            "sketch": state.sketch,
            "number of parameters": state.num_parameters,
            "weights": state.held,
            "size": state.columns,
        }

    def _basis(
        self,
        state: SketchState,
        values: Tensor,
        vectors: Tensor,
        *,
        residual_norm: float,
        residual_rank: int,
        slack: float = 0.0,
        clamped: int = 0,
    ) -> Eigenbasis:
        """Return the basis of ``F_hat`` from values, residual norm and slack of the sum."""
        num_data = max(1, state.num_data)
        state.matrices.clear()  # the stream has ended, as far as is known
        trace = float(state.squared_norm)
        if state.num_estimated:  # and what was found is there for certain
            trace = max(trace, float(values.sum()))
        return Eigenbasis(
            values=(values / num_data).to(vectors.dtype),
            vectors=vectors,
            num_data=state.num_data,
            trace=trace / num_data,
            certified=self.certified and not state.num_estimated,
            residual_norm=residual_norm / num_data,
            residual_rank=residual_rank,
            slack=slack / num_data,
            clamped=clamped,
        )

    def _merge_tensors(self, state: SketchState, other: SketchState) -> None:
        for name, tensor in state.tensors.items():
            tensor += other.tensors[name].to(tensor.device)


class FlatFactors(Factors):
    """Rows given as one matrix, all parameters in one block.

    Args:
        rows: ``(R, N)``.
    """

    def __init__(self, rows: Tensor) -> None:
        self._rows = rows
        self.num_rows = rows.shape[0]

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield all columns with their rows ``(R, 1, N)``."""
        yield slice(0, self._rows.shape[1]), self._rows[:, None]


def empty_state(
    sketch: Sketch,
    shape: tuple[int, int],
    tensors: dict[str, Tensor],
    held: range | None = None,
) -> SketchState:
    """Return a state of ``shape (N, T)`` around tensors of zeros."""
    device = next(iter(tensors.values())).device
    squared_norm = torch.zeros((), dtype=torch.float64, device=device)
    return SketchState(sketch, *shape, tensors, squared_norm, held=held)


def refuse_parts(sketch: Sketch, held: range | None) -> None:
    """Refuse to divide the weights of a sketch among processes.

    Raises:
        OptionError: If that is asked for.
    """
    if held is not None:
        raise OptionError(
            f"expected a sketch that can be divided by weights, got {sketch}, which holds "
            "whole rows; type sketch=Nystrom() or TwoSided()"
        )


def flat_rows(rows: Tensor, like: Tensor) -> Tensor:
    """Return rows ``(b, q, n)`` as ``(b q, n)`` in the dtype and on the device of the sums."""
    return rows.flatten(0, 1).to(like.device, like.dtype)


def own_transpose(rows: Tensor) -> Tensor:
    """Return the transpose in memory of its own (``contiguous`` may hand back the original)."""
    return rows.mT.clone(memory_format=torch.contiguous_format)
