"""What a forward pass remembers of one call on chosen parameters.

A rule turns the call of a torch function into a `Layer`; the layer turns gradients at the
call's output into per-sample gradients of its parameters, for all directions at once.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

import torch
from torch import Tensor
from typing_extensions import Self

from scodkit.errors import BatchError
from scodkit.factors.lay import FIRST, Lay
from scodkit.numerics.matmul import sum_dtype

_version = attrgetter("_version")


class UnsupportedCallError(BatchError):
    """No rule covers a call on a chosen parameter: another engine has to take the model."""


@dataclass(frozen=True)
class Batch:
    """Where the samples are in a layer's output.

    Its leading axes hold ``m`` places of each of the ``B`` samples (tokens, windows, frames).

    Args:
        size: ``B``.
        lay: Where they lie; of no importance where there is but one.
    """

    size: int
    lay: Lay = FIRST

    def led_by(self, shape: Sequence[int]) -> Batch:
        """Return where they are once the leading axes, of this shape, are one axis."""
        if self.size == 1:
            return self
        axis, outer, inner = self.lay
        before, after = math.prod(shape[:axis]), math.prod(shape[axis + 1 :])
        return Batch(self.size, Lay(0, before * outer, inner * after))

    def split(self, rows: Tensor, axis: int = 0) -> Tensor:
        """Return ``rows`` with its axis of ``B m`` rows replaced by two: ``B``, then ``m``."""
        _, outer, inner = self.lay
        if self.size == 1 or outer == 1:
            return unflatten(rows, axis, (self.size, rows.shape[axis] // self.size))
        if inner == 1:
            return unflatten(rows, axis, (outer, self.size)).transpose(axis, axis + 1)
        apart = unflatten(unflatten(rows, axis, (outer, -1)), axis + 1, (self.size, inner))
        return apart.transpose(axis, axis + 1).flatten(axis + 1, axis + 2)

    def sum_places(self, rows: Tensor, axis: int) -> Tensor:
        """Return ``rows`` with its axis of ``B m`` rows summed over the ``m``."""
        if rows.shape[axis] == self.size:
            return rows
        return self.split(rows, axis).sum(axis + 1)


def unflatten(tensor: Tensor, axis: int, sizes: tuple[int, int]) -> Tensor:
    """Return a view with one axis replaced by two (``Tensor.unflatten``, but cheap to call)."""
    return tensor.view(*tensor.shape[:axis], *sizes, *tensor.shape[axis + 1 :])


class Outer:
    """Rows that are outer products ``delta_j a^T``, never formed unless asked for.

    Args:
        delta: ``(b, q, o)``.
        a: ``(b, i)``.
    """

    def __init__(self, delta: Tensor, a: Tensor) -> None:
        self._delta = delta
        self._a = a

    @property
    def nbytes(self) -> int:
        """How many bytes the rows would take."""
        return self._delta.nbytes * self._a.shape[1]

    def dense(self) -> Tensor:
        """Return the rows ``(b, q, o i)``."""
        return (self._delta[..., None] * self._a[:, None, None, :]).flatten(2)

    def squared_norms(self) -> Tensor:
        """Return the sums of squares ``(b,)`` in float64: a product of two."""
        wide = sum_dtype(self._a)
        norm = torch.linalg.vector_norm(self._delta, dim=(1, 2), dtype=wide).double()
        squares: Tensor = (norm * torch.linalg.vector_norm(self._a, dim=1, dtype=wide)).square()
        return squares

    def project(self, matrix: Tensor) -> Tensor:
        """Return rows times ``matrix (o i, k)``, ``(b, q, k)``.

        The activations are shared by the directions, so they go first: ``q`` times fewer
        products than with the rows themselves. A single direction goes first itself, in one
        product over contiguous memory.
        """
        wide = sum_dtype(matrix)
        delta, a, matrix = self._delta.to(wide), self._a.to(wide), matrix.to(wide)
        outputs, inputs = delta.shape[2], a.shape[1]
        if delta.shape[1] == 1:
            along = (delta[:, 0] @ matrix.view(outputs, -1)).view(len(a), inputs, -1)
            return torch.bmm(a[:, None], along)
        return torch.bmm(delta, activations_along(a, matrix).transpose(0, 1))


def activations_along(a: Tensor, matrix: Tensor) -> Tensor:
    """Return what weights like each column make of activations, ``(o, b, k)``.

    Args:
        a: ``(b, i)``.
        matrix: ``(o i, k)``, in the same dtype.
    """
    columns = matrix.view(-1, a.shape[1], matrix.shape[1])
    return torch.bmm(a.expand(len(columns), *a.shape), columns)


Rows = Tensor | Outer


@dataclass(frozen=True)
class Place:
    """Where a parameter, or a part of one, sits among the chosen columns.

    Args:
        block: Columns of the whole parameter.
        columns: Its own columns.
    """

    block: slice
    columns: slice


class Layer(ABC):
    """One call of a torch function on chosen parameters.

    Args:
        batch: Where the samples are in its output; set again by `place`.
        parameters: What the call takes gradients of, chosen or not.
        inputs: Other tensors that the gradients need; they must not change afterwards.

    Attributes:
        places: Where its chosen parameters sit among the columns, by their ids.
    """

    def __init__(
        self, batch: Batch, parameters: Sequence[Tensor | None], *inputs: Tensor
    ) -> None:
        self.batch = batch
        self.parameters = [parameter for parameter in parameters if parameter is not None]
        self.places: dict[int, Place] = {}
        self.inputs = inputs
        # tensors made in inference mode have no version, and nobody can change them here
        self._versions = [None if t.is_inference() else t._version for t in inputs]

    def place(self, batch: Batch, output: Tensor, places: Mapping[int, Place]) -> None:
        """Note where the samples are in the output, and where the chosen parameters sit.

        Args:
            batch: Where the samples are.
            output: What the call returned.
            places: Of all chosen parameters and parts of them, by id.
        """
        self.batch = batch
        used = map(id, self.parameters)
        self.places = {
            parameter: places[parameter] for parameter in used if parameter in places
        }

    def again(self, inputs: tuple[Tensor, ...]) -> Self:
        """Return the same call on other inputs of the same shapes."""
        layer = object.__new__(type(self))
        vars(layer).update(vars(self))
        layer.inputs, layer._versions = inputs, list(map(_version, inputs))
        return layer

    @abstractmethod
    def gradients(self, delta: Tensor) -> Iterator[tuple[Place, Rows]]:
        """Yield the per-sample gradients ``(b, q, n)`` of the chosen parameters.

        Args:
            delta: Gradients at the call's output, ``(q, *shape of the output)``.
        """

    def check_unchanged(self) -> None:
        """Refuse inputs that an in-place operation has changed since the call.

        Raises:
            UnsupportedCallError: If one has.
        """
        for tensor, version in zip(self.inputs, self._versions, strict=True):
            if version is not None and tensor._version != version:
                raise UnsupportedCallError(
                    "an input of a layer was modified in place after the layer had used it"
                )
