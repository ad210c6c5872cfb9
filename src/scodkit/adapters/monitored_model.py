"""A model that returns its scores, and the same as a graph without Python: export, ONNX.

A monitor of the weights of a last Linear layer scores in closed form (`Head`): it takes what
enters the layer and what leaves it, and no gradient. That can be traced with the model.
"""

from __future__ import annotations

import hashlib
import inspect
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from scodkit.calibration import Calibration
from scodkit.errors import MismatchError, NotFittedError, OptionError, first_line, optional
from scodkit.factors.engine import Head
from scodkit.factors.pieces import fill_samples, finite_rows
from scodkit.fused import Fused
from scodkit.model.inputs import Inputs
from scodkit.model.parameters import LastLayers, select
from scodkit.monitor import Monitor
from scodkit.numerics.files import replacing
from scodkit.scoring.energies import Energies, finite_ones
from scodkit.scoring.score import SelfTest, score

# a batch of one would be taken for a constant by torch.export
_FEWEST = 2

# bytes of an ONNX file that holds its weights: protobuf counts in 31 bits
_LARGEST = 2**31 - 2**20


class Monitored(NamedTuple):
    """What a monitored model returns.

    Attributes:
        output: The model's output, ``(B, *shape)``.
        score: ``(B,)``, larger = more atypical; infinite for samples with a NaN or an infinity.
        p_value: ``(B,)`` in (0, 1], smaller = more atypical.
    """

    output: Tensor
    score: Tensor
    p_value: Tensor


