"""Copies of a model's modules that share its weights, and checks that they are current."""

from __future__ import annotations

import copy
import functools
import gc
import itertools
import operator
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Set
from typing import Any

import torch
from torch import Tensor, nn

from scodkit.numerics.torch_private import OPERATORS, foreach_copy

# where a parameter or a buffer is: the dict of a module, and the key in it
Place = tuple[dict[str, Any], str]

# the buffers of a module: its name, if it has one, the live dict, and its pristine contents
Slot = tuple[str | None, dict[str, Any], dict[str, Any]]

# types without references, types that are copied, and types at which a search for modules ends
_PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None), torch.dtype})
_CONTAINERS = frozenset({list, dict, set, deque, OrderedDict, defaultdict})
_ENDS = (Tensor, type, types.ModuleType, *OPERATORS)
_PROXIES = (weakref.ProxyType, weakref.CallableProxyType)

_MOST = 20_000  # objects to visit in a search for modules from one of an unknown type

# attributes of every module; those with these endings change together with the hooks or
# buffers they belong to
OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_BESIDE = ("_with_kwargs", "_always_called", "_buffers_set")

# bytes of a buffer up to which it is copied on every call: version counters miss some changes
# (running statistics of BatchNorm). Larger ones are tables, copied when their counter changes.
_COPIED = 1 << 22

_END = object()  # sentinel at the end of both sides of a comparison: a longer one differs

_version = operator.attrgetter("_version")
_chained = itertools.chain.from_iterable


class NoTwinError(Exception):
    """The model has references to its modules that cannot be redirected to the twin."""


