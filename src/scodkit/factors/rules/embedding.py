"""``F.embedding``: the gradient at an output goes to the row that was looked up."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from scodkit.factors.rules.layer import Batch, Derived, Layer, Place, UnsupportedCallError
from scodkit.factors.rules.rows import LookedUp, Rows


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
        yield place, LookedUp(places, delta, entries)
