"""Second moments of per-sample gradients, times a few columns: where projections come from.

With gradients ``G (o, i)`` of a weight these are ``sum G^T G X`` and ``sum G G^T X`` over
samples and directions, formed from the terms of ``G``; or KFAC's, ``sum a a^T X`` over
activations and ``sum d d^T X`` over gradients at the outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from scodkit.factors.rules import Rows
from scodkit.factors.rules.layer import Patches
from scodkit.factors.rules.rows import LookedUp, Outer, Several, Summed, Transposed, dense
from scodkit.numerics.matmul import sum_dtype

# bytes of what is formed of some samples at a time
_AT_ONCE, _AT_ONCE_ON_GPU = 1 << 26, 1 << 30


class Moments:
    """Moments of one weight, summed up over batches.

    Args:
        sides: Of the weight, ``(o, i)``.
        out: Columns ``X`` of the outputs' side, ``(o, l)``; None if it needs no moment.
        into: Columns of the inputs' side, ``(i, l)``; likewise.
        kfac: Whether the moments are KFAC's, where the terms of gradients are known.

    Attributes:
        of_out: ``(o, l)``, the sum so far.
        of_in: ``(i, l)``.
    """

    def __init__(
        self, sides: tuple[int, int], out: Tensor | None, into: Tensor | None, kfac: bool
    ) -> None:
        self.sides, self.out, self.into, self._kfac = sides, out, into, kfac
        self.of_out = None if out is None else torch.zeros_like(out)
        self.of_in = None if into is None else torch.zeros_like(into)

    def add(self, rows: Rows) -> None:
        """Add the gradients of some samples.

        Args:
            rows: ``(b, q, o i)``; the uses of a weight are taken apart, as if each was one of
                another sample.
        """
        if isinstance(rows, Several):
            entries = slice(0, self.sides[0] * self.sides[1])
            if all(which == entries for which, _ in rows.uses):
                for _, use in rows.uses:
                    self.add(use)
                return
        if isinstance(rows, Transposed):
            turned = Moments(self.sides[::-1], self.into, self.out, self._kfac)
            turned.of_out, turned.of_in = self.of_in, self.of_out  # the same memory
            turned.add(rows.rows)
            return
        if isinstance(rows, Patches) and self._kfac:
            rows = rows.summed() or rows
        if isinstance(rows, Outer):
            rows = rows.summed()
        if isinstance(rows, (Summed, LookedUp)) and rows.sides == self.sides:
            self._add_pieces(rows)
        else:
            flat = dense(rows)
            self._add_pieces(flat.view(*flat.shape[:2], *self.sides))

    def _add_pieces(self, rows: Tensor | Summed | LookedUp) -> None:
        columns = [x for x in (self.out, self.into) if x is not None]
        width, like = max(x.shape[1] for x in columns), columns[0]
        delta = rows if isinstance(rows, Tensor) else rows.delta
        each = delta[0].numel() // delta.shape[3] * width + delta[0].numel()
        each += delta.shape[1] * max(self.sides) * width
        limit = (_AT_ONCE_ON_GPU if delta.is_cuda else _AT_ONCE) // like.itemsize
        at_once = max(1, limit // each)
        for start in range(0, len(delta), at_once):
            which = slice(start, start + at_once)
            gradients = delta[which].to(sum_dtype(like))
            if isinstance(rows, Tensor):
                self._add_dense(gradients)
            elif isinstance(rows, Summed):
                self._add_summed(gradients, rows.a[which].to(gradients.dtype))
            else:
                self._add_looked_up(rows.tokens[which], gradients, rows.entries)

    def _add_dense(self, gradients: Tensor) -> None:
        """Add ``(b, q, o, i)``."""
        flat = gradients.flatten(0, 1)
        if self.into is not None and self.of_in is not None:
            along = flat @ self.into
            self.of_in += flat.flatten(0, 1).mT @ along.flatten(0, 1)
        if self.out is not None and self.of_out is not None:
            self.of_out += (flat @ (flat.mT @ self.out)).sum(0)

    def _add_summed(self, delta: Tensor, a: Tensor) -> None:
        """Add gradients ``(b, q, m, o)`` times activations ``(b, m, i)``."""
        if self.into is not None and self.of_in is not None:
            along = a @ self.into
            if not self._kfac:
                along = (delta @ (delta.mT @ along[:, None])).sum(1)
            self.of_in += a.flatten(0, 1).mT @ along.flatten(0, 1)
        if self.out is not None and self.of_out is not None:
            along = delta @ self.out
            if not self._kfac:
                of_inputs = a[:, None].mT @ along  # (b, q, i, l)
                along = a[:, None] @ of_inputs
            self.of_out += delta.flatten(0, 2).mT @ along.flatten(0, 2)

    def _add_looked_up(self, tokens: Tensor, delta: Tensor, entries: int) -> None:
        """Add gradients ``(b, q, m, e)`` of the rows of tokens ``(b, m)``."""
        count, places = delta.shape[1], delta.shape[2]
        if self.into is not None and self.of_in is not None:
            along = delta @ self.into
            if not self._kfac:
                alike = LookedUp(tokens, delta, entries).alike[:, None]
                along = alike.to(along.dtype) @ along
            self.of_in += delta.flatten(0, 2).mT @ along.flatten(0, 2)
        if self.out is not None and self.of_out is not None:
            along = self.out[tokens][:, None].expand(-1, count, places, -1)
            if not self._kfac:
                along = delta @ (delta.mT @ along)
            self.of_out.index_add_(0, tokens.flatten(), along.sum(1).flatten(0, 1))
