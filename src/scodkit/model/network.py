"""The user's model, seen as a function of its inputs and (chosen) weights.

Everything that differs between models is handled here and nowhere else: what part of a batch
goes in, what part of the result counts as the output, wrappers, devices, train mode, grad mode.
The model is left exactly as it was found: what is run is its twin, on copies of the inputs.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import itertools
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from scodkit.errors import BatchError, ModelCallError, OptionError
from scodkit.model.twin import Twin, own_tensors
from scodkit.numerics.matmul import tf32_products

# torch chooses kernels for the whole process: whoever changes that must change it back first
_SWITCH = threading.RLock()
_ANOMALIES = threading.Lock()
_anomalies_off = 0  # how many keep torch's anomaly detection off
_anomalies_before = (False, True)  # whether it was on, and whether it looked for NaN

_DEVICES = ("cpu", "cuda", "mps", "xpu")  # that torch has a switch for autocast for

_NOTHING = contextlib.nullcontext()

# where a dict has its labels, which are no inputs
LABEL_KEYS = ("label", "labels", "target", "targets")

_ONE_BY_ONE = (
    "score the batches one by one: torch.cat([monitor.score(batch) for batch in batches])"
)


@dataclass(frozen=True)
class Inputs:
    """The arguments of one call of the model; tensors share their first axis, the batch.

    Args:
        args: Positional arguments.
        kwargs: Keyword arguments. Values that are not tensors are passed on as they are.

    Attributes:
        batch_size: Number of samples.
        shapes: Shape and dtype of each tensor.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    batch_size: int = field(init=False, repr=False, compare=False)
    shapes: tuple[Any, ...] = field(init=False, repr=False, compare=False)
    _tensors: list[Tensor] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        values = (*self.args, *self.kwargs.values()) if self.kwargs else self.args
        tensors, shapes, sizes = [], [], set()
        for value in values:
            if isinstance(value, Tensor):
                tensors.append(value)
                shapes.append((value.shape, value.dtype))
                sizes.add(len(value) if value.ndim else None)
        size = next(iter(sizes), None)
        vars(self).update(_tensors=tensors, shapes=tuple(shapes), batch_size=size)
        if len(tensors) < len(values):
            _check_not_nested(values)
        if not sizes:
            raise BatchError(
                "expected at least one tensor among the model's inputs, got "
                f"{[type(value).__name__ for value in values]}; "
                "pick them with Monitor(..., inputs=lambda batch: ...)"
            )
        if len(sizes) > 1 or None in sizes:
            listed = [tuple(t.shape) for t in tensors]
            raise BatchError(
                "expected every input tensor to have the batch as its first axis, got shapes "
                f"{listed}; pick or reshape them with Monitor(..., inputs=lambda batch: ...)"
            )

    def tensors(self) -> list[Tensor]:
        """Return the tensors, positional ones first, keywords in their order."""
        return self._tensors

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

    def repeated(self, count: int) -> Inputs:
        """Return the call with each sample several times, one after the other."""
        if len(self.args) == 1 and not self.kwargs:
            return Inputs((self.args[0].repeat_interleave(count, 0),), {})
        return self.map(lambda t: t.repeat_interleave(count, 0))

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


@dataclass(frozen=True)
class Form:
    """How the batches of a fit look, for later ones to be compared with.

    Args:
        parts: In a tuple or list; 1 for anything else.
        axes: Of each input tensor.
    """

    parts: int
    axes: Sequence[int]

    @staticmethod
    def of(batch: object, call: Inputs) -> Form:
        """Return the form of a batch with these inputs."""
        parts = len(batch) if isinstance(batch, (tuple, list)) else 1
        return Form(parts, [tensor.ndim for tensor in call.tensors()])

    def document(self) -> dict[str, Any]:
        """Return it as plain data, what it is made of."""
        return asdict(self)

    def check(self, call: Inputs) -> None:
        """Refuse a sample without a batch axis: some layers would take it for a batch.

        Raises:
            BatchError: If that is what it looks like.
        """
        for (shape, _), axes in zip(call.shapes, self.axes, strict=False):
            if len(shape) + 1 != axes:
                return
        if len(call.shapes) == len(self.axes):
            shapes = [tuple(shape) for shape, _ in call.shapes]
            raise BatchError(
                f"expected inputs of {', '.join(map(str, self.axes))} axes, the batch first, "
                f"as in the fit, got shapes {shapes}; for a single sample type x[None]; "
                "otherwise pick the inputs with Monitor(..., inputs=lambda batch: ...)"
            )


