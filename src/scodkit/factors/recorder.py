"""Watches forward passes: the first of a shape in full, later ones by comparison.

Every torch function a model calls is looked at, in this thread only: nothing of the model is
changed, and several threads may watch the same model at once.

To find out what every function of a pass makes of the samples takes longer than a small
network. So the calls of the first batch of a shape are written down, with what each was given:
numbers, the model's own tensors, results of earlier calls. A later pass that makes the same
calls with the same arguments does the same with its samples; one that does not is found out at
the first difference, and watched in full.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode, resolve_name

from scodkit.factors.head import Head
from scodkit.factors.lay import FIRST, MIXED, tensors_in
from scodkit.factors.pullback import Edges
from scodkit.factors.rules import RULES, Batch, Layer, Place, UnsupportedCallError
from scodkit.factors.rules.layer import Linear
from scodkit.factors.samples import Samples, Strangers, constants_of
from scodkit.model.network import ordinary
from scodkit.model.parameters import ParameterSet

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
        if kind in (tuple, torch.Size) and all(type(part) is int for part in value):
            return value
        if kind in (list, tuple, torch.Size):
            return _Nested(kind, tuple(map(self._value, value)))
        raise TypeError(kind)


# what they return is, to autograd, no longer the parameter
_CONSTANTS = frozenset({Tensor.detach, Tensor.data.__get__})  # type: ignore[attr-defined]

_OPERANDS = 2


class Recorder(TorchFunctionMode):
    """A context in which a model's calls on chosen parameters are remembered.

    Args:
        model: The model that will run.
        parameters: The chosen weights.
        size: Of the batch.
        constants: See `Samples`.
        older: Likewise.
        copies: Whether the model has weights or buffers made in inference mode, which
            autograd refuses to save.

    Attributes:
        layers: The calls, in order.
        script: All calls of torch functions; None where they cannot be made again.
        edges: Where in the graph their outputs were made.
        places: Where tensors with chosen weights sit, by id: parameters, and cuts of them.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: ParameterSet,
        size: int,
        constants: dict[int, Tensor] | None = None,
        older: Strangers | None = None,
        *,
        copies: bool,
    ) -> None:
        super().__init__()
        self.layers: list[Layer] = []
        self.edges = Edges()
        named = dict(model.named_parameters())
        columns = {block.name: block.columns for block in parameters.blocks}
        self.places = {id(named[n]): Place(own, own) for n, own in columns.items()}
        self._alive: list[Tensor] = [
            named[name] for name in columns
        ]  # ids hold while their tensors live
        self._batch = Batch(size)
        # a sample alone owns all there is
        own = constants_of(model) if constants is None else constants
        self._samples = Samples(size, own, older) if size > 1 else None
        self.script = None if copies else Script(own)
        self._copies = copies
        # by a parameter's first column: the outputs' bytes a number, of each use of all of it
        self._uses: dict[int, list[int]] = {c.start: [] for c in columns.values()}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Return what a torch function returns, having remembered it where that is needed.

        Raises:
            UnsupportedCallError: If it computes something from a chosen parameter that no
                rule covers.
        """
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward:
            with self:
                return attention(*args, **kwargs)
        concerned = self._concerned(args) or (kwargs and self._concerned(kwargs.values()))
        concerned = concerned and torch.is_grad_enabled()
        if self.script is not None:
            graph = concerned or self.layers or func is torch._C._set_grad_enabled
            self.script.add(func, args, kwargs, bool(graph))
        if concerned:
            if func in RULES:
                output = self._remember(func, args, kwargs)
                if self.script is not None:
                    self.script.mark(output)
                return output
            result = self._seen_from(func, args, kwargs)
        else:
            result = self._pass_on(func, args, kwargs)
        if self._samples is not None:
            self._samples.follow(func, args, kwargs, result)
        if self.script is not None:
            self.script.mark(result)
        return result

    def watch(self, tensor: Tensor) -> None:
        """Follow the samples of an input from here on.

        Args:
            tensor: The copy that the model is run on.
        """
        if self._samples is not None:
            self._samples.put(tensor, FIRST)
        if self.script is not None:
            self.script.mark(tensor)

    @property
    def strangers(self) -> Strangers:
        """Tensors that nobody saw being made."""
        return {} if self._samples is None else self._samples.strangers

    def check(self, output: Tensor) -> None:
        """Make sure that a sample's output is made of what is its own.

        Args:
            output: Of the model.

        Raises:
            UnsupportedCallError: If that cannot be known.
        """
        if self._samples is None:
            return
        self._check_known()
        where = self._samples.of(output)
        if where != FIRST and (where is not None or self.layers):
            raise UnsupportedCallError("its output may be made of several samples at a time")

    def _check_known(self) -> None:
        if self._samples is not None and self._samples.lost:
            raise UnsupportedCallError(f"{self._samples.lost} may have mixed up the samples")

    def _concerned(self, values: Iterable[object]) -> bool:
        places = self.places
        for value in values:
            if id(value) in places:
                return True
            if type(value) in (list, tuple) and self._concerned(value):  # type: ignore[arg-type]
                return True
        return False

    def _pass_on(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if self._copies:
            args, kwargs = _mapped(args, kwargs, ordinary)
        if self.layers or func is torch._C._set_grad_enabled:
            return func(*args, **kwargs)
        # nothing before the first chosen layer needs a graph
        with torch.no_grad():
            return func(*args, **kwargs)

    def _remember(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Tensor:
        layer = RULES[func](self._batch, *args, **kwargs)
        # with nothing before it to differentiate, a layer's own weights start the graph
        first = not any(
            isinstance(value, Tensor) and value.grad_fn and id(value) not in self.places
            for value in (*args, *kwargs.values())
        )

        weights: dict[int, Tensor] = {}

        def constant(tensor: Tensor) -> Tensor:
            if id(tensor) in self.places:
                detached = ordinary(tensor.detach())
                weights[id(tensor)] = detached.requires_grad_() if first else detached
                return weights[id(tensor)]
            return ordinary(tensor) if self._copies else tensor

        output: Tensor = self._call(func, args, kwargs, constant)
        if not output.requires_grad:  # of the others only the shape counts, as in expand_as
            first = True
            output = self._call(func, args, kwargs, constant)
        self._place(layer, func, args, kwargs, output)
        self.layers.append(layer)
        self.edges.add(output, start=first)
        if self.script is not None:
            self.script.add_layer(layer, [*args, *kwargs.values()], weights, first)
        for parameter in layer.parameters:
            place = self.places.get(id(parameter))
            if place is not None:
                whole = place.columns == place.block
                self._uses[place.block.start].append(output.itemsize if whole else 0)
        return output

    def _place(
        self,
        layer: Layer,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Tensor,
    ) -> None:
        """Tell a layer where the samples are in its output.

        Raises:
            UnsupportedCallError: If nobody knows.
        """
        batch = self._batch
        if self._samples is not None:
            self._samples.follow(func, args, kwargs, output)
            self._check_known()
            where = self._samples.of(output)
            if where is None and output.ndim and len(output) == batch.size:
                # the same for all samples so far: a place for each, if it is used as such
                where = FIRST
                self._samples.put(output, where)
            if where is None or where is MIXED:
                raise UnsupportedCallError(
                    f"{resolve_name(func) or func} may be given several samples at a time"
                )
            batch = Batch(batch.size, where)
        layer.place(batch, output, self.places)

    @property
    def layout(self) -> object:
        """On which axes the samples lie in the layers."""
        return tuple(layer.batch.lay.axis for layer in self.layers)

    def head(self, output: Tensor) -> Head | None:
        """Return the chosen layer, where it is a single one and its output the network's.

        Args:
            output: Of the network, with its graph.
        """
        layer = self.layers[0] if len(self.layers) == 1 and output.requires_grad else None
        if not isinstance(layer, Linear) or layer.input.ndim != _OPERANDS:
            return None
        if layer.batch.lay != FIRST or len(layer.input) != layer.batch.size:
            return None
        layer.check_unchanged()
        made, end = self.edges.of_layers[0], get_gradient_edge(output)
        if (made.node, made.output_nr) != (end.node, end.output_nr):
            return None
        tensors = [layer.weight] if layer.bias is None else [layer.weight, layer.bias]
        found = [self.places.get(id(tensor)) for tensor in tensors]
        # parts of parameters are left to rows, and so are chosen ones without influence
        whole = all(place is None or place.columns == place.block for place in found)
        if not whole or sum(place is not None for place in found) < len(self._uses):
            return None
        weight, bias, *_ = (
            None if place is None else place.columns for place in (*found, None)
        )
        return Head(layer.input.detach(), weight, bias)

    def row_bytes(self, sum_bytes: int) -> int:
        """Return the bytes of a row in weight space.

        Args:
            sum_bytes: Of a number where several uses of a parameter, or of parts, are summed.
        """
        blocks = {place.block.start: place.block for place in self.places.values()}
        total = 0
        for start, uses in self._uses.items():
            single = uses[0] if len(uses) == 1 and uses[0] else sum_bytes
            total += (blocks[start].stop - start) * single
        return total

    @staticmethod
    def _call(
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        change: Callable[[Tensor], Tensor],
    ) -> Tensor:
        args, kwargs = _mapped(args, kwargs, change)
        result: Tensor = func(*args, **kwargs)
        return result

    def _seen_from(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Return what is asked of a parameter: its shape and the like, or a part of it.

        Raises:
            UnsupportedCallError: If it is something else.
        """
        result = func(*args, **kwargs)
        if func in _CONSTANTS:
            return result
        for part in result if isinstance(result, (list, tuple)) else [result]:
            if isinstance(part, Tensor) and not self._is_part(part, args[0]):
                raise UnsupportedCallError(f"there is no rule for {resolve_name(func) or func}")
        return result

    def _is_part(self, part: Tensor, whole: object) -> bool:
        """Return whether this is a part, consecutive and not a copy; note where it sits."""
        if not isinstance(whole, Tensor) or id(whole) not in self.places:
            return False
        shared = part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
        if not (shared and part.is_contiguous() and whole.is_contiguous()):
            return False
        place = self.places[id(whole)]
        start = place.columns.start + part.storage_offset() - whole.storage_offset()
        self.places[id(part)] = Place(place.block, slice(start, start + part.numel()))
        self._alive.append(part)
        return True


