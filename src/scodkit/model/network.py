"""The user's model as a function of its inputs and (chosen) weights.

Everything that differs between models is handled here and nowhere else: which part of a batch
is the input, which part of the result is the output, wrappers, devices, train mode, grad mode.
The model itself is not modified: its twin is run instead, on copies of the inputs.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter, getitem, is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from scodkit.errors import BatchError, OptionError, StaleMonitorError
from scodkit.model.failures import check_dtypes
from scodkit.model.frames import Columns, in_order, ordering
from scodkit.model.inputs import Form, Inputs, default_inputs, ordinary
from scodkit.model.kinds import as_tensors, is_loader
from scodkit.model.parameters import Fingerprints, ParameterSet
from scodkit.model.structure import OF_EVERY_MODULE
from scodkit.model.twin import Hold, Twin, Watcher
from scodkit.numerics.matmul import tf32_products

# torch's choice of kernels is global to the process: one thread at a time may change it
_SWITCH = threading.RLock()
_ANOMALIES = threading.Lock()
_anomalies_off = 0  # number of contexts that keep torch's anomaly detection off
_anomalies_before = (False, True)  # whether it was on, and whether it checked for NaN

_DEVICES = ("cpu", "cuda", "mps", "xpu")  # device types with an autocast switch of their own

_NOTHING = contextlib.nullcontext()

# number of tensors named in the message of a `StaleMonitorError`
_NAMED = 4

_version = attrgetter("_version")
_place = Tensor.data_ptr


def check_not_sharded(model: nn.Module) -> None:
    """Refuse models of whose weights each process has a part.

    Every pass would gather them, and processes do not make the same passes.

    Raises:
        OptionError: If there are such weights.
    """
    for name, parameter in model.named_parameters():
        # by name: importing DTensor takes long
        if type(parameter).__module__.startswith("torch.distributed."):
            raise OptionError(
                f"expected whole weights in this process, got {name!r} sharded over several; "
                "for FSDP2's fully_shard type: with scodkit.unsharded(model): ... in all "
                "processes; for tensor parallelism load the weights into a model that is not "
                "sharded: model.load_state_dict("
                "torch.distributed.checkpoint.state_dict.get_model_state_dict(sharded, "
                "options=StateDictOptions(full_state_dict=True)))"
            )


class Network:
    """A trained model with the mappings from batches to inputs and from results to outputs.

    Args:
        model: Any ``nn.Module``; DDP, DataParallel and ``torch.compile`` wrappers are removed.
        inputs: Maps a batch to the model's arguments: a tensor, a tuple (positional) or a dict
            (keywords). By default a tensor is passed as it is, of a tuple or list the first
            element, of a dict the keys the model's ``forward`` names, without labels.
        outputs: Maps the model's result to the tensor that parametrises the prediction. By
            default the tensor itself, or ``.logits`` if there is one.

    Attributes:
        precision: Autocast dtype, None for the model's own dtypes; see `at_precision`.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: Callable[[Any], Any] | None = None,
        outputs: Callable[[Any], Tensor] | None = None,
    ) -> None:
        self.model = _bare(model)
        check_not_sharded(self.model)
        self._pick_inputs = inputs
        self._pick_outputs = outputs
        self.precision: torch.dtype | None = None
        self._twin = Twin(self.model)
        self._recurrent = any(isinstance(m, nn.RNNBase) for m in self.model.modules())

    @property
    def device(self) -> torch.device:
        """The device of the weights (of the first one, for models spread over several)."""
        first = self._twin.first
        if first is None:
            first = next(self.model.parameters(), torch.empty(0))
        return first.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the first weight in floating point; torch's default without weights."""
        dtypes = (p.dtype for p in self.model.parameters() if p.is_floating_point())
        return next(dtypes, torch.get_default_dtype())

    def is_loader(self, batch: object) -> bool:
        """Return whether a value is a loader of batches, not a batch of this model.

        Args:
            batch: What a user passes for a batch.
        """
        return is_loader(batch, picked=self._pick_inputs is not None)

    @property
    def by_name(self) -> bool:
        """Whether columns of data frames are told apart by name: unless ``inputs`` picks."""
        return self._pick_inputs is None

    def ordering(self, columns: Columns | None = None) -> Callable[[Any], Any]:
        """Return a function that puts columns of batches into one order; see `ordering`.

        Args:
            columns: In that order; None for that of the first batch.
        """
        return ordering(columns) if self.by_name else lambda batch: batch

    def inputs_of(self, batch: object, form: Form | None = None) -> Inputs:
        """Return the model's inputs in a batch, on the model's device.

        Args:
            batch: As the loader yields it; or the inputs themselves. Arrays become tensors,
                those in floating point of the model's dtype.
            form: Of the fit's batches, if known.

        Raises:
            BatchError: If the batch has no tensors, or another form.
            OptionError: If the model has no weights yet.
        """
        picked = batch
        if self._pick_inputs is None:
            if not isinstance(batch, Tensor):
                if form is not None and form.columns is not None:
                    batch = in_order(batch, form.columns)
                batch = as_tensors(batch, self.dtype)
                picked = default_inputs(batch, self.model.forward, form)
        elif not isinstance(batch, Inputs):
            picked = self._pick_inputs(batch)
            if not isinstance(picked, Tensor):
                picked = as_tensors(picked, self.dtype)
        call = Inputs.of(picked)
        if form is not None:
            form.check(call)
        device = self.device
        if device.type == "meta":
            raise OptionError("expected a model with weights, got one on meta; load them first")
        cuda = device.type == "cuda"  # only there do later operations wait for the copy
        for tensor in call.tensors():
            if tensor.device != device or tensor.is_inference():
                return call.map(lambda t: ordinary(t.to(device, non_blocking=cuda)))
        return call

    def __call__(self, call: Inputs, watcher: Watcher | None = None) -> Tensor:
        """Return the output ``(B, *shape)`` of the model with its current weights.

        Args:
            call: The inputs.
            watcher: Entered while the model is run; given the tensors that it is run on.

        Raises:
            ModelCallError: If the model fails on inputs of another dtype than its weights'.
            RuntimeError: If it fails for another reason.
        """
        try:
            with _NOTHING if self.precision is None else self._autocast():
                result = None if self._twin.proven else self._twin.prove(call)
                if result is None or watcher is not None or torch.is_grad_enabled():
                    result = self._twin.run(call, None, watcher)
            output = self._output(result, call.batch_size)
            if watcher is not None and output is not result:  # it must see outputs= as well
                with watcher:
                    output = self._output(result, call.batch_size)
            return output
        except RuntimeError as error:
            check_dtypes(self, call, error)
            raise

    def at(self, weights: Mapping[str, Tensor], call: Inputs) -> Tensor:
        """Return the output ``(B, *shape)`` with some weights replaced."""
        tensors = itertools.chain(self.model.named_parameters(), self.model.named_buffers())
        # autograd refuses to save tensors created in inference mode
        copies = {name: ordinary(t.detach()) for name, t in tensors if t.is_inference()}
        return self.run_at({**copies, **weights}, call)

    def run_at(self, weights: Mapping[str, Tensor], call: Inputs) -> Tensor:
        """Return the same as `at`, for a model without tensors created in inference mode."""
        with self._autocast():
            return self._output(self._twin.run(call, weights), call.batch_size)

    def running(self, example: Inputs) -> nn.Module:
        """Return the module that is run, in eval mode: the twin, or the model itself.

        Args:
            example: Inputs to find out whether the model can have a twin.
        """
        self._twin.prove(example)
        with self._twin.held() as module:
            return module

    def of(self, model: nn.Module) -> Network:
        """Return a copy around a model that is not the user's, and is run without a twin."""
        network = copy.copy(self)
        network.model, network._twin = model, Twin(model, apart=False)
        return network

    def in_float32(self) -> Network:
        """Return a copy of the model with weights and buffers in float32."""
        return Network(copy.deepcopy(self.model).float(), self._pick_inputs, self._pick_outputs)

    def at_precision(self, precision: torch.dtype | None) -> Network:
        """Return the same model under ``torch.autocast`` to a dtype; None for its own."""
        if precision == self.precision:
            return self
        network = copy.copy(self)
        network.precision = precision
        return network

    @contextlib.contextmanager
    def in_full_precision(self) -> Iterator[None]:
        """Run the model in its own dtypes and without TF32 inside this context."""
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
            part, several = "0", "(Categorical(), ...)"
            if isinstance(result, Mapping):
                part = repr(next(iter(result), 0))
                several = f"{{{part}: Categorical(), ...}}"
            raise BatchError(
                f"expected the model to return a tensor, got {type(result).__name__}; say "
                f"which part is the prediction: Monitor(..., outputs=lambda out: out[{part}]); "
                f"for several give each a likelihood: Monitor(model, {several})"
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
        """Hold the model's twin, in eval mode, with gradients enabled.

        One thread at a time: function transforms replace its weights during a call. Reentrant.
        The caller's context does not affect the model: neither grad mode nor
        ``torch.autocast`` nor anomaly detection.

        Returns:
            A context manager.
        """
        cast = any(map(torch.is_autocast_enabled, _DEVICES))
        without_cudnn = self._recurrent and self.device.type == "cuda"
        anomalies = torch.is_anomaly_enabled() or _anomalies_off
        plain = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        if plain and not (cast or without_cudnn or anomalies):
            return Hold(self._twin)
        return self._apart_from_context(without_cudnn)

    @contextlib.contextmanager
    def _apart_from_context(self, without_cudnn: bool) -> Iterator[None]:
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            _not_detecting_anomalies(),
            contextlib.ExitStack() as stack,
        ):
            # certificates hold for the model's own dtypes
            for kind in filter(torch.is_autocast_enabled, _DEVICES):
                stack.enter_context(torch.autocast(kind, enabled=False))
            if without_cudnn:  # its RNNs have no backward pass in eval mode
                tf32 = torch.backends.cudnn.allow_tf32
                stack.enter_context(_cudnn(enabled=False, allow_tf32=tf32))
            stack.enter_context(self._twin.held())
            yield

    @property
    def volatile(self) -> frozenset[str]:
        """Names of the buffers that a call of the model is known to have changed."""
        return self._twin.volatile

    def storage(self) -> tuple[int, ...]:
        """Return the twin's revision, and the addresses of weights and buffers.

        A change of modules, hooks or attributes increases the revision; other tensors have
        other addresses.
        """
        where = tuple(tensor.data_ptr() for tensor in self._twin.tensors())
        return (self._twin.revision, *where)


