"""Parameters that scale or shift: normalisations, element-wise products and sums.

The gradient of such a parameter is the gradient at the output, times the tensor that the
parameter scales, summed over the axes it is broadcast along.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from scodkit.factors.rules.layer import Batch, Derived, Layer, Place, UnsupportedCallError
from scodkit.factors.rules.rows import Rows

# positions from which a matrix product beats an element-wise product and a sum, on a GPU
_MANY = 64
_SAMPLES = 8  # and samples: few write little memory, and their kernels may be fused


@dataclass(frozen=True)
class _Term:
    """A parameter of the layer.

    Args:
        parameter: None if the layer has none.
        axes: The axes of the output it spans; None for the last ones, as in broadcasting.
        scaled: Computes the tensor it scales from the layer's inputs; None for ones.
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
    """``y = scaled * weight + bias``, where weight or bias may be missing."""

    def __init__(self, batch: Batch, inputs: Sequence[Tensor], *terms: _Term) -> None:
        super().__init__(batch, [term.parameter for term in terms], *inputs)
        self._terms = terms

    def place(
        self, batch: Batch, output: Tensor, places: Mapping[int, Place | Derived]
    ) -> None:
        """See `Layer.place`.

        Raises:
            UnsupportedCallError: If a parameter spans the batch axis.
        """
        super().place(batch, output, places)
        self._terms = tuple(term for term in self._terms if id(term.parameter) in places)
        for term in self._terms if batch.size > 1 else ():
            if batch.lay.axis in term.spans(output.ndim):
                raise UnsupportedCallError("a parameter with an entry per sample")

    def gradients(self, delta: Tensor) -> Iterator[tuple[Place | Derived, Rows]]:
        """See `Layer.gradients`."""
        sample_axis = self.batch.lay.axis if self.batch.size > 1 else None
        for term in self._terms:
            place = self.places[id(term.parameter)]
            axes = term.spans(delta.ndim - 1)
            # delta has one axis more than the output: the directions, in front
            summed = [
                a + 1 for a in range(delta.ndim - 1) if a != sample_axis and a not in axes
            ]
            rows = _summed(
                delta, None if term.scaled is None else term.scaled(*self.inputs), summed
            )
            if sample_axis is None:
                yield place, rows.reshape(1, len(rows), -1)
                continue
            rows = rows.movedim(1 + sum(axis < sample_axis for axis in axes), 1)
            rows = self.batch.sum_places(rows, axis=1).transpose(0, 1)
            yield place, rows.reshape(*rows.shape[:2], -1)


def norm(func: Callable[..., Tensor]) -> Callable[..., Layer]:
    """Return the rule for one of torch's normalisations.

    Its weight and bias span the channels, or the axes that are normalised over.

    Args:
        func: A function with arguments ``input``, ``weight`` and ``bias`` of these names.
    """
    signature = inspect.signature(func)

    def rule(batch: Batch, *args: Any, **kwargs: Any) -> Layer:
        options = signature.bind(*args, **kwargs).arguments
        input, weight = options.pop("input"), options.pop("weight", None)
        bias = options.pop("bias", None)
        normalise = _without_updates(func, options)
        shape = options.get("normalized_shape")
        axes = [1] if shape is None else range(input.ndim - len(shape), input.ndim)
        scale = _Term(weight, axes, lambda input: normalise(input, **options))
        return Broadcast(batch, [input], scale, _Term(bias, axes))

    return rule


def _without_updates(
    func: Callable[..., Tensor], options: dict[str, Any]
) -> Callable[..., Tensor]:
    """Return a normalisation that computes the same and updates no running statistics.

    Args:
        func: The function that the model calls.
        options: Its arguments beside input, weight and bias; changed in place to fit.

    Raises:
        UnsupportedCallError: If it uses the statistics of the batch.
    """
    if func is F.batch_norm and (options.get("training") or options["running_mean"] is None):
        raise UnsupportedCallError("batch_norm with statistics of the batch")
    if func is not F.instance_norm:
        return func
    # torch writes the running statistics on every call, whether it uses them or not
    if not options.pop("use_input_stats", True):
        return F.batch_norm
    options.pop("running_mean", None)
    options.pop("running_var", None)
    return func


def product(batch: Batch, input: Tensor, other: Tensor) -> Layer:
    """Return the layer of ``input * other``."""
    first = _Term(input, None, lambda _, other: other)
    second = _Term(other, None, lambda input, _: input)
    return Broadcast(batch, _tensors(input, other), first, second)


def total(batch: Batch, input: Tensor, other: Tensor, *, alpha: float = 1) -> Layer:
    """Return the layer of ``input + other``.

    Raises:
        UnsupportedCallError: If ``other`` is scaled by ``alpha``.
    """
    _tensors(input, other)
    if alpha != 1:
        raise UnsupportedCallError("an addition with a factor")
    return Broadcast(batch, [], _Term(input, None), _Term(other, None))


def expansion(batch: Batch, input: Tensor, *_: object) -> Layer:
    """Return the layer of ``input.expand(B, ...)``."""
    return Broadcast(batch, [], _Term(input, None))


def _summed(delta: Tensor, scaled: Tensor | None, axes: list[int]) -> Tensor:
    """Return ``delta (q, ...)``, times ``scaled (...)`` if given, summed over ``axes``."""
    positions = math.prod(delta.shape[axis] for axis in axes)
    trailing = axes == list(range(3, delta.ndim))
    large = delta.is_cuda and positions >= _MANY and delta.shape[1] >= _SAMPLES
    if scaled is not None and trailing and large:
        # as a matrix product: the scaled gradients are never written to memory
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
