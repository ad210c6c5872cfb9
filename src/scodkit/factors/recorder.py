"""Records a forward pass: its calls on chosen parameters, and where their samples lie.

A torch function mode sees every torch function the model calls, in this thread only: the model
is not changed, and several threads may record the same model at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode, resolve_name

from scodkit.factors.engine import Head
from scodkit.factors.layout import FIRST, MIXED, NOBODYS, tensors_in
from scodkit.factors.pullback import Edges
from scodkit.factors.rules import (
    REFUSALS,
    RULES,
    UNROLLED,
    Batch,
    Derived,
    Layer,
    Place,
    UnsupportedCallError,
    unrolled,
)
from scodkit.factors.rules.layer import Linear
from scodkit.factors.sample_rules import ASKING
from scodkit.factors.samples import Samples, Strangers, constants_of
from scodkit.factors.script import Script
from scodkit.model.inputs import ordinary
from scodkit.model.parameters import ParameterSet
from scodkit.numerics.torch_private import attention, set_grad_enabled, without_torch_function

# functions whose result is a constant to autograd, not the parameter
_CONSTANTS = frozenset({Tensor.detach, Tensor.data.__get__})  # type: ignore[attr-defined]

_EXPANDING = frozenset({Tensor.expand, Tensor.expand_as})

_ASSIGNING = frozenset({"__setitem__", "__iand__", "__ior__", "__ixor__"})

_OPERANDS = 2


class Recorder(TorchFunctionMode):
    """A torch function mode that records a model's calls on chosen parameters.

    Args:
        model: The model that will run.
        parameters: The chosen weights.
        size: Batch size.
        constants: See `Samples`.
        older: See `Samples`.
        copies: Whether the model has weights or buffers created in inference mode, which
            autograd refuses to save.
        per_sample: Whether what is computed from parameters alone, with as many rows as there
            are samples, has a row for each sample; or else for each position of a sequence.

    Attributes:
        layers: The calls on chosen parameters, in order.
        derived: Tensors computed from chosen parameters alone, in order.
        script: All calls of torch functions.
        edges: Gradient edges of the layers' outputs.
        places: Columns of tensors with chosen weights, by id: parameters, and parts of them.
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
        per_sample: bool = True,
    ) -> None:
        super().__init__()
        self.layers: list[Layer] = []
        self.derived: list[Tensor] = []
        self.edges = Edges()
        named = dict(model.named_parameters())
        columns = {block.name: block.columns for block in parameters.blocks}
        self._path: list[int] = []  # hashes of all functions that were called: these copy
        self.places: dict[int, Place | Derived] = {
            id(named[n]): Place(block, block) for n, block in columns.items()
        }
        self._alive: list[Tensor] = [
            named[name] for name in columns
        ]  # an id is valid only while its tensor is alive
        self._batch = Batch(size)
        # everything belongs to a single sample
        constants = constants_of(model) if constants is None else constants
        self._samples = Samples(size, constants, older) if size > 1 else None
        self.script = Script(constants)
        self.script.complete = not copies
        self._copies, self._per_sample = copies, per_sample
        self._leaves: dict[int, Tensor] = {}  # of derived tensors, by the parameter's id
        # by a parameter's first column: item size of the output of its last use
        self._itemsizes: dict[int, int | None] = {c.start: None for c in columns.values()}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Return the result of a call, and record it if it takes chosen parameters.

        Raises:
            UnsupportedCallError: If no rule covers what it computes from a chosen parameter.
        """
        kwargs = kwargs or {}
        self._path.append(hash(func))
        if func is F.multi_head_attention_forward:
            with self:
                return attention(*args, **kwargs)
        concerned = self._concerned(args) or (kwargs and self._concerned(kwargs.values()))
        concerned = concerned and torch.is_grad_enabled()
        if func in UNROLLED and (concerned or (self.layers and torch.is_grad_enabled())):
            self.script.add(unrolled, (), {}, graph=False)
            with self:
                return unrolled(func, args)
        graph = concerned or self.layers or func is set_grad_enabled
        self.script.add(func, args, kwargs, bool(graph))
        if concerned:
            if self._is_shared(func, args, kwargs):
                result = self._derive(func, args, kwargs)
            elif func in RULES:
                output = self._remember(func, args, kwargs)
                self.script.mark(output)
                return output
            else:
                result = self._seen_from(func, args, kwargs)
        else:
            result = self._pass_on(func, args, kwargs)
        if self._samples is not None:
            self._samples.follow(func, args, kwargs, result)
        self.script.mark(result)
        return result

    def watch(self, tensor: Tensor) -> None:
        """Track the samples of an input.

        Args:
            tensor: The copy that the model is run on.
        """
        if self._samples is not None:
            self._samples.put(tensor, FIRST)
        self.script.mark(tensor)

    @property
    def strangers(self) -> Strangers:
        """Tensors that were neither inputs nor returned by a call of this pass."""
        return {} if self._samples is None else self._samples.strangers

    def check(self, output: Tensor) -> None:
        """Make sure that each sample's output depends on that sample alone.

        Args:
            output: Of the model.

        Raises:
            UnsupportedCallError: If samples are mixed, or may be.
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
        if self.layers or func is set_grad_enabled:
            return func(*args, **kwargs)
        # nothing before the first chosen layer needs a graph
        with torch.no_grad():
            return func(*args, **kwargs)

    def _remember(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Tensor:
        layer = RULES[func](self._batch, *args, **kwargs)
        # if nothing before the layer is differentiated, its own weights start the graph
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

        def run() -> Tensor:
            constants, named = _mapped(args, kwargs, constant)
            result: Tensor = func(*constants, **named)
            return result

        output = run()
        if output.is_complex():
            raise UnsupportedCallError("a layer of complex numbers")
        if not output.requires_grad:  # only the shape of the rest is used, as in expand_as
            first = True
            output = run()
        self._place(layer, func, args, kwargs, output)
        self.layers.append(layer)
        if first:
            self.edges.starts.append(len(self.edges.of_layers))
        self.edges.of_layers.append(get_gradient_edge(output))
        self.edges.output_bytes += output.nbytes
        derived = {key for key in weights if isinstance(self.places[key], Derived)}
        self.script.add_layer(layer, [*args, *kwargs.values()], weights, derived)
        for parameter in layer.parameters:
            place = self.places.get(id(parameter))
            if isinstance(place, Place):
                self._use(place, output.itemsize)
        return output

    def _is_shared(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> bool:
        """Return whether a call on chosen parameters has a result that all samples share.

        Raises:
            UnsupportedCallError: If it modifies a tensor in place.
        """
        if self._samples is None:
            return False  # everything belongs to the single sample
        if func in ASKING or func in _CONSTANTS:
            return False
        given = tensors_in((*args, *kwargs.values()))
        if any(self._samples.of(tensor) not in NOBODYS for tensor in given):
            return False
        if _modifies(func, kwargs):  # what it was before may have been used
            raise UnsupportedCallError(
                f"{resolve_name(func) or func} modifies in place what parameters alone give"
            )
        if func in _EXPANDING or (func in RULES and self._per_sample):
            with without_torch_function(), torch.no_grad():
                result = func(*args, **kwargs)
            return not (result.ndim and len(result) == self._batch.size)
        return func in RULES or not self._is_view(func, args, kwargs)

    def _is_view(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> bool:
        """Return whether a call returns parts of a parameter, or no tensor at all."""
        with without_torch_function(), torch.no_grad():
            result = func(*args, **kwargs)
        parts = result if isinstance(result, (list, tuple)) else [result]
        return all(
            not isinstance(part, Tensor) or self._part_of(part, args[0]) for part in parts
        )

    def _derive(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Return the result of a call on parameters alone, with its graph."""
        leaves: dict[int, Tensor] = {}

        def leaf(tensor: Tensor) -> Tensor:
            place = self.places.get(id(tensor))
            if not isinstance(place, Place):
                return ordinary(tensor) if self._copies else tensor
            if id(tensor) not in self._leaves:
                self._leaves[id(tensor)] = ordinary(tensor.detach()).requires_grad_()
                self.edges.leaves.append((place, self._leaves[id(tensor)]))
            self._use(place, tensor.itemsize)
            self.edges.shared.add(place.block.start)
            leaves[id(tensor)] = self._leaves[id(tensor)]
            return leaves[id(tensor)]

        swapped, named = _mapped(args, kwargs, leaf)
        result = func(*swapped, **named)
        for tensor in tensors_in((result,)):
            if tensor.requires_grad:
                self.places[id(tensor)] = Derived(len(self.derived))
                self.derived.append(tensor)
        self.script.add_derived([*args, *kwargs.values()], leaves)
        return result

    def _use(self, place: Place, itemsize: int) -> None:
        start = place.block.start
        if self._itemsizes[start] is not None or place.columns != place.block:
            self.edges.shared.add(start)
        self._itemsizes[start] = itemsize

    def _place(
        self,
        layer: Layer,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Tensor,
    ) -> None:
        """Set where the samples lie in the output of a layer.

        Raises:
            UnsupportedCallError: If that is unknown.
        """
        batch = self._batch
        if self._samples is not None:
            self._samples.follow(func, args, kwargs, output)
            self._check_known()
            where = self._samples.of(output)
            if where is None and output.ndim and len(output) == batch.size:
                # the same for all samples so far: take the first axis as the batch axis
                where = FIRST
                self._samples.put(output, where)
            if where is None or where is MIXED:
                raise UnsupportedCallError(
                    f"{resolve_name(func) or func} may be given several samples at a time"
                )
            batch = Batch(batch.size, where)
        layer.place(batch, output, self.places)

    @property
    def derived_bytes(self) -> int:
        """Bytes of one row of all derived tensors that layers use."""
        places = [place for layer in self.layers for place in layer.places.values()]
        used = {place.index for place in places if isinstance(place, Derived)}
        return sum(self.derived[index].nbytes for index in used)

    @property
    def layout(self) -> object:
        """All functions that were called, and the batch axis of each layer's output."""
        return tuple(self._path), tuple(layer.batch.lay.axis for layer in self.layers)

    def head(self, output: Tensor) -> Head | None:
        """Return the chosen layer if it is the only one and its output is the network's.

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
        places = [self.places.get(id(tensor)) for tensor in (layer.weight, layer.bias)]
        chosen = [place for place in places if isinstance(place, Place)]
        # rows are used for parts of parameters, and if a chosen one does not affect the output
        whole = all(place.columns == place.block for place in chosen)
        if not whole or len(chosen) < len(self._itemsizes):
            return None
        weight, bias = (p.columns if isinstance(p, Place) else None for p in places)
        return Head(layer.input.detach(), weight, bias)

    def row_bytes(self, sum_bytes: int) -> int:
        """Return the bytes of a row in weight space.

        Args:
            sum_bytes: Item size where several uses, or parts, of a parameter are summed.
        """
        chosen = (place for place in self.places.values() if isinstance(place, Place))
        blocks = {place.block.start: place.block for place in chosen}
        total = 0
        for start, itemsize in self._itemsizes.items():
            summed = itemsize is None or start in self.edges.shared
            total += (blocks[start].stop - start) * (sum_bytes if summed else itemsize)
        return total

    def _seen_from(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Return the result of a call without a rule: an attribute or a view of a parameter.

        Raises:
            UnsupportedCallError: If it is something else.
        """
        if _modifies(func, kwargs):
            raise UnsupportedCallError(f"{resolve_name(func) or func} writes a parameter")
        result = func(*args, **kwargs)
        if func in _CONSTANTS:
            return result
        for part in result if isinstance(result, (list, tuple)) else [result]:
            if isinstance(part, Tensor) and not self._is_part(part, args[0]):
                unnamed = f"there is no rule for {resolve_name(func) or func}"
                raise UnsupportedCallError(REFUSALS.get(func, unnamed))
        return result

    def _is_part(self, part: Tensor, whole: object) -> bool:
        """Return whether a tensor is a contiguous view of a parameter; record its columns."""
        place = self._part_of(part, whole)
        if place is None:
            return False
        self.places[id(part)] = place
        self._alive.append(part)
        return True

    def _part_of(self, part: Tensor, whole: object) -> Place | None:
        """Return the columns of a contiguous view of a parameter; None if it is none."""
        place = self.places.get(id(whole))
        if not isinstance(whole, Tensor) or not isinstance(place, Place):
            return None
        shared = part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
        if not (shared and part.is_contiguous() and whole.is_contiguous()):
            return None
        start = place.columns.start + part.storage_offset() - whole.storage_offset()
        return Place(place.block, slice(start, start + part.numel()))


def _modifies(func: Callable[..., Any], kwargs: dict[str, Any]) -> bool:
    """Return whether a function modifies one of its arguments."""
    name = getattr(func, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name in _ASSIGNING or kwargs.get("out") is not None


def _mapped(
    args: tuple[Any, ...], kwargs: dict[str, Any], function: Callable[[Tensor], Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    named = {name: _on(value, function) for name, value in kwargs.items()}
    return tuple(_on(value, function) for value in args), named


# no recursive closure: the reference cycle would keep forward passes alive until collected
def _on(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    if type(value) in (list, tuple):
        return type(value)(_on(part, function) for part in value)
    return value
