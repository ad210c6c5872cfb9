"""Records the trace of a forward pass, and replays it on later batches of the same shapes.

Tracking the samples through every function of a pass takes longer than running a small
network. So the calls of the first batch of a shape are recorded with their arguments: numbers,
the model's own tensors, results of earlier calls. A later pass that makes the same calls with
the same arguments treats its samples the same way; any other is abandoned at the first
difference.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode

from scodkit.factors.layout import tensors_in
from scodkit.factors.pullback import Edges
from scodkit.factors.rules import UNROLLED, Layer, unrolled
from scodkit.numerics.torch_private import attention, set_grad_enabled

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
    """A pass makes other calls than the recorded one."""


class _Slot(int):
    """The index of a tensor among the inputs and results of a pass."""


class _Older(NamedTuple):
    """A tensor that existed before the pass and is not the model's: a mask, or a table."""

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
        values: Its arguments, keywords last: plain values and the model's tensors as they
            are, other tensors by their slot.
        names: Of the keyword arguments.
        graph: Whether autograd has to record it.
        layer: The layer of a call on chosen parameters, without its inputs.
        inputs: Indices of the layer's inputs among the values.
        weights: Indices of the chosen parameters, each with the tensor to use in its place; of
            a derived tensor, whether the one of this pass is to require gradients.
        derived: Whether it computes a derived tensor.
    """

    func: Callable[..., Any]
    values: tuple[Any, ...]
    names: tuple[str, ...]
    graph: bool
    layer: Layer | None = None
    inputs: tuple[int, ...] = ()
    weights: tuple[tuple[int, Tensor | bool], ...] = ()
    derived: bool = False

    @property
    def form(self) -> tuple[Callable[..., Any], tuple[str, ...], int]:
        """The function, the names of its keyword arguments, and how many arguments."""
        return self.func, self.names, len(self.values)


class Script:
    """The calls of one forward pass, in order.

    Args:
        constants: The model's own tensors by id, which outlive the pass.

    Attributes:
        steps: The calls.
        complete: False if a call has an argument that cannot be compared, or a layer that
            cannot be rebuilt; no later calls are recorded then.
        edges: What all passes have in common; without the gradient edges of one graph.
        traced: Whether the model was run as if it was traced.
    """

    def __init__(self, constants: Mapping[int, Tensor]) -> None:
        self.steps: list[Step] = []
        self.complete = True
        self.edges = Edges()
        self.traced = False
        self._constants = constants
        self._slots = 0

    def mark(self, made: Any) -> None:
        """Number the tensors in an input of the pass, or in the result of a call."""
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
        """Record a call, before it is made.

        Args:
            func: The function.
            args: Its positional arguments.
            kwargs: Its keyword arguments.
            graph: Whether autograd has to record it.
        """
        if not self.complete:
            return
        try:
            values = tuple(map(self._value, (*args, *kwargs.values())))
        except TypeError:
            self.complete = False
            return
        self.steps.append(Step(func, values, tuple(kwargs), graph))

    def add_derived(self, given: list[Any], leaves: dict[int, Tensor]) -> None:
        """Mark the last call as one that computes a tensor from chosen parameters alone.

        Args:
            given: Its arguments, keywords last.
            leaves: The tensors used in place of parameters, by the ids of these.
        """
        if not self.complete:
            return
        swaps = tuple((i, leaves[id(v)]) for i, v in enumerate(given) if id(v) in leaves)
        if len(swaps) < len(leaves):  # in a list of arguments
            self.complete = False
            return
        self.steps[-1] = self.steps[-1]._replace(weights=swaps, derived=True)

    def add_layer(
        self,
        layer: Layer,
        given: list[Any],
        weights: dict[int, Tensor],
        derived: Collection[int],
    ) -> None:
        """Mark the last call as one on chosen parameters.

        Args:
            layer: The layer of the call.
            given: Its arguments, keywords last.
            weights: The tensors used in place of the chosen parameters, by the ids of these.
            derived: The ids among these that are of derived tensors.
        """
        if not self.complete:
            return
        ids = list(map(id, given))
        try:
            inputs = tuple(ids.index(id(tensor)) for tensor in layer.inputs)
        except ValueError:  # an input of the layer was computed from the arguments
            self.complete = False
            return
        swaps = tuple(
            (i, weights[key].requires_grad if key in derived else weights[key])
            for i, key in enumerate(ids)
            if key in weights
        )
        # without the inputs, which would keep the whole pass in memory
        self.steps[-1] = self.steps[-1]._replace(
            layer=layer.again(()), inputs=inputs, weights=swaps
        )

    def _value(self, value: Any) -> Any:
        """Return the form of an argument that later passes are compared with.

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
            if any(isinstance(p, Tensor) and id(p) not in self._constants for p in parts):
                raise TypeError(kind)  # the part of a parameter may be another one next time
            return _Nested(slice, tuple(map(self._value, parts)))
        if kind in (tuple, torch.Size) and all(type(part) is int for part in value):
            return value
        if kind in (list, tuple, torch.Size):
            return _Nested(kind, tuple(map(self._value, value)))
        raise TypeError(kind)


