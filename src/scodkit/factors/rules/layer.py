"""Layers: recorded calls on chosen parameters, with rules for linear layers and convolutions.

A rule turns the call of a torch function into a `Layer`; the layer turns gradients at the
call's output into per-sample gradients of its parameters, for all directions at once. The
weight gradient of a convolution is a product of gradients at the output positions with the
patches of the input under them: one batched product serves all directions.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from typing_extensions import Self

from scodkit.errors import BatchError
from scodkit.factors.layout import FIRST, Lay
from scodkit.factors.rules.rows import Factored, Outer, Rows, Summed, Transposed, compressed
from scodkit.model.projected import Pair
from scodkit.numerics import kernels
from scodkit.numerics.matmul import convolution_bmm

Size = int | Sequence[int]

# entries in a row that a GPU's matrix units can load at once
_ALIGNED = 8

# up to so many rows, a matrix is multiplied faster from the left on a CPU, from so many in a
# batch
_NARROW = 32
_SEVERAL = 8

_IMAGES = 4  # axes of a batch of images
_FEW_PLACES = 64  # of a convolution kernel; our Triton kernel unrolls a loop over them

# positions are padded to a multiple of what matrix units load at once, for any dtype, where
# they are copied anyway or are many
_FILL = 16
_WORTH_FILLING = 1024

_MATRIX = 2  # axes of a matrix

_version = attrgetter("_version")


class UnsupportedCallError(BatchError):
    """No rule covers a call on a chosen parameter: the model needs another engine."""


@dataclass(frozen=True)
class Batch:
    """Where the samples lie in a layer's output.

    Its leading axes have ``m`` places for each of the ``B`` samples (tokens, windows, frames).

    Args:
        size: Batch size ``B``.
        lay: Where they lie; unused if there is only one.
    """

    size: int
    lay: Lay = FIRST

    def led_by(self, shape: Sequence[int]) -> Batch:
        """Return where the samples lie once the leading axes, of this shape, are flattened."""
        if self.size == 1:
            return self
        axis, outer, inner = self.lay
        before, after = math.prod(shape[:axis]), math.prod(shape[axis + 1 :])
        return Batch(self.size, Lay(0, before * outer, inner * after))

    def lead(self, rows: Tensor, axis: int = 0) -> Tensor:
        """Return ``rows`` with the leading axes of a call replaced by two: ``B``, then ``m``.

        Args:
            rows: ``(..., *leading, n)``, of several places for each sample.
            axis: The first of the leading axes.
        """
        if self.size > 1 and self.lay.outer == self.lay.inner == 1:  # a view of any memory
            return rows.movedim(axis + self.lay.axis, axis).flatten(axis + 1, -2)
        batch = self.led_by(rows.shape[axis:-1])
        return batch.split(rows.flatten(axis, -2), axis)

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
    """Return a view with one axis split in two (``Tensor.unflatten``, with less overhead)."""
    return tensor.view(*tensor.shape[:axis], *sizes, *tensor.shape[axis + 1 :])


@dataclass(frozen=True)
class Place:
    """Columns of a parameter, or of a part of one, among the chosen weights.

    Args:
        block: Columns of the whole parameter.
        columns: Columns of the part.
    """

    block: slice
    columns: slice


@dataclass(frozen=True)
class Derived:
    """A tensor computed from chosen parameters alone, which no sample had a part in.

    A table of positions that was looked up, or a weight that is normalised before use. The
    layer that uses it yields rows of the tensor, as if that were a parameter.

    Args:
        index: Of the tensor, in the order in which a forward pass computes them.
    """

    index: int


class Layer(ABC):
    """One call of a torch function on chosen parameters.

    Args:
        batch: Where the samples lie in its output; replaced by `place`.
        parameters: Its parameters, chosen or not.
        inputs: Other tensors that the gradients need; they must not change afterwards.

    Attributes:
        places: Columns of its chosen parameters, by their ids.
        takes_parameters: Whether an input may be a chosen parameter, whose gradient is known.
    """

    takes_parameters = True

    def __init__(
        self, batch: Batch, parameters: Sequence[Tensor | None], *inputs: Tensor
    ) -> None:
        self.batch = batch
        self.parameters = [parameter for parameter in parameters if parameter is not None]
        self.places: dict[int, Place | Derived] = {}
        self.inputs = inputs
        # tensors created in inference mode have no version, and cannot be modified here
        self._versions = [None if t.is_inference() else t._version for t in inputs]

    def place(
        self, batch: Batch, output: Tensor, places: Mapping[int, Place | Derived]
    ) -> None:
        """Set where the samples lie in the output, and the columns of the parameters.

        Args:
            batch: Where the samples lie.
            output: The result of the call.
            places: Columns of all chosen parameters and parts of them, by id.

        Raises:
            UnsupportedCallError: If a chosen parameter is an input and must not be one.
        """
        if not self.takes_parameters and any(id(own) in places for own in self.inputs):
            raise UnsupportedCallError("a parameter as the input of a layer")
        self.batch = batch
        used = map(id, self.parameters)
        self.places = {
            parameter: places[parameter] for parameter in used if parameter in places
        }

    def again(self, inputs: tuple[Tensor, ...]) -> Self:
        """Return a copy of the layer for other inputs of the same shapes."""
        layer = object.__new__(type(self))
        vars(layer).update(vars(self))
        layer.inputs, layer._versions = inputs, list(map(_version, inputs))
        return layer

    @abstractmethod
    def gradients(self, delta: Tensor) -> Iterator[tuple[Place | Derived, Rows]]:
        """Yield the per-sample gradients ``(b, q, n)`` of the chosen parameters.

        Args:
            delta: Gradients at the call's output, ``(q, *shape of the output)``.
        """

    def check_unchanged(self) -> None:
        """Make sure that no input was modified in place since the call.

        Raises:
            UnsupportedCallError: If one was.
        """
        for tensor, version in zip(self.inputs, self._versions, strict=True):
            if version is not None and tensor._version != version:
                raise UnsupportedCallError(
                    "an input of a layer was modified in place after the layer had used it"
                )


class Linear(Layer):
    """``y = x W^T + b`` on ``x (..., i)``; the arguments are those of ``F.linear``."""

    takes_parameters = False

    def __init__(
        self, batch: Batch, input: Tensor, weight: Tensor, bias: Tensor | None = None
    ) -> None:
        super().__init__(batch, [weight, bias], input)
        self.weight, self.bias = weight, bias

    @property
    def input(self) -> Tensor:
        """``x``."""
        return self.inputs[0]

    def gradients(self, delta: Tensor) -> Iterator[tuple[Place | Derived, Rows]]:
        """See `Layer.gradients`; outer products if there is one place per sample."""
        weight, bias = self.places.get(id(self.weight)), self.places.get(id(self.bias))
        a = self.inputs[0]
        a = a if a.dtype == delta.dtype else a.to(delta.dtype)
        if a.numel() == self.batch.size * a.shape[-1]:  # one row for each sample
            if a.ndim != _MATRIX:
                a, delta = a.flatten(0, -2), delta.flatten(1, -2)
            delta = delta.transpose(0, 1)
            if weight is not None:
                yield weight, Outer(delta, a)
            if bias is not None:
                yield bias, delta
            return
        # (b, q, m, o)
        delta = self.batch.lead(delta, axis=1).transpose(0, 1)
        if weight is not None:
            yield weight, Summed(delta, self.batch.lead(a))
        if bias is not None:
            yield bias, delta.sum(2)


class Product(Linear):
    """``y = x W (+ b)`` on ``x (..., i)``, with a weight ``(i, o)``: a matrix product."""

    def __init__(
        self, batch: Batch, input: Tensor, other: Tensor, bias: Tensor | None = None
    ) -> None:
        super().__init__(batch, input, other, bias)

    def place(
        self, batch: Batch, output: Tensor, places: Mapping[int, Place | Derived]
    ) -> None:
        """See `Layer.place`.

        Raises:
            UnsupportedCallError: If a parameter is on the left, or it is no matrix.
        """
        super().place(batch, output, places)
        if self.weight.ndim != _MATRIX:
            raise UnsupportedCallError("a product with a parameter that is no matrix")

    def gradients(self, delta: Tensor) -> Iterator[tuple[Place | Derived, Rows]]:
        """See `Layer.gradients`."""
        weight = self.places.get(id(self.weight))
        for place, rows in super().gradients(delta):
            if place is weight:
                assert isinstance(rows, (Outer, Summed))
                inputs, outputs = self.weight.shape
                yield place, Transposed(rows, (outputs, inputs))
            else:
                yield place, rows


def biased_product(
    batch: Batch,
    input: Tensor,
    mat1: Tensor,
    mat2: Tensor,
    *,
    beta: float = 1,
    alpha: float = 1,
) -> Layer:
    """Return the layer of ``addmm``: ``input + mat1 mat2``.

    Raises:
        UnsupportedCallError: If a factor is scaled, or what is added is no vector.
    """
    if (beta, alpha) != (1, 1) or input.ndim != 1:
        raise UnsupportedCallError("a product that is scaled, or added to a matrix")
    return Product(batch, mat1, mat2, input)


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
        self.weight, self._bias = weight, bias
        self._groups = groups
        self._window = _Window(input, weight, stride, dilation)
        self._margins = self._window.margins(padding)

    def gradients(self, delta: Tensor) -> Iterator[tuple[Place | Derived, Rows]]:
        """See `Layer.gradients`."""
        weight, bias = self.places.get(id(self.weight)), self.places.get(id(self._bias))
        if weight is not None:
            yield weight, Patches(self, delta)
        if bias is not None:
            sums = self.batch.sum_places(delta.flatten(3).sum(-1), axis=1)
            yield bias, sums.transpose(0, 1)

    def weight_rows(self, delta: Tensor) -> Tensor:
        """Return the rows of the weight, ``(b, q, n)``; the argument is that of `gradients`."""
        input = self.inputs[0].to(delta.dtype)
        if delta.is_cuda and kernels.run_on(delta) and self._is_plain:
            return self._by_kernels(input, delta)
        places = self._window.places(_padded(input, self._margins))
        rows = _sum_over_positions(
            self._apart(delta, 1), self._apart(places, 0)[None], delta.ndim - 3
        )
        return rows.transpose(1, 2).flatten(2)

    def summed(self, delta: Tensor) -> Summed | None:
        """Return the same rows as sums over positions; None if they are no such sums."""
        if self._groups > 1:
            return None
        input = _padded(self.inputs[0].to(delta.dtype), self._margins)
        axes = delta.ndim - 3
        patches = _matrices(self._apart(self._window.places(input), 0)[None], axes)
        left = self._apart(delta, 1).transpose(0, 1)  # (B, q, m, 1, o, *positions)
        left = left.flatten(5).permute(0, 1, 2, 5, 3, 4).flatten(4).flatten(2, 3)
        return Summed(left, patches.mT)

    @property
    def _is_plain(self) -> bool:
        """Whether this is an ungrouped 2d convolution, one image per sample, small kernel."""
        images = self.inputs[0].ndim == _IMAGES and len(self.inputs[0]) == self.batch.size
        places = math.prod(self.weight.shape[2:])
        return images and self._groups == 1 and places <= _FEW_PLACES

    def _by_kernels(self, input: Tensor, delta: Tensor) -> Tensor:
        """Return the same rows, from patches gathered by our Triton kernels."""
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
        """Return a tensor with axes ``B m, channels`` split: ``B, m, groups, channels``."""
        return unflatten(self.batch.split(tensor, axis), axis + 2, (self._groups, -1))


class Patches(Factored):
    """Rows of a convolution: sums over positions of gradients times patches of the input.

    Args:
        layer: The convolution.
        delta: Gradients at its output, ``(q, *shape of the output)``.
    """

    def __init__(self, layer: Convolution, delta: Tensor) -> None:
        self._layer, self._delta = layer, delta
        self._size = layer.weight.numel()
        self.sides = (layer.weight.shape[0], self._size // layer.weight.shape[0])
        self.nbytes = layer.batch.size * len(delta) * self._size * delta.itemsize

    def dense(self) -> Tensor:
        """Return what `Factored.dense` describes."""
        return self._layer.weight_rows(self._delta)

    def summed(self) -> Summed | None:
        """Return what `Convolution.summed` describes."""
        return self._layer.summed(self._delta)

    def compressed(self, pair: Pair) -> tuple[Tensor, Tensor]:
        """Return what `Factored.compressed` describes; whole rows one by one."""
        count, outputs = len(self._delta), pair.sides[0]
        places = self._delta.numel() // (count * outputs * self._layer.batch.size)
        if places * (pair.sides[1] + count * outputs) < count * self._size:
            summed = self.summed()
            if summed is not None:
                return summed.compressed(pair)
        each = [compressed(self._layer.weight_rows(d[None]), pair) for d in self._delta]
        rows, squares = zip(*each, strict=True)
        return torch.cat(rows, dim=1), torch.cat(squares, dim=1)


class TransposedConvolution(Convolution):
    """Input and output swap roles; the arguments are ``F.conv_transpose1d``'s to ``3d``'s."""

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

    def summed(self, delta: Tensor) -> Summed | None:
        """Return what `Convolution.summed` describes."""
        return None

    def weight_rows(self, delta: Tensor) -> Tensor:
        """Return what `Convolution.weight_rows` describes."""
        padded, (input,) = _padded(delta.flatten(0, 1), self._margins), self.inputs
        # output_padding may add positions that no input reaches
        places = self._window.places(padded, positions=input.shape[2:])
        places = unflatten(places, 0, (delta.shape[0], -1))
        input_places = self._apart(input.to(delta.dtype), 0)[None]
        rows = _sum_over_positions(self._apart(places, 1), input_places, delta.ndim - 3)
        # the weight has the input's channels first
        rows = unflatten(rows, 3, (-1, input.shape[1] // self._groups)).mT
        return rows.transpose(1, 2).flatten(2)


class _Window:
    """The sliding window of a convolution: the inputs under its kernel at each position."""

    def __init__(self, input: Tensor, weight: Tensor, stride: Size, dilation: Size) -> None:
        if input.ndim != weight.ndim:
            raise UnsupportedCallError("a convolution of one sample, without a batch axis")
        self._kernel = tuple(weight.shape[2:])
        self._stride = self._each(stride)
        self._dilation = self._each(dilation)

    def margins(self, padding: Size | str) -> list[int]:
        """Return the padding in the order of `F.pad`: before and after, last axis first."""
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
            padded: The padded input.
            positions: How many to take along each axis, where more would fit.
        """
        windows = padded
        steps = zip(self._kernel, self._stride, self._dilation, strict=True)
        for axis, (k, s, d) in enumerate(steps, start=2):
            windows = windows.unfold(axis, d * (k - 1) + 1, s)[..., ::d]
            if positions is not None:
                windows = windows.narrow(axis, 0, positions[axis - 2])
        axes = len(self._kernel)
        return windows.permute(0, 1, *range(2 + axes, 2 + 2 * axes), *range(2, 2 + axes))

    def patches(
        self, input: Tensor, margins: list[int], positions: Sequence[int], fill: int
    ) -> Tensor:
        """Return the patches of images (im2col), ``(n, channels kernel, positions)``.

        Args:
            input: ``(n, channels, height, width)``.
            margins: From `margins`.
            positions: Rows and columns of output positions.
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
        # the narrow matrix on the left, one direction at a time: the large one is not copied
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
        # matrix units need aligned rows: make the other axis contiguous
        turned = tensor.permute(1, 3, 2, *positions, 0, *inner)
        return turned.reshape(shape[1] * shape[3], columns, rows).mT
    straight = tensor.permute(1, 3, 0, *inner, 2, *positions)
    return straight.reshape(shape[1] * shape[3], rows, columns)
