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
    Place,
    Rows,
    UnsupportedCallError,
    unflatten,
)
from scodkit.numerics import kernels
from scodkit.numerics.matmul import convolution_bmm

Size = int | Sequence[int]

# entries in a row that GPUs' matrix units can load at once
_ALIGNED = 8

# rows of a matrix that a CPU multiplies faster from the left, in a batch of several
_NARROW = 32
_SEVERAL = 8

_IMAGES = 4  # axes of a batch of them
_FEW_PLACES = 64  # of a kernel, each of which is a copy in the code of ours

# positions are filled up to a multiple of what matrix units load at once, for any dtype, where
# they are copied anyway or are many
_FILL = 16
_WORTH_FILLING = 1024


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
        self._weight, self._bias = weight, bias
        self._groups = groups
        self._window = _Window(input, weight, stride, dilation)
        self._margins = self._window.margins(padding)

    def gradients(self, delta: Tensor) -> Iterator[tuple[Place, Rows]]:
        """See `Layer.gradients`."""
        weight, bias = self.places.get(id(self._weight)), self.places.get(id(self._bias))
        if weight is not None:
            input = self.inputs[0].to(delta.dtype)
            if kernels.run_on(delta) and self._is_plain:
                yield weight, self._by_kernels(input, delta)
            else:
                places = self._window.places(_padded(input, self._margins))
                rows = _sum_over_positions(
                    self._apart(delta, 1), self._apart(places, 0)[None], delta.ndim - 3
                )
                yield weight, rows.transpose(1, 2).flatten(2)
        if bias is not None:
            yield bias, _sums(delta, self.batch)

    @property
    def _is_plain(self) -> bool:
        """Whether images come one to a sample, all channels together, seen by small kernels."""
        images = self.inputs[0].ndim == _IMAGES and len(self.inputs[0]) == self.batch.size
        places = math.prod(self._weight.shape[2:])
        return images and self._groups == 1 and places <= _FEW_PLACES

    def _by_kernels(self, input: Tensor, delta: Tensor) -> Tensor:
        """Return the same rows, from copies made by kernels of our own."""
        q, batch, channels, *positions = delta.shape
        count = math.prod(positions)
        in_place = 1 in (q, batch)  # the axes need not be swapped in memory
        fill = 1 if in_place and count < _WORTH_FILLING else _FILL
        if in_place and count % fill == 0:
            left = delta.reshape(batch, q * channels, count)
        else:
            left = kernels.patches(delta, fill=fill).flatten(1, 2)
        right = self._window.patches(input, self._margins, positions, fill)
        return convolution_bmm(left, right.mT).view(batch, q, -1)

    def _apart(self, tensor: Tensor, axis: int) -> Tensor:
        """Return a tensor with its axis of ``B m``, channels as ``B, m, groups, channels``."""
        return unflatten(self.batch.split(tensor, axis), axis + 2, (self._groups, -1))