def _cudnn(enabled: bool, allow_tf32: bool) -> contextlib.AbstractContextManager[None]:
    """Return a context that sets these two of cuDNN's flags and keeps the others."""
    cudnn = torch.backends.cudnn
    return cudnn.flags(
        enabled,
        benchmark=cudnn.benchmark,
        deterministic=cudnn.deterministic,
        allow_tf32=allow_tf32,
    )


@contextlib.contextmanager
def differentiable_attention() -> Iterator[None]:
    """Disable attention kernels without a backward pass, or without second derivatives."""
    with _SWITCH, sdpa_kernel(SDPBackend.MATH):
        before = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(before)


@contextlib.contextmanager
def _not_detecting_anomalies() -> Iterator[None]:
    """Disable anomaly detection: function transforms fail under it."""
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


def state_to_copy(owner: object, *parts: object) -> dict[str, Any]:
    """Return the attributes of a detector, for ``__getstate__``.

    Args:
        owner: The detector.
        parts: Other objects with functions that the user passed in.

    Raises:
        OptionError: If pickle cannot find one of its functions by name.
    """
    caller = sys._getframe(2).f_globals["__name__"]
    if caller == "copy" or "cloudpickle" in caller:  # these accept any function
        return vars(owner)
    picks = [getattr(part, "_pick_outputs", None) for part in parts]  # which may hold another
    for part in (owner, *parts, *picks):
        for name, value in getattr(part, "__dict__", {}).items():
            if isinstance(value, types.FunctionType) and "<" in value.__qualname__:
                raise OptionError(
                    "expected functions that pickle finds by name, got "
                    f"{value.__qualname__} as {name.removeprefix('_pick').lstrip('_')}; write "
                    "it with def at the top level of a module, or type .save(path) here and "
                    ".load(path, model, ...) there"
                )
    return vars(owner)


