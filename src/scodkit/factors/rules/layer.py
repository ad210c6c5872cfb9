"""What a forward pass remembers of one call on chosen parameters.

A rule turns the call of a torch function into a `Layer`; the layer turns gradients at the
call's output into per-sample gradients of its parameters, for all directions at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from scodkit.errors import BatchError
from scodkit.mixed import sum_dtype

# whether the first axis holds the samples alone; places of each sample on it, and what is over
Fold = tuple[bool, int, int]


class UnsupportedCallError(BatchError):
    """No rule covers a call on a chosen parameter: another engine has to take the model."""


@dataclass(frozen=True)
class Batch:
    """Where the samples are on the axes that lead a layer's tensors.

    Leading axes hold ``m`` places of each of the ``B`` samples (tokens, windows, frames).

    Args:
        size: ``B``.
        sample_major: Whether all places of a sample come before the next sample; otherwise
            all samples of a place before the next place, as inside ``nn.MultiheadAttention``.
        folds: Filled with how the samples lay in the layers. Where that changes from batch to
            batch, they may no longer lie as they did when the engine was tried.
    """

    size: int
    sample_major: bool = True
    folds: set[Fold] = field(default_factory=set, compare=False)

    def split(self, rows: Tensor, axis: int = 0) -> Tensor:
        """Return ``rows`` with its axis of ``B m`` rows replaced by two: ``B``, then ``m``.

        Raises:
            UnsupportedCallError: If that axis cannot hold the samples.
        """
        length = rows.shape[axis]
        if length % self.size:
            raise UnsupportedCallError(
                f"expected {self.size} samples along the leading axes, got {length} rows"
            )
        places = length // self.size
        if self.sample_major:
            return unflatten(rows, axis, (self.size, places))
        return unflatten(rows, axis, (places, self.size)).transpose(axis, axis + 1)

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
Wanted = Callable[[Tensor], bool]


class Layer(ABC):
    """One call of a torch function on chosen parameters.

    Args:
        batch: Where the samples are.
        parameters: What the call takes gradients of, chosen or not.
        remembered: Inputs of the call that gradients need; they must not change afterwards.
    """

    def __init__(
        self, batch: Batch, parameters: Sequence[Tensor | None], *remembered: Tensor
    ) -> None:
        self.batch = batch
        if remembered and batch.sample_major and remembered[0].ndim:
            length = len(remembered[0])
            batch.folds.add((length == batch.size, *divmod(length, batch.size)))
        self.parameters = [parameter for parameter in parameters if parameter is not None]
        # what was made in inference mode has no version, and no one can change it here
        self._versions = [(t, t._version) for t in remembered if not t.is_inference()]

    @abstractmethod
    def gradients(self, delta: Tensor, wanted: Wanted) -> Iterator[tuple[Tensor, Rows]]:
        """Yield parameters with their per-sample gradients, ``(b, q, n)``.

        Args:
            delta: Gradients at the call's output, ``(q, *shape of the output)``.
            wanted: Says whether a parameter is one of the chosen.
        """

    def check_unchanged(self) -> None:
        """Refuse what was remembered if an in-place operation has changed it since.

        Raises:
            UnsupportedCallError: If one has.
        """
        if any(tensor._version != version for tensor, version in self._versions):
            raise UnsupportedCallError(
                "an input of a layer was modified in place after the layer had used it"
            )