class Replay(TorchFunctionMode):
    """A torch function mode that replays a script; the first call that differs raises.

    Args:
        script: Of an earlier pass over a batch of the same shapes.

    Attributes:
        layers: The calls on chosen parameters, in order.
        derived: Tensors computed from chosen parameters alone, in order.
        edges: Gradient edges of the layers' outputs.
        steps: The remaining calls.
    """

    def __init__(self, script: Script) -> None:
        super().__init__()
        self.layers: list[Layer] = []
        self.derived: list[Tensor] = []
        self.edges = replace(script.edges, of_layers=[])
        self.steps = iter(script.steps)
        self._slots = 0
        # for the marks of tensors: with the replay itself they would form a reference cycle
        self._token = object()

    def watch(self, tensor: Tensor) -> None:
        """Number an input of the pass."""
        setattr(tensor, _MARK, (self._token, self._slots))
        self._slots += 1

    def __torch_function__(
        self,
        func: Callable[..., Any],
        _: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Return the result of a call if it is the next one of the script.

        Raises:
            OtherCallsError: If it is not.
        """
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward:
            with self:
                return attention(*args, **kwargs)
        given = (*args, *kwargs.values())
        step = next(self.steps, None)
        if step is None or (func, tuple(kwargs), len(given)) != step.form:
            if step is not None and step.func is unrolled and func in UNROLLED:
                with self:
                    return unrolled(func, args)
            raise self._abandoned(func, args)
        for value, known in zip(given, step.values, strict=True):
            if value is not known and not self._same(value, known):
                raise self._abandoned(func, args)
        if step.layer is not None or step.derived:
            result: Any = self._layer(step, given)
        elif step.graph:
            result = func(*args, **kwargs)
        else:
            with torch.no_grad():
                result = func(*args, **kwargs)
        if isinstance(result, Tensor):
            setattr(result, _MARK, (self._token, self._slots))
            self._slots += 1
        else:
            self._watch_all(result)
        return result

    def _abandoned(self, func: Callable[..., Any], args: tuple[Any, ...]) -> OtherCallsError:
        if func is set_grad_enabled:  # or leaving the model's no_grad would leave it switched
            func(*args)
        return OtherCallsError()

    def _watch_all(self, results: Any) -> None:
        if type(results) in (list, tuple):
            for tensor in tensors_in(results):
                self.watch(tensor)

    def _layer(self, step: Step, given: tuple[Any, ...]) -> Tensor:
        """Return the output of a call on chosen parameters, and record the layer.

        Raises:
            OtherCallsError: If the output does not require a gradient.
        """
        output: Tensor = self._run(step, given)
        if step.layer is None:
            self.derived += [t for t in tensors_in((output,)) if t.requires_grad]
            return output
        inputs = tuple(map(given.__getitem__, step.inputs))
        if not output.requires_grad:  # it did in the recording
            raise OtherCallsError
        self.edges.of_layers.append(get_gradient_edge(output))
        self.layers.append(step.layer.again(inputs))
        return output

    def _run(self, step: Step, given: tuple[Any, ...]) -> Any:
        """Return the result of a call, with its chosen parameters replaced."""
        swapped = list(given)
        for i, weight in step.weights:
            if isinstance(weight, bool):
                weight = given[i].detach().requires_grad_(weight)
            swapped[i] = weight
        if not step.names:
            return step.func(*swapped)
        count = len(given) - len(step.names)
        named = dict(zip(step.names, swapped[count:], strict=True))
        return step.func(*swapped[:count], **named)

    def _same(self, value: Any, known: Any) -> bool:
        """Return whether an argument equals the recorded one."""
        kind = type(known)
        if value is known:
            return True
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
