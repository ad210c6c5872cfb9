"""What is run in a model's place, so that the model itself is only read.

To examine a model, we exchange weights, switch modes and add hooks; and its forward pass may
write to buffers and attributes. All of that happens to its twin: modules of our own around the
same weights. Code that trains the model meanwhile, or another model with the same layers,
notices nothing.
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

# held while a model itself is run: any other model may have layers in common with it
_ITSELF = threading.RLock()

# activation checkpointing, which a model may have for training, is bypassed in a hold
_BYPASS = threading.Lock()
_this_thread = threading.local()  # .bypasses: whether it runs checkpointed blocks as they are
_bypasses = 0  # number of holds, in all threads

_apply = checkpoint.CheckpointFunction.apply


class Watcher(contextlib.AbstractContextManager[Any], Protocol):
    """Looks at a forward pass."""

    def watch(self, tensor: Tensor) -> None:
        """Note a tensor that the model is run on: a copy of an input."""


class Twin:
    """Runs a model's twin, or the model itself where it cannot have one.

    Args:
        model: The model.
        apart: False to run the model itself in any case.

    Attributes:
        volatile: Names of buffers that a forward pass was seen to change.
        revision: How often the model was found with other modules, hooks or attributes.
        proven: Whether it is known which of the two is run.
        first: The first parameter, as it was when the twin was last brought up to date; None
            for a model that is run itself.
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
        """Hold what is run, in eval mode, in one thread at a time; holds may be nested.

        Returns:
            A context with the twin, up to date with the model; or with the model itself, and
            then no other thread runs any model itself meanwhile.
        """
        return _Hold(self)

    def run(
        self,
        call: Inputs,
        weights: Mapping[str, Tensor] | None = None,
        watcher: Watcher | None = None,
    ) -> Any:
        """Return what one forward pass returns; buffers that it changes are put back.

        Args:
            call: The inputs. The model gets copies, as it may write to them.
            weights: Tensors that replace parameters and buffers for this pass, by name.
            watcher: Entered around the pass; shown the copies of the inputs.
        """
        own = self._copy
        if self._holder != threading.get_ident() or (own is None and not self._inside):
            with self.held():
                return self.run(call, weights, watcher)
        args = [v.clone() if isinstance(v, Tensor) else v for v in call.args]
        kwargs = call.kwargs and {
            k: v.clone() if isinstance(v, Tensor) else v for k, v in call.kwargs.items()
        }
        module = self._model if own is None else own.module
        before: list[tuple[dict[str, Any], str, Any]] = []
        try:
            if weights:
                # not torch's functional_call: it leaves others' weights in modules with
                # several parents
                places = places_of(module) if own is None else own.places
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
            if own is not None:
                self.volatile |= own.put_back_buffers()

    def prove(self, call: Inputs) -> Any:
        """Find out, once, whether a pass of the twin uses tensors of the model.

        If it does, the model itself is run from here on.

        Args:
            call: Inputs of a forward pass.

        Returns:
            What that pass returned, without gradients, where `run` would return the same; None
            where it would not, or where no pass was needed.
        """
        if self.proven:
            return None
        named = dict(self._model.named_parameters())
        watch = _Watch(itertools.chain(named.values(), self._model.buffers()))
        others = {name: parameter.detach() for name, parameter in named.items()}
        result = None
        try:
            with self.held(), torch.no_grad():
                if self._copy is not None:
                    result = self.run(call, others, watch)
                    self._copy.put_back_attributes()
        except Exception:  # the call that this is done for will say what is wrong
            return None
        self.proven = True
        if watch.seen:
            self._apart, self._copy, self.first = False, None, None
        return None if watch.seen or watch.slower_kernels else result

    def tensors(self) -> Iterable[Tensor]:
        """Return the weights and buffers of what is run, up to date with the model."""
        if self.up_to_date() and self._copy is not None:
            return self._copy.tensors
        return itertools.chain(self._model.parameters(), self._model.buffers())

    def up_to_date(self) -> bool:
        """Bring the twin up to date with the model.

        Returns:
            Whether there is a twin.
        """
        # not to wait: a thread that holds it has brought it up to date
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
        # no thread may exchange weights of a model that is run itself meanwhile
        with _ITSELF, torch.inference_mode(False), torch.no_grad():
            if self._copy is not None and self._copy.is_current():
                return
            self.revision += 1
            try:
                self._copy = Structure(self._model)
                self.first = self._copy.first
            except Exception:  # whatever a third-party object raises when it is looked at
                self._apart, self._copy, self.first = False, None, None

    @contextlib.contextmanager
    def _itself(self) -> Iterator[None]:
        """Hold the model itself in eval mode, and put its modes and buffers back."""
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
                kept = [
                    (buffer, buffer._version, buffer.clone())
                    for buffer in self._model.buffers()
                    if not buffer.is_inference()  # which nobody writes to outside
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
                    for buffer, version, value in kept:
                        if buffer._version != version:
                            written[id(buffer)] = buffer.copy_(value)
                self.volatile |= put_back(slots, written)


class _Hold(contextlib.AbstractContextManager[nn.Module]):
    """See `Twin.held`. Not a generator: entering one takes longer than all that is done here.

    Args:
        twin: What is held.
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
                if self._copy is not None:
                    self._copy.put_back_attributes()
            twin._lock.release()


class _Watch(TorchFunctionMode):
    """A context that notices the use of tensors in this thread.

    Args:
        tensors: To look for.

    Attributes:
        seen: Whether one of them was used.
        slower_kernels: Whether torch took other kernels than it takes unwatched.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        self._looked_for = {id(tensor): tensor for tensor in tensors}
        self.seen = self.slower_kernels = False

    def watch(self, tensor: Tensor) -> None:
        """Take no notice of the inputs."""

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
        # under any such mode attention does without its inference kernel, which rounds
        # differently
        self.slower_kernels |= func is nn.functional.multi_head_attention_forward
        # other modes that are active must not see this pass
        with torch_private.without_torch_function():
            return func(*args, **kwargs)


def _bypassing() -> bool:
    return getattr(_this_thread, "bypasses", False)


def _bypass_checkpoints(change: int, bypassing: bool) -> bool:
    """Let this thread run checkpointed blocks as they are, or no longer.

    Checkpointed blocks recompute their activations in the backward pass. Recomputed layers are
    not those that were watched in the forward pass, and the reentrant kind gives their weights
    no gradient at all where the input needs none. Other threads are not concerned.

    Args:
        change: 1 or -1. The first bypass puts our functions into torch's module, and the end
            of the last one takes them out again.
        bypassing: Whether this thread bypasses checkpoints from here on.

    Returns:
        Whether it did before.
    """
    global _bypasses
    before = getattr(_this_thread, "bypasses", False)
    _this_thread.bypasses = bypassing
    with _BYPASS:
        _bypasses += change
        own = _bypasses > 0
        block: Any = checkpoint.CheckpointFunction
        block.apply = staticmethod(_plain_apply) if own else _apply
        around = _plain_around if own else torch_private.around_checkpoint
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