def _bare(model: nn.Module) -> nn.Module:
    """Return the model inside wrappers that change how it runs but not what it computes."""
    # importing dynamo takes seconds; whoever compiled a model has imported it already
    compiler = sys.modules.get("torch._dynamo")
    while True:
        if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            model = model.module
        elif compiler is not None and isinstance(model, compiler.OptimizedModule):
            model = model._orig_mod
        else:
            return model


# --- Is it the model of the fit? ---


class StateWatch:
    """Detects that a model has changed, in microseconds as long as it has not.

    Compares the identities of all modules, parameters and buffers, the version counters of all
    tensors, and the addresses of parameters. Writes that bypass the counters, through ``.data``
    or a numpy view, are only detected by comparing the contents.

    Args:
        network: The model, in the state to compare with.
        renewal: Code to type to fit again, for messages.
    """

    def __init__(
        self,
        network: Network,
        renewal: str = "monitor.renew(train_loader, heldout_loader)",
    ) -> None:
        self._network, self._renewal = network, renewal
        self._noted = _Noted(network)
        self._seen: int | None = None  # revision of the twin with the recorded objects

    def unmoved(self) -> bool:
        """Return whether the model is unchanged, as far as identities and counters show."""
        noted, twin = self._noted, self._network._twin
        revision = twin.revision if twin.up_to_date() else None
        # a twin that is up to date has compared the identities already
        if revision is None or revision != self._seen:
            if not noted.same_objects():
                return False
            self._seen = revision
        return (
            list(map(_version, noted.counted)) == noted.versions
            and list(map(_place, noted.placed)) == noted.places
            and noted.exempt == twin.volatile
        )

    def settled(
        self, fingerprints: Fingerprints, parameters: ParameterSet, doing: str
    ) -> Fingerprints:
        """Compare the model's contents, and take its current state as the new reference.

        Args:
            fingerprints: Of the recorded model.
            parameters: The chosen weights.
            doing: What is about to be done, for the message.

        Returns:
            The fingerprints, without buffers that the model is known to change itself.

        Raises:
            StaleMonitorError: If the model is not the one of the fit any more.
        """
        model, exempt = self._network.model, self._network.volatile
        noted, now = self._noted, _Noted(self._network)
        moved = [
            name
            for name in {**noted.marks, **now.marks}
            if name not in exempt and noted.marks.get(name) != now.marks.get(name)
        ]
        known = exempt <= set(fingerprints.exempt)
        difference = _other_layer(noted.layers, now.layers)
        # a buffer that turns out volatile is still part of the fingerprints: rely on counters
        if difference is None and (moved or known):
            check_not_sharded(model)  # it may have been whole for a while
            difference = fingerprints.difference_to(model, parameters)
        if difference is not None:
            listed = ", ".join(moved[:_NAMED]) + (" ..." if len(moved) > _NAMED else "")
            raise StaleMonitorError(
                f"expected the model of the fit for {doing}, but {difference}"
                + (f" (touched since: {listed})" if moved else "")
                + f"; load the weights of that time, or fit again: {self._renewal}"
            )
        if not known:
            names = exempt.union(fingerprints.exempt)
            fingerprints = Fingerprints.of(model, parameters, names)
        self._noted, self._seen = now, None
        return fingerprints