class Structure:
    """The modules of a twin, and a snapshot to detect changes of the model since.

    Args:
        model: The model.

    Attributes:
        module: The twin of the model.
        tensors: Its weights and buffers.
        places: Where they are, by name.
        first: The first parameter; None if the model has none.
        clones: Buffers of the model with their copies in the twin, by id.

    Raises:
        NoTwinError: If the model cannot have a twin.
    """

    def __init__(self, model: nn.Module) -> None:
        self._made: dict[
            int, tuple[Any, Any]
        ] = {}  # by id of the original, which is kept alive
        self._harmless: dict[int, object] = {}
        self._names = {id(module): name for name, module in model.named_modules()}
        self._watched: list[Iterable[object]] = []  # live views of the model's contents
        self._state: list[object] = []  # the snapshot of these contents
        self._empty: list[Any] = []  # containers that must stay empty
        self._flags: set[int] = set()  # indices of the training flags in the snapshot
        self._modules: list[nn.Module] = []
        self._attributes: list[tuple[Any, Any]] = []  # of the twin: live, and pristine
        self._slots: list[Slot] = []
        self.clones: dict[int, tuple[Tensor, Tensor]] = {}
        self.module: nn.Module = self._twin(model)
        self._watch([_END], [_END])
        self._kinds = [type(self._made[id(module)][1]) for module in self._modules]
        self.places = places_of(self.module)
        self.first = next(self.module.parameters(), None)
        self._live_attributes = [*(_values(live) for live, _ in self._attributes), [_END]]
        self._made_attributes = [*_chained(_values(made) for _, made in self._attributes), _END]
        self._live_buffers = [*(live.values() for _, live, _ in self._slots), [_END]]
        self._index()

    def _index(self) -> None:
        """List the buffers for comparisons, and group them to be copied in one call."""
        self.tensors = [*self.module.parameters(), *self.module.buffers()]
        self._buffers = [*_chained(made.values() for _, _, made in self._slots), _END]
        self._counted = [clone for _, clone in self.clones.values()]
        self._versions = [clone._version for clone in self._counted]
        self._alike: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
        self._large: list[tuple[Tensor, Tensor, int]] = []
        for original, clone in self.clones.values():
            if original.numel() * original.itemsize <= _COPIED or original.is_inference():
                pair = self._alike.setdefault((original.dtype, original.device), ([], []))
                pair[0].append(clone.data)  # bypasses the counter, kept for forward passes
                pair[1].append(original)
            else:
                self._large.append((clone.data, original, -1))

    # --- Comparison with the model ---

    def is_current(self) -> bool:
        """Return whether the model still has the same objects; training flags may differ."""
        if any(self._empty) or not all(
            map(operator.is_, map(type, self._modules), self._kinds)
        ):
            return False
        now = _chained(self._watched)
        if all(map(operator.is_, now, self._state)):
            return True
        current = list(_chained(self._watched))
        pairs = enumerate(zip(current, self._state, strict=False))
        changed = {i for i, (value, before) in pairs if value is not before}
        if len(current) != len(self._state) or not changed <= self._flags:
            return False
        self._state = current
        return True

    def refresh(self) -> None:
        """Copy the model's buffers."""
        for clones, originals in self._alike.values():
            foreach_copy(clones, originals)
        for i, (clone, original, version) in enumerate(self._large):
            if original._version != version:
                self._large[i] = clone, original, original._version
                clone.copy_(original)

    # --- Undoing the writes of a forward pass ---

    def put_back_buffers(self) -> Set[str]:
        """Restore the buffers that changed.

        Returns:
            Their names.
        """
        unwritten = list(map(_version, self._counted)) == self._versions
        now = _chained(self._live_buffers)
        if unwritten and all(map(operator.is_, now, self._buffers)):
            return frozenset()
        fresh: dict[int, Tensor] = {}  # new tensors: a backward pass may need the written ones
        versions = dict(zip(self.clones, self._versions, strict=True))
        with torch.inference_mode(False), torch.no_grad():
            for key, (original, clone) in self.clones.items():
                if clone._version != versions[key]:
                    fresh[id(clone)] = original.detach().clone()
                    self.clones[key] = original, fresh[id(clone)]
        names = put_back(self._slots, fresh)
        self._index()
        return names

    def put_back_attributes(self) -> None:
        """Restore the attributes that changed."""
        # comparing values in order suffices: an added or removed one shifts the others
        now = _chained(self._live_attributes)
        if not all(map(operator.is_, now, self._made_attributes)):
            for live, made in self._attributes:
                _refill(live, made)

    # --- Construction ---

    def _watch(self, live: Iterable[object], values: Iterable[object]) -> None:
        self._watched.append(live)
        self._state += values

    def _twin(self, value: Any) -> Any:
        """Return the twin's version of a value: the value itself if it leads to no module."""
        kind = type(value)
        if kind in _PLAIN or issubclass(kind, _ENDS):
            return value
        if id(value) not in self._made:
            if issubclass(kind, nn.Module):
                return self._module(value)
            if kind in _CONTAINERS:
                return self._container(value)
            self._made[id(value)] = value, self._object(value)
        return self._made[id(value)][1]

    def _module(self, module: nn.Module) -> nn.Module:
        kind = type(module)
        slots = any(vars(base).get("__slots__") for base in kind.__mro__)
        if slots or hasattr(kind, "__del__") or isinstance(module, torch.jit.ScriptModule):
            raise NoTwinError
        twin: nn.Module = object.__new__(kind)
        self._made[id(module)] = module, twin
        self._modules.append(module)
        originals = vars(module).copy()  # atomic with respect to other threads
        if id(module) in self._names:
            self._flags.add(len(self._state) + list(originals).index("training"))
        self._watch(vars(module).values(), originals.values())
        for name, value in originals.items():
            vars(twin)[name] = self._attribute(module, name, value)
        self._attributes.append((vars(twin), vars(twin).copy()))
        return twin

    def _attribute(self, module: nn.Module, name: str, value: Any) -> Any:
        if name == "training" and id(module) in self._names:
            return False
        if name == "_compiled_call_impl":  # compiled for the model, not for the twin
            return None
        if name not in OF_EVERY_MODULE:
            return self._twin(value)
        if type(value) in _PLAIN or "state_dict" in name:
            return value
        if type(value) not in _CONTAINERS:
            raise NoTwinError
        if name == "_buffers":
            return self._buffers_of(module, value)
        if name.endswith(_BESIDE):
            return value.copy()
        if not value:  # most dicts of hooks: a check that they stay empty suffices
            self._empty.append(value)
            return value.copy()
        return self._container(value, shared=False)

    def _buffers_of(self, module: nn.Module, buffers: dict[str, Any]) -> dict[str, Any]:
        clones = buffers.copy()
        self._watch(buffers.values(), clones.values())
        for name, buffer in clones.items():
            if buffer is not None:
                if id(buffer) not in self.clones:
                    self.clones[id(buffer)] = buffer, buffer.detach().clone()
                clones[name] = self.clones[id(buffer)][1]
        self._slots.append((self._names.get(id(module)), clones, clones.copy()))
        return clones

    def _container(self, value: Any, *, shared: bool = True) -> Any:
        """Return a copy of a container; itself if `shared` and without tensors and modules."""
        twin = copy.copy(value)
        self._made[id(value)] = value, twin
        named = isinstance(value, dict)
        originals: Any = value.copy() if named else list(value)  # atomic, as above
        parts = [*originals, *originals.values()] if named else originals
        twins: Any = [self._twin(part) for part in parts]
        same = all(map(operator.is_, twins, parts))
        if shared and same and not any(isinstance(part, Tensor) for part in parts):
            self._made[id(value)] = value, value
            return value
        if named:
            twins = dict(zip(twins[: len(originals)], twins[len(originals) :], strict=True))
        _refill(twin, twins)
        self._watch(_values(value), _values(originals))
        self._attributes.append((twin, twin.copy() if named else list(twin)))
        return twin

    def _object(self, value: Any) -> Any:
        kind = type(value)
        if kind in (tuple, frozenset):
            parts = [self._twin(part) for part in value]
            return value if all(map(operator.is_, parts, value)) else kind(parts)
        if kind is types.MethodType:
            owner = self._twin(value.__self__)
            return value if owner is value.__self__ else kind(value.__func__, owner)
        if kind is functools.partial:
            args, named = (self._twin(part) for part in (value.args, value.keywords))
            twin = kind(self._twin(value.func), *args, **named)
            vars(twin).update({name: self._twin(part) for name, part in vars(value).items()})
            return twin
        if kind is weakref.ref and isinstance(value(), nn.Module):
            return weakref.ref(self._twin(value()))
        self._look_behind(value)
        return value

    def _look_behind(self, value: object) -> None:
        """Make sure that an object shared with the twin references no module of the model.

        Raises:
            NoTwinError: If it does, or if the search visits too many objects.
        """
        todo, visits = [value], 0
        while todo:
            item = todo.pop()
            kind = type(item)
            if kind in _PLAIN or issubclass(kind, _ENDS) or id(item) in self._harmless:
                continue
            visits += 1
            if id(item) in self._names or kind in _PROXIES or visits > _MOST:
                raise NoTwinError
            self._harmless[id(item)] = item
            if isinstance(item, types.FunctionType):
                todo += _seen_by(item)
            elif kind is weakref.ref:
                todo.append(item())  # type: ignore[operator]
            else:
                todo += gc.get_referents(item)


