"""Random test matrices ``Omega`` (N x T) that are never stored.

Any rows of ``Omega`` can be made from a seed and their positions alone, by integer hashing:
the same numbers on every device, in every block size and in every version of torch. Columns
have (about) unit norm and are (about) orthogonal.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from scodkit.errors import OptionError

# numbers of Omega made at a time: few enough to stay in a CPU's cache beside the block they
# multiply, and on a GPU enough to keep it busy
_CHUNK = 1 << 19
_CHUNK_ON_GPU = 1 << 26


class Map(ABC):
    """A family of seeded test matrices."""

    @abstractmethod
    def rows(
        self, start: int, stop: int, shape: tuple[int, int], seed: int, like: Tensor
    ) -> Tensor:
        """Return rows ``start`` to ``stop`` of the test matrix.

        Args:
            start: First row.
            stop: One past the last row.
            shape: ``(N, T)`` of the whole matrix.
            seed: Which matrix of the family.
            like: A tensor with the dtype and device wanted.

        Returns:
            ``(stop - start, T)``.
        """


@dataclass(frozen=True)
class Fold(Map):
    """One signed entry a row: chunks of length T, each rotated by a random offset.

    A CountSketch whose rows never collide inside a chunk. The cheapest map to make; less
    accurate than the others where few weights carry most of the curvature (networks on raw,
    unscaled features).
    """

    def rows(
        self, start: int, stop: int, shape: tuple[int, int], seed: int, like: Tensor
    ) -> Tensor:
        """See `Map.rows`.

        Returns:
            ``(stop - start, T)`` with one non-zero per row.
        """
        num_rows, size = shape
        position = torch.arange(start, stop, device=like.device)
        offset = _hash(seed, 1, position // size) % size
        column = (position + offset) % size
        entry = _signs(seed, 0, position).to(like.dtype) * (size / num_rows) ** 0.5
        result = like.new_zeros(stop - start, size)
        return result.scatter_(1, column[:, None], entry[:, None])


@dataclass(frozen=True)
class Gaussian(Map):
    """Independent normal entries: the reference in theory, the dearest to make."""

    def rows(
        self, start: int, stop: int, shape: tuple[int, int], seed: int, like: Tensor
    ) -> Tensor:
        """See `Map.rows`.

        Returns:
            ``(stop - start, T)`` with variance ``1/N``.
        """
        num_rows, size = shape
        first = torch.arange(start, stop, device=like.device)[:, None] * size
        place = first + torch.arange(size, device=like.device)
        # Box-Muller; the half keeps the logarithm finite
        radius = (-2.0 * ((_hash(seed, 2, place).double() + 0.5) / 2**32).log()).sqrt()
        angle = (_hash(seed, 3, place).double() + 0.5) * (2 * math.pi / 2**32)
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

    nonzeros: int = 8

    def __post_init__(self) -> None:
        if self.nonzeros < 1:
            raise OptionError(f"expected nonzeros >= 1, got {self.nonzeros}")

    def rows(
        self, start: int, stop: int, shape: tuple[int, int], seed: int, like: Tensor
    ) -> Tensor:
        """See `Map.rows`.

        Returns:
            ``(stop - start, T)`` with ``nonzeros`` entries per row.
        """
        num_rows, size = shape
        count = min(self.nonzeros, size)
        # the columns fall into `count` bins of nearly equal width; one entry in each
        edges = torch.arange(count + 1, device=like.device) * size // count
        width = edges[1:] - edges[:-1]
        own = _hash(seed, 4, torch.arange(start, stop, device=like.device))[:, None]
        # one more round of mixing per bin: its lowest bit is the sign, the rest the column
        bits = _mix(own ^ _hash(seed, 5, torch.arange(count, device=like.device)))
        column = edges[:-1] + (bits >> 1) % width
        # columns of a narrow bin have more entries, so smaller ones
        size_of_entry = (width.double() / num_rows).sqrt().to(like.dtype)
        entry = ((bits & 1) * 2 - 1).to(like.dtype) * size_of_entry
        return like.new_zeros(stop - start, size).scatter_(1, column, entry)


@dataclass(frozen=True)
class SRFT(Map):
    """Subsampled randomised trigonometric transform: signs, orthonormal DCT-II, sampled rows.

    The frequencies are drawn without replacement, so the columns are exactly orthonormal.
    """

    def rows(
        self, start: int, stop: int, shape: tuple[int, int], seed: int, like: Tensor
    ) -> Tensor:
        """See `Map.rows`.

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
        signs = _signs(seed, 6, position)[:, None]
        entries: Tensor = wave * scale * signs
        return entries.to(like.dtype)

    @staticmethod
    def _frequencies(shape: tuple[int, int], seed: int) -> Tensor:
        """Return ``T`` of ``N`` frequencies, drawn without replacement."""
        num_rows, size = shape
        if 2 * size >= num_rows:  # rejection would be slow: rank all of them
            return _hash(seed, 7, torch.arange(num_rows)).argsort(stable=True)[:size]
        drawn: dict[int, None] = {}
        counter = 0
        while len(drawn) < size:
            batch = _hash(seed, 7, torch.arange(counter, counter + size))
            high = _hash(seed, 8, torch.arange(counter, counter + size))
            for value in ((high << 20) ^ batch).remainder(num_rows).tolist():
                if len(drawn) < size:
                    drawn[value] = None
            counter += size
        return torch.tensor(list(drawn))


