"""``F.embedding``: the gradient at an output goes to the row that was looked up."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from scodkit.factors.rules.layer import Batch, Derived, Layer, Place, Rows, UnsupportedCallError
from scodkit.numerics.matmul import squared_norms, sum_dtype

# entries of a table, for each that a sample looks up, from which most of its rows is zeros
_SPARSE = 8


class LookedUp:
    """Rows of a table, zero but for the entries that a sample looked up.

    Args:
        delta: Gradients at what was looked up, ``(b, q, m, e)``.
        places: Which entries, ``(b, m)``.
        entries: ``V``, of the table.
    """

    def __init__(self, delta: Tensor, places: Tensor, entries: int) -> None:
        self._delta, self._places, self._entries = delta, places, entries

    @property
    def nbytes(self) -> int:
        """Size of the rows if they were materialised, in bytes."""
        samples, count, _, width = self._delta.shape
        return samples * count * self._entries * width * self._delta.itemsize

    def dense(self) -> Tensor:
        """Return the rows ``(b, q, V e)``."""
        samples, count, _, width = self._delta.shape
        rows = self._delta.new_zeros(samples, count, self._entries, width)
        return _added(rows, self._places, self._delta)

    def energies(self, matrix: Tensor) -> tuple[Tensor, Tensor]:
        """Return squared norms ``(b,)`` and rows times ``matrix (V e, k)``, ``(b, q, k)``."""
        same = self._places[:, :, None] == self._places[:, None, :]
        first = same.byte().argmax(2)  # an entry may be looked up several times
        rows = _added(torch.zeros_like(self._delta), first, self._delta)
        wide = sum_dtype(rows, matrix)
        looked_up = matrix.view(self._entries, -1)[self._places].to(wide)
        along = torch.bmm(rows.to(wide), looked_up.view(len(rows), rows.shape[2], -1))
        return squared_norms(rows), along


def _added(rows: Tensor, places: Tensor, delta: Tensor) -> Tensor:
    """Return rows ``(b, q, n, e)``, flattened, with ``delta`` added at places ``(b, m)``."""
    return rows.scatter_add_(2, places[:, None, :, None].expand_as(delta), delta).flatten(2)


class Embedding(Layer):
    """Looks up ``input (...)`` in ``weight (V, e)``; the arguments are ``F.embedding``'s."""

    def __init__(
        self,
        batch: Batch,
        input: Tensor,
        weight: Tensor,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
    ) -> None:
        super().__init__(batch, [weight], input)
        if max_norm is not None or scale_grad_by_freq:
            raise UnsupportedCallError("an embedding with max_norm or scale_grad_by_freq")
        self._weight = weight
        self._padding = padding_idx

    def gradients(self, delta: Tensor) -> Iterator[tuple[Place | Derived, Rows]]:
        """See `Layer.gradients`."""
        (place,), (input,) = self.places.values(), self.inputs
        entries, width = self._weight.shape
        batch = self.batch.led_by(input.shape)
        places = batch.split(input.flatten())
        delta = delta.reshape(delta.shape[0], -1, width)
        delta = batch.split(delta, axis=1).transpose(0, 1)  # (b, q, m, e)
        if self._padding is not None:
            delta = delta.masked_fill((places == self._padding % entries)[:, None, :, None], 0)
        rows = LookedUp(delta, places, entries)
        # what is multiplied grows with the columns of a matrix, as the rows do not
        yield place, rows if places.shape[1] * _SPARSE <= entries else rows.dense()