def _seen_by(function: types.FunctionType) -> Iterator[object]:
    """Yield the objects a function references; of its globals those whose name it uses."""
    yield from (function.__closure__, function.__defaults__, function.__kwdefaults__)
    yield vars(function)
    known = function.__globals__
    codes = [function.__code__]
    while codes:
        code = codes.pop()
        codes += [part for part in code.co_consts if isinstance(part, types.CodeType)]
        for value in (known[name] for name in code.co_names if name in known):
            # functions of other files do not know the model
            if getattr(value, "__globals__", known) is known:
                yield value


def _values(container: Any) -> Any:
    """Return the elements of a container; of a dict a live view of its values."""
    return container.values() if isinstance(container, dict) else container


def _refill(container: Any, parts: Any) -> None:
    container.clear()
    (container.update if isinstance(container, (dict, set)) else container.extend)(parts)


def put_back(slots: Iterable[Slot], fresh: Mapping[int, Tensor]) -> set[str]:
    """Restore the buffers of modules.

    Args:
        slots: The modules.
        fresh: Replacements of buffers that were written to, by the ids of these.

    Returns:
        Names of the buffers that were written to, or replaced.
    """
    names = set()
    for name, live, pristine in slots:
        now = dict(live.items())
        for key, buffer in pristine.items():
            if id(buffer) in fresh or now.get(key) is not buffer:
                live[key] = pristine[key] = fresh.get(id(buffer), buffer)
                if name is not None:
                    names.add(f"{name}.{key}".lstrip("."))
        for key in now.keys() - pristine.keys():
            del live[key]
    return names


def places_of(module: nn.Module) -> dict[str, list[Place]]:
    """Return all places of each parameter and buffer, by name: several if they are tied."""
    places: dict[int, list[Place]] = {}
    for owner in module.modules():
        for place in (owner._parameters, owner._buffers):
            for key, tensor in place.items():
                places.setdefault(id(tensor), []).append((place, key))
    named = itertools.chain(
        module.named_parameters(remove_duplicate=False),
        module.named_buffers(remove_duplicate=False),
    )
    return {name: places[id(tensor)] for name, tensor in named}
