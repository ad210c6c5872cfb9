"""Random test matrices ``Omega`` (N x T) that need not be stored.

Any rows of ``Omega`` can be made from a seed and their positions alone, by integer hashing:
the same numbers on every device, in every block size and in every version of torch. Columns
have (about) unit norm and are (about) orthogonal.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from scodkit.errors import OptionError
from scodkit.numerics.hashing import hashed, mixed, signs
from scodkit.numerics.matmul import add_matmul, sum_dtype

# numbers of Omega made at a time: few enough to stay in a CPU's cache beside the block they
# multiply, and on a GPU enough to keep it busy
_CHUNK = 1 << 19
_CHUNK_ON_GPU = 1 << 26

# entries up to which a pattern of signs is cached rather than regenerated for every batch, and
# up to which it is cached in float32, ready for products, rather than in int8
_CACHED = 1 << 32
_CACHED_AS_FLOATS = 1 << 24

# rows of Omega in a chunk are a multiple of this: columns of rows in half precision, which are
# read 16 bytes at a time
_ALIGNED = 64

# of a test matrix: (N, T)
Shape = tuple[int, int]


class Map(ABC):
    """A family of seeded test matrices, each a pattern with scaled columns.

    Attributes:
        signs: Whether the pattern has no entries but -1, 0 and 1: exact in any precision.
        making_bytes: Scratch bytes to make an entry.
    """

    signs: ClassVar[bool] = False
    making_bytes: ClassVar[int] = 8

    @abstractmethod
    def pattern(self, start: int, stop: int, shape: Shape, seed: int, like: Tensor) -> Tensor:
        """Return rows ``start`` to ``stop`` of the test matrix before its columns are scaled.

        Args:
            start: First row.
            stop: One past the last row.
            shape: ``(N, T)`` of the whole matrix.
            seed: Which matrix of the family.
            like: A tensor with the dtype and device of the result.

        Returns:
            ``(stop - start, T)``.
        """

    def scale(self, shape: Shape) -> Tensor:
        """Return the scale of each column of a test matrix of that shape, ``(T,)``."""
        return torch.ones(shape[1], dtype=torch.float64)

    def rows(self, start: int, stop: int, shape: Shape, seed: int, like: Tensor) -> Tensor:
        """Return rows ``start`` to ``stop`` of the test matrix; the arguments are `pattern`'s.

        Returns:
            ``(stop - start, T)``.
        """
        scale = self.scale(shape).to(like.device, like.dtype)
        return self.pattern(start, stop, shape, seed, like) * scale


@dataclass(frozen=True)
class Fold(Map):
    """One signed entry a row: chunks of length T, each rotated by a random offset.

    A CountSketch whose rows never collide inside a chunk. The cheapest map to make; less
    accurate than the others where few weights carry most of the curvature (networks on raw,
    unscaled features).
    """

    signs: ClassVar[bool] = True

    def pattern(self, start: int, stop: int, shape: Shape, seed: int, like: Tensor) -> Tensor:
        """See `Map.pattern`.

        Returns:
            ``(stop - start, T)`` with one non-zero per row.
        """
        size = shape[1]
        position = torch.arange(start, stop, device=like.device)
        offset = hashed(seed, 1, position // size) % size
        column = (position + offset) % size
        entry = signs(seed, 0, position).to(like.dtype)
        result = like.new_zeros(stop - start, size)
        return result.scatter_(1, column[:, None], entry[:, None])

    def scale(self, shape: Shape) -> Tensor:
        """Return ``sqrt(T / N)`` for every column: each has about ``N / T`` entries."""
        num_rows, size = shape
        return torch.full((size,), (size / num_rows) ** 0.5, dtype=torch.float64)


@dataclass(frozen=True)
class Gaussian(Map):
    """Independent normal entries: the reference in theory, the most expensive to make."""

    making_bytes: ClassVar[int] = 72

    def pattern(self, start: int, stop: int, shape: Shape, seed: int, like: Tensor) -> Tensor:
        """See `Map.pattern`.

        Returns:
            ``(stop - start, T)`` with variance ``1/N``.
        """
        num_rows, size = shape
        first = torch.arange(start, stop, device=like.device)[:, None] * size
        place = first + torch.arange(size, device=like.device)
        # Box-Muller; the half keeps the logarithm finite
        radius = (-2.0 * ((hashed(seed, 2, place).double() + 0.5) / 2**32).log()).sqrt()
        angle = (hashed(seed, 3, place).double() + 0.5) * (2 * math.pi / 2**32)
        normal: Tensor = (radius * angle.cos()).to(like.dtype)
        return normal / math.sqrt(num_rows)


@dataclass(frozen=True)
class SparseSign(Map):
    """A few random signs a row, in distinct columns.

    Cheaper to make than the dense maps, and as accurate on all networks measured; the
    default.

    Args:
        nonzeros: Entries per row (at most ``T``).
    """

    signs: ClassVar[bool] = True

    nonzeros: int = 8

    def __post_init__(self) -> None:
        if self.nonzeros < 1:
            raise OptionError(f"expected nonzeros >= 1, got {self.nonzeros}")

    def pattern(self, start: int, stop: int, shape: Shape, seed: int, like: Tensor) -> Tensor:
        """See `Map.pattern`.

        Returns:
            ``(stop - start, T)`` with ``nonzeros`` entries per row.
        """
        edges = self._edges(shape).to(like.device)
        count, width = len(edges) - 1, edges.diff()
        of_row = hashed(seed, 4, torch.arange(start, stop, device=like.device))[:, None]
        # one more round of mixing per bin: its lowest bit is the sign, the rest the column
        bits = mixed(of_row ^ hashed(seed, 5, torch.arange(count, device=like.device)))
        column = edges[:-1] + (bits >> 1) % width
        entry = ((bits & 1) * 2 - 1).to(like.dtype)
        return like.new_zeros(stop - start, shape[1]).scatter_(1, column, entry)

    def scale(self, shape: Shape) -> Tensor:
        """Return the scale of each column: those of a narrow bin have more entries."""
        width = self._edges(shape).diff()
        per_column: Tensor = width.repeat_interleave(width).double()
        return (per_column / shape[0]).sqrt()

    def _edges(self, shape: Shape) -> Tensor:
        """Return the edges of the bins of columns; each row has one entry in each bin."""
        count = min(self.nonzeros, shape[1])
        return torch.arange(count + 1) * shape[1] // count


@dataclass(frozen=True)
class SRFT(Map):
    """Subsampled randomised trigonometric transform: signs, orthonormal DCT-II, sampled rows.

    The frequencies are drawn without replacement, so the columns are exactly orthonormal.
    """

    making_bytes: ClassVar[int] = 32

    def pattern(self, start: int, stop: int, shape: Shape, seed: int, like: Tensor) -> Tensor:
        """See `Map.pattern`.

        Returns:
            ``(stop - start, T)``, dense.
        """
        num_rows, _ = shape
        frequency = self._frequencies(shape, seed).to(like.device)
        position = torch.arange(start, stop, device=like.device)
        # cos(pi (2n + 1) f / 2N), its argument reduced exactly in integers
        phase = (2 * position + 1)[:, None] * frequency % (4 * num_rows)
        wave = (phase.double() * (math.pi / (2 * num_rows))).cos()
        scale = ((2.0 - (frequency == 0).double()) / num_rows).sqrt()
        entries: Tensor = wave * scale * signs(seed, 6, position)[:, None]
        return entries.to(like.dtype)

    @staticmethod
    def _frequencies(shape: Shape, seed: int) -> Tensor:
        """Return ``T`` of ``N`` frequencies, drawn without replacement."""
        num_rows, size = shape
        if 2 * size >= num_rows:  # rejection would be slow: rank all of them
            return hashed(seed, 7, torch.arange(num_rows)).argsort(stable=True)[:size]
        drawn: dict[int, None] = {}  # in order, each once
        counter = torch.arange(size)
        while len(drawn) < size:
            bits = (hashed(seed, 8, counter) << 20) ^ hashed(seed, 7, counter)
            drawn.update(dict.fromkeys(bits.remainder(num_rows).tolist()))
            counter += size
        return torch.tensor(list(drawn)[:size])


def check_map(mapping: object, seed: object) -> None:
    """Raise if ``mapping`` is not a map or ``seed`` is not an integer.

    Raises:
        OptionError: With what to type instead.
    """
    if not isinstance(mapping, Map):
        raise OptionError(
            f"expected a map from scodkit.sketch, got {mapping!r}; type map=SparseSign()"
        )
    if not isinstance(seed, int):
        raise OptionError(f"expected an integer seed, got {seed!r}")


def matrix_bytes(mapping: Map, shape: Shape, device: torch.device) -> tuple[int, int]:
    """Return the bytes that a `SeededMatrix` caches, and the scratch bytes to regenerate it.

    One of the two is 0.
    """
    entries, dtype = shape[0] * shape[1], _cached_dtype(mapping, shape)
    if dtype is not None:
        return entries * dtype.itemsize, 0
    return 0, mapping.making_bytes * min(entries, _chunk_entries(device))


def _cached_dtype(mapping: Map, shape: Shape) -> torch.dtype | None:
    """Return the dtype a pattern is cached in; None if it is regenerated."""
    entries = shape[0] * shape[1]
    if not mapping.signs or entries > _CACHED:
        return None
    return torch.float32 if entries <= _CACHED_AS_FLOATS else torch.int8


def _chunk_entries(device: torch.device) -> int:
    return _CHUNK_ON_GPU if device.type == "cuda" else _CHUNK


class SeededMatrix:
    """One test matrix ``Omega`` that rows are multiplied with.

    A pattern of signs is made once and cached, unless it would be too large; other matrices
    are regenerated, a slice of rows at a time.

    Args:
        mapping: The family.
        shape: ``(N, T)``.
        seed: Which matrix of the family.
        device: Where it is needed.
        weights: Which of the ``N`` rows to make, all by default; methods count from the first.
    """

    def __init__(
        self,
        mapping: Map,
        shape: Shape,
        seed: int,
        device: torch.device,
        weights: range | None = None,
    ) -> None:
        self._mapping, self._shape, self._seed = mapping, shape, seed
        self._weights = range(shape[0]) if weights is None else weights
        self._scale = mapping.scale(shape).to(device)
        step = max(1, _chunk_entries(device) // shape[1])
        self._step = step // _ALIGNED * _ALIGNED or step
        self._signs: Tensor | None = None
        size = (len(self._weights), shape[1])
        dtype = _cached_dtype(mapping, size)
        if dtype is not None:
            cached = torch.empty(size, dtype=dtype, device=device)
            for chunk, pattern in self._patterns(0, size[0], cached):
                cached[chunk] = pattern
            self._signs = cached

    def project(self, rows: Tensor, first: int) -> Tensor:
        """Return ``rows @ Omega[first : first + n]``.

        Args:
            rows: ``(R, n)``, some columns of longer rows.
            first: Where these columns sit among the ``N``.

        Returns:
            ``(R, T)``, in float32 for rows in half precision.
        """
        result = rows.new_zeros(rows.shape[0], self._shape[1], dtype=sum_dtype(rows))
        # signs are exact in half precision; other entries are not
        like = rows if self._mapping.signs else result
        for chunk, pattern in self._patterns(first, first + rows.shape[1], like):
            add_matmul(result, rows[:, chunk.start - first : chunk.stop - first], pattern)
        return result.mul_(self._scale)

    def rows(self, chunk: slice, like: Tensor) -> Tensor:
        """Return some rows of ``Omega``, rounded as in `project` for such rows, in float64.

        Args:
            chunk: Which rows.
            like: A tensor with the dtype of the rows to be multiplied, or of the sums.

        Returns:
            ``(n, T)``.
        """
        return self._pattern(chunk, like).double().mul_(self._scale)

    def columns(self, which: slice, like: Tensor) -> Tensor:
        """Return some columns of ``Omega``, each contiguous in memory.

        Args:
            which: Which columns.
            like: A tensor with the dtype of the result.

        Returns:
            ``(t, N)``. If the matrix is not cached, this takes as long as the whole matrix.
        """
        columns = like.new_empty(which.stop - which.start, len(self._weights))
        for chunk, pattern in self._patterns(0, len(self._weights), like):
            columns[:, chunk] = pattern[:, which].mT
        return columns.mul_(self._scale[which, None].to(like.dtype))

    def _patterns(self, start: int, stop: int, like: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yield rows ``start`` to ``stop`` of the pattern, a chunk of them at a time."""
        for first in range(start, stop, self._step):
            chunk = slice(first, min(first + self._step, stop))
            yield chunk, self._pattern(chunk, like)

    def _pattern(self, chunk: slice, like: Tensor) -> Tensor:
        if self._signs is not None:
            return self._signs[chunk].to(like.dtype)
        rows = self._weights[chunk]
        return self._mapping.pattern(rows.start, rows.stop, self._shape, self._seed, like)
