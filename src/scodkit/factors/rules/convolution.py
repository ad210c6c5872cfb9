"""Convolutions of one to three dimensions, and their transposes.

The weight gradient of a sample is a product of gradients at the output positions with the
patches of the input under them: one batched product serves all directions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from scodkit.factors.rules.layer import (
    Batch,
    Layer,
    Rows,
    UnsupportedCallError,
    Wanted,
    unflatten,
)

Size = int | Sequence[int]


class Convolution(Layer):
    """``x (B m, channels, *positions)``; the arguments are those of ``F.conv1d`` to ``3d``."""

    def __init__(
        self,
        batch: Batch,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Size = 1,
        padding: Size | str = 0,
        dilation: Size = 1,
        groups: int = 1,
    ) -> None:
        super().__init__(batch, [weight, bias], input)
        self._input, self._weight, self._bias = input, weight, bias
        self._groups = groups
        self._window = _Window(input, weight, stride, dilation)
        self._margins = self._window.margins(padding)

    def gradients(self, delta: Tensor, wanted: Wanted) -> Iterator[tuple[Tensor, Rows]]:
        """See `Layer.gradients`."""
        if wanted(self._weight):
            patches = self._window.patches(_padded(self._input, self._margins))
            patches = _by_group(patches[None], self.batch, self._groups)
            rows = _product(_by_group(delta.flatten(3), self.batch, self._groups), patches)
            rows = rows.view(self.batch.size, self._groups, delta.shape[0], -1)
            yield self._weight, rows.transpose(1, 2).flatten(2)
        if self._bias is not None and wanted(self._bias):
            yield self._bias, _sums(delta, self.batch)


class TransposedConvolution(Layer):
    """Input and output change roles; the arguments are ``F.conv_transpose1d``'s to ``3d``'s."""

    def __init__(
        self,
        batch: Batch,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Size = 1,
        padding: Size = 0,
        output_padding: Size = 0,
        groups: int = 1,
        dilation: Size = 1,
    ) -> None:
        super().__init__(batch, [weight, bias], input)
        self._input, self._weight, self._bias = input, weight, bias
        self._groups = groups
        self._window = _Window(input, weight, stride, dilation)
        self._margins = self._window.margins(padding)

    def gradients(self, delta: Tensor, wanted: Wanted) -> Iterator[tuple[Tensor, Rows]]:
        """See `Layer.gradients`."""
        if wanted(self._weight):
            directions = delta.shape[0]
            padded = _padded(delta.flatten(0, 1), self._margins)
            # output_padding may add positions that no input reaches
            patches = self._window.patches(padded, positions=self._input.shape[2:])
            patches = unflatten(patches, 0, (directions, -1))
            patches = _by_group(patches, self.batch, self._groups)
            inputs = _by_group(self._input.flatten(2)[None], self.batch, self._groups)
            # (b g, q K, m l) (b g, m l, c); the weight has the input's channels first
            rows = unflatten(torch.bmm(patches, inputs.mT), 1, (directions, -1))
            rows = unflatten(rows, 0, (self.batch.size, self._groups)).mT
            yield self._weight, rows.transpose(1, 2).flatten(2)
        if self._bias is not None and wanted(self._bias):
            yield self._bias, _sums(delta, self.batch)


class _Window:
    """The places a kernel looks at, seen from each position."""

    def __init__(self, input: Tensor, weight: Tensor, stride: Size, dilation: Size) -> None:
        if input.ndim != weight.ndim:
            raise UnsupportedCallError("a convolution of one sample, without a batch axis")
        self._kernel = tuple(weight.shape[2:])
        self._stride = self._each(stride)
        self._dilation = self._each(dilation)

    def margins(self, padding: Size | str) -> list[int]:
        """Return what `F.pad` takes: the margins before and after, last axis first."""
        if padding == "same":
            spans = [d * (k - 1) for k, d in zip(self._kernel, self._dilation, strict=True)]
            sides = [(span // 2, span - span // 2) for span in spans]
        else:
            sizes = self._each(0 if isinstance(padding, str) else padding)
            sides = [(size, size) for size in sizes]
        return [margin for side in reversed(sides) for margin in side]

    def patches(self, padded: Tensor, positions: Sequence[int] | None = None) -> Tensor:
        """Return ``(n, channels places, positions)`` of ``padded (n, channels, *size)``.

        Args:
            padded: The input with its margins.
            positions: How many to take along each axis, where more would fit.
        """
        seen = padded
        steps = zip(self._kernel, self._stride, self._dilation, strict=True)
        for axis, (k, s, d) in enumerate(steps, start=2):
            seen = seen.unfold(axis, d * (k - 1) + 1, s)[..., ::d]
            if positions is not None:
                seen = seen.narrow(axis, 0, positions[axis - 2])
        axes = len(self._kernel)
        order = [0, 1, *range(2 + axes, 2 + 2 * axes), *range(2, 2 + axes)]
        places = padded.shape[1] * math.prod(self._kernel)
        return seen.permute(order).reshape(padded.shape[0], places, -1)

    def _each(self, size: Size) -> tuple[int, ...]:
        sizes = (size,) if isinstance(size, int) else tuple(size)
        return sizes * len(self._kernel) if len(sizes) == 1 else sizes


def _by_group(tensor: Tensor, batch: Batch, groups: int) -> Tensor:
    """Return ``(q, B m, channels, l)`` as ``(B g, q channels/g, m l)``."""
    tensor = unflatten(batch.split(tensor, axis=1), 3, (groups, -1))
    q, b, m, g, c, length = tensor.shape
    return tensor.permute(1, 3, 0, 4, 2, 5).reshape(b * g, q * c, m * length)


def _padded(tensor: Tensor, margins: list[int]) -> Tensor:
    return F.pad(tensor, margins) if any(margins) else tensor  # pad copies in any case


def _product(deltas: Tensor, patches: Tensor) -> Tensor:
    """Return ``(n, r, l) (n, K, l)^T``, the narrow one in front where one is much narrower."""
    if 4 * patches.shape[1] <= deltas.shape[1]:
        return torch.bmm(patches, deltas.mT).mT.contiguous()
    return torch.bmm(deltas, patches.mT)


def _sums(delta: Tensor, batch: Batch) -> Tensor:
    """Return ``(q, B m, channels, *positions)`` summed over places and positions."""
    return batch.split(delta.flatten(3).sum(-1), axis=1).sum(2).transpose(0, 1)
