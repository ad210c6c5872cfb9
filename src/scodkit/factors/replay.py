"""A forward pass that was recorded once, and is only compared when it is run again.

To find out what every torch function of a pass makes of the samples takes longer than a small
network. So the calls of the first batch of a layout are written down, with what each was given:
numbers, the model's own tensors, results of earlier calls. A later pass that makes the same
calls with the same arguments does the same with its samples; one that does not is found out at
the first difference, and looked at anew.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode

from scodkit.factors.backward import Edges
from scodkit.factors.lay import tensors_in
from scodkit.factors.rules import Layer

_MARK = "_scodkit_slot"

# attention as torch writes it, but without handing the whole call to whoever watches
attention = types.FunctionType(
    F.multi_head_attention_forward.__code__,
    {**F.multi_head_attention_forward.__globals__, "has_torch_function": lambda _: False},
    argdefs=F.multi_head_attention_forward.__defaults__,
)

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
        start: Whether nothing before the layer needs gradients.
    """

    func: Callable[..., Any]
    values: tuple[Any, ...]
    names: tuple[str, ...]
    graph: bool
    layer: Layer | None = None
    inputs: tuple[int, ...] = ()
    weights: tuple[tuple[int, Tensor], ...] = ()
    start: bool = False


class Script:
    """The calls of one forward pass, in order.

    Args:
        constants: The model's own tensors by id, which outlive the pass.

    Attributes:
        steps: The calls.
        complete: False where one was given something that cannot be compared.
    """

    def __init__(self, constants: Mapping[int, Tensor]) -> None:
        self.steps: list[Step] = []
        self.complete = True
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
        try:
            values = tuple(map(self._value, (*args, *kwargs.values())))
        except TypeError:
            self.complete = False
            return
        self.steps.append(Step(func, values, tuple(kwargs), graph))

    def add_layer(
        self, layer: Layer, given: list[Any], weights: dict[int, Tensor], start: bool
    ) -> None:
        """Note that the last call was one on chosen parameters.

        Args:
            layer: What is remembered of it.
            given: What it was given, keywords last.
            weights: What stood for the chosen parameters, by their ids.
            start: Whether nothing before it needs gradients.
        """
        if not self.complete:
            return
        ids = list(map(id, given))
        try:
            inputs = tuple(ids.index(id(tensor)) for tensor in layer.inputs)
        except ValueError:  # made of what was given
            self.complete = False
            return
        swaps = tuple((i, weights[own]) for i, own in enumerate(ids) if own in weights)
        # without the inputs, or a whole pass would stay in memory
        self.steps[-1] = self.steps[-1]._replace(
            layer=layer.again(()), inputs=inputs, weights=swaps, start=start
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
        if kind in (list, tuple, torch.Size):
            return _Nested(kind, tuple(map(self._value, value)))
        raise TypeError(kind)


class Replay(TorchFunctionMode):
    """A context in which a model makes the calls of a script, or is found out.

    Args:
        script: Of an earlier pass over a batch of the same shapes.

    Attributes:
        layers: The calls on chosen parameters, in order.
        edges: Where in the graph their outputs were made.
    """

    def __init__(self, script: Script) -> None:
        super().__init__()
        self.layers: list[Layer] = []
        self.edges = Edges()
        self._steps = iter(script.steps)
        self._slots = 0

    def watch(self, tensor: Tensor) -> None:
        """Number a tensor that the pass is given."""
        setattr(tensor, _MARK, (self, self._slots))
        self._slots += 1

    def check_end(self) -> None:
        """Make sure that no call is missing.

        Raises:
            OtherCallsError: If one is.
        """
        if next(self._steps, None) is not None:
            raise OtherCallsError

    def __torch_function__(
        self,
        func: Callable[..., Any],
        _: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Return what a torch function returns, if it is the one that comes next.

        Raises:
            OtherCallsError: If it is not.
        """
        if func is F.multi_head_attention_forward:
            with self:
                return attention(*args, **(kwargs or {}))
        step = next(self._steps, None)
        given = (*args, *kwargs.values()) if kwargs else args
        if (
            step is None
            or step.func != func
            or len(given) != len(step.values)
            or (kwargs and step.names != tuple(kwargs))
        ):
            raise OtherCallsError
        # the first comparison is enough for the model's tensors and for most others
        for value, known in zip(given, step.values, strict=True):
            if value is not known:
                mark = getattr(value, _MARK, None)
                if type(known) is _Slot and mark is not None:
                    if mark[0] is not self or mark[1] != known:
                        raise OtherCallsError
                elif not self._same(value, known):
                    raise OtherCallsError
        if step.layer is not None:
            result = self._layer(step, given)
        elif step.graph:
            result = func(*args, **kwargs) if kwargs else func(*args)
        else:
            with torch.no_grad():
                result = func(*args, **(kwargs or {}))
        made = (result,) if isinstance(result, Tensor) else tensors_in((result,))
        for tensor in made:
            setattr(tensor, _MARK, (self, self._slots))
            self._slots += 1
        return result

    def _layer(self, step: Step, given: tuple[Any, ...]) -> Tensor:
        """Return the output of a call on chosen parameters, which is remembered."""
        assert step.layer is not None
        layer = step.layer.again(tuple([given[i] for i in step.inputs]))
        swapped = list(given)
        for i, weight in step.weights:
            swapped[i] = weight
        count = len(given) - len(step.names)
        named = dict(zip(step.names, swapped[count:], strict=True))
        output: Tensor = step.func(*swapped[:count], **named)
        edges = self.edges
        if step.start:
            edges.starts.append(len(self.layers))
        edges.of_layers.append(get_gradient_edge(output))
        edges.output_bytes += output.nbytes
        self.layers.append(layer)
        return output

    def _same(self, value: Any, known: Any) -> bool:
        """Return whether a value is that of the recording."""
        kind = type(known)
        if kind is _Slot:
            mark = getattr(value, _MARK, None)
            return mark is not None and mark[0] is self and mark[1] == known
        if kind is _Older:
            version = 0 if known.tensor.is_inference() else known.tensor._version
            return value is known.tensor and version == known.version
        if kind is _Nested:
            if type(value) is not known.kind:
                return False
            if known.kind is slice:
                value = (value.start, value.stop, value.step)
            return len(value) == len(known.values) and all(
                own is other or self._same(own, other)
                for own, other in zip(value, known.values, strict=True)
            )
        return type(value) is kind and kind in _PLAIN and bool(value == known)