class _Noted:
    """A snapshot of a model: identities, versions and addresses of its tensors and layers.

    Args:
        network: The model; buffers that its own forward pass changes are left out.

    Attributes:
        owners, keys, values: The dicts with tensors and layers, their keys and values.
        children, sizes: The dicts of layers, which may grow, and their lengths.
        counted, versions: The tensors with a version counter, and its values.
        placed, places: The parameters, which may be moved in place, and their addresses.
        layers: The layers by name.
        marks: Identity, version and address of each tensor by name.
    """

    def __init__(self, network: Network) -> None:
        self.exempt = exempt = network.volatile
        modules = dict(network.model.named_modules())
        slots = {
            name: (owner, key)
            for prefix, module in modules.items()
            for owner in (module._parameters, module._buffers, module._modules)
            for key in list(owner.keys())
            if (name := f"{prefix}.{key}".lstrip(".")) not in exempt
        }
        self.owners: list[Any] = [owner for owner, _ in slots.values()]
        self.keys = [key for _, key in slots.values()]
        self.values: list[Any] = list(map(getitem, self.owners, self.keys))
        self.children = [module._modules for module in modules.values()]
        self.sizes = list(map(len, self.children))
        tensors = [value for value in self.values if isinstance(value, Tensor)]
        self.counted = [tensor for tensor in tensors if not tensor.is_inference()]
        self.versions = list(map(_version, self.counted))
        self.placed = [t for t in tensors if isinstance(t, nn.Parameter) and _has_place(t)]
        self.places = list(map(_place, self.placed))
        named = dict(zip(slots, self.values, strict=True))
        self.layers = {name: v for name, v in named.items() if isinstance(v, nn.Module)}
        versions = dict(zip(map(id, self.counted), self.versions, strict=True))
        places = dict(zip(map(id, self.placed), self.places, strict=True))
        self.marks = {
            name: (id(value), versions.get(id(value)), places.get(id(value)))
            for name, value in named.items()
            if name not in self.layers
        }

    def same_objects(self) -> bool:
        """Return whether the same layers and tensors are under the same names."""
        try:
            return (
                all(map(is_, map(getitem, self.owners, self.keys), self.values))
                and list(map(len, self.children)) == self.sizes
            )
        except KeyError:  # a layer or tensor was removed
            return False


