"""The twin: a copy that is run in a model's place, so that the model itself is only read.

To examine a model, we replace weights, switch modes and add hooks; and its forward pass may
write to buffers and attributes. All of that happens to its twin: copies of its modules that
share its weights. Code that trains the model at the same time, or another model with the same
layers, is not affected.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint

from scodkit.model.inputs import Inputs
from scodkit.model.structure import Slot, Structure, places_of, put_back
from scodkit.numerics import torch_private

# held while a model itself is run: any other model may share layers with it
_ITSELF = threading.RLock()

# activation checkpointing, which a model may have for training, is bypassed in a hold
_BYPASS = threading.Lock()
_this_thread = threading.local()  # .bypasses: whether it runs blocks without checkpointing
_bypasses = 0  # number of holds, in all threads

_apply = checkpoint.CheckpointFunction.apply


class Watcher(contextlib.AbstractContextManager[Any], Protocol):
    """A context manager that observes a forward pass."""

    def watch(self, tensor: Tensor) -> None:
        """Register a tensor that the model is run on: a copy of an input."""


class Twin:
    """Runs a model's twin, or the model itself if it cannot have one.

    Args:
        model: The model.
        apart: False to run the model itself in any case.

    Attributes:
        volatile: Names of buffers that a forward pass is known to have changed.
        revision: How often changed modules, hooks or attributes of the model were detected.
        proven: Whether it is known which of the two is run.
        first: The first parameter, as of the last update of the twin; None if the model
            itself is run.
    """

    def __init__(self, model: nn.Module, *, apart: bool = True) -> None:
        self.volatile: frozenset[str] = frozenset()
        self.revision = 0
        self._model = model
        self._apart = apart
        self.proven = not apart
        self.first: Tensor | None = None
        self._copy: Structure | None = None
        self._lock = threading.RLock()
        self._holder: int | None = None  # the thread that holds it
        self._inside = False  # whether the model itself is held

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial(Twin, apart=self._apart), (self._model,)

    def held(self) -> contextlib.AbstractContextManager[nn.Module]:
        """Hold the module that is run, in eval mode, in one thread at a time; reentrant.

        Returns:
            A context manager with the twin, up to date with the model; or with the model
            itself, and then no other thread runs any model itself at the same time.
        """
        return Hold(self)

    def run(
        self,
        call: Inputs,
        weights: Mapping[str, Tensor] | None = None,
        watcher: Watcher | None = None,
    ) -> Any:
        """Return the result of a forward pass; buffers and attributes it changes are restored.

        Args:
            call: The inputs. The model gets copies, as it may write to them.
            weights: Tensors that replace parameters and buffers for this pass, by name.
            watcher: Entered around the pass; given the copies of the inputs.
        """
        twin = self._copy
        if self._holder != threading.get_ident() or (twin is None and not self._inside):
            with self.held():
                return self.run(call, weights, watcher)
        args = [v.clone() if isinstance(v, Tensor) else v for v in call.args]
        kwargs = call.kwargs and {
            k: v.clone() if isinstance(v, Tensor) else v for k, v in call.kwargs.items()
        }
        module = self._model if twin is None else twin.module
        before: list[tuple[dict[str, Any], str, Any]] = []
        try:
            if weights:
                # not torch's functional_call: it does not restore the weights of modules with
                # several parents
                places = places_of(module) if twin is None else twin.places
                for name, tensor in weights.items():
                    for place, key in places[name]:
                        before.append((place, key, place[key]))
                        place[key] = tensor
            if watcher is None:
                return module(*args, **kwargs)
            for value in (*args, *kwargs.values()):
                if isinstance(value, Tensor):
                    watcher.watch(value)
            with watcher:
                return module(*args, **kwargs)
        finally:
            for place, key, tensor in before:
                place[key] = tensor
            if twin is not None:
                self.volatile |= twin.put_back_buffers()
                twin.put_back_attributes()

    def prove(self, call: Inputs) -> Any:
        """Find out, once, whether a pass of the twin uses tensors of the model.

        If it does, the model itself is run from here on.

        Args:
            call: Inputs of a forward pass.

        Returns:
            The result of that pass, without gradients, if `run` would return the same; None
            if it would not, or if no pass was needed.
        """
        if self.proven:
            return None
        named = dict(self._model.named_parameters())
        watch = _Watch(itertools.chain(named.values(), self._model.buffers()))
        weights = {name: parameter.detach() for name, parameter in named.items()}
        result = None
        try:
            with self.held(), torch.no_grad():
                if self._copy is not None:
                    result = self.run(call, weights, watch)
        except Exception:  # the actual call will raise the same error
            return None
        self.proven = True
        if watch.seen:
            self._apart, self._copy, self.first = False, None, None
        return None if watch.seen or watch.slower_kernels else result

    def tensors(self) -> Iterable[Tensor]:
        """Return the weights and buffers of the module that is run, up to date."""
        if self.up_to_date() and self._copy is not None:
            return self._copy.tensors
        return itertools.chain(self._model.parameters(), self._model.buffers())

    def up_to_date(self) -> bool:
        """Bring the twin up to date with the model.

        Returns:
            Whether there is a twin.
        """
        # non-blocking: a thread that holds it has brought it up to date
        if self._holder is None and self._lock.acquire(blocking=False):
            try:
                if self._holder is None:
                    self._follow()
            finally:
                self._lock.release()
        return self._copy is not None

    def _follow(self) -> None:
        """Bring the twin up to date with the model."""
        if not self._apart:
            return
        if self._copy is None or not self._copy.is_current():
            self._make()
        if self._copy is not None and self._copy.clones:
            try:
                with torch.inference_mode(False), torch.no_grad():
                    self._copy.refresh()
            except RuntimeError:  # a buffer has another size now
                self._copy = None
                self._make()

    def _make(self) -> None:
        # no other thread may be replacing weights of a model that is run itself
        with _ITSELF, torch.inference_mode(False), torch.no_grad():
            if self._copy is not None and self._copy.is_current():
                return
            self.revision += 1
            try:
                self._copy = Structure(self._model)
                self.first = self._copy.first
            except Exception:  # whatever a third-party object raises when it is inspected
                self._apart, self._copy, self.first = False, None, None

    @contextlib.contextmanager
    def _itself(self) -> Iterator[None]:
        """Hold the model itself in eval mode, and restore its modes and buffers."""
        with _ITSELF:
            if self._inside:
                yield
                return
            self._inside = True
            modules = dict(self._model.named_modules())
            training = [module for module in modules.values() if module.training]
            slots: list[Slot] = [
                (name, m._buffers, dict(m._buffers.items())) for name, m in modules.items()
            ]
            with torch.inference_mode(False), torch.no_grad():
                backups = [
                    (buffer, buffer._version, buffer.clone())
                    for buffer in self._model.buffers()
                    if not buffer.is_inference()  # not writable outside inference mode
                ]
            try:
                for module in training:
                    module.training = False
                yield
            finally:
                self._inside = False
                for module in training:
                    module.training = True
                written = {}
                with torch.inference_mode(False), torch.no_grad():
                    for buffer, version, value in backups:
                        if buffer._version != version:
                            written[id(buffer)] = buffer.copy_(value)
                self.volatile |= put_back(slots, written)


class Hold(contextlib.AbstractContextManager[nn.Module]):
    """See `Twin.held`. Not a generator: entering one takes longer than all the work here.

    Args:
        twin: The twin to hold.
    """

    def __init__(self, twin: Twin) -> None:
        self._twin = twin
        self._itself: contextlib.AbstractContextManager[None] | None = None

    def __enter__(self) -> nn.Module:
        twin = self._twin
        twin._lock.acquire()
        try:
            self._outermost = twin._holder is None
            if self._outermost:
                twin._follow()
                twin._holder = threading.get_ident()
            self._copy = twin._copy
            if self._copy is None:
                self._itself = twin._itself()
                self._itself.__enter__()
        except BaseException:
            if self._outermost:
                twin._holder = None
            twin._lock.release()
            raise
        self._outer = _bypass_checkpoints(1, True)
        return twin._model if self._copy is None else self._copy.module

    def __exit__(self, *error: Any) -> None:
        twin = self._twin
        try:
            _bypass_checkpoints(-1, self._outer)
            if self._itself is not None:
                self._itself.__exit__(*error)
        finally:
            if self._outermost:
                twin._holder = None
            twin._lock.release()


class _Watch(TorchFunctionMode):
    """A torch function mode that detects the use of tensors in this thread.

    Args:
        tensors: The tensors to look for.

    Attributes:
        seen: Whether one of them was used.
        slower_kernels: Whether torch used other kernels than it does without the mode.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        self._looked_for = {id(tensor): tensor for tensor in tensors}
        self.seen = self.slower_kernels = False

    def watch(self, tensor: Tensor) -> None:
        """Ignore the inputs."""

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
            self.seen = id(part) in self._looked_for
            if type(part) in (list, tuple):
                parts += part
        # under any torch function mode attention does not use its inference kernel, which
        # rounds differently
        self.slower_kernels |= func is nn.functional.multi_head_attention_forward
        # other modes that are active must not see this pass
        with torch_private.without_torch_function():
            return func(*args, **kwargs)