class _Bound(nn.Module):
    """A module that belongs to one monitor: its state loads into no other's."""

    @property
    def digest(self) -> bytes:
        """Tells its monitor from others."""
        raise NotImplementedError

    def get_extra_state(self) -> Tensor:
        """Return the digest, ``(32,)`` bytes, as part of the state."""
        return torch.tensor(list(self.digest), dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        """Refuse the state of a module with another monitor.

        Args:
            state: The digest of its monitor.

        Raises:
            MismatchError: If it is another.
        """
        if bytes(state.tolist()) != self.digest:
            raise MismatchError(
                "expected the state of a module with this very monitor, got that of another: "
                "most of a monitor is no part of a state_dict; type monitor.save(path) there, "
                "and MonitoredModel(Monitor.load(path, model)) here"
            )


class MonitoredModel(_Bound):
    """A model with its monitor, as a module: called as the model is, it returns scores, too.

    The monitor does all the work, in eval mode and without gradients, and refuses to answer for
    a model that has changed. The module holds the model itself, not a copy, and moves it with
    ``.to(device)``; the monitor follows. Its ``state_dict`` has the model's weights and a
    digest of the monitor: it loads into a module with the same monitor and into no other.

    Args:
        monitor: A `Monitor` or `Fused`, fitted and calibrated.

    Examples:
        >>> from scodkit import Categorical, LastLayers
        >>> _ = torch.manual_seed(0)
        >>> net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 3))
        >>> monitor = Monitor(net, Categorical(), parameters=LastLayers(count=1))
        >>> _ = monitor.fit([torch.randn(256, 2)], progress=False)
        >>> _ = monitor.calibrate([torch.randn(99, 2)], progress=False)
        >>> monitored = MonitoredModel(monitor)
        >>> output, score, p_value = monitored(torch.randn(4, 2))
        >>> output.shape, score.shape, p_value.shape
        (torch.Size([4, 3]), torch.Size([4]), torch.Size([4]))
    """

    def __init__(self, monitor: Monitor | Fused) -> None:
        super().__init__()
        _calibration_of(monitor)
        self.monitor = monitor
        self.model = monitor.model

    def forward(self, *args: Any, **kwargs: Any) -> Monitored:
        """Predict and score.

        Args:
            *args: What the model takes.
            **kwargs: Likewise.

        Returns:
            Output, score and p-value, detached, on the model's device.

        Raises:
            OptionError: If the call is being traced, which sees no Python.
        """
        if torch.compiler.is_compiling():
            raise OptionError(
                "expected a call, got a trace of one, which would keep nothing of the monitor; "
                "type monitored.closed_form(example) for a module that can be traced, "
                "monitored.export(example), monitored.save_onnx(path, example), or, for speed, "
                "monitor.compile(example)"
            )
        scored = self.monitor(Inputs(args, kwargs))
        assert scored.p_value is not None
        return Monitored(scored.output, scored.score, scored.p_value.to(scored.score.device))

    def closed_form(self, *args: Any, **kwargs: Any) -> ClosedForm:
        """Return the same as a module of tensor operations, for a monitor of the last layer.

        Args:
            *args: An example of what the model takes, of at least two samples.
            **kwargs: Likewise.

        Raises:
            OptionError: If the score has no closed form, with the reason.
        """
        return ClosedForm(self.monitor, Inputs(args, kwargs))

    def export(self, *args: Any, **kwargs: Any) -> torch.export.ExportedProgram:
        """Return the closed form as a program of ``torch.export``, for any batch size.

        Args:
            *args: As for `closed_form`.
            **kwargs: Likewise.

        Returns:
            A program of the tensors alone, by position: those of ``args``, then of ``kwargs``.

        Raises:
            OptionError: If the score has no closed form, or the model cannot be exported.
        """
        module = _ByPosition(self.closed_form(*args, **kwargs), args, kwargs)
        tensors = tuple(_tensors(args, kwargs).values())
        batch = torch.export.Dim("batch")
        try:
            return torch.export.export(
                module, tensors, dynamic_shapes=(({0: batch},) * len(tensors),), strict=False
            )
        except Exception as error:
            raise OptionError(
                f"expected a model that torch.export takes, got {first_line(error)}; export "
                "the model alone to find out why: torch.export.export(model, (example,))"
            ) from error

    def save_onnx(self, path: str | Path, *args: Any, **kwargs: Any) -> None:
        """Write the closed form as an ONNX file, for any batch size.

        Its inputs have the names of the model's arguments, its outputs are ``output``,
        ``score`` and ``p_value``.

        Args:
            path: Where to.
            *args: As for `closed_form`.
            **kwargs: Likewise.

        Raises:
            OptionError: If the score has no closed form, or the model cannot be exported.
        """
        optional("onnx", "onnx")
        optional("onnxscript", "onnx")
        names = dict(enumerate(inspect.signature(self.model.forward).parameters))
        given = _tensors(args, kwargs)
        program = self.export(*args, **kwargs)
        size = sum(tensor.nbytes for tensor in program.state_dict.values())
        if size > _LARGEST:
            raise OptionError(
                f"expected at most {_LARGEST:,} bytes of weights, as one ONNX file holds, got "
                f"{size:,}; type torch.onnx.export(monitored.export(x), path, dynamo=True, "
                "external_data=True), which writes several"
            )
        try:
            graph = torch.onnx.export(
                program,
                input_names=[
                    names.get(key, f"input_{key}") if isinstance(key, int) else key
                    for key in given
                ],
                output_names=list(Monitored._fields),
                dynamo=True,
                verbose=False,
            )
        except Exception as error:
            raise OptionError(
                f"expected a model that torch.onnx takes, got {first_line(error)}; export the "
                "model alone to find out why: torch.onnx.export(model, (x,), dynamo=True)"
            ) from error
        assert graph is not None
        with replacing(Path(path)) as unfinished:
            graph.save(unfinished, external_data=False)

    @property
    def digest(self) -> bytes:
        """Tells its monitor from others."""
        return _digest_of(self.monitor)


class _ByPosition(nn.Module):
    """A module that is given the tensors among its arguments, in order.

    ``torch.export`` does not take keywords of a module whose signature is open.

    Args:
        module: Any.
        args: Its arguments; tensors among them are examples.
        kwargs: Likewise.
    """

    def __init__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        super().__init__()
        self._module = module
        self._tensors = [*_tensors(args, kwargs)]
        given: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        self._rest = {k: v for k, v in given.items() if k not in self._tensors}
        self._count = len(args)

    def forward(self, *tensors: Tensor) -> Any:
        """Return what the module does.

        Args:
            *tensors: In the order of the example.
        """
        given = {**self._rest, **dict(zip(self._tensors, tensors, strict=True))}
        args = [given.pop(place) for place in range(self._count)]
        return self._module(*args, **given)


def _tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[int | str, Tensor]:
    """Return the tensors among arguments, by position or keyword."""
    given: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
    return {key: value for key, value in given.items() if isinstance(value, Tensor)}


class ClosedForm(_Bound):
    """Output, score and p-value of a monitor of the last Linear layer, in tensor operations.

    A copy of nothing but numbers: it holds the model, the basis and the held-out scores as they
    were when it was made. What a monitor does besides (stale models, ranges of inputs,
    warnings) is not in it, and it runs the model as it is: leave that in eval mode.

    Args:
        monitor: A `Monitor`, fitted and calibrated.
        example: Inputs of at least two samples, on which it is compared with the monitor.

    Raises:
        OptionError: If the score has no closed form, with the reason.
    """

    values: Tensor
    vectors: Tensor
    held_out: Tensor
    groups: Tensor | None

    def __init__(self, monitor: Monitor | Fused, example: Inputs) -> None:
        super().__init__()
        calibration = _calibration_of(monitor)
        if isinstance(monitor, Fused):
            raise OptionError(
                _not_closed("a Monitor of the last layer", "a Fused, which looks at more")
            )
        example = monitor._network.inputs_of(example)
        layer, head = _head_of(monitor, example)
        self.model, self.training = monitor.model, False
        self._digest = _digest_of(monitor)
        self._layer, self._places = layer, (head.weight, head.bias)
        self._network, self._by = monitor._network, monitor._by
        self._likelihood, self._prior_scale = monitor.likelihood, monitor.prior_scale
        self._basis = basis = monitor.basis
        device, groups = basis.values.device, calibration.groups
        self.register_buffer("values", basis.values)
        self.register_buffer("vectors", basis.vectors)
        self.register_buffer("held_out", calibration.scores.to(device))
        self.register_buffer("groups", None if groups is None else groups.to(device))
        copied = example.map(torch.clone)  # a model may write to its inputs
        own = self(*copied.args, **copied.kwargs).score
        test = SelfTest("ClosedForm", own, monitor.score(example))
        if not test.ok:
            expected = "the monitor's own scores in closed form"
            raise OptionError(_not_closed(expected, f"others: {test}"))

    @property
    def digest(self) -> bytes:
        """Tells its monitor from others."""
        return self._digest

    def forward(self, *args: Any, **kwargs: Any) -> Monitored:
        """Predict and score.

        Args:
            *args: What the model takes.
            **kwargs: Likewise.

        Returns:
            Output, score and p-value, detached.

        Raises:
            OptionError: If the numbers were rounded, as by ``.half()``.
        """
        if self.held_out.dtype != torch.float64:
            raise OptionError(
                "expected the numbers of the monitor, got them rounded to "
                f"{self.held_out.dtype}; convert the model, fit it anew, and type "
                "MonitoredModel(monitor).closed_form(example)"
            )
        tensors = [*_tensors(args, kwargs).values()]
        features: list[Tensor] = []

        def keep(_: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
            features.append(next(iter((*given, *named.values()))).detach())

        layer = self.model.get_submodule(self._layer)
        with layer.register_forward_pre_hook(keep, with_kwargs=True):
            result = self.model(*args, **kwargs)
        output = self._network._output(result, tensors[0].shape[0]).detach()
        finite = finite_rows([*tensors, output])
        head = Head(fill_samples(features[0], ~finite), *self._places)
        clean = fill_samples(output, ~finite)
        parts = Energies(*head.energies(clean, self._likelihood, self.vectors))
        basis = replace(self._basis, values=self.values, vectors=self.vectors)
        scores = score(finite_ones([parts], finite), basis, self._prior_scale)
        scores = scores.to(self.values.dtype)
        return Monitored(output, scores, self._p_value(scores, output))

    def _p_value(self, scores: Tensor, output: Tensor) -> Tensor:
        """Return what `Calibration.p_value` does, by comparing with every held-out score."""
        judged = scores.double()[:, None]
        above = self.held_out >= judged
        if self._by is None or self.groups is None:
            return (1 + above.sum(1)).double() / (len(self.held_out) + 1)
        own = self.groups == self._by(output)[:, None]
        pooled = ~own.any(1, keepdim=True) | (judged == torch.inf)
        own = own | pooled
        return (1 + (above & own).sum(1)).double() / (own.sum(1) + 1).double()


def _digest_of(monitor: Monitor | Fused) -> bytes:
    """Return what tells a monitor from others: of model, fit and held-out scores."""
    fit = monitor.monitor if isinstance(monitor, Fused) else monitor
    about = fit.fitted.fingerprints, fit.likelihood, fit.prior_scale, fit.basis.num_data
    digest = hashlib.sha256(repr(about).encode())
    for tensor in (_calibration_of(monitor).scores, fit.basis.values):
        digest.update(tensor.cpu().double().numpy().tobytes())
    return digest.digest()


def _calibration_of(monitor: Monitor | Fused) -> Calibration:
    """Return the held-out scores of a monitor.

    Raises:
        OptionError: If it is no monitor.
        NotFittedError: If it is not calibrated.
    """
    if not isinstance(monitor, (Monitor, Fused)):
        raise OptionError(
            f"expected a Monitor or a Fused, got a {type(monitor).__name__}; type "
            "MonitoredModel(Monitor(model, likelihood).fit(train).calibrate(heldout))"
        )
    if monitor.calibration is None:
        raise NotFittedError(
            "expected a calibrated monitor, got one without p-values; type "
            "monitor.calibrate(heldout_loader) first"
        )
    return monitor.calibration


def _head_of(monitor: Monitor, example: Inputs) -> tuple[str, Head]:
    """Return the name of the layer that a monitor is of, and where its weights are.

    Args:
        monitor: Fitted.
        example: Inputs of the model.

    Raises:
        OptionError: If its score has no closed form.
    """
    if example.batch_size < _FEWEST:
        raise OptionError(
            f"expected an example of at least {_FEWEST} samples, so that the size of a batch "
            f"is seen to vary, got {example.batch_size}; type torch.cat([x, x])"
        )
    if any(module.training for module in monitor.model.modules()):
        raise OptionError(
            "expected a model in eval mode, as it is scored, got one in train mode, whose "
            "dropout would be in the graph; type model.eval()"
        )
    if monitor.precision is not None:
        raise OptionError(
            f"expected a monitor that scores in its model's own precision, got one that scores "
            f"in {monitor.precision}, whose rounding is not exported; type monitor.precision = "
            "None, and monitor.calibrate(heldout_loader) again"
        )
    if monitor.task is not None:
        raise OptionError(_not_closed("a score of the whole prediction", "one with a task"))
    if not monitor.likelihood.closed or monitor.likelihood.worst:
        raise OptionError(_not_closed("a likelihood in closed form", str(monitor.likelihood)))
    with monitor._ready().prepared(example, None, "a closed form") as (call, source, _):
        head = source.engine.linearize(call).head
    layers = {name.rpartition(".")[0] for name in monitor.fitted.parameters.names}
    listed = ", ".join(map(repr, sorted(layers)[:4])) + (", ..." if len(layers) > 4 else "")
    expected = "the weights of one Linear layer whose output (B, d) is the model's"
    last = select(LastLayers(count=1), monitor._network, example).names
    if not {*monitor.fitted.parameters.names} <= {*last}:
        raise OptionError(_not_closed(expected, f"those of {listed}"))
    layer = layers.pop()
    if head is None:
        raise OptionError(
            f"expected {expected}, got those of {listed}, whose output is not what the model "
            "returns: such a score has no closed form to export; let the model end in a Linear "
            "layer, and fit and calibrate that"
        )
    own = type(monitor.model.get_submodule(layer))
    if own.forward is not nn.Linear.forward:
        got = f"{layer!r}, a {own.__name__}"
        raise OptionError(_not_closed("torch's own Linear layer at the end", got))
    return layer, head


def _not_closed(expected: str, got: str) -> str:
    return (
        f"expected {expected}, got {got}: such a score has no closed form to export; type "
        "Monitor(model, likelihood, parameters=LastLayers(count=1)), without a task, and fit "
        "and calibrate that"
    )
