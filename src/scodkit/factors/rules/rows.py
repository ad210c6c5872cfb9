"""Per-sample gradients of a weight as sums of outer products, materialised if they must be.

A projected gradient ``P_out^T G P_in`` is formed from its projected terms, and ``|G|^2`` beside
it, of each direction and exactly: from the inner products of the terms, or from ``G`` itself in
pieces, whichever takes fewer operations.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from scodkit.model.projected import Pair
from scodkit.numerics import kernels
from scodkit.numerics.matmul import matmul, squared_norms, sum_dtype, wide_bmm

# bytes of rows that stay in a CPU's cache between two uses; and that keep a GPU busy
_IN_CACHE = 3 << 20
_ON_GPU = 1 << 28

# rows that are multiplied at once with a basis, which is read again for the next ones: bytes,
# and from how many outputs on they are of fewer samples
_MULTIPLIED, _OUTPUTS = 6 << 20, 256

# entries of a table, for each that a sample looks up, from which most of its rows is zeros
_SPARSE = 8

_Part = TypeVar("_Part")


class Factored(ABC):
    """Rows ``(b, q, o i)`` of a weight ``(o, i)`` that are not materialised.

    Attributes:
        nbytes: Size of the rows if they were materialised, in bytes.
        sides: ``(o, i)``.
    """

    nbytes: int
    sides: tuple[int, int]

    @abstractmethod
    def dense(self) -> Tensor:
        """Return the rows ``(b, q, o i)``."""

    @abstractmethod
    def compressed(self, pair: Pair) -> tuple[Tensor, Tensor]:
        """Return projected rows and the squared norms of the whole ones.

        Args:
            pair: Of the weight.

        Returns:
            ``P_out^T G P_in`` as ``(b, q, r s)`` in float32 or float64, and ``|G|^2`` as
            ``(b, q)`` in float64.
        """


def compressed(rows: Rows, pair: Pair) -> tuple[Tensor, Tensor]:
    """Return what `Factored.compressed` does, of rows of either kind."""
    if not isinstance(rows, Tensor) and rows.sides == pair.sides:
        return rows.compressed(pair)
    whole = dense(rows)
    return pair.of_gradients(whole), each_squared(whole)


def dense(rows: Rows) -> Tensor:
    """Return rows of either kind, materialised."""
    return rows if isinstance(rows, Tensor) else rows.dense()


def each_squared(rows: Tensor) -> Tensor:
    """Return the squared norm of each row ``(b, q, n)``, ``(b, q)`` in float64."""
    return squared_norms(rows.flatten(0, 1)[:, None]).view(rows.shape[:2])


def _in_pieces(run: Callable[..., _Part], bytes_each: int, *tensors: Tensor) -> list[_Part]:
    """Return a function of tensors, a few samples at a time.

    Args:
        run: The function.
        bytes_each: What a sample takes.
        tensors: Arguments, samples first.
    """
    limit = _ON_GPU if tensors[0].is_cuda else _IN_CACHE
    at_once = max(1, limit // max(1, bytes_each))
    parts = zip(*(torch.split(tensor, at_once) for tensor in tensors), strict=True)
    return [run(*part) for part in parts]


class Outer(Factored):
    """Rows that are outer products ``delta_j a^T``, materialised by `dense` only.

    Args:
        delta: ``(b, q, o)``.
        a: ``(b, i)``.
    """

    def __init__(self, delta: Tensor, a: Tensor) -> None:
        self.delta = delta
        self.a = a
        self.sides = (delta.shape[2], a.shape[1])
        self.nbytes = delta.nbytes * a.shape[1]

    def dense(self) -> Tensor:
        """Return the rows ``(b, q, o i)``."""
        # not indexing with None, which takes as long as the product for a small layer
        return (self.delta.unsqueeze(3) * self.a.unsqueeze(1).unsqueeze(1)).flatten(2)

    def summed(self) -> Summed:
        """Return the same rows as sums over one position."""
        return Summed(self.delta[:, :, None], self.a[:, None])

    def compressed(self, pair: Pair) -> tuple[Tensor, Tensor]:
        """Return what `Factored.compressed` describes."""
        left, right = pair.left(self.delta), pair.right(self.a)
        rows = left[..., None] * right[:, None, None]
        wide = sum_dtype(rows)
        norms = torch.linalg.vector_norm(self.delta, dim=2, dtype=wide).double()
        norms = norms * torch.linalg.vector_norm(self.a, dim=1, keepdim=True, dtype=wide)
        return rows.flatten(2).to(wide), norms.square()

    def energies(self, matrix: Tensor) -> tuple[Tensor, Tensor]:
        """Return squared norms ``(b,)`` and rows times ``matrix (o i, k)``, ``(b, q, k)``."""
        return self.squared_norms(), self.project(matrix)

    def squared_norms(self) -> Tensor:
        """Return the squared norms ``|delta|^2 |a|^2``, ``(b,)`` in float64."""
        wide = sum_dtype(self.a)
        norm = torch.linalg.vector_norm(self.delta, dim=(1, 2), dtype=wide).double()
        squares: Tensor = (norm * torch.linalg.vector_norm(self.a, dim=1, dtype=wide)).square()
        return squares

    def project(self, matrix: Tensor) -> Tensor:
        """Return rows times ``matrix (o i, k)``, ``(b, q, k)``.

        The directions share the activations, so these are multiplied first: ``q`` times fewer
        operations than with the rows themselves. A single direction is multiplied before the
        activations, in one product over contiguous memory.
        """
        wide = sum_dtype(matrix)
        delta, a, matrix = self.delta.to(wide), self.a.to(wide), matrix.to(wide)
        outputs, inputs = delta.shape[2], a.shape[1]
        if delta.shape[1] == 1:
            along = (delta[:, 0] @ matrix.view(outputs, -1)).view(len(a), inputs, -1)
            return torch.bmm(a[:, None], along)
        return torch.bmm(delta, activations_along(a, matrix).transpose(0, 1))


class Summed(Factored):
    """Rows that are sums of outer products over positions, ``sum_m delta_jm a_m^T``.

    Read on a CPU, they are materialised a few samples at a time: written to memory and read
    again, they take three times as long as in its cache.

    Args:
        delta: ``(b, q, m, o)``.
        a: ``(b, m, i)``.
    """

    def __init__(self, delta: Tensor, a: Tensor) -> None:
        self.delta = delta
        self.a = a
        samples, count, _, outputs = delta.shape
        self.sides = (outputs, a.shape[2])
        self.nbytes = samples * count * outputs * a.shape[2] * a.itemsize

    def dense(self) -> Tensor:
        """Return the rows ``(b, q, o i)``."""
        # positions first: copied in long runs, and aligned however many positions there are
        delta = self.delta.transpose(1, 2).flatten(2)
        return torch.bmm(delta.mT, self.a).view(*self.delta.shape[:2], -1)

    def energies(self, matrix: Tensor) -> tuple[Tensor, Tensor]:
        """Return squared norms ``(b,)`` and rows times ``matrix (o i, k)``, ``(b, q, k)``."""
        samples, count, _, outputs = self.delta.shape
        inputs = self.a.shape[2]
        each = count * inputs * self.a.itemsize  # bytes of a sample's rows of one output
        at_once = min(samples, max(1, _MULTIPLIED // (_OUTPUTS * each)))
        width = min(outputs, max(1, _MULTIPLIED // (at_once * each)))
        memory = self.a.new_empty(at_once * count * width * inputs)
        norms, along = [], []
        samples_each = (torch.split(own, at_once) for own in (self.delta, self.a))
        for delta, a in zip(*samples_each, strict=True):
            sums = []
            split = torch.split(delta, width, 3), torch.split(matrix, width * inputs)
            for some, part in zip(*split, strict=True):
                size = (count, len(a), some.shape[3], inputs)
                rows = memory[: math.prod(size)].view(size)
                for one, out in zip(some.unbind(1), rows, strict=True):  # nothing is copied
                    torch.bmm(one.mT, a, out=out)
                flat = rows.view(count * len(a), -1)
                sums.append((squared_norms(flat[:, None]), matmul(flat, part)))
            norm, total = (torch.stack(each).sum(0) for each in zip(*sums, strict=True))
            norms.append(norm.view(count, -1).sum(0))
            along.append(total.view(count, len(a), -1).transpose(0, 1))
        return torch.cat(norms), torch.cat(along)

    def compressed(self, pair: Pair) -> tuple[Tensor, Tensor]:
        """Return what `Factored.compressed` describes."""
        # directions first, as backward passes lie in memory
        left = pair.left(self.delta.transpose(0, 1)).transpose(0, 1)
        rows = wide_bmm(left.mT.flatten(1, 2), pair.right(self.a))
        return rows.view(*left.shape[:2], -1), self.each_squared()

    def each_squared(self) -> Tensor:
        """Return the squared norm of each row, ``(b, q)`` in float64."""
        _, count, places, outputs = self.delta.shape
        inputs = self.a.shape[2]
        if places * (inputs + count * outputs) < count * outputs * inputs:
            each = torch.float32.itemsize * (count + 1) * places**2
            squares = _in_pieces(_squares_by_places, each, self.delta, self.a)
        else:
            each = self.nbytes // len(self.a)
            squares = _in_pieces(_squares_by_rows, each, self.delta, self.a)
        return torch.cat(squares)


def _squares_by_places(delta: Tensor, a: Tensor) -> Tensor:
    """Return ``sum_mn (delta_m . delta_n)(a_m . a_n)``.

    The mean of the activations is split off: where gradients nearly sum to zero over the
    positions, as those of attention keys do, large terms would cancel. (In bfloat16 the
    gradients themselves are rounded by as much.)
    """
    if a.itemsize < torch.float32.itemsize or not a.shape[1]:
        return _contracted(delta, wide_bmm(a, a.mT))
    wide = sum_dtype(delta, a)
    delta, mean = delta.to(wide), a.mean(1, keepdim=True, dtype=torch.float64).to(wide)
    rest = a.to(wide) - mean
    total = delta.sum(2, dtype=torch.float64)
    lengths = mean.double().square().sum(2) * total.square().sum(2)
    along = (delta @ total.to(wide).unsqueeze(3)).squeeze(3) * (rest @ mean.mT).mT
    others = _contracted(delta, wide_bmm(rest, rest.mT))
    return (lengths + 2 * along.double().sum(2) + others).clamp_min(0)


def _squares_by_rows(delta: Tensor, a: Tensor) -> Tensor:
    return each_squared(wide_bmm(delta.mT.flatten(1, 2), a).view(*delta.shape[:2], -1))


def project_whole(rows: Tensor, matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return the result of `Factors.project` for all columns at once.

    Args:
        rows: ``(b, q, N)``, on a CPU.
        matrix: ``(N, k)``, of the same dtype.
    """
    along = matmul(rows.view(-1, len(matrix)), matrix)
    # in float64: a score is a difference of near-equal sums
    norms = torch.linalg.vector_norm(rows, dim=(1, 2), dtype=torch.float64)
    return norms.square(), along.view(*rows.shape[:2], -1).double()


