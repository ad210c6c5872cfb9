"""Compares a forward pass with an earlier one of the same shapes, call by call.

To find out what every function of a pass makes of the samples takes longer than a small
network. So the calls of the first batch of a shape are written down, with what each was given:
numbers, the model's own tensors, results of earlier calls. A later pass that makes the same
calls with the same arguments does the same with its samples; any other is abandoned at the
first difference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode

from scodkit.factors.layout import tensors_in
from scodkit.factors.pullback import Edges
from scodkit.factors.rules import Layer
from scodkit.numerics.torch_private import attention

_MARK = "_scodkit_slot"

# arguments that are compared by their value
_PLAIN = frozenset(
    {
        int,
        float,
        bool,
        str,
        complex,
        type(None),
        type(...),
        torch.dtype,
        torch.device,
        torch.layout,
        torch.memory_format,
    }
)


_COMPARED = _PLAIN | {tuple, torch.Size}


class OtherCallsError(Exception):
    """A pass makes other calls than the one that was recorded."""


class _Slot(int):
    """The number of a tensor among those that a pass was given or has made."""


class _Older(NamedTuple):
    """A tensor from before the pass that is not one of the model's: a mask, or a table."""

    tensor: Tensor
    version: int


class _Nested(NamedTuple):
    """A list or tuple of arguments."""

    kind: type
    values: tuple[Any, ...]


class Step(NamedTuple):
    """One call of a torch function.

    Args:
        func: The function.
        values: What it was given, keywords last: plain values and the model's tensors as they
            are, other tensors by their slot.
        names: Of the keywords.
        graph: Whether autograd has to see it.
        layer: What was remembered of a call on chosen parameters, without its inputs.
        inputs: Where among the values the layer's inputs are.
        weights: Where the chosen parameters are, each with the tensor that stands for it.
    """

    func: Callable[..., Any]
    values: tuple[Any, ...]
    names: tuple[str, ...]
    graph: bool
    layer: Layer | None = None
    inputs: tuple[int, ...] = ()
    weights: tuple[tuple[int, Tensor], ...] = ()


class Script:
    """The calls of one forward pass, in order.

    Args:
        constants: The model's own tensors by id, which outlive the pass.

    Attributes:
        steps: The calls.
        complete: False where one was given something that cannot be compared, or cannot be
            made again as it was; later calls are not written down then.
        edges: What is known of them in every such pass: without those of a graph.
    """

    def __init__(self, constants: Mapping[int, Tensor]) -> None:
        self.steps: list[Step] = []
        self.complete = True
        self.edges = Edges()
        self._constants = constants
        self._slots = 0

    def mark(self, made: Any) -> None:
        """Number the tensors that a pass is given, or that a call has returned."""
        for tensor in tensors_in((made,)):
            setattr(tensor, _MARK, (self, self._slots))
            self._slots += 1

    def add(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        graph: bool,
    ) -> None:
        """Write down a call, before it is made.

        Args:
            func: The function.
            args: What it is given.
            kwargs: Likewise.
            graph: Whether autograd has to see it.
        """
        if not self.complete:
            return
        try:
            values = tuple(map(self._value, (*args, *kwargs.values())))
        except TypeError:
            self.complete = False
            return
        self.steps.append(Step(func, values, tuple(kwargs), graph))

    def add_layer(self, layer: Layer, given: list[Any], weights: dict[int, Tensor]) -> None:
        """Note that the last call was one on chosen parameters.

        Args:
            layer: What is remembered of it.
            given: What it was given, keywords last.
            weights: What stood for the chosen parameters, by their ids.
        """
        if not self.complete:
            return
        ids = list(map(id, given))
        try:
            inputs = tuple(ids.index(id(tensor)) for tensor in layer.inputs)
        except ValueError:  # made of what was given
            self.complete = False
            return
        swaps = tuple((i, weights[key]) for i, key in enumerate(ids) if key in weights)
        # without the inputs, or a whole pass would stay in memory
        self.steps[-1] = self.steps[-1]._replace(
            layer=layer.again(()), inputs=inputs, weights=swaps
        )

    def _value(self, value: Any) -> Any:
        """Return what to compare a value with in later passes.

        Raises:
            TypeError: If it cannot be compared.
        """
        kind = type(value)
        if kind in _PLAIN:
            return value
        if isinstance(value, Tensor):
            if id(value) in self._constants:
                return value
            mark = getattr(value, _MARK, None)
            if mark is not None and mark[0] is self:
                return _Slot(mark[1])
            return _Older(value, 0 if value.is_inference() else value._version)
        if kind is slice:
            parts = (value.start, value.stop, value.step)
            return _Nested(slice, tuple(map(self._value, parts)))
        if kind in (tuple, torch.Size) and all(type(part) is int for part in value):
            return value
        if kind in (list, tuple, torch.Size):
            return _Nested(kind, tuple(map(self._value, value)))
        raise TypeError(kind)


