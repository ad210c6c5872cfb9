"""The contract of every sketch: zero, update, merge, eigenbasis.

A sketch object holds options only. What it has seen lives in a `SketchState`: named tensors
and two sums, so that saving, moving and (for linear sketches) merging need no special cases.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from scodkit.eigenbasis import Eigenbasis
from scodkit.errors import MergeError
from scodkit.factors import Factors
from scodkit.parameters import Block

# rows of a tall matrix handled at a time where a copy in float64 is needed
_TALL_CHUNK = 1 << 16


@dataclass
class SketchState:
    """What a sketch has seen so far. Sums, never means: nothing depends on knowing ``M`` ahead.

    Args:
        sketch: The options it was made with.
        num_parameters: ``N``.
        tensors: The sketch's own numbers.
        squared_norm: Sum of ``|L_i|_F^2``, a float64 scalar on the sketch's device.
        num_data: Samples seen.
        num_rows: Rows seen (samples times directions).
        numbers: Further plain numbers a sketch keeps.
    """

    sketch: Sketch
    num_parameters: int
    tensors: dict[str, Tensor]
    squared_norm: Tensor
    num_data: int = 0
    num_rows: int = 0
    numbers: dict[str, float] = field(default_factory=dict)

    def copy(self) -> SketchState:
        """Return the same state in memory of its own."""
        return replace(
            self,
            tensors={name: tensor.clone() for name, tensor in self.tensors.items()},
            squared_norm=self.squared_norm.clone(),
            numbers=dict(self.numbers),
        )

    def to(self, device: torch.device | str) -> SketchState:
        """Return the state itself, its tensors moved."""
        self.tensors = {name: tensor.to(device) for name, tensor in self.tensors.items()}
        self.squared_norm = self.squared_norm.to(device)
        return self


class Sketch(ABC):
    """A way to summarise ``F = (1/M) sum_i L_i L_i^T`` while the ``L_i`` stream past.

    Attributes:
        certified: Whether the result satisfies ``F_hat <= F``.
        linear: Whether merging is adding: then order, batches and machines do not matter.
    """

    certified: ClassVar[bool]
    linear: ClassVar[bool]

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
    def zero(
        self, num_parameters: int, rank: int, dtype: torch.dtype, device: torch.device | str
    ) -> SketchState:
        """Return the state that has seen nothing.

        Args:
            num_parameters: ``N``.
            rank: ``k``, the rank that will be asked for.
            dtype: Of the sums; float32 or float64.
            device: Where they live.
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
        if factors.num_rows:
            self.absorb(state, factors)
        state.squared_norm += squared_norm.to(state.squared_norm)
        state.num_data += num_data
        state.num_rows += factors.num_rows

    def merge(self, state: SketchState, other: SketchState) -> SketchState:
        """Return the state of one pass over both streams, reusing the memory of ``state``.

        Args:
            state: One part; changed in place.
            other: The other part; left alone.

        Raises:
            MergeError: If they were made with different options, maps, seeds or sizes.
        """
        differences = [
            f"{what}: {mine} and {theirs}"
            for what, mine, theirs in (
                ("sketch", state.sketch, other.sketch),
                ("number of parameters", state.num_parameters, other.num_parameters),
            )
            if mine != theirs
        ]
        if differences:
            raise MergeError(
                "expected two parts of one sketch, got different ones ("
                + "; ".join(differences)
                + "); fit every part with the same sketch=..., parameters=... and model"
            )
        self._merge_tensors(state, other)
        state.squared_norm += other.squared_norm.to(state.squared_norm.device)
        state.num_data += other.num_data
        state.num_rows += other.num_rows
        return state

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

    def blocks(self) -> Iterator[tuple[Block, Tensor]]:
        """Yield the one block with its rows ``(R, 1, N)``."""
        length = self._rows.shape[1]
        yield Block("all", (length,), slice(0, length)), self._rows[:, None]


def empty_state(
    sketch: Sketch,
    num_parameters: int,
    tensors: dict[str, Tensor],
    device: torch.device | str,
) -> SketchState:
    """Return a state around tensors of zeros."""
    squared_norm = torch.zeros((), dtype=torch.float64, device=device)
    return SketchState(sketch, num_parameters, tensors, squared_norm)


def flat_rows(rows: Tensor, like: Tensor) -> Tensor:
    """Return rows ``(b, q, n)`` as ``(b q, n)`` in the dtype and on the device of the sums."""
    return rows.flatten(0, 1).to(like.device, like.dtype)


def tall_chunks(length: int) -> Iterator[slice]:
    """Cut ``range(length)`` into the slices tall matrices are worked through in."""
    for start in range(0, length, _TALL_CHUNK):
        yield slice(start, min(start + _TALL_CHUNK, length))


def tall_gram(a: Tensor, b: Tensor) -> Tensor:
    """Return ``a^T b`` in float64 for tall ``a`` and ``b``, a chunk of rows at a time."""
    total = torch.zeros(a.shape[1], b.shape[1], dtype=torch.float64, device=a.device)
    for chunk in tall_chunks(a.shape[0]):
        total += a[chunk].double().mT @ b[chunk].double()
    return total


def tall_times(a: Tensor, small: Tensor, overwrite: bool = False) -> Tensor:
    """Return ``a @ small`` for tall ``a`` in its dtype, with float64 products by chunks.

    Args:
        a: ``(N, m)``.
        small: ``(m, r)`` in float64.
        overwrite: Put the result into the memory of ``a``; needs ``r <= m``.
    """
    result = a[:, : small.shape[1]] if overwrite else a.new_empty(len(a), small.shape[1])
    for chunk in tall_chunks(a.shape[0]):
        result[chunk] = (a[chunk].double() @ small).to(a.dtype)
    return result


def tall_svd(a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``U, s, V`` with ``a = U diag(s) V^T`` for a tall matrix, in its own memory.

    Two rounds of Gram matrices: the first finds the directions, the second repairs what
    squaring did to the orthogonality of the small ones. Directions below rounding are dropped.

    Args:
        a: ``(N, m)``; overwritten.

    Returns:
        ``U (N, r)``, a view into ``a``; ``s (r,)`` descending and ``V (m, r)`` in float64.
    """
    squared, right = torch.linalg.eigh(tall_gram(a, a))
    floor = torch.finfo(torch.float64).eps * max(a.shape)
    kept = squared > floor * squared[-1:].clamp_min(0)
    scale, right = squared[kept].sqrt(), right[:, kept]
    left = tall_times(a, right / scale, overwrite=True)
    # left = Q R with R near the identity, so a = Q (R diag(scale)) right^T
    gram_values, gram_vectors = torch.linalg.eigh(tall_gram(left, left))
    root = gram_values.sqrt()
    inner, s, turned = torch.linalg.svd(root[:, None] * gram_vectors.mT * scale)
    u = tall_times(left, (gram_vectors / root) @ inner, overwrite=True)
    return u, s, right @ turned.mT