def activations_along(a: Tensor, matrix: Tensor) -> Tensor:
    """Return ``U_k a`` for the weight matrix ``U_k`` in each column, ``(o, b, k)``.

    Args:
        a: Activations ``(b, i)``.
        matrix: ``(o i, k)``, in the same dtype.
    """
    columns = matrix.view(-1, a.shape[1], matrix.shape[1])
    return torch.bmm(a.expand(len(columns), *a.shape), columns)


class LookedUp(Factored):
    """Rows of an embedding, ``sum_m e_m delta_jm^T`` with ``e_m`` the unit vector of a token.

    Args:
        tokens: ``(b, m)``.
        delta: Gradients at the output, ``(b, q, m, e)``.
        entries: ``V``.
    """

    def __init__(self, tokens: Tensor, delta: Tensor, entries: int) -> None:
        self.tokens, self.delta, self.entries = tokens, delta, entries
        samples, count, _, width = delta.shape
        self.sides = (entries, width)
        self.nbytes = samples * count * entries * width * delta.itemsize

    @property
    def alike(self) -> Tensor:
        """Which places have the same token, ``(b, m, m)``."""
        return self.tokens[:, :, None] == self.tokens[:, None]

    @property
    def sparse(self) -> bool:
        """Whether most of the rows is zeros: what is multiplied grows with the places."""
        return self.tokens.shape[1] * _SPARSE <= self.entries

    def dense(self) -> Tensor:
        """Return what `Factored.dense` describes."""
        samples, count, _, width = self.delta.shape
        rows = self.delta.new_zeros(samples, count, self.entries, width)
        return _added(rows, self.tokens, self.delta)

    def energies(self, matrix: Tensor) -> tuple[Tensor, Tensor]:
        """Return squared norms ``(b,)`` and rows times ``matrix (V e, k)``, ``(b, q, k)``."""
        first = self.alike.byte().argmax(2)  # a token may be there several times
        rows = _added(torch.zeros_like(self.delta), first, self.delta)
        wide = sum_dtype(rows, matrix)
        looked_up = matrix.view(self.entries, -1)[self.tokens].to(wide)
        along = torch.bmm(rows.to(wide), looked_up.view(len(rows), rows.shape[2], -1))
        return squared_norms(rows), along

    def compressed(self, pair: Pair) -> tuple[Tensor, Tensor]:
        """Return what `Factored.compressed` describes."""
        if pair.out is None:
            return compressed(self.dense(), pair)
        right, left = pair.right(self.delta).to(pair.out.dtype), pair.out[self.tokens]
        samples, count, places, width = right.shape
        turned = right.permute(0, 2, 1, 3).reshape(samples, places, -1)
        rows = torch.bmm(left.mT, turned).view(samples, -1, count, width)
        return rows.transpose(1, 2).flatten(2), self._squares()

    def _squares(self) -> Tensor:
        _, count, places, _ = self.delta.shape

        def squares(tokens: Tensor, delta: Tensor) -> Tensor:
            return _contracted(delta, LookedUp(tokens, delta, self.entries).alike)

        each = torch.float32.itemsize * (count + 1) * places**2
        return torch.cat(_in_pieces(squares, each, self.tokens, self.delta))

    def along(self, other: Summed) -> Tensor:
        """Return the inner products with other rows of the same weight, ``(b, q)`` float64."""
        inner = wide_bmm(self.delta.flatten(1, 2), other.a.mT).view(
            *self.delta.shape[:3], -1
        )  # (b, q, m, m of the other)
        where = self.tokens[:, None, None, :].expand(*other.delta.shape[:3], -1)
        return _inner(inner, other.delta.gather(3, where).mT)


