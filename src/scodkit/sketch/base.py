"""The contract of every sketch: zero, update, merge, eigenbasis.

A sketch object has options only. What it has seen lives in a `SketchState`: named tensors, a
sum of squares and counts, so that saving, moving and (for linear sketches) merging need no
special cases.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from scodkit.errors import MergeError, OptionError
from scodkit.factors.engine import Factors, HeldFactors
from scodkit.factors.products import Curvature
from scodkit.numerics.kernels import accumulate
from scodkit.numerics.matmul import AddUp, alone, tall_bytes, tall_svd
from scodkit.sketch.eigenbasis import Eigenbasis
from scodkit.sketch.maps import Map, SeededMatrix, SparseSign, check_map, matrix_bytes

# what is added to a sketch's seed for the test matrix of each of its tensors
_SEED_OFFSETS = {"y": 0, "w": 0x5C0D}


@dataclass
class SketchState:
    """What a sketch has seen so far. Sums, never means: nothing depends on knowing ``M`` ahead.

    Args:
        sketch: The options it was made with.
        num_parameters: ``N``.
        columns: ``T``, the vectors of ``N`` numbers it holds or may come to hold.
        tensors: The sums, rows or products of the sketch, by name.
        squared_norm: Sum of ``|L_i|_F^2`` over its ``N`` columns, a float64 scalar on the
            sketch's device.
        num_data: Samples seen.
        num_rows: Rows seen (samples times directions).
        num_updates: Additions made to the sums, each of which rounded them.
        numbers: Further plain numbers of the sketch, by name.
        weights: Which of the ``N`` weights it covers, where several processes divide them.
        add_up: Adds up sums over weights, over those processes; not part of the state.
        matrices: Cache of test matrices, by tensor, from the first use to the next basis; not
            part of the state.
        outside: What projections of the weights have left out of ``squared_norm``, likewise a
            float64 scalar; see `Factors.outside`.
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
    weights: range | None = None
    add_up: AddUp = field(default=alone, repr=False, compare=False)
    matrices: dict[str, SeededMatrix] = field(default_factory=dict, repr=False, compare=False)
    outside: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.outside = torch.zeros_like(self.squared_norm)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the tensors, by name."""
        return {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the tensors."""
        return next(iter(self.tensors.values())).dtype

    def filled(self, name: str) -> Tensor:
        """Return the rows of a tensor that are in use: the first ``numbers["filled"]``."""
        return self.tensors[name][: int(self.numbers["filled"])]

    @property
    def num_estimated(self) -> int:
        """How many samples have an estimate of ``|L_i|_F^2``: those seen in products only."""
        return int(self.numbers.get("estimated", 0))

    @property
    def rounding(self) -> float:
        """A bound on what rounding has added to the sum of ``L_i L_i^T``, in spectral norm.

        In the usual model of rounding as independent noise: each update adds an error of at
        most ``eps`` times the sum so far, and errors add up like a random walk. The constant
        covers the products within an update and the rounding of the result.
        """
        eps = torch.finfo(self.dtype).eps
        return eps * (4 + math.sqrt(self.num_updates)) * float(self.squared_norm)

    def copy(self) -> SketchState:
        """Return the same state in memory of its own."""
        copied = replace(
            self,
            tensors={name: tensor.clone() for name, tensor in self.tensors.items()},
            squared_norm=self.squared_norm.clone(),
            numbers=dict(self.numbers),
            matrices={},
        )
        copied.outside += self.outside
        return copied

    def to(self, device: torch.device | str) -> SketchState:
        """Return the state itself, its tensors moved."""
        self.tensors = {name: tensor.to(device) for name, tensor in self.tensors.items()}
        self.squared_norm = self.squared_norm.to(device)
        self.outside = self.outside.to(device)
        self.matrices = {}
        return self


