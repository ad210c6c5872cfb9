"""The user's model, seen as a function of its inputs and (chosen) weights.

Everything that differs between models is handled here and nowhere else: what part of a batch
goes in, what part of the result counts as the output, wrappers, devices, train mode, grad mode.
The model is left exactly as it was found.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import itertools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from scodkit.errors import BatchError, OptionError
from scodkit.mixed import tf32_products
from scodkit.recomputing import not_recomputing

# torch chooses kernels for the whole process: whoever changes that must change it back first
_SWITCH = threading.RLock()

_LABEL_KEYS = frozenset({"label", "labels", "target", "targets"})


@dataclass(frozen=True)
class Inputs:
    """The arguments of one call of the model; tensors share their first axis, the batch.

    Args:
        args: Positional arguments.
        kwargs: Keyword arguments. Values that are not tensors are passed on as they are.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def __post_init__(self) -> None:
        nested = [type(v) for v in (*self.args, *self.kwargs.values()) if _holds_tensors(v)]
        if nested:
            raise BatchError(
                f"expected tensors as the model's inputs, got a {nested[0].__name__} of them; "
                "pass them one by one (inputs=lambda batch: (a, b) or {'name': a}), with a "
                "small module around the model that puts them together"
            )
        sizes = {t.shape[0] if t.ndim else None for t in self.tensors()}
        if not sizes:
            raise BatchError(
                "expected at least one tensor among the model's inputs, got "
                f"{[type(a).__name__ for a in (*self.args, *self.kwargs.values())]}; "
                "pick them with Monitor(..., inputs=lambda batch: ...)"
            )
        if len(sizes) > 1 or None in sizes:
            shapes = [tuple(t.shape) for t in self.tensors()]
            raise BatchError(
                "expected every input tensor to have the batch as its first axis, got shapes "
                f"{shapes}; pick or reshape them with Monitor(..., inputs=lambda batch: ...)"
            )

    def tensors(self) -> list[Tensor]:
        """Return the tensors, positional ones first, keywords in their order."""
        return self._tensors

    @functools.cached_property
    def _tensors(self) -> list[Tensor]:
        values = (*self.args, *self.kwargs.values())
        return [v for v in values if isinstance(v, Tensor)]

    def map(self, function: Callable[[Tensor], Tensor]) -> Inputs:
        """Return the same call with ``function`` applied to each tensor."""
        args, kwargs = self.with_tensors([function(t) for t in self.tensors()])
        return Inputs(args, kwargs)

    def with_tensors(self, tensors: list[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return ``(args, kwargs)`` with the tensors replaced, in the order of `tensors`."""
        fresh = iter(tensors)

        def swap(value: object) -> object:
            return next(fresh) if isinstance(value, Tensor) else value

        return tuple(map(swap, self.args)), {k: swap(v) for k, v in self.kwargs.items()}

    @property
    def batch_size(self) -> int:
        """Number of samples."""
        return self.tensors()[0].shape[0]

    def check_some(self) -> None:
        """Make sure there is a sample to choose an engine with.

        Raises:
            BatchError: If there is none.
        """
        if self.batch_size == 0:
            raise BatchError("expected samples in the first batch, got none; leave it out")

    def samples(self, which: slice) -> Inputs:
        """Return the call restricted to some samples."""
        return self.map(lambda t: t[which])

    def joined(self, other: Inputs) -> Inputs:
        """Return the samples of both calls; those of this one, if they do not go together."""
        pairs = list(zip(self.tensors(), other.tensors(), strict=False))
        alike = len(self.tensors()) == len(other.tensors()) == len(pairs) and all(
            a.shape[1:] == b.shape[1:] and a.dtype == b.dtype for a, b in pairs
        )
        if not alike:
            return self
        return Inputs(*self.with_tensors([torch.cat(pair) for pair in pairs]))

    def first(self, count: int) -> Inputs:
        """Return the call with its first samples, the last of them again if there are fewer."""
        order = torch.arange(count).clamp_max(self.batch_size - 1)
        return self.map(lambda t: t[order.to(t.device)])


def _holds_tensors(value: object) -> bool:
    if isinstance(value, Mapping):
        value = list(value.values())
    return isinstance(value, (list, tuple)) and any(isinstance(v, Tensor) for v in value)


class Network:
    """A trained model together with how batches enter it and outputs leave it.

    Args:
        model: Any ``nn.Module``; DDP, DataParallel and ``torch.compile`` wrappers are looked
            through.
        inputs: Maps a batch to what the model is called with: a tensor, a tuple (positional)
            or a dict (keywords). By default tensors go in as they are, of a tuple or list
            the first element, of a dict the keys the model's ``forward`` names, without labels.
        outputs: Maps what the model returns to the tensor that parametrises the prediction.
            By default the tensor itself, or ``.logits`` where there is one.

    Attributes:
        precision: What the model is run in, where that is not its own; see `at_precision`.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: Callable[[Any], Any] | None = None,
        outputs: Callable[[Any], Tensor] | None = None,
    ) -> None:
        self.model = _bare(model)
        self._pick_inputs = inputs
        self._pick_outputs = outputs
        self.precision: torch.dtype | None = None
        self._lock = _lock_of(self.model)
        self._volatile: set[str] | None = None  # buffers a call changes; unknown before one
        self._recurrent = any(isinstance(m, nn.RNNBase) for m in self.model.modules())

    @property
    def device(self) -> torch.device:
        """Where the weights are (the first one's device, for models spread over several)."""
        return next(self.model.parameters(), torch.empty(0)).device

    def inputs_of(self, batch: object) -> Inputs:
        """Return the model's inputs in a batch, on the model's device.

        Raises:
            BatchError: If no tensors can be found in the batch.
            OptionError: If the model has no weights yet.
        """
        picked = self._pick_inputs(batch) if self._pick_inputs else self._default_inputs(batch)
        if isinstance(picked, Mapping):
            call = Inputs((), dict(picked))
        elif isinstance(picked, (tuple, list)):
            call = Inputs(tuple(picked), {})
        elif isinstance(picked, Tensor):
            call = Inputs((picked,), {})
        else:
            raise BatchError(
                f"expected a tensor, tuple, list or dict as a batch, got "
                f"{type(picked).__name__}; pass inputs=lambda batch: ... to the Monitor"
            )
        device = self.device
        if device.type == "meta":
            raise OptionError("expected a model with weights, got one on meta; load them first")
        return call.map(lambda t: ordinary(t.to(device, non_blocking=device.type == "cuda")))

    def _default_inputs(self, batch: object) -> object:
        if isinstance(batch, Mapping):
            accepted = inspect.signature(self.model.forward).parameters
            anything = any(p.kind is p.VAR_KEYWORD for p in accepted.values())
            picked = {
                str(key): value
                for key, value in batch.items()
                if (anything or key in accepted) and key not in _LABEL_KEYS
            }
            if not picked:
                raise BatchError(
                    f"expected a dict with inputs of the model ({', '.join(accepted)}), got "
                    f"{', '.join(map(str, batch))}; pick them with inputs=lambda batch: ..."
                )
            return picked
        if isinstance(batch, (tuple, list)) and batch:
            first = batch[0]
            return self._default_inputs(first) if isinstance(first, Mapping) else first
        return batch

    def __call__(self, call: Inputs) -> Tensor:
        """Return the output ``(B, *shape)`` of the model as it stands.

        Raises:
            BatchError: If the model fails on inputs of another dtype than its weights'.
            RuntimeError: If it fails for another reason.
        """
        try:
            with self._autocast():
                result = self.model(*call.args, **call.kwargs)
        except RuntimeError as error:
            own = {p.dtype for p in self.model.parameters() if p.is_floating_point()}
            given = {t.dtype for t in call.tensors() if t.is_floating_point()}
            if self.precision is None and given - own and own:
                wanted = " or ".join(sorted(map(str, own)))
                raise BatchError(
                    f"expected inputs in {wanted}, as the model's weights are, got "
                    f"{', '.join(sorted(map(str, given)))}, and the model failed on them; type "
                    f"x.to({wanted.split(' ')[0]})"
                ) from error
            raise
        return self._output(result, call.batch_size)

    def at(self, weights: Mapping[str, Tensor], call: Inputs) -> Tensor:
        """Return the output ``(B, *shape)`` with some weights replaced."""
        return self.at_raw(weights, call.args, call.kwargs, call.batch_size)

    def at_raw(
        self,
        weights: Mapping[str, Tensor],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        batch_size: int,
    ) -> Tensor:
        """Return what `at` does, from bare arguments (inside function transforms)."""
        rest = {name: t for name, t in self._made_in_inference_mode() if name not in weights}
        with self._autocast():
            result = functional_call(self.model, {**rest, **weights}, args, dict(kwargs))
        return self._output(result, batch_size)

    def at_precision(self, precision: torch.dtype | None) -> Network:
        """Return the same model, run under ``torch.autocast`` to a dtype; None for as it is."""
        other = copy.copy(self)
        other.precision = precision
        return other

    @contextlib.contextmanager
    def in_full_precision(self) -> Iterator[None]:
        """Run the model as it is for a while, in TF32 neither."""
        precision, self.precision = self.precision, None
        try:
            with contextlib.ExitStack() as stack:
                if self.device.type == "cuda":
                    stack.enter_context(tf32_products(False))
                    stack.enter_context(_cudnn(torch.backends.cudnn.enabled, allow_tf32=False))
                yield
        finally:
            self.precision = precision

    def _autocast(self) -> contextlib.AbstractContextManager[None]:
        if self.precision is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, self.precision)

    def _made_in_inference_mode(self) -> Iterator[tuple[str, Tensor]]:
        """Return copies of the weights and buffers that autograd would refuse."""
        tensors = itertools.chain(self.model.named_parameters(), self.model.named_buffers())
        return ((name, ordinary(t.detach())) for name, t in tensors if t.is_inference())

    def _output(self, result: Any, batch_size: int) -> Tensor:
        if self._pick_outputs is not None:
            result = self._pick_outputs(result)
        elif not isinstance(result, Tensor) and isinstance(
            getattr(result, "logits", None), Tensor
        ):
            result = result.logits
        if not isinstance(result, Tensor):
            part = repr(next(iter(result), 0)) if isinstance(result, Mapping) else "0"
            raise BatchError(
                f"expected the model to return a tensor, got {type(result).__name__}; say "
                f"which part is the prediction: Monitor(..., outputs=lambda out: out[{part}])"
            )
        if result.ndim == 0 or result.shape[0] != batch_size:
            raise BatchError(
                f"expected an output of shape ({batch_size}, ...), one row per sample, got "
                f"{tuple(result.shape)}; for a single sample type x[None]; otherwise say which "
                "part is the prediction: Monitor(..., outputs=lambda out: ...)"
            )
        output: Tensor = result if self.precision is None else result.float()
        return output if output.ndim > 1 else output[:, None]

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Hold the model alone, in eval mode, with gradients possible; put everything back.

        One thread at a time, over all monitors of a model: function transforms exchange its
        weights for the time of a call. May be nested.
        """
        with self._lock:
            training = [module for module in self.model.modules() if module.training]
            buffers = self._buffers_to_guard()
            try:
                for module in training:
                    module.training = False
                with (
                    torch.inference_mode(False),
                    torch.enable_grad(),
                    self._kernels(),
                    not_recomputing(),
                ):
                    yield
            finally:
                for module in training:
                    module.training = True
                self._restore(buffers)

    @property
    def changes_buffers(self) -> bool:
        """Whether a call of the model was seen to change its buffers."""
        return bool(self._volatile)

    def storage(self) -> tuple[int, ...]:
        """Return where the weights and buffers lie in memory: other ones lie elsewhere."""
        tensors = itertools.chain(self.model.parameters(), self.model.buffers())
        return tuple(tensor.data_ptr() for tensor in tensors)

    def _buffers_to_guard(self) -> dict[str, tuple[Tensor, int, Tensor]]:
        """Return buffers as they are: all at first, then those a call is known to change."""
        if self._volatile is not None and not self._volatile:
            return {}
        return {
            name: (buffer, buffer._version, buffer.clone())
            for name, buffer in self.model.named_buffers()
            if (self._volatile is None or name in self._volatile) and not buffer.is_inference()
        }

    def _restore(self, buffers: dict[str, tuple[Tensor, int, Tensor]]) -> None:
        if not buffers and self._volatile is not None:
            return
        now = dict(self.model.named_buffers())
        changed = {
            name
            for name, (buffer, version, _) in buffers.items()
            if now.get(name) is not buffer or buffer._version != version
        }
        with torch.inference_mode(False), torch.no_grad():
            for name in changed:
                buffer, _, copy = buffers[name]
                buffer.copy_(copy)
                owner, _, leaf = name.rpartition(".")
                self.model.get_submodule(owner)._buffers[leaf] = buffer
        self._volatile = changed if self._volatile is None else self._volatile

    def _kernels(self) -> contextlib.AbstractContextManager[None]:
        """Return a context without cuDNN for recurrent models: its RNNs refuse eval mode."""
        if self._recurrent and self.device.type == "cuda":
            return _cudnn(enabled=False, allow_tf32=torch.backends.cudnn.allow_tf32)
        return contextlib.nullcontext()


def _cudnn(enabled: bool, allow_tf32: bool) -> contextlib.AbstractContextManager[None]:
    """Return a context in which only these two of cuDNN's switches are turned."""
    cudnn = torch.backends.cudnn
    return cudnn.flags(
        enabled,
        benchmark=cudnn.benchmark,
        deterministic=cudnn.deterministic,
        allow_tf32=allow_tf32,
    )


# by model, not by monitor: two monitors of one model must not be in it at once
_LOCKS: weakref.WeakKeyDictionary[nn.Module, threading.RLock] = weakref.WeakKeyDictionary()
_LOCKS_LOCK = threading.Lock()


@contextlib.contextmanager
def differentiable_attention() -> Iterator[None]:
    """Keep torch from attention kernels that are for inference or for one derivative only."""
    with _SWITCH, sdpa_kernel(SDPBackend.MATH):
        before = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(before)


def _lock_of(model: nn.Module) -> threading.RLock:
    with _LOCKS_LOCK:
        return _LOCKS.setdefault(model, threading.RLock())


def _bare(model: nn.Module) -> nn.Module:
    """Return the model inside wrappers that change how it runs but not what it computes."""
    # whoever compiled a model has loaded it, which takes seconds
    compiler = sys.modules.get("torch._dynamo")
    while True:
        if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            model = model.module
        elif compiler is not None and isinstance(model, compiler.OptimizedModule):
            model = model._orig_mod
        else:
            return model


def ordinary(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor made under inference_mode: autograd refuses to save those."""
    if not tensor.is_inference():
        return tensor
    with torch.inference_mode(False):
        return tensor.clone()