class TransposedConvolution(Convolution):
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
        super().__init__(batch, input, weight, bias, stride, padding, dilation, groups)

    def gradients(self, delta: Tensor) -> Iterator[tuple[Place, Rows]]:
        """See `Layer.gradients`."""
        weight, bias = self.places.get(id(self._weight)), self.places.get(id(self._bias))
        if weight is not None:
            padded = _padded(delta.flatten(0, 1), self._margins)
            # output_padding may add positions that no input reaches
            places = self._window.places(padded, positions=self.inputs[0].shape[2:])
            places = unflatten(places, 0, (delta.shape[0], -1))
            rows = _sum_over_positions(
                self._apart(places, 1),
                self._apart(self.inputs[0].to(delta.dtype), 0)[None],
                delta.ndim - 3,
            )
            # the weight has the input's channels first
            rows = unflatten(rows, 3, (-1, self.inputs[0].shape[1] // self._groups)).mT
            yield weight, rows.transpose(1, 2).flatten(2)
        if bias is not None:
            yield bias, _sums(delta, self.batch)


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

    def places(self, padded: Tensor, positions: Sequence[int] | None = None) -> Tensor:
        """Return a view ``(n, channels, *kernel, *positions)`` of ``(n, channels, *size)``.

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
        return seen.permute(0, 1, *range(2 + axes, 2 + 2 * axes), *range(2, 2 + axes))

    def patches(
        self, input: Tensor, margins: list[int], positions: Sequence[int], fill: int
    ) -> Tensor:
        """Return what is seen of images, ``(n, channels kernel, positions)``.

        Args:
            input: ``(n, channels, height, width)``.
            margins: From `margins`.
            positions: How many down and across.
            fill: See `kernels.patches`.
        """
        (high, wide), (down, across) = self._kernel, positions
        unmoved = self._kernel == self._stride == (1, 1) and not any(margins)
        if unmoved and down * across % fill == 0:
            return input.flatten(2)
        left, _, above, _ = margins
        return kernels.patches(
            input[None],
            (high, wide),
            (self._stride[0], self._stride[1]),
            (self._dilation[0], self._dilation[1]),
            (above, left),
            (down, across),
            fill,
        ).flatten(1, 2)

    def _each(self, size: Size) -> tuple[int, ...]:
        sizes = (size,) if isinstance(size, int) else tuple(size)
        return sizes * len(self._kernel) if len(sizes) == 1 else sizes


def _padded(tensor: Tensor, margins: list[int]) -> Tensor:
    return F.pad(tensor, margins) if any(margins) else tensor  # pad copies in any case


def _sum_over_positions(left: Tensor, right: Tensor, axes: int) -> Tensor:
    """Return the products of two views, summed over places and positions.

    Args:
        left: ``(q, B, m, groups, ..., *positions)``.
        right: ``(1, B, m, groups, ..., *positions)``.
        axes: How many axes the positions take.

    Returns:
        ``(B, groups, q, l r)``, ``l`` and ``r`` the numbers of entries in between.
    """
    b = _matrices(right, axes)
    q, batch, groups = left.shape[0], left.shape[1], left.shape[3]
    if b.shape[1] <= _NARROW and b.shape[0] >= _SEVERAL and not b.is_cuda:
        # the narrow one in front, direction by direction: no copy of the large one is needed
        turned = [torch.bmm(b, _matrices(one[None], axes).mT) for one in left]
        rows = torch.stack(turned).view(q, batch, groups, b.shape[1], -1)
        return rows.permute(1, 2, 0, 4, 3).reshape(batch, groups, q, -1)
    a = _matrices(left, axes)
    return convolution_bmm(a, b.mT).view(batch, groups, q, -1)


def _matrices(tensor: Tensor, axes: int) -> Tensor:
    """Return ``(q, B, m, groups, ..., *positions)`` as ``(B groups, q ..., m positions)``."""
    inner = range(4, tensor.ndim - axes)
    positions = range(tensor.ndim - axes, tensor.ndim)
    shape = tensor.shape
    rows = shape[0] * math.prod(shape[4 : tensor.ndim - axes])
    columns = shape[2] * math.prod(shape[tensor.ndim - axes :])
    if tensor.is_cuda and columns % _ALIGNED:
        # matrix units want aligned rows: the other axis is contiguous then
        turned = tensor.permute(1, 3, 2, *positions, 0, *inner)
        return turned.reshape(shape[1] * shape[3], columns, rows).mT
    straight = tensor.permute(1, 3, 0, *inner, 2, *positions)
    return straight.reshape(shape[1] * shape[3], rows, columns)


def _sums(delta: Tensor, batch: Batch) -> Tensor:
    """Return ``(q, B m, channels, *positions)`` summed over places and positions."""
    return batch.sum_places(delta.flatten(3).sum(-1), axis=1).transpose(0, 1)
