"""``F.linear``: products of activations and gradients, over any leading axes."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from scodkit.factors.rules.layer import Batch, Layer, Outer, Place, Rows

_MATRIX = 2


class Linear(Layer):
    """``y = x W^T + b`` on ``x (..., i)``; the arguments are those of ``F.linear``."""

    def __init__(
        self, batch: Batch, input: Tensor, weight: Tensor, bias: Tensor | None = None
    ) -> None:
        super().__init__(batch, [weight, bias], input)
        self.weight, self.bias = weight, bias

    @property
    def input(self) -> Tensor:
        """``x``."""
        return self.inputs[0]

    def gradients(self, delta: Tensor) -> Iterator[tuple[Place, Rows]]:
        """See `Layer.gradients`; one place per sample gives outer products."""
        weight, bias = self.places.get(id(self.weight)), self.places.get(id(self.bias))
        a = self.inputs[0].to(delta.dtype)
        if a.numel() == self.batch.size * a.shape[-1]:  # one row for each sample
            if a.ndim != _MATRIX:
                a, delta = a.flatten(0, -2), delta.flatten(1, -2)
            delta = delta.transpose(0, 1)
            if weight is not None:
                yield weight, Outer(delta, a)
            if bias is not None:
                yield bias, delta
            return
        batch = self.batch.led_by(delta.shape[1:-1])
        # (b, q, m, o)
        delta = batch.split(delta.flatten(1, -2), axis=1).transpose(0, 1)
        if weight is not None:
            a = batch.split(a.flatten(0, -2))
            rows = torch.bmm(delta.mT.flatten(1, 2), a)
            yield weight, rows.view(*delta.shape[:2], -1)
        if bias is not None:
            yield bias, delta.sum(2)