class Replay(TorchFunctionMode):
    """A context in which a model makes the calls of a script, or is found out.

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
        self.edges = Edges()
        self.steps = iter(script.steps)
        self._slots = 0

    def watch(self, tensor: Tensor) -> None:
        """Number a tensor that the pass is given."""
        setattr(tensor, _MARK, (self, self._slots))
        self._slots += 1

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
        step = next(self.steps, None)
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
            if value is known:
                continue
            if type(known) is _Slot:
                mark = getattr(value, _MARK, None)
                same = mark is not None and mark[0] is self and mark[1] == known
            elif type(known) in _COMPARED:
                same = type(value) is type(known) and value == known
            else:
                same = self._same(value, known)
            if not same:
                raise OtherCallsError
        if step.layer is not None:
            result = self._layer(step, given)
        elif step.graph:
            result = func(*args, **kwargs) if kwargs else func(*args)
        else:
            with torch.no_grad():
                result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            setattr(result, _MARK, (self, self._slots))
            self._slots += 1
        elif type(result) in (list, tuple):
            for tensor in tensors_in((result,)):
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
        edges = self.edges
        if step.start:
            edges.starts.append(len(self.layers))
        edges.of_layers.append(get_gradient_edge(output))
        edges.output_bytes += output.nbytes
        self.layers.append(step.layer.again(inputs))
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


def _mapped(
    args: tuple[Any, ...], kwargs: dict[str, Any], function: Callable[[Tensor], Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    named = {name: _on(value, function) for name, value in kwargs.items()}
    return tuple(_on(value, function) for value in args), named


# no closure of its own name: such a cycle would keep every forward pass alive for a while
def _on(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    if type(value) in (list, tuple):
        return type(value)(_on(part, function) for part in value)
    return value
