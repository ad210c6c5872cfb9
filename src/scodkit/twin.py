"""A model's modules once more, around the same weights: what is run in the model's place.

To look at a model, weights are exchanged, modes turned, hooks added; and its forward pass may
write to buffers and attributes. All of that happens to the twin. The model itself is only read,
so that whoever trains it, or another model with the same layers, notices nothing.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import itertools
import operator
import threading
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

# held by whoever runs a model itself: any other model may have layers in common with it
_ITSELF = threading.RLock()

# these hold nothing; those are looked into and made again; at others the search for modules ends
_PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None), torch.dtype})
_CONTAINERS = frozenset({list, dict, set, deque, OrderedDict, defaultdict})
_ENDS = (Tensor, type, types.ModuleType, torch._ops.OpOverload, torch._ops.OpOverloadPacket)
_PROXIES = (weakref.ProxyType, weakref.CallableProxyType)

_MOST = 20_000  # objects to look at in search of a module, behind one that is not known

# whatever changes these changes the hooks they belong to as well
_BESIDE_HOOKS = frozenset(
    {
        "_forward_hooks_with_kwargs",
        "_forward_hooks_always_called",
        "_forward_pre_hooks_with_kwargs",
        "_non_persistent_buffers_set",
    }
)
_OF_TORCH = frozenset(vars(nn.Module()))

# bytes of a buffer up to which it is copied on every call: not every change is counted (the
# running statistics of BatchNorm are not). Larger ones are tables, and go by their counter.
_COPIED = 1 << 16


class _NoTwinError(Exception):
    """Modules may be reached in a way that cannot be led to the twin."""


class Twin:
    """Runs a model's twin, or the model itself where it cannot have one.

    Args:
        model: The model.
        apart: False to run the model itself in any case.

    Attributes:
        volatile: Names of buffers that a forward pass was seen to change.
        revision: How often the model was found with other modules, hooks or attributes.
    """

    def __init__(self, model: nn.Module, *, apart: bool = True) -> None:
        self.volatile: set[str] = set()
        self.revision = 0
        self._model = model
        self._apart = apart
        self._copy: _Copy | None = None
        self._proven = False
        self._lock = threading.RLock()
        self._depth = 0
        self._inside = False  # whether the model itself is held

    def __reduce__(self) -> tuple[Any, ...]:
        return _remade, (self._model, self._apart)

    @contextlib.contextmanager
    def held(self) -> Iterator[nn.Module]:
        """Hold what is run, in eval mode, one thread at a time; may be nested.

        Yields:
            The twin, as the model is now; or the model, and then no other thread runs a model
            itself meanwhile.
        """
        with self._lock:
            if not self._depth:
                self._follow()
            self._depth += 1
            own = self._copy
            try:
                if own is not None:
                    yield own.module
                else:
                    with self._itself():
                        yield self._model
            finally:
                self._depth -= 1
                if own is not None and not self._depth:
                    own.put_back_attributes()

    @contextlib.contextmanager
    def running(self, weights: Mapping[str, Tensor] | None = None) -> Iterator[nn.Module]:
        """Hold what is run for one forward pass; buffers that it changes are put back.

        Args:
            weights: Parameters and buffers that others take the place of meanwhile, by name.

        Yields:
            As `held` does.
        """
        with self.held() as module:
            own = self._copy
            try:
                if weights:
                    with _exchanged(own.places if own else _places(module), weights):
                        yield module
                else:
                    yield module
            finally:
                if own is not None:
                    self.volatile |= own.put_back_buffers()

    def prove(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Make sure, once, that the twin leads to itself: else the model itself is run.

        Args:
            args: Of a forward pass; not altered.
            kwargs: Likewise.
        """
        if self._proven or not self._apart:
            return
        named = dict(self._model.named_parameters())
        watch = _Watch(itertools.chain(named.values(), self._model.buffers()))
        others = {name: parameter.detach() for name, parameter in named.items()}
        args, kwargs = own_tensors(args, kwargs)
        try:
            with self.running(others) as module, torch.no_grad(), watch:
                if module is not self._model:
                    module(*args, **kwargs)
        except Exception:  # the call that this is done for will say what is wrong
            return
        self._proven = True
        if watch.seen:
            self._apart, self._copy = False, None

    def tensors(self) -> Iterable[Tensor]:
        """Return the weights and buffers that are run; the twin's are brought up to date."""
        # not to wait: whoever holds it has done so
        if self._lock.acquire(blocking=False):
            try:
                if not self._depth:
                    self._follow()
            finally:
                self._lock.release()
        if self._copy is not None:
            return self._copy.tensors
        return itertools.chain(self._model.parameters(), self._model.buffers())

    def _follow(self) -> None:
        """Bring the twin up to what the model is now."""
        if not self._apart:
            return
        with torch.inference_mode(False), torch.no_grad():
            if self._copy is None or not self._copy.is_current():
                self._make()
            if self._copy is not None:
                self._copy.refresh()

    def _make(self) -> None:
        with _ITSELF:  # no weights are exchanged meanwhile
            old = self._copy
            if old is not None and old.is_current():
                return
            self.revision += 1
            try:
                self._copy = _Copy(self._model, {} if old is None else old.clones)
            except Exception:  # whatever a third-party object raises when it is looked at
                self._apart, self._copy = False, None

    @contextlib.contextmanager
    def _itself(self) -> Iterator[None]:
        """Hold the model itself; put flags and buffers back."""
        with _ITSELF:
            if self._inside:
                yield
                return
            self._inside = True
            training = [module for module in self._model.modules() if module.training]
            with torch.inference_mode(False), torch.no_grad():
                buffers = [
                    (name, buffer, buffer._version, buffer.clone())
                    for name, buffer in self._model.named_buffers()
                    if not buffer.is_inference()
                ]
            try:
                for module in training:
                    module.training = False
                yield
            finally:
                self._inside = False
                for module in training:
                    module.training = True
                self._restore(buffers)

    def _restore(self, buffers: list[tuple[str, Tensor, int, Tensor]]) -> None:
        now = dict(self._model.named_buffers())
        with torch.inference_mode(False), torch.no_grad():
            for name, buffer, version, before in buffers:
                if now.get(name) is not buffer or buffer._version != version:
                    self.volatile.add(name)
                    buffer.copy_(before)
                    owner, _, leaf = name.rpartition(".")
                    self._model.get_submodule(owner)._buffers[leaf] = buffer