def _has_place(tensor: Tensor) -> bool:
    """Return whether a tensor has an address, which some subclasses do not."""
    try:
        return _place(tensor) is not None
    except (RuntimeError, NotImplementedError, ValueError):
        return False


def _other_layer(before: Mapping[str, nn.Module], now: Mapping[str, nn.Module]) -> str | None:
    """Return a description of a layer that was added, removed or replaced; None if none was."""
    for name in {**before, **now}:
        if name not in now:
            return f"the layer {name} is gone"
        if name not in before:
            return f"the layer {name} is new"
        old, new = before[name], now[name]
        if old is not new and not _alike(old, new):
            return f"the layer {name} was {old} and is {new}"
    return None


def _alike(old: nn.Module, new: nn.Module) -> bool:
    """Return whether two layers are equal, apart from their tensors and child layers."""
    before, after = (
        {name: value for name, value in vars(module).items() if name not in OF_EVERY_MODULE}
        for module in (old, new)
    )
    return (
        type(old) is type(new)
        and before.keys() == after.keys()
        and all(_equal(before[name], after[name]) for name in before)
    )


def _equal(one: object, other: object) -> bool:
    try:
        if isinstance(one, Tensor) and isinstance(other, Tensor):
            return one is other or torch.equal(one, other)
        return one is other or (type(one) is type(other) and bool(one == other))
    except Exception:  # arrays and other objects whose comparison is not a bool
        return False