def _check_not_nested(values: Iterable[object]) -> None:
    """Refuse tensors inside of other values.

    Raises:
        BatchError: If there are such.
    """
    for value in values:
        inner = list(value.values()) if isinstance(value, Mapping) else value
        if isinstance(inner, (list, tuple)) and any(isinstance(v, Tensor) for v in inner):
            raise BatchError(
                f"expected tensors as the model's inputs, got a {type(value).__name__} of "
                "them; pass them one by one (inputs=lambda batch: (a, b) or {'name': a}), with "
                "a small module around the model that puts them together"
            )


def _check_one_batch(batch: object, form: Form | None) -> None:
    """Refuse several batches in place of one, of which all but the first would be dropped.

    Tensors of one form may also be inputs and targets, as an autoencoder has them: they are
    taken for that where the batches of the fit had as many parts or, if nobody knows, where
    they have as many samples.

    Raises:
        BatchError: If that is what they look like.
    """
    if not isinstance(batch, (tuple, list)):
        return
    like = [p for p in batch if isinstance(p, Tensor) and p.ndim]
    like = [p for p in like if p.dtype == like[0].dtype and p.shape[1:] == like[0].shape[1:]]
    if len(like) < 2 or like[0] is not batch[0]:
        return
    several = len({len(p) for p in like}) > 1
    if several or (form is not None and form.parts != len(batch)):
        raise BatchError(
            f"expected one batch, got {len(like)} tensors that look like one each, of shapes "
            f"{[tuple(p.shape) for p in like]}; {_ONE_BY_ONE}; or, if the others are targets, "
            "pass batch[0], or inputs=lambda batch: batch[0] to the Monitor"
        )