class SketchMemory(NamedTuple):
    """What a sketch needs beside its state.

    Attributes:
        kept_bytes: Test matrices that are cached while data streams past.
        making_bytes: Scratch to regenerate test matrices that are not cached.
        solve_columns: Vectors of ``N`` numbers, in the dtype of the state, to find a basis.
        solve_bytes: Scratch for that in float64: chunks, and small matrices.
    """

    kept_bytes: int
    making_bytes: int
    solve_columns: int
    solve_bytes: int


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

    @abstractmethod
    def _shapes(self, num_weights: int, columns: int) -> dict[str, tuple[int, int]]:
        """Return the shapes of the tensors of a state, by name.

        Args:
            num_weights: How many of the weights the state covers.
            columns: ``T``.
        """

    def _numbers(self, rank: int) -> dict[str, float]:
        """Return the plain numbers of a state that has seen nothing."""
        return {}

    def memory(self, num_parameters: int, columns: int, device: torch.device) -> SketchMemory:
        """Return what is needed beside the state; by default a copy of it, to find a basis.

        Args:
            num_parameters: ``N``.
            columns: ``T``.
            device: Where the state is.
        """
        scratch = tall_bytes(num_parameters, columns, device)
        return SketchMemory(0, 0, solve_columns=columns, solve_bytes=scratch)

    def zero(
        self,
        num_parameters: int,
        rank: int,
        dtype: torch.dtype,
        device: torch.device | str,
        weights: range | None = None,
    ) -> SketchState:
        """Return the state that has seen nothing.

        Args:
            num_parameters: ``N``.
            rank: ``k``, the rank that will be asked for.
            dtype: Of the sums; float32 or float64.
            device: Where they live.
            weights: Which of the ``N`` weights it covers; all by default.

        Raises:
            OptionError: If the sketch cannot be divided by weights.
        """
        if weights is not None and not self.takes_products:
            raise OptionError(
                f"expected a sketch that can be divided by weights, got {self}, which holds "
                "whole rows; type sketch=Nystrom() or TwoSided()"
            )
        columns = self.columns(num_parameters, rank)
        shapes = self._shapes(num_parameters if weights is None else len(weights), columns)
        return SketchState(
            sketch=self,
            num_parameters=num_parameters,
            columns=columns,
            tensors={
                name: torch.zeros(shape, dtype=dtype, device=device)
                for name, shape in shapes.items()
            },
            squared_norm=torch.zeros((), dtype=torch.float64, device=device),
            numbers=self._numbers(rank),
            weights=weights,
        )

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
        """Return whether a state from a file has the form of a state of this sketch.

        Args:
            state: Of finite numbers.
        """
        covered = state.num_parameters if state.weights is None else len(state.weights)
        return state.shapes == self._shapes(covered, state.columns)

    def update(
        self, state: SketchState, factors: Factors, squared_norm: Tensor, num_data: int
    ) -> None:
        """Add rows, in place.

        Args:
            state: Changed in place.
            factors: Rows in weight space, all finite.
            squared_norm: Their sum of squares, a scalar (`Factors.squared_norms`, summed).
                Of projected weights it has squares outside of the columns, too.
            num_data: How many samples these rows complete: the directions of a sample may come
                in several pieces, but it counts once.
        """
        if factors.num_rows == 0:
            return
        self.absorb(state, factors)
        if factors.outside is not None:
            outside = factors.outside.sum()
            state.outside += outside.to(state.outside)
            squared_norm = squared_norm - outside
        state.squared_norm += squared_norm.to(state.squared_norm)
        state.num_data += num_data
        state.num_rows += factors.num_rows
        state.num_updates += 1

    def test_matrices(self, state: SketchState) -> dict[str, SeededMatrix]:
        """Return the test matrices of a sketch that takes products, by tensor of the state."""
        return {}

    def update_by_products(self, state: SketchState, curvature: Curvature) -> None:
        """Add samples that are seen only through products with their curvature, in place.

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
                directions = matrix.columns(which, total)
                trace += curvature.add_times(directions, total[:, which]).to(trace)
        state.squared_norm += trace * state.num_parameters / state.columns
        state.num_data += curvature.num_data
        state.num_rows += curvature.num_rows
        state.num_updates += 1
        state.numbers["estimated"] = state.num_estimated + curvature.num_data

    def merge(self, state: SketchState, other: SketchState) -> SketchState:
        """Return the state of one pass over both streams, reusing the memory of ``state``.

        Args:
            state: One part; changed in place.
            other: The other part; left alone.

        Raises:
            MergeError: If they were made with different options, maps, seeds or sizes.
        """
        compared: list[tuple[str, object, object]] = [
            ("sketch", state.sketch, other.sketch),
            ("number of parameters", state.num_parameters, other.num_parameters),
            ("weights", state.weights, other.weights),
            ("columns", state.columns, other.columns),
            ("size", state.numbers.get("kept"), other.numbers.get("kept")),
        ]
        differing = [f"{name}: {mine} and {its}" for name, mine, its in compared if mine != its]
        if differing:
            raise MergeError(
                f"expected two parts of one sketch, got different ones ({'; '.join(differing)}"
                "); fit every part with the same sketch, rank, parameters and model"
            )
        self._merge_tensors(state, other)
        state.squared_norm += other.squared_norm.to(state.squared_norm.device)
        state.outside += other.outside.to(state.outside.device)
        state.num_data += other.num_data
        state.num_rows += other.num_rows
        state.num_updates += other.num_updates + 1
        if other.num_estimated:
            state.numbers["estimated"] = state.num_estimated + other.num_estimated
        return state

    def _basis(
        self,
        state: SketchState,
        rank: int,
        values: Tensor,
        vectors: Tensor,
        *,
        residual_rank: int,
        residual_norm: float = math.inf,
        slack: float = 0.0,
        clamped: int = 0,
    ) -> Eigenbasis:
        """Return the top eigenpairs of ``F_hat``.

        Args:
            state: What was seen.
            rank: How many pairs to keep.
            values: Eigenvalues of ``M F_hat``, descending.
            vectors: Its eigenvectors.
            residual_rank: As in `Eigenbasis`.
            residual_norm: As in `Eigenbasis`, of ``M F_hat``.
            slack: As in `Eigenbasis`, of ``M F_hat``.
            clamped: As in `Eigenbasis`.
        """
        num_data = max(1, state.num_data)
        state.matrices.clear()  # most likely the stream has ended
        trace = float(state.squared_norm)
        if state.num_estimated:  # but the curvature that was found is certain
            trace = max(trace, float(values.sum()))
        outside = float(state.outside)
        basis = Eigenbasis(
            values=(values / num_data).to(vectors.dtype),
            vectors=vectors,
            num_data=state.num_data,
            trace=(trace + outside) / num_data,
            outside=outside / num_data,
            certified=self.certified and not state.num_estimated,
            residual_norm=residual_norm / num_data,
            residual_rank=residual_rank,
            slack=slack / num_data,
            clamped=clamped,
        )
        return basis.bounded_by_trace().truncate(rank)

    def _merge_tensors(self, state: SketchState, other: SketchState) -> None:
        for name, tensor in state.tensors.items():
            tensor += other.tensors[name].to(tensor.device)


@dataclass(frozen=True)
class SeededSketch(Sketch):
    """A linear sketch of products ``F Omega`` with test matrices that are made from a seed.

    Args:
        size: ``T``, vectors of ``N`` numbers held while fitting.
        map: Family of the test matrices.
        seed: Which test matrices; sketches merge only if theirs agree.
    """

    linear: ClassVar[bool] = True
    takes_products: ClassVar[bool] = True

    size: int | None = None
    map: Map = SparseSign()  # noqa: RUF009 (frozen)
    seed: int = 0

    def __post_init__(self) -> None:
        check_map(self.map, self.seed)

    def memory(self, num_parameters: int, columns: int, device: torch.device) -> SketchMemory:
        """See `Sketch.memory`.

        Returns:
            With the test matrices, either cached or regenerated one at a time.
        """
        shapes = self._shapes(num_parameters, columns).values()
        sizes = [matrix_bytes(self.map, (rows, width), device) for rows, width in shapes]
        cached, scratch = zip(*sizes, strict=True)
        memory = super().memory(num_parameters, columns, device)
        return memory._replace(kept_bytes=sum(cached), making_bytes=max(scratch))

    def test_matrices(self, state: SketchState) -> dict[str, SeededMatrix]:
        """See `Sketch.test_matrices`.

        Returns:
            The same ones until the next basis, made when they are first needed.
        """
        if not state.matrices:
            state.matrices = {
                name: SeededMatrix(
                    self._map_of(state),
                    (state.num_parameters, tensor.shape[1]),
                    self.seed + _SEED_OFFSETS[name],
                    tensor.device,
                    state.weights,
                )
                for name, tensor in state.tensors.items()
            }
        return state.matrices

    def _map_of(self, state: SketchState) -> Map:
        """Return the family that the test matrices of a state are from."""
        return self.map

    def absorb(self, state: SketchState, factors: Factors) -> None:
        """Add ``G^T (G Omega)`` to each tensor: two sweeps over the blocks of ``G``.

        Where processes divide the weights, each adds to its own rows of the tensor.
        """
        for name, omega in self.test_matrices(state).items():
            total = state.tensors[name]
            products = total.new_zeros(factors.num_rows, total.shape[1])
            for columns, rows in factors.blocks():
                products += omega.project(rows.flatten(0, 1).to(total.device), columns.start)
            products = factors.add_up(products)
            for columns, rows in factors.blocks():
                accumulate(total[columns], rows.flatten(0, 1).to(total.device), products)


class FlatFactors(HeldFactors):
    """Rows given as one matrix ``(R, N)``, all parameters in one block."""

    def __init__(self, rows: Tensor) -> None:
        super().__init__([(slice(0, rows.shape[1]), rows[:, None])])


def eigenpairs_of_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the eigenvalues of ``rows^T rows``, descending, and its eigenvectors.

    Args:
        rows: ``(R, N)``; left alone.

    Returns:
        ``(r,)`` in float64, and ``(N, r)`` in the dtype of the rows.
    """
    # a clone, which `tall_svd` may overwrite: ``contiguous`` may return the original
    columns = rows.mT.clone(memory_format=torch.contiguous_format)
    vectors, singular, _ = tall_svd(columns)
    return singular.square(), vectors