def _bypassing() -> bool:
    return getattr(_this_thread, "bypasses", False)


def _bypass_checkpoints(change: int, bypassing: bool) -> bool:
    """Turn the bypass of activation checkpointing on or off for this thread.

    Checkpointed blocks recompute their activations in the backward pass. Recomputed layers are
    not those recorded in the forward pass, and reentrant checkpoints give their weights no
    gradient at all if the input requires none. Other threads are not affected.

    Args:
        change: 1 or -1. The first bypass patches torch's checkpoint module, and the end of the
            last one restores it.
        bypassing: Whether this thread bypasses checkpoints from here on.

    Returns:
        Whether it did before.
    """
    global _bypasses
    before = getattr(_this_thread, "bypasses", False)
    _this_thread.bypasses = bypassing
    with _BYPASS:
        _bypasses += change
        patched = _bypasses > 0
        block: Any = checkpoint.CheckpointFunction
        block.apply = staticmethod(_plain_apply) if patched else _apply
        around = _plain_around if patched else torch_private.around_checkpoint
        setattr(checkpoint, torch_private.AROUND_CHECKPOINT, around)
    return before


def _plain_apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
    if _bypassing():
        return function(*args)
    return _apply(function, preserve, *args)  # type: ignore[no-untyped-call]


def _plain_around(*args: Any, **kwargs: Any) -> Iterator[None]:
    if _bypassing():
        yield
    else:
        yield from torch_private.around_checkpoint(*args, **kwargs)
