"""The parts of a fused score: raw evidence of each kind."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from scodkit.errors import CaptureError, CaptureWarning, MergeError
from scodkit.factors.pieces import finite_samples
from scodkit.fit import data
from scodkit.fit.processes import Processes
from scodkit.fused.features import FeatureBank, ForwardPass, forward_pass, variance_of_logits
from scodkit.likelihoods import Categorical, Likelihood
from scodkit.model.failures import check_runs
from scodkit.model.input_range import InputRange
from scodkit.model.inputs import Inputs
from scodkit.monitor import Monitor
from scodkit.numerics.hashing import hashed
from scodkit.scoring.compiled import Captured, capture
from scodkit.scoring.evidence import energy, is_classifier, standardised_logit
from scodkit.scoring.score import Scorer, rest_of
from scodkit.sketch.eigenbasis import Eigenbasis

_RANGE = "input range"
_CLASSIFICATION = ("standardised logit", "energy", "neighbours", "class distance", _RANGE)
_REGRESSION = ("scod", "unexplained share", _RANGE)


class Parts:
    """Turns batches into the parts of a score.

    Args:
        monitor: Of the chosen weights.
        layer: Name of the module whose input are the features; None if there are none.
        bank: Training features; None if there are none.
        closed: Whether the chosen weights are those of one Linear layer that makes the outputs:
            then the variance of logits has a closed form.
        why: What was chosen, in words.
        range: Of training inputs; None for none yet.
    """

    def __init__(
        self,
        monitor: Monitor,
        layer: str | None,
        bank: FeatureBank | None,
        closed: bool,
        why: tuple[str, ...],
        range: InputRange | None = None,
    ) -> None:
        self.monitor, self.layer, self.bank = monitor, layer, bank
        self.closed, self.why = closed, why
        self.range = InputRange() if range is None else range
        self._captured: Captured | None = None
        # of the recording: where weights lay, what is not a tensor, and the fit it scores by
        self._storage: tuple[int, ...] = ()
        self._rest: list[object] = []
        self._scorer: Scorer | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the parts."""
        return part_names(self.monitor.likelihood)

    # --- Training data ---

    def fit(self, loader: Any, stream: Iterable[Any], **options: Any) -> None:
        """Summarise training data in one pass.

        Args:
            loader: Says how many batches there are.
            stream: All of its batches.
            options: Of `Monitor.fit`.
        """
        self.monitor.fit(self._tapped(loader, stream), **options)
        self._share()

    def update(self, loader: Any, stream: Iterable[Any], **options: Any) -> Parts:
        """Return the same parts with new training data; the monitor is changed.

        Args:
            loader: Says how many batches there are.
            stream: All of its batches.
            options: Of `Monitor.update`.
        """
        bank = self.bank and self.bank.emptied()
        fresh = Parts(self.monitor, self.layer, bank, self.closed, self.why)
        self.monitor.update(fresh._tapped(loader, stream), **options)
        fresh._share()
        fresh.range = self.range.merged(fresh.range)
        if self.bank is not None and fresh.bank is not None:
            fresh.bank = FeatureBank.merged([self.bank, fresh.bank])
        return fresh

    def merge(self, other: Parts) -> Parts:
        """Return the parts of both fits' data; this one's monitor is changed.

        Args:
            other: Of the same model, left alone.

        Raises:
            MergeError: If their features are of different layers or numbers.
        """
        if self.layer != other.layer:
            raise MergeError(
                f"expected features of one layer in both, got {self.layer!r} and "
                f"{other.layer!r}; fit both with layer={self.layer!r}"
            )
        bank = self.bank
        if bank is not None and other.bank is not None:
            bank = FeatureBank.merged([bank, other.bank.on(bank.samples.device)])
        self.monitor.merge(other.monitor)
        both = self.range.merged(other.range)
        return Parts(self.monitor, self.layer, bank, self.closed, self.why, both)

    def used_once(self, batch: object) -> bool:
        """Return whether one call of a forward pass uses the chosen weights, and no other.

        Args:
            batch: Of which the first sample is run.
        """
        with self.monitor._ready().prepared(batch, None, "a fit") as (call, source, _):
            return bool(source.engine.num_calls(call.samples(slice(0, 1))) == 1)

    def _tapped(self, loader: Any, stream: Iterable[Any]) -> _Tap:
        return _Tap(loader, stream, self._absorb)

    def _absorb(self, batch: object) -> None:
        """Add the range and the features of a training batch."""
        network = self.monitor._network
        call = network.inputs_of(batch)
        if not call.batch_size:
            return
        self.range.add(call)
        if self.bank is None:
            return
        assert self.layer is not None
        with network.evaluating():
            try:
                passed = forward_pass(network, call, self.layer)
            except Exception as error:
                check_runs(network, call, error, None)
                raise
            good = _finite(call, passed)
            labels = _predicted(self.monitor.likelihood, passed.output)
            keys = sample_keys(data.digests_of(call))
            rounding = torch.finfo(passed.layer_input.dtype).eps
            self.bank.add(passed.features[good], labels[good], keys[good], rounding)

    def _share(self) -> None:
        """Let every process of a group have the range and the features of all of them."""
        processes = Processes.here()
        if processes.count == 1:
            return
        ranges = processes.gathered(self.range.pack())
        self.range = functools.reduce(InputRange.merged, map(InputRange, ranges))
        if self.bank is not None:
            packed = None
            if not self.bank.empty:
                packed = {name: tensor.cpu() for name, tensor in self.bank.pack().items()}
            everyone = [own for own in processes.gathered(packed) if own is not None]
            banks = [FeatureBank.unpack(own, self.bank.most) for own in everyone]
            self.bank = FeatureBank.merged(banks).on(self.monitor._network.device)

    # --- Evidence ---

    def __call__(self, batch: object) -> tuple[Tensor, Tensor]:
        """Return outputs ``(B, *shape)`` and parts ``(B, P)`` in float64.

        All parts of a sample with a NaN or an infinity are infinite.

        Args:
            batch: As the loader yields it.
        """
        if self.bank is None:
            return self._of_regression(batch)
        scorer = self.monitor._ready()
        inputs = self.monitor._network.inputs_of(batch, scorer.fitted.form)
        if inputs.batch_size == 0:
            nothing = torch.empty(0, len(self.names), dtype=torch.float64)
            return scorer(inputs, None).output, nothing
        with scorer.prepared(inputs, None, "a score") as (call, _, basis):
            recorded = self._captured
            if (
                recorded is not None
                and recorded.fits(call.tensors())
                and self._is_current(call)
            ):
                output, parts = recorded(call.tensors(), 2)
                return output, parts
            return self._of_classifier(call, basis)

    def _of_classifier(
        self, call: Inputs, basis: Eigenbasis, *, checked: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Return outputs and parts of a batch that is not empty, of a model that is held.

        Args:
            call: The batch.
            basis: The eigenbasis, on the model's device.
            checked: Whether outputs are known to be those of the layer.
        """
        assert self.layer is not None
        assert self.bank is not None
        monitor, likelihood = self.monitor, self.monitor.likelihood
        passed = forward_pass(monitor._network, call, self.layer)
        output, features = passed.output.detach(), passed.features
        bank = self.bank = self.bank.on(features.device)
        if self.closed and (checked or passed.ends_in_layer):
            places = {block.name: block.columns for block in monitor.fitted.parameters.blocks}
            variance = variance_of_logits(
                features,
                output.shape[1],
                basis,
                weight=places[f"{self.layer}.weight"],
                bias=places.get(f"{self.layer}.bias"),
                prior_scale=monitor.prior_scale,
            )
        else:
            variance = monitor.output_variance(call)
        parts = torch.stack(
            [
                standardised_logit(likelihood, output, variance),
                energy(likelihood, output),
                bank.distance_to_neighbours(features.nan_to_num()),
                bank.distance_to_classes(features.nan_to_num()),
                self.range.excess(call).to(features.device),
            ],
            dim=1,
        )
        good = _finite(call, passed) & ~parts.isnan().any(1)
        return output, parts.masked_fill(~good[:, None], torch.inf)

    def _of_regression(self, batch: object) -> tuple[Tensor, Tensor]:
        call = self.monitor._network.inputs_of(batch, self.monitor.fitted.form)
        found = self.monitor.evidence(call)
        tiny = torch.finfo(torch.float64).tiny
        share = found.unexplained_share.nan_to_num(1.0)  # of what no weight changes
        score = found.score.double()
        outside = self.range.excess(call).to(score.device)
        logs = score.clamp_min(tiny).log(), share.clamp_min(tiny).log()
        bad = score == torch.inf
        parts = torch.stack([*logs, outside], dim=1)
        return found.output, parts.masked_fill(bad[:, None], torch.inf)

    def compile(self, example: object, *, fuse: bool) -> None:
        """Record the pass for batches of one shape; see `Fused.compile`.

        Args:
            example: A batch of that shape.
            fuse: On CUDA, compile before recording.

        Raises:
            CaptureError: If logits take backward passes, or the pass cannot be recorded.
        """
        if self.bank is None:
            self.monitor.compile(example, fuse=fuse)
            return
        if not self.closed:
            raise CaptureError(
                "expected a classifier that ends in a Linear layer, or a regression, got one "
                "whose logits take backward passes; go on without fused.compile"
            )
        with self.monitor._ready().prepared(example, None, "a recording") as (call, _, basis):

            def run(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
                return self._of_classifier(call.with_tensors(tensors), basis, checked=True)

            run(call.tensors())  # what is prepared once is not to be recorded
            self._captured = capture(run, call.tensors(), fuse=fuse)
            self._storage, self._rest = self.monitor._network.storage(), rest_of(call)
            self._scorer = self.monitor._ready()

    def _is_current(self, call: Inputs) -> bool:
        """Return whether the recording is of such a call, weights and fit as they are now."""
        same_fit = self._scorer is self.monitor._ready()
        if same_fit and self._storage == self.monitor._network.storage():
            return rest_of(call) == self._rest
        self._captured = None
        warnings.warn(
            "weights or buffers have been replaced or moved, or attributes of the model or its "
            "monitor changed, since fused.compile: the recording is dropped; type "
            "fused.compile(example) again",
            CaptureWarning,
            stacklevel=4,
        )
        return False


class _Tap:
    """The batches of a loader, each shown to a function before it is passed on.

    Args:
        loader: Says how many batches and samples there are.
        stream: All of its batches.
        see: Shown every batch.
    """

    def __init__(
        self, loader: Any, stream: Iterable[Any], see: Callable[[object], None]
    ) -> None:
        self._loader, self._stream, self._see = loader, stream, see
        if hasattr(loader, "dataset"):
            self.dataset = loader.dataset

    def __iter__(self) -> Iterator[Any]:
        for batch in self._stream:
            self._see(batch)
            yield batch

    def __len__(self) -> int:
        return len(self._loader)


def part_names(likelihood: Likelihood) -> tuple[str, ...]:
    """Return the names of the parts that a likelihood's score has."""
    return _CLASSIFICATION if is_classifier(likelihood) else _REGRESSION


def num_classes(likelihood: Likelihood, output: Tensor) -> int:
    """Return how many classes a sample can be of; 1 where it has several variables.

    Args:
        likelihood: `Categorical` or `Bernoulli`.
        output: Logits, ``(B, *shape)``.
    """
    if isinstance(likelihood, Categorical):
        logits = likelihood.logits(output)
        return logits.shape[2] if logits.shape[1] == 1 else 1
    return 2 if output[0].numel() == 1 else 1


def _predicted(likelihood: Likelihood, output: Tensor) -> Tensor:
    """Return the predicted class of each sample, ``(B,)``."""
    classes = num_classes(likelihood, output)
    if isinstance(likelihood, Categorical) and classes > 1:
        return likelihood.logits(output)[:, 0].argmax(1)
    return (output.flatten(1)[:, 0] > 0).long() * (classes - 1)


def sample_keys(digests: Tensor) -> Tensor:
    """Return random numbers that depend on the samples alone, ``(B,)`` in int64.

    Args:
        digests: Of the samples, ``(B,)``.
    """
    return hashed(1, 0, digests) << 31 ^ hashed(1, 1, digests)


def split_keys(digests: Tensor) -> Tensor:
    """Return random numbers for each of a set of samples, ``(n,)`` in int64, in any order.

    Those of samples that are alike differ, or all of them would fall on one side of a split.

    Args:
        digests: Of the samples, ``(n,)``.
    """
    _, kind, counts = torch.unique(digests, return_inverse=True, return_counts=True)
    order = kind.argsort(stable=True)
    first = (counts.cumsum(0) - counts)[kind[order]]
    again = torch.empty_like(kind)  # how many like it came before
    again[order] = torch.arange(len(kind)) - first
    return sample_keys(digests + hashed(1, 2, again) * again)


def _finite(call: Inputs, passed: ForwardPass) -> Tensor:
    good = finite_samples(call, passed.output)
    return good & passed.layer_input.flatten(1).isfinite().all(1)