def _added(rows: Tensor, places: Tensor, delta: Tensor) -> Tensor:
    """Return rows ``(b, q, n, e)``, flattened, with ``delta`` added at places ``(b, m)``."""
    return rows.scatter_add_(2, places[:, None, :, None].expand_as(delta), delta).flatten(2)


class Transposed(Factored):
    """Rows of a weight that is used as the transposed matrix.

    Args:
        rows: Of that matrix.
        shape: Of that, ``(o, i)``.
    """

    def __init__(self, rows: Outer | Summed, shape: tuple[int, int]) -> None:
        self.rows = rows
        self.sides, self.nbytes = shape[::-1], rows.nbytes

    def dense(self) -> Tensor:
        """Return what `Factored.dense` describes."""
        return _transposed(self.rows.dense(), self.sides[::-1])

    def compressed(self, pair: Pair) -> tuple[Tensor, Tensor]:
        """Return what `Factored.compressed` describes."""
        rows, squares = compressed(self.rows, pair.swapped)
        return _transposed(rows, pair.shape[::-1]), squares


class Several(Factored):
    """Rows of a weight with several uses: their sum.

    Args:
        uses: Rows of each use, with the entries of the flat weight that it uses.
        sides: Of the whole weight, ``(o, i)``.
    """

    def __init__(self, uses: Sequence[tuple[slice, Rows]], sides: tuple[int, int]) -> None:
        self.uses, self.sides = _joined(uses), sides
        self.nbytes = sum(rows.nbytes for _, rows in uses)

    def dense(self) -> Tensor:
        """Return what `Factored.dense` describes."""
        total: Tensor | None = None
        for which, rows in self.uses:
            part = dense(rows)
            if total is None:
                total = part.new_zeros(*part.shape[:2], self.sides[0] * self.sides[1])
            total[:, :, which] += part
        assert total is not None
        return total

    def compressed(self, pair: Pair) -> tuple[Tensor, Tensor]:
        """Return what `Factored.compressed` describes; of whole rows if kinds are mixed."""
        if [type(rows) for _, rows in self.uses] == [LookedUp, Summed]:
            return self._tied(pair)
        entries, width = [which for which, _ in self.uses], self.sides[1]
        apart = all(a.stop <= b.start for a, b in itertools.pairwise(entries))
        if not apart or any((e.start % width, e.stop % width) != (0, 0) for e in entries):
            return compressed(self.dense(), pair)
        outputs = [self._outputs(which) for which in entries]
        parts = [
            compressed(rows, pair.of_outputs(some))
            for some, (_, rows) in zip(outputs, self.uses, strict=True)
        ]
        total = torch.stack([squares for _, squares in parts]).sum(0)
        if pair.out is not None:
            return torch.stack([rows for rows, _ in parts]).sum(0), total
        whole = parts[0][0].new_zeros(*total.shape, *pair.shape)
        for some, (rows, _) in zip(outputs, parts, strict=True):
            whole[:, :, some] = rows.view(*rows.shape[:2], -1, pair.shape[1])
        return whole.flatten(2), total

    def _tied(self, pair: Pair) -> tuple[Tensor, Tensor]:
        """Return what `compressed` does for an embedding that is also the output layer."""
        (one, looked_up), (other, summed) = self.uses
        assert isinstance(looked_up, LookedUp)
        assert isinstance(summed, Summed)
        if one != other or looked_up.sides != summed.sides:
            return compressed(self.dense(), pair)
        (rows, squares), (more, more_squares) = (
            compressed(own, pair) for own in (looked_up, summed)
        )
        squares = squares + more_squares + 2 * looked_up.along(summed)
        return rows + more, squares.clamp_min(0)

    def _outputs(self, which: slice) -> slice:
        """Return rows of the weight, of entries of the flat one."""
        return slice(which.start // self.sides[1], which.stop // self.sides[1])


def _joined(uses: Sequence[tuple[slice, Rows]]) -> list[tuple[slice, Rows]]:
    """Return uses, those of the same kind and entries as one, in the order of entries."""
    groups: dict[tuple[int, int, str], list[Rows]] = {}
    for which, rows in uses:
        rows = rows.summed() if isinstance(rows, Outer) else rows
        key = (which.start, which.stop, type(rows).__name__)  # LookedUp comes before Summed
        groups.setdefault(key, []).append(rows)
    joined: list[tuple[slice, Rows]] = []
    for (start, stop, _), same in sorted(groups.items(), key=lambda group: group[0]):
        joined += [(slice(start, stop), rows) for rows in _as_one(same)]
    return joined


def _as_one(same: list[Rows]) -> list[Rows]:
    """Return rows of one kind as sums over the places of all, if their kind allows it."""
    summed = [rows for rows in same if isinstance(rows, Summed)]
    looked_up = [rows for rows in same if isinstance(rows, LookedUp)]
    if len(same) == 1 or not summed + looked_up:
        return same
    delta = torch.cat([rows.delta for rows in summed or looked_up], dim=2)
    if summed:
        return [Summed(delta, torch.cat([rows.a for rows in summed], dim=1))]
    tokens = torch.cat([rows.tokens for rows in looked_up], dim=1)
    return [LookedUp(tokens, delta, looked_up[0].entries)]


def _transposed(rows: Tensor, shape: tuple[int, int]) -> Tensor:
    """Return flat matrices ``(b, q, n)``, transposed."""
    return rows.view(*rows.shape[:2], *shape).mT.flatten(2)


def _contracted(delta: Tensor, weights: Tensor) -> Tensor:
    """Return ``sum_mn (delta_m . delta_n) w_mn``, ``(b, q)``, of a form that is positive.

    Args:
        delta: ``(b, q, m, n)``.
        weights: ``(b, m, m)``, symmetric.
    """
    vectors = delta.transpose(0, 1)  # as backward passes lie in memory
    if kernels.multiplies(vectors):
        return kernels.contract(vectors, weights).mT.clamp_min(0)
    flat = vectors.flatten(0, 1)
    inner = wide_bmm(flat, flat.mT).view(*vectors.shape[:2], *weights.shape[1:])
    return _inner(inner, weights).mT.clamp_min(0)


def _inner(one: Tensor, other: Tensor) -> Tensor:
    """Return inner products of matrices ``(b, q, m, n)``, ``(b, q)`` summed in float64."""
    return (one * other).sum(3).double().sum(2)


Rows = Tensor | Factored