class Replay(TorchFunctionMode):
    """A context in which a model repeats the calls of a script; the first other one raises.

    Args:
        script: Of an earlier pass over a batch of the same shapes.

    Attributes:
        layers: The calls on chosen parameters, in order.
        edges: Where in the graph their outputs were made.
        steps: The calls that are still to come.
    """

    def __init__(self, script: Script) -> None:
        super().__init__()
        self.layers: list[Layer] = []
        known = script.edges
        self.edges = Edges([], known.starts, known.output_bytes, known.shared)
        self.steps = iter(script.steps)
        self._slots = 0
        # in marks of tensors; the replay itself would hold on to them, and they to it
        self._token = object()

    def watch(self, tensor: Tensor) -> None:
        """Number a tensor that the pass is given."""
        setattr(tensor, _MARK, (self._token, self._slots))
        self._slots += 1

    def __torch_function__(
        self,
        func: Callable[..., Any],
        _: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Return the result of a call, if it is the next of the script.

        Raises:
            OtherCallsError: If it is not.
        """
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward:
            with self:
                return attention(*args, **kwargs)
        given = (*args, *kwargs.values())
        step = next(self.steps, None)
        form = (func, tuple(kwargs), len(given))
        if step is None or form != (step.func, step.names, len(step.values)):
            raise OtherCallsError
        for value, known in zip(given, step.values, strict=True):
            if value is not known and not self._same(value, known):
                raise OtherCallsError
        if step.layer is not None:
            result: Any = self._layer(step, given)
        elif step.graph:
            result = func(*args, **kwargs)
        else:
            with torch.no_grad():
                result = func(*args, **kwargs)
        if isinstance(result, Tensor):
            setattr(result, _MARK, (self._token, self._slots))
            self._slots += 1
        elif type(result) in (list, tuple):
            for tensor in tensors_in(result):
                self.watch(tensor)
        return result

    def _layer(self, step: Step, given: tuple[Any, ...]) -> Tensor:
        """Return the output of a call on chosen parameters, which is remembered.

        Raises:
            OtherCallsError: If no gradient leads to it.
        """
        assert step.layer is not None
        inputs = tuple(map(given.__getitem__, step.inputs))
        swapped = list(given)
        for i, weight in step.weights:
            swapped[i] = weight
        if step.names:
            count = len(given) - len(step.names)
            named = dict(zip(step.names, swapped[count:], strict=True))
            output: Tensor = step.func(*swapped[:count], **named)
        else:
            output = step.func(*swapped)
        if not output.requires_grad:  # as others did in the recording
            raise OtherCallsError
        self.edges.of_layers.append(get_gradient_edge(output))
        self.layers.append(step.layer.again(inputs))
        return output

    def _same(self, value: Any, known: Any) -> bool:
        """Return whether an argument is the one that was recorded."""
        kind = type(known)
        if kind is _Slot:
            mark = getattr(value, _MARK, None)
            return mark is not None and mark[0] is self._token and mark[1] == known
        if kind is _Older:
            version = 0 if known.tensor.is_inference() else known.tensor._version
            return value is known.tensor and version == known.version
        if kind is _Nested:
            if type(value) is not known.kind:
                return False
            if known.kind is slice:
                value = (value.start, value.stop, value.step)
            return len(value) == len(known.values) and all(map(self._same, value, known.values))
        return type(value) is kind and kind in _COMPARED and bool(value == known)