class Watcher(contextlib.AbstractContextManager[Any], Protocol):
    """Looks at a forward pass."""

    def watch(self, tensor: Tensor) -> None:
        """Note a tensor that the model is run on: a copy of an input."""


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
        self._twin = Twin(self.model)
        self._recurrent = any(isinstance(m, nn.RNNBase) for m in self.model.modules())

    @property
    def device(self) -> torch.device:
        """Where the weights are (the first one's device, for models spread over several)."""
        first = self._twin.first
        if first is None:
            first = next(self.model.parameters(), torch.empty(0))
        return first.device

    def inputs_of(self, batch: object, form: Form | None = None) -> Inputs:
        """Return the model's inputs in a batch, on the model's device.

        Args:
            batch: As the loader yields it; or the inputs themselves.
            form: What the batches of the fit looked like, where that is known.

        Raises:
            BatchError: If no tensors can be found in the batch, or it looks otherwise.
            OptionError: If the model has no weights yet.
        """
        picked = batch
        if self._pick_inputs is None:
            if not isinstance(batch, Tensor):
                _check_one_batch(batch, form)
                picked = self._default_inputs(batch)
        elif not isinstance(batch, Inputs):
            picked = self._pick_inputs(batch)
        if isinstance(picked, Inputs):
            call = picked
        elif isinstance(picked, Mapping):
            call = Inputs((), dict(picked))
        elif isinstance(picked, (tuple, list)):
            call = Inputs(tuple(picked), {})
        elif isinstance(picked, Tensor):
            call = Inputs((picked,), {})
        else:
            advice = "pass inputs=lambda batch: ... to the Monitor"
            if isinstance(picked, Iterable):  # a loader, or something like it
                advice += f"; of a loader, {_ONE_BY_ONE}"
            raise BatchError(
                f"expected a tensor, tuple, list or dict as a batch, got "
                f"{type(picked).__name__}; {advice}"
            )
        if form is not None:
            form.check(call)
        device = self.device
        if device.type == "meta":
            raise OptionError("expected a model with weights, got one on meta; load them first")
        for tensor in call.tensors():
            if tensor.device != device or tensor.is_inference():
                break
        else:
            return call
        return call.map(lambda t: ordinary(t.to(device, non_blocking=device.type == "cuda")))

    def _default_inputs(self, batch: object) -> object:
        if isinstance(batch, Mapping):
            accepted = inspect.signature(self.model.forward).parameters
            anything = any(p.kind is p.VAR_KEYWORD for p in accepted.values())
            picked = {
                str(key): value
                for key, value in batch.items()
                if (anything or key in accepted) and key not in LABEL_KEYS
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

    def __call__(self, call: Inputs, watcher: Watcher | None = None) -> Tensor:
        """Return the output ``(B, *shape)`` of the model as it stands.

        Args:
            call: The inputs.
            watcher: Entered while the model is run; shown the tensors that it is run on.

        Raises:
            ModelCallError: If the model fails on inputs of another dtype than its weights'.
            RuntimeError: If it fails for another reason.
        """
        self._twin.prove(call.args, call.kwargs)
        args, kwargs = own_tensors(
            call.args, call.kwargs, None if watcher is None else watcher.watch
        )
        try:
            with self._autocast():
                result = self._twin.run(args, kwargs, None, watcher)
            output = self._output(result, call.batch_size)
            if watcher is not None and output is not result:  # it is to see how that is made
                with watcher:
                    output = self._output(result, call.batch_size)
            return output
        except RuntimeError as error:
            own = {p.dtype for p in self.model.parameters() if p.is_floating_point()}
            given = {t.dtype for t in call.tensors() if t.is_floating_point()}
            advice = ""
            if not given and own and self._takes_floats(call, min(own, key=str)):
                given = {t.dtype for t in call.tensors()}
                advice = "x.float() / 255 for bytes of images, or "
            if self.precision is None and given - own and own:
                wanted = " or ".join(sorted(map(str, own)))
                raise ModelCallError(
                    f"expected inputs in {wanted}, as the model's weights are, got "
                    f"{', '.join(sorted(map(str, given)))}, and the model failed on them; type "
                    f"{advice}x.to({wanted.split(' ')[0]})"
                ) from error
            raise

    def _takes_floats(self, call: Inputs, dtype: torch.dtype) -> bool:
        """Return whether a model that failed on integers can be run on the same as floats."""
        floats = call.map(lambda t: t.to(dtype))
        try:
            with torch.no_grad():
                self.model(*floats.args, **floats.kwargs)
        except Exception:  # it is about something else, then
            return False
        return True

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
        weights = {**dict(_made_in_inference_mode(self.model)), **weights}
        return self._run_at(weights, args, kwargs, batch_size)

    def run_at(self, weights: Mapping[str, Tensor], call: Inputs) -> Tensor:
        """Return what `at` does, of a model without weights made in inference mode."""
        return self._run_at(weights, call.args, call.kwargs, call.batch_size)

    def _run_at(
        self,
        weights: Mapping[str, Tensor],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        batch_size: int,
    ) -> Tensor:
        own, named = own_tensors(args, kwargs)
        with self._autocast():
            return self._output(self._twin.run(own, named, weights), batch_size)

    def running(self, example: Inputs) -> nn.Module:
        """Return what is run for the model, held in eval mode: its twin, or the model itself.

        Args:
            example: Inputs to tell with whether the model can have a twin.
        """
        self._twin.prove(example.args, example.kwargs)
        with self._twin.held() as module:
            return module

    def of(self, model: nn.Module) -> Network:
        """Return the same for a model of our own, which is run itself."""
        other = copy.copy(self)
        other.model, other._twin = model, Twin(model, apart=False)
        return other

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
            return _NOTHING
        return torch.autocast(self.device.type, self.precision)

    def _output(self, result: Any, batch_size: int) -> Tensor:
        if self._pick_outputs is not None:
            result = self._pick_outputs(result)
        elif not isinstance(result, Tensor):
            logits = getattr(result, "logits", None)
            result = logits if isinstance(logits, Tensor) else result
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

    def evaluating(self) -> contextlib.AbstractContextManager[Any]:
        """Hold the model's twin, in eval mode, with gradients possible.

        One thread at a time: function transforms exchange its weights for the time of a call.
        May be nested. Nothing of the caller's context reaches the model: neither grad mode nor
        ``torch.autocast`` nor anomaly detection.

        Returns:
            A context.
        """
        cast = [kind for kind in _DEVICES if torch.is_autocast_enabled(kind)]
        without_cudnn = self._recurrent and self.device.type == "cuda"
        anomalies = torch.is_anomaly_enabled() or _anomalies_off
        plain = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        if plain and not (cast or without_cudnn or anomalies):
            return self._twin.held()
        return self._apart_from_context(cast, without_cudnn)

    @contextlib.contextmanager
    def _apart_from_context(self, cast: list[str], without_cudnn: bool) -> Iterator[None]:
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            _not_detecting_anomalies(),
            contextlib.ExitStack() as stack,
        ):
            for kind in cast:  # the model's own dtypes are what certificates are for
                stack.enter_context(torch.autocast(kind, enabled=False))
            if without_cudnn:  # its RNNs refuse eval mode
                tf32 = torch.backends.cudnn.allow_tf32
                stack.enter_context(_cudnn(enabled=False, allow_tf32=tf32))
            stack.enter_context(self._twin.held())
            yield

    @property
    def volatile(self) -> frozenset[str]:
        """Names of the buffers that a call of the model was seen to change."""
        return self._twin.volatile

    @property
    def changes_buffers(self) -> bool:
        """Whether a call of the model was seen to change its buffers."""
        return bool(self._twin.volatile)

    def storage(self) -> tuple[int, ...]:
        """Return where weights and buffers lie in memory, and the model's revision.

        Others lie elsewhere; with other modules, hooks or attributes it is another revision.
        """
        where = tuple(tensor.data_ptr() for tensor in self._twin.tensors())
        return (self._twin.revision, *where)