def _remade(model: nn.Module, apart: bool) -> Twin:
    return Twin(model, apart=apart)


def _places(module: nn.Module) -> dict[str, list[tuple[dict[str, Any], str]]]:
    """Return all places of each parameter and buffer, by name: several, where they are tied."""
    places: dict[int, list[tuple[dict[str, Any], str]]] = {}
    for owner in module.modules():
        for place in (owner._parameters, owner._buffers):
            for key, tensor in place.items():
                places.setdefault(id(tensor), []).append((place, key))
    named = itertools.chain(
        module.named_parameters(remove_duplicate=False),
        module.named_buffers(remove_duplicate=False),
    )
    return {name: places[id(tensor)] for name, tensor in named}


@contextlib.contextmanager
def _exchanged(
    places: Mapping[str, list[tuple[dict[str, Any], str]]], weights: Mapping[str, Tensor]
) -> Iterator[None]:
    # not torch's functional_call: it leaves others' weights in modules with several parents
    before: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for name, tensor in weights.items():
            for place, key in places[name]:
                before.append((place, key, place[key]))
                place[key] = tensor
        yield
    finally:
        for place, key, tensor in before:
            place[key] = tensor


def own_tensors(
    args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments with copies of their tensors: a model may write to its inputs."""

    def own(value: Any) -> Any:
        return value.clone() if isinstance(value, Tensor) else value

    return tuple(map(own, args)), {name: own(value) for name, value in kwargs.items()}


class _Copy:
    """The twin as it was made, and how to tell that it is no longer the model's.

    Args:
        model: The model.
        clones: By id: buffers with copies of them from before, to be used again: a recorded
            call has them.

    Attributes:
        module: The twin of the model.
        tensors: Its weights and buffers.
        places: Where they are, by name.
        clones: Buffers with their copies, by id.

    Raises:
        _NoTwinError: If the model cannot have one.
    """

    def __init__(self, model: nn.Module, clones: dict[int, tuple[Tensor, Tensor]]) -> None:
        self._made: dict[int, tuple[Any, Any]] = {}  # by id of the original, which lives on
        self._harmless: dict[int, object] = {}
        self._names = {id(module): name for name, module in model.named_modules()}
        self._watched: list[Iterable[object]] = []  # what the model was made of, live
        self._state: list[object] = []  # and as it was
        self._flags: set[int] = set()  # where among that the modes are
        self._kinds: list[type] = []
        self._modules: list[nn.Module] = []
        self._own: list[tuple[Any, Any]] = []  # attributes of the twin, as they are and were
        self._slots: list[tuple[str | None, dict[str, Any], dict[str, Any]]] = []
        self._before, self.clones = clones, dict[int, tuple[Tensor, Tensor]]()
        self.module: nn.Module = self._twin(model)
        end = object()  # so that no length has to be compared
        self._watch([end], [end])
        self.places = _places(self.module)
        self.tensors = [*self.module.parameters(), *self.module.buffers()]
        self._held_buffers = [own.values() for _, own, _ in self._slots] + [[end]]
        self._buffers = [b for _, _, pristine in self._slots for b in pristine.values()] + [end]
        self._counted = [own for _, own in self.clones.values()]
        self._versions = [own._version for own in self._counted]
        self._alike: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
        self._large: list[tuple[Tensor, Tensor, int]] = []
        for theirs, own in self.clones.values():
            if theirs.numel() * theirs.element_size() <= _COPIED or theirs.is_inference():
                pair = self._alike.setdefault((theirs.dtype, theirs.device), ([], []))
                pair[0].append(own.data)  # past the counter, which tells of forward passes
                pair[1].append(theirs)
            else:
                self._large.append((own.data, theirs, -1))
        self.refresh()

    # --- Is it the model's? ---

    def is_current(self) -> bool:
        """Return whether the model still is what this was made of, modes aside."""
        now = itertools.chain.from_iterable(self._watched)
        if not all(map(operator.is_, map(type, self._modules), self._kinds)):
            return False
        if all(map(operator.is_, now, self._state)):
            return True
        found = list(itertools.chain.from_iterable(self._watched))
        pairs = enumerate(zip(found, self._state, strict=False))
        if len(found) != len(self._state) or any(
            a is not b and i not in self._flags for i, (a, b) in pairs
        ):
            return False
        self._state = found
        return True

    def refresh(self) -> None:
        """Copy the model's buffers."""
        for own, theirs in self._alike.values():
            torch._foreach_copy_(own, theirs)
        for i, (own, theirs, version) in enumerate(self._large):
            if theirs._version != version:
                self._large[i] = own, theirs, theirs._version
                own.copy_(theirs)

    # --- What a forward pass wrote ---

    def put_back_buffers(self) -> set[str]:
        """Put back the buffers that changed, and return their names."""
        same = [own._version for own in self._counted] == self._versions
        held = itertools.chain.from_iterable(self._held_buffers)
        if same and all(map(operator.is_, held, self._buffers)):
            return set()
        moved = {
            id(own)
            for own, before in zip(self._counted, self._versions, strict=True)
            if own._version != before
        }
        names = set()
        for name, own, pristine in self._slots:
            changed = [
                key for key, b in pristine.items() if id(b) in moved or own.get(key) is not b
            ]
            if name is not None:
                names |= {f"{name}.{key}" if name else key for key in changed}
            _refill(own, pristine)
        with torch.inference_mode(False), torch.no_grad():
            for theirs, own in self.clones.values():
                if id(own) in moved:
                    own.copy_(theirs)
        self._versions = [own._version for own in self._counted]
        return names

    def put_back_attributes(self) -> None:
        """Put back the attributes that changed."""
        for live, pristine in self._own:
            try:
                same = live == pristine  # whatever is the same object is not compared
            except Exception:  # tensors, for instance, are not to be compared as a whole
                same = False
            if not same:
                _refill(live, pristine)

    # --- How it is made ---

    def _watch(self, live: Iterable[object], values: Iterable[object]) -> None:
        self._watched.append(live)
        self._state += values

    def _twin(self, value: Any) -> Any:
        """Return what stands for a value in the twin: itself, where it leads to no module."""
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
            raise _NoTwinError
        twin: nn.Module = object.__new__(kind)
        self._made[id(module)] = module, twin
        self._modules.append(module)
        self._kinds.append(kind)
        theirs = vars(module).copy()  # at once, whatever other threads do
        in_tree = id(module) in self._names
        if in_tree:
            self._flags.add(len(self._state) + list(theirs).index("training"))
        self._watch(vars(module).values(), theirs.values())
        own = vars(twin)
        for name, value in theirs.items():
            if name == "training" and in_tree:
                own[name] = False
            elif name == "_buffers":
                own[name] = self._buffers_of(module, value)
            elif name == "_compiled_call_impl":  # compiled for the model
                own[name] = None
            elif "state_dict" in name and name in _OF_TORCH:
                own[name] = value
            elif name in _BESIDE_HOOKS:
                own[name] = value.copy()
            elif name in _OF_TORCH and value == {}:  # most hooks: not worth more than a look
                self._watch(value.values(), ())
                own[name] = value.copy()
            elif name in _OF_TORCH and type(value) in _CONTAINERS:
                own[name] = self._container(value, shared=False)
            else:
                own[name] = self._twin(value)
        self._own.append((own, own.copy()))
        return twin

    def _buffers_of(self, module: nn.Module, buffers: dict[str, Any]) -> dict[str, Any]:
        theirs = buffers.copy()
        self._watch(buffers.values(), theirs.values())
        own = copy.copy(buffers)
        for name, buffer in theirs.items():
            own[name] = None if buffer is None else self._clone(buffer)
        self._slots.append((self._names.get(id(module)), own, own.copy()))
        return own

    def _clone(self, buffer: Tensor) -> Tensor:
        if id(buffer) not in self.clones:
            _, own = self._before.get(id(buffer), (buffer, buffer))
            alike = (own.shape, own.dtype, own.device) == (
                buffer.shape,
                buffer.dtype,
                buffer.device,
            )
            if own is buffer or not alike:
                own = buffer.detach().clone()
            self.clones[id(buffer)] = buffer, own
        return self.clones[id(buffer)][1]

    def _container(self, value: Any, *, shared: bool = True) -> Any:
        """Return a container once more; one without tensors or modules may be shared."""
        own, theirs = copy.copy(value), copy.copy(value)
        self._made[id(value)] = value, own
        mapped = isinstance(value, dict)
        keys = [self._twin(key) for key in theirs]
        values = [self._twin(item) for item in theirs.values()] if mapped else keys
        parts = [*theirs, *theirs.values()] if mapped else list(theirs)
        same = all(map(operator.is_, [*keys, *values] if mapped else keys, parts))
        if shared and same and not any(isinstance(part, Tensor) for part in parts):
            self._made[id(value)] = value, value
            return value
        _refill(own, dict(zip(keys, values, strict=True)) if mapped else keys)
        self._watch(value.values() if mapped else value, theirs.values() if mapped else parts)
        self._own.append((own, copy.copy(own)))
        return own

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
            own = kind(self._twin(value.func), *args, **named)
            vars(own).update({name: self._twin(part) for name, part in vars(value).items()})
            return own
        if kind is weakref.ref and isinstance(value(), nn.Module):
            return weakref.ref(self._twin(value()))
        self._look_behind(value)
        return value

    def _look_behind(self, value: object) -> None:
        """Make sure that an object, which the twin shares, leads to no module of the model.

        Raises:
            _NoTwinError: If it does, or if there is no end to it.
        """
        todo, looked_at = [value], 0
        while todo:
            item = todo.pop()
            kind = type(item)
            if kind in _PLAIN or issubclass(kind, _ENDS) or id(item) in self._harmless:
                continue
            looked_at += 1
            if id(item) in self._names or kind in _PROXIES or looked_at > _MOST:
                raise _NoTwinError
            self._harmless[id(item)] = item
            if isinstance(item, types.FunctionType):
                todo += _seen_by(item)
            elif kind is weakref.ref:
                todo.append(item())  # type: ignore[operator]
            else:
                todo += gc.get_referents(item)


def _seen_by(function: types.FunctionType) -> Iterator[object]:
    """Yield what a function can reach, of its module's names those it mentions."""
    yield from (function.__closure__, function.__defaults__, function.__kwdefaults__)
    yield vars(function)
    known = function.__globals__
    codes = [function.__code__]
    while codes:
        code = codes.pop()
        codes += [part for part in code.co_consts if isinstance(part, types.CodeType)]
        for value in (known[name] for name in code.co_names if name in known):
            # functions of other files are no one's who knows the model
            if getattr(value, "__globals__", known) is known:
                yield value


def _refill(container: Any, parts: Any) -> None:
    container.clear()
    (container.update if isinstance(container, (dict, set)) else container.extend)(parts)


class _Watch(TorchFunctionMode):
    """A context that notices the use of tensors in this thread.

    Args:
        tensors: To look for.

    Attributes:
        seen: Whether one of them was used.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        self._alive = list(tensors)
        self._ids = {id(tensor) for tensor in self._alive}
        self.seen = False

    def __torch_function__(
        self,
        func: Any,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        parts: list[Any] = [*args, *kwargs.values()]
        while parts and not self.seen:
            part = parts.pop()
            self.seen = id(part) in self._ids
            if type(part) in (list, tuple):
                parts += part
        # whoever else watches is not to see a call that is not theirs
        with torch._C.DisableTorchFunction():
            return func(*args, **kwargs)