def check_map(mapping: object, seed: object) -> None:
    """Refuse what is not a map or not a seed.

    Raises:
        OptionError: With what to type instead.
    """
    if not isinstance(mapping, Map):
        raise OptionError(
            f"expected a map from scodkit.sketch, got {mapping!r}; type map=SparseSign()"
        )
    if not isinstance(seed, int):
        raise OptionError(f"expected an integer seed, got {seed!r}")


def project(
    mapping: Map, rows: Tensor, start: int, shape: tuple[int, int], seed: int
) -> Tensor:
    """Return ``rows @ Omega[start : start + n]`` without forming more than a slice of Omega.

    Args:
        mapping: The family.
        rows: ``(R, n)``, some columns of longer rows.
        start: Where these columns sit among the ``N``.
        shape: ``(N, T)``.
        seed: Which matrix of the family.

    Returns:
        ``(R, T)``.
    """
    result = rows.new_zeros(rows.shape[0], shape[1])
    step = max(1, (_CHUNK_ON_GPU if rows.is_cuda else _CHUNK) // shape[1])
    for first in range(0, rows.shape[1], step):
        last = min(first + step, rows.shape[1])
        omega = mapping.rows(start + first, start + last, shape, seed, rows)
        result.addmm_(rows[:, first:last], omega)
    return result


def _signs(seed: int, stream: int, counter: Tensor) -> Tensor:
    return (_hash(seed, stream, counter) & 1) * 2 - 1


def _hash(seed: int, stream: int, counter: Tensor) -> Tensor:
    """Return 32 well-mixed bits (as int64) for each counter: exact on every device."""
    mask = 0xFFFFFFFF
    low, high = counter & mask, counter >> 32
    h = _mix((low ^ _key(seed, stream)) & mask)
    return _mix((h + high * 0x9E3779B1 + _key(seed, stream + 101)) & mask)


def _mix(h: Tensor) -> Tensor:
    mask = 0xFFFFFFFF
    # multipliers below 2**31: a product of 32 and 31 bits fits int64 exactly
    h = ((h ^ (h >> 16)) * 0x21F0AAAD) & mask
    h = ((h ^ (h >> 15)) * 0x735A2D97) & mask
    return h ^ (h >> 15)


def _key(seed: int, stream: int) -> int:
    """Return 32 bits for a seed and a stream (splitmix64, in Python's exact integers)."""
    mask = 0xFFFFFFFFFFFFFFFF
    z = (seed + (stream + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return (z ^ (z >> 31)) >> 32
