"""Parameters that scale or shift: normalisations, element-wise products and sums.

The gradient of such a parameter is a sum, over the axes it is broadcast along, of the
gradient at the output, times what the parameter scales.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from scodkit.factors.rules.layer import Batch, Layer, Place, Rows, UnsupportedCallError

# positions from which a product of matrices beats an element-wise one and a sum, on a GPU
_MANY = 64
_SAMPLES = 8  # and samples: with few there is little to write, and kernels may be fused


@dataclass(frozen=True)
class _Term:
    """A parameter of the layer.

    Args:
        parameter: None where the layer has none.
        axes: The axes of the output it spans; None for the last ones, as broadcasting goes.
        scaled: Makes what it scales from the layer's inputs; None for ones.
    """

    parameter: Tensor | None
    axes: Sequence[int] | None
    scaled: Callable[..., Tensor] | None = None

    def spans(self, ndim: int) -> Sequence[int]:
        """Return the axes of an output of ``ndim`` axes that the parameter spans."""
        if self.axes is not None or self.parameter is None:
            return self.axes or ()
        lead = ndim - self.parameter.ndim
        return [lead + i for i, size in enumerate(self.parameter.shape) if size != 1]


class Broadcast(Layer):
    """``y = scaled * weight + bias``, either of them missing."""

    def __init__(self, batch: Batch, inputs: Sequence[Tensor], *terms: _Term) -> None:
        super().__init__(batch, [term.parameter for term in terms], *inputs)
        self._terms = terms

    def place(self, batch: Batch, output: Tensor, places: Mapping[int, Place]) -> None:
        """See `Layer.place`.

        Raises:
            UnsupportedCallError: If a parameter spans the samples.
        """
        super().place(batch, output, places)
        self._terms = tuple(term for term in self._terms if id(term.parameter) in places)
        for term in self._terms if batch.size > 1 else ():
            if batch.lay.axis in term.spans(output.ndim):
                raise UnsupportedCallError("a parameter with an entry per sample")

    def gradients(self, delta: Tensor) -> Iterator[tuple[Place, Rows]]:
        """See `Layer.gradients`."""
        own = self.batch.lay.axis if self.batch.size > 1 else None
        for term in self._terms:
            place = self.places[id(term.parameter)]
            axes = term.spans(delta.ndim - 1)
            # one axis more than the output, the directions, in front
            summed = [a + 1 for a in range(delta.ndim - 1) if a != own and a not in axes]
            rows = _summed(
                delta, None if term.scaled is None else term.scaled(*self.inputs), summed
            )
            if own is None:
                yield place, rows.reshape(1, len(rows), -1)
                continue
            rows = rows.movedim(1 + sum(axis < own for axis in axes), 1)
            rows = self.batch.sum_places(rows, axis=1).transpose(0, 1)
            yield place, rows.reshape(*rows.shape[:2], -1)


def batch_norm(
    batch: Batch,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Layer:
    """Return the layer of ``F.batch_norm``.

    Raises:
        UnsupportedCallError: If it takes the statistics of the batch.
    """
    if training or running_mean is None:
        raise UnsupportedCallError("batch_norm with statistics of the batch")

    def normalised(input: Tensor) -> Tensor:
        return F.batch_norm(input, running_mean, running_var, eps=eps)

    return _norm(batch, input, [1], normalised, weight, bias)


def layer_norm(
    batch: Batch,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Layer:
    """Return the layer of ``F.layer_norm``."""

    def normalised(input: Tensor) -> Tensor:
        return F.layer_norm(input, list(normalized_shape), eps=eps)

    return _norm(batch, input, _last_axes(input, normalized_shape), normalised, weight, bias)


def rms_norm(
    batch: Batch,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Layer:
    """Return the layer of ``F.rms_norm``."""

    def normalised(input: Tensor) -> Tensor:
        return F.rms_norm(input, list(normalized_shape), eps=eps)

    return _norm(batch, input, _last_axes(input, normalized_shape), normalised, weight, None)


def group_norm(
    batch: Batch,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Layer:
    """Return the layer of ``F.group_norm``."""

    def normalised(input: Tensor) -> Tensor:
        return F.group_norm(input, num_groups, eps=eps)

    return _norm(batch, input, [1], normalised, weight, bias)


def instance_norm(
    batch: Batch,
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Layer:
    """Return the layer of ``F.instance_norm``."""

    def normalised(input: Tensor) -> Tensor:
        if not use_input_stats:
            return F.batch_norm(input, running_mean, running_var, eps=eps)
        return F.instance_norm(input, eps=eps)

    return _norm(batch, input, [1], normalised, weight, bias)


def product(batch: Batch, input: Tensor, other: Tensor) -> Layer:
    """Return the layer of ``input * other``."""
    first = _Term(input, None, lambda _, other: other)
    second = _Term(other, None, lambda input, _: input)
    return Broadcast(batch, _tensors(input, other), first, second)


def total(batch: Batch, input: Tensor, other: Tensor, *, alpha: float = 1) -> Layer:
    """Return the layer of ``input + other``.

    Raises:
        UnsupportedCallError: If ``other`` is scaled on the way.
    """
    _tensors(input, other)
    if alpha != 1:
        raise UnsupportedCallError("an addition with a factor")
    return Broadcast(batch, [], _Term(input, None), _Term(other, None))


def expansion(batch: Batch, input: Tensor, *_: object) -> Layer:
    """Return the layer of ``input.expand(B, ...)``."""
    return Broadcast(batch, [], _Term(input, None))


def _norm(
    batch: Batch,
    input: Tensor,
    axes: Sequence[int],
    normalised: Callable[[Tensor], Tensor],
    weight: Tensor | None,
    bias: Tensor | None,
) -> Layer:
    return Broadcast(batch, [input], _Term(weight, axes, normalised), _Term(bias, axes))


def _last_axes(input: Tensor, shape: Sequence[int]) -> range:
    return range(input.ndim - len(shape), input.ndim)


def _summed(delta: Tensor, scaled: Tensor | None, axes: list[int]) -> Tensor:
    """Return ``delta (q, ...)``, times ``scaled (...)`` where given, summed over some axes."""
    positions = math.prod(delta.shape[axis] for axis in axes)
    trailing = axes == list(range(3, delta.ndim))
    large = delta.is_cuda and positions >= _MANY and delta.shape[1] >= _SAMPLES
    if scaled is not None and trailing and large:
        # as a product of matrices the scaled gradients are never written to memory
        left = delta.reshape(len(delta), -1, positions).transpose(0, 1)
        right = scaled.to(left.dtype).expand(delta.shape[1:]).reshape(-1, positions, 1)
        sums = torch.bmm(left, right)
        return sums[..., 0].T.reshape(delta.shape[:3])
    product = delta if scaled is None else delta * scaled
    return product.sum(axes) if axes else product


def _tensors(*operands: object) -> list[Tensor]:
    tensors = [operand for operand in operands if isinstance(operand, Tensor)]
    if len(tensors) < len(operands):
        raise UnsupportedCallError("arithmetic on a parameter alone")
    return tensors
