"""``F.linear``: products of activations and gradients, over any leading axes."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from scodkit.factors.rules.layer import Batch, Layer, Outer, Rows, Wanted


class Linear(Layer):
    """``y = x W^T + b`` on ``x (..., i)``; the arguments are those of ``F.linear``."""

    def __init__(
        self, batch: Batch, input: Tensor, weight: Tensor, bias: Tensor | None = None
    ) -> None:
        super().__init__(batch, [weight, bias], input)
        self.input, self.weight, self.bias = input, weight, bias

    def gradients(self, delta: Tensor, wanted: Wanted) -> Iterator[tuple[Tensor, Rows]]:
        """See `Layer.gradients`; one place per sample gives outer products."""
        batch = self.batch.led_by(delta.shape[1:-1])
        # (b, q, m, o)
        delta = batch.split(delta.flatten(1, -2), axis=1).transpose(0, 1)
        if wanted(self.weight):
            a = batch.split(self.input.to(delta.dtype).flatten(0, -2))
            if a.shape[1] == 1:
                yield self.weight, Outer(delta[:, :, 0], a[:, 0])
            else:
                rows = torch.bmm(delta.mT.flatten(1, 2), a)
                yield self.weight, rows.view(*delta.shape[:2], -1)
        if self.bias is not None and wanted(self.bias):
            yield self.bias, delta[:, :, 0] if delta.shape[2] == 1 else delta.sum(2)