def _cudnn(enabled: bool, allow_tf32: bool) -> contextlib.AbstractContextManager[None]:
    """Return a context in which only these two of cuDNN's switches are turned."""
    cudnn = torch.backends.cudnn
    return cudnn.flags(
        enabled,
        benchmark=cudnn.benchmark,
        deterministic=cudnn.deterministic,
        allow_tf32=allow_tf32,
    )


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


@contextlib.contextmanager
def _not_detecting_anomalies() -> Iterator[None]:
    """Switch anomaly detection off: function transforms fail under it."""
    global _anomalies_off, _anomalies_before
    with _ANOMALIES:
        if not _anomalies_off:
            nan = torch.is_anomaly_check_nan_enabled()
            _anomalies_before = torch.is_anomaly_enabled(), nan
        was_on = _anomalies_before[0]
        if was_on:
            _anomalies_off += 1
            torch.set_anomaly_enabled(False)
    try:
        yield
    finally:
        if was_on:
            with _ANOMALIES:
                _anomalies_off -= 1
                if not _anomalies_off:
                    torch.set_anomaly_enabled(*_anomalies_before)


def _made_in_inference_mode(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Return copies of the weights and buffers that autograd would refuse."""
    tensors = itertools.chain(module.named_parameters(), module.named_buffers())
    return ((name, ordinary(t.detach())) for name, t in tensors if t.is_inference())


def state_to_copy(owner: object, *parts: object) -> dict[str, Any]:
    """Return the attributes of a detector, for ``__getstate__``.

    Args:
        owner: The detector.
        parts: What else may hold functions it was made with.

    Raises:
        OptionError: If pickle cannot find one of its functions by name.
    """
    caller = sys._getframe(2).f_globals["__name__"]
    by_name = caller != "copy" and "cloudpickle" not in caller  # these take any function
    for name, value in [
        item for part in (owner, *parts) for item in getattr(part, "__dict__", {}).items()
    ]:
        if by_name and isinstance(value, types.FunctionType) and "<" in value.__qualname__:
            raise OptionError(
                "expected functions that pickle finds by name, got "
                f"{value.__qualname__} as {name.removeprefix('_pick').lstrip('_')}; write it "
                "with def at the top level of a module, or type .save(path) here and "
                ".load(path, model, ...) there"
            )
    return vars(owner)


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
