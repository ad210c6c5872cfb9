"""`Fused`: the detector that chooses its own evidence."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn
from typing_extensions import Self

from scodkit.calibration import Calibration, groups_of
from scodkit.errors import (
    CalibrationError,
    CalibrationWarning,
    MergeError,
    NotFittedError,
    OptionError,
)
from scodkit.factors.pieces import finite_samples
from scodkit.fit import data
from scodkit.fit.processes import Processes
from scodkit.fused.choose import Budget, choose, num_classes
from scodkit.fused.features import FeatureBank, ForwardPass, forward_pass, variance_of_logits
from scodkit.fused.standard import FusedExplanation, Standard
from scodkit.likelihoods import Categorical, Likelihood
from scodkit.model.inputs import Inputs
from scodkit.model.parameters import Selection
from scodkit.monitor import Monitor
from scodkit.numerics.hashing import hashed
from scodkit.scoring.evidence import (
    energy,
    is_classifier,
    standardised_logit,
)
from scodkit.scoring.score import Scored

# one in so many held-out samples standardises the parts; p-values are of the others
_STANDARDISE = 4
_FEWEST = 8

_CLASSIFICATION = ("standardised logit", "energy", "neighbours", "class distance")
_REGRESSION = ("scod", "unexplained share")


class Fused:
    """A score fused from several kinds of evidence, for when none is known to be the best.

    Classifiers: how many posterior standard deviations the winning logit stands above the mean
    logit, the energy, the distance to the nearest training features and to the nearest class.
    All others: the SCOD score, and the share of it that the training data leaves open. Labels
    are not needed. Scores are of held-out data's making, so `calibrate` comes before them.

    Args:
        model: Any trained ``nn.Module``; left as found.
        likelihood: What distribution its output parametrises.
        parameters: Which weights, as for `Monitor`; None for the last Linear layer of a
            classifier that ends in one (then no backward pass is needed), and for
            ``LastLayers(fraction=0.15)`` otherwise.
        rank: Directions of curvature to keep; None for as many as the budget allows, up to 100.
        prior_scale: ``eps``, as for `Monitor`.
        layer: Name of the module whose input are a classifier's features; None for the layer
            that is called last.
        budget: Memory and time that a score may take.
        inputs: As for `Monitor`.
        outputs: As for `Monitor`.

    Attributes:
        calibration: Held-out scores; None until calibrated.
        layer_name: Name of the module whose input are the features; None if there are none.

    Examples:
        >>> from scodkit import Categorical
        >>> _ = torch.manual_seed(0)
        >>> net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 3))
        >>> fused = Fused(net, Categorical()).fit([torch.randn(256, 2)], progress=False)
        >>> fused = fused.calibrate([torch.randn(256, 2)], progress=False)
        >>> near, far = fused.score(torch.tensor([[0.1, -0.2], [9.0, -9.0]]))
        >>> bool(near < far)
        True
    """

    def __init__(  # noqa: PLR0913 (each a choice of its own)
        self,
        model: nn.Module,
        likelihood: Likelihood,
        *,
        parameters: Selection | None = None,
        rank: int | None = None,
        prior_scale: float = 1.0,
        layer: str | None = None,
        budget: Budget | None = None,
        inputs: Callable[[Any], Any] | None = None,
        outputs: Callable[[Any], Tensor] | None = None,
    ) -> None:
        picks: dict[str, Any] = {"inputs": inputs, "outputs": outputs}
        self._options: dict[str, Any] = {"prior_scale": prior_scale, **picks}
        # refuses what cannot be right at once; the fit makes it anew, of the weights it chooses
        self._monitor = Monitor(model, likelihood, 1 if rank is None else rank, **self._options)
        modules = dict(self.model.named_modules())
        if layer is not None and layer not in modules:
            listed = ", ".join(map(repr, list(modules)[-8:]))
            raise OptionError(
                f"expected the name of a module of the model, got layer={layer!r}; type one of "
                f"{listed}, or None for the one that is called last"
            )
        self.likelihood = likelihood
        self.layer, self.budget = layer, Budget() if budget is None else budget
        self.calibration: Calibration | None = None
        self._parameters, self._rank = parameters, rank
        self._bank: FeatureBank | None = None
        self._standard: Standard | None = None
        self._by: Callable[[Tensor], Tensor] | None = None
        self.layer_name: str | None = None
        self._closed = False  # whether the logits' variance is had in closed form
        self._why: tuple[str, ...] = ()

    @property
    def model(self) -> nn.Module:
        """The model, without wrappers."""
        return self._monitor.model

    @property
    def monitor(self) -> Monitor:
        """The monitor whose curvature the score rests on, over the weights that were chosen."""
        return self._monitor

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the parts, in the order of `parts`."""
        return _CLASSIFICATION if is_classifier(self.likelihood) else _REGRESSION

    def fit(
        self,
        loader: Iterable[Any],
        *,
        progress: bool = True,
        on_bad: Literal["raise", "skip"] = "raise",
    ) -> Self:
        """Summarise the training data in one pass. Labels are not needed.

        Args:
            loader: Batches as the model takes them; any iterable, read once.
            progress: Show a progress bar.
            on_bad: Raise on a sample with a NaN or an infinity, or skip it.

        Returns:
            The detector itself, fitted. An earlier calibration is dropped; a fit that raises
            leaves it as it was before.
        """
        before = dict(vars(self))
        try:
            first, stream = data.open_stream(loader)
            choice = choose(
                self._monitor,
                first,
                parameters=self._parameters,
                rank=self._rank,
                layer=self.layer,
                budget=self.budget,
                **self._options,
            )
            self._monitor, self._bank = choice.monitor, choice.bank
            self.layer_name, self._why = choice.layer, choice.why
            tap = _Tap(loader, stream, None if self._bank is None else self._absorb)
            self._monitor.fit(tap, progress=progress, on_bad=on_bad)
            self._share_bank()
            self._closed = choice.closed and self._used_once(first)
        except BaseException:
            vars(self).update(before)
            raise
        self.calibration = self._standard = self._by = None
        return self

    def update(self, loader: Iterable[Any], *, progress: bool = True) -> Self:
        """Add new data to a fit: one pass over the new data only.

        Args:
            loader: Batches of new training data.
            progress: Show a progress bar.

        Returns:
            The detector itself; an earlier calibration is dropped. If anything goes wrong, it
            is as it was before.
        """
        self._ready()
        before = self._bank
        self._bank = None if before is None else FeatureBank(before.num_classes, before.most)
        try:
            _, stream = data.open_stream(loader)
            tap = _Tap(loader, stream, None if before is None else self._absorb)
            self._monitor.update(tap, progress=progress)
            self._share_bank()
        except BaseException:
            self._bank = before
            raise
        if before is not None and self._bank is not None:
            self._bank = FeatureBank.merged([before, self._bank])
        self.calibration = self._standard = self._by = None
        return self

    def merge(self, other: Fused) -> Self:
        """Add the data of a detector fitted on another part of the training data.

        Args:
            other: One of the same model and options; left alone.

        Returns:
            This detector, as if fitted on both parts; an earlier calibration is dropped.

        Raises:
            MergeError: If the fits are of other models, options, layers, or of the same data.
        """
        self._ready()
        other._ready()
        if (self.layer_name, self._closed) != (other.layer_name, other._closed):
            raise MergeError(
                f"expected features of one layer in both, got {self.layer_name!r} and "
                f"{other.layer_name!r}; fit both with layer={self.layer_name!r}"
            )
        self._monitor.merge(other._monitor)
        if self._bank is not None and other._bank is not None:
            self._bank = FeatureBank.merged([self._bank, other._bank])
        self.calibration = self._standard = self._by = None
        return self

    def calibrate(
        self,
        loader: Iterable[Any],
        *,
        by: Callable[[Tensor], Tensor] | None = None,
        progress: bool = True,
    ) -> Self:
        """Standardise the parts on held-out data, and turn scores into p-values.

        A quarter of the samples, chosen at random, standardises the parts; the others, which it
        has not seen, are what p-values count (split conformal). So ``n`` held-out samples allow
        false-alarm rates down to ``1 / (3 n / 4 + 1)``.

        Args:
            loader: In-distribution batches that were not used for fitting.
            by: Maps outputs to groups that are calibrated apart, as for `Monitor.calibrate`.
            progress: Show a progress bar.

        Returns:
            The detector itself, calibrated. If anything goes wrong it is as it was before.

        Raises:
            CalibrationError: If there are fewer than 8 samples, or some are not finite.
        """
        self._ready().check("a calibration", contents=True)
        parts, keys, groups = [], [], [torch.empty(0, dtype=torch.int64)]
        samples = data.nothing()
        _, stream = data.open_stream(loader)
        total = data.num_batches(loader)
        for batch in data.batches_of(stream, total, "calibrating", progress):
            digests = data.digests_of(self._monitor._network.inputs_of(batch))
            samples.add(digests)
            keys.append(_keys(digests).cpu())
            output, own = self._evidence(batch)
            parts.append(own.cpu())
            if by is not None:
                groups.append(groups_of(by, output))
        all_parts, order = torch.cat(parts), torch.cat(keys).argsort(stable=True)
        self._check_held_out(all_parts)
        count = max(2, len(order) // _STANDARDISE)
        chosen, others = order[:count], order[count:]
        standard = Standard.of(all_parts[chosen], correlated=not is_classifier(self.likelihood))
        scores = standard.contributions(all_parts[others]).sum(1)
        calibration = Calibration(scores, None if by is None else torch.cat(groups)[others])
        self._standard, self.calibration, self._by = standard, calibration, by
        again = data.seen_again(self._monitor.fitted.samples, samples.all())
        if again is not None:
            warnings.warn(
                f"{again} held-out samples were fitted: a network knows those best, so that "
                "alarms on other data may be far too many; calibrate with data that was not "
                "used for training or fitting",
                CalibrationWarning,
                stacklevel=2,
            )
        return self

    @staticmethod
    def _check_held_out(parts: Tensor) -> None:
        """Refuse held-out data that parts cannot be standardised on.

        Raises:
            CalibrationError: If there is too little of it, or some is not finite.
        """
        if len(parts) < _FEWEST:
            raise CalibrationError(
                f"expected at least {_FEWEST} held-out samples, got {len(parts)}; a quarter of "
                "them standardises the parts of the score, the others give p-values: pass "
                "about 1,000 to fused.calibrate"
            )
        bad = int((~parts.isfinite().all(1)).sum())
        if bad:
            raise CalibrationError(
                f"expected finite held-out data, got {bad} of {len(parts)} samples with a NaN "
                "or an infinity in inputs, features or outputs; remove those from the "
                "calibration set"
            )

    def __call__(self, batch: object) -> Scored:
        """Predict and score.

        Args:
            batch: As the loader yields it: a tensor, a tuple or list, a dict.

        Returns:
            Output, score and p-value.
        """
        standard, calibration = self._calibrated()
        output, parts = self._evidence(batch)
        score = standard.contributions(parts).sum(1)
        p_value = calibration.p_value(score, self._groups(output))
        return Scored(output, score, p_value)

    def score(self, batch: object) -> Tensor:
        """Return the score ``(B,)`` in float64: larger = more atypical, any sign.

        In robust standard deviations of held-out data, summed over the parts.

        Args:
            batch: As the loader yields it; a NaN or an infinity in a sample scores infinity.
        """
        standard, _ = self._calibrated()
        return standard.contributions(self._evidence(batch)[1]).sum(1)

    def p_value(self, batch: object) -> Tensor:
        """Return p-values ``(B,)`` in (0, 1]; smaller = more atypical.

        Args:
            batch: As the loader yields it.
        """
        found = self(batch).p_value
        assert found is not None
        return found

    def flag(
        self, batch: object, false_alarm: float = 0.05, *, confidence: float | None = None
    ) -> Tensor:
        """Return ``(B,)`` booleans: True where the score is too high for a known input.

        Args:
            batch: As the loader yields it.
            false_alarm: Accepted share of alarms on data like the held-out data.
            confidence: As for `Monitor.flag`.
        """
        standard, calibration = self._calibrated()
        output, parts = self._evidence(batch)
        score = standard.contributions(parts).sum(1)
        return calibration.flag(
            score, false_alarm, groups=self._groups(output), confidence=confidence
        )

    def parts(self, batch: object) -> dict[str, Tensor]:
        """Return the parts of the score by name, each ``(B,)``, larger = more atypical.

        Args:
            batch: As the loader yields it.
        """
        self._ready()
        _, parts = self._evidence(batch)
        return dict(zip(self.names, parts.unbind(1), strict=True))

    def explain(self, batch: object) -> FusedExplanation:
        """Return which part accuses each sample, and how strongly; print it for words.

        Args:
            batch: As the loader yields it.
        """
        standard, calibration = self._calibrated()
        output, parts = self._evidence(batch)
        contributions = standard.contributions(parts)
        score = contributions.sum(1)
        p_value = calibration.p_value(score, self._groups(output))
        return FusedExplanation(self.names, parts, contributions, score, p_value)

    def summary(self) -> str:
        """Return what was chosen, why, and how parts are weighed, as lines of text."""
        self._ready()
        basis = self._monitor.basis
        lines = [*self._why]
        lines.append(
            f"rank {basis.rank} of {len(basis.vectors):,} weights, fitted on "
            f"{basis.num_data:,} samples; curvature captured: {basis.captured:.3f}"
        )
        if self._bank is not None:
            size = self._bank.samples
            lines.append(f"training features kept: {len(size):,} of {size.shape[1]} numbers")
        if self._standard is not None and self.calibration is not None:
            standard, held = self._standard, self.calibration.num_data
            lines.append(
                f"standardised on {standard.num_data} held-out samples; p-values count {held} "
                f"others: false-alarm rates from {1 / (held + 1):.2g}"
            )
            for name, *row in zip(
                self.names, standard.median, standard.spread, standard.weight, strict=True
            ):
                median, spread, weight = (float(value) for value in row)
                lines.append(
                    f"  {name}: median {median:.3g}, spread {spread:.3g}, x {weight:.2f}"
                )
        return "\n".join(lines)

    def memory(self) -> dict[str, int]:
        """Return the bytes of what is kept for scoring, besides the model, by name."""
        basis = self._ready().fitted.basis
        kept = {"basis": basis.vectors.nbytes + basis.values.nbytes}
        if self._bank is not None:
            kept["features"] = sum(tensor.nbytes for tensor in self._bank.pack().values())
        return kept

    def __repr__(self) -> str:
        fitted = "not fitted" if self._monitor._scorer is None else "fitted"
        state = "calibrated" if self.calibration else fitted
        return f"Fused({type(self.model).__name__}, {self.likelihood}, {state})"

    def _used_once(self, first: object) -> bool:
        """Return whether one call of a forward pass uses the chosen weights, and no other."""
        with self._ready().prepared(first, None, "a fit") as (call, source, _):
            return bool(source.engine.num_calls(call.samples(slice(0, 1))) == 1)

    def _absorb(self, batch: object) -> None:
        """Add the features of a training batch to the bank."""
        assert self._bank is not None
        network = self._monitor._network
        with network.evaluating():
            call = network.inputs_of(batch)
            if not call.batch_size:
                return
            assert self.layer_name is not None
            passed = forward_pass(network, call, self.layer_name)
            good = _finite(call, passed)
            labels = _predicted(self.likelihood, passed.output)
            keys = _keys(data.digests_of(call))
            rounding = torch.finfo(passed.layer_input.dtype).eps
            self._bank.add(passed.features[good], labels[good], keys[good], rounding)

    def _share_bank(self) -> None:
        """Let every process of a group have the features of all of them."""
        processes = Processes.here()
        if self._bank is not None and processes.count > 1:
            device = self._monitor._network.device
            packed = {name: tensor.cpu() for name, tensor in self._bank.pack().items()}
            banks = [
                FeatureBank.unpack(own, self._bank.most) for own in processes.gathered(packed)
            ]
            self._bank = FeatureBank.merged(banks).on(device)

    # --- Evidence ---

    def _evidence(self, batch: object) -> tuple[Tensor, Tensor]:
        """Return outputs ``(B, *shape)`` and parts ``(B, P)`` in float64.

        All parts of a sample with a NaN or an infinity are infinite.
        """
        scorer = self._ready()
        if self._bank is None:
            return self._of_regression(batch)
        network = self._monitor._network
        if network.inputs_of(batch, self._monitor.fitted.form).batch_size == 0:
            output = scorer(batch, None).output
            return output, torch.empty(0, len(self.names), dtype=torch.float64)
        with scorer.prepared(batch, None, "a score") as (call, _, basis):
            assert self.layer_name is not None
            passed = forward_pass(network, call, self.layer_name)
            good, output, features = _finite(call, passed), passed.output, passed.features
            self._bank = self._bank.on(features.device)
            if self._closed and passed.ends_in_layer:
                places = [block.columns for block in self._monitor.fitted.parameters.blocks]
                variance = variance_of_logits(
                    features,
                    output.shape[1],
                    basis,
                    places[0],
                    places[1] if len(places) > 1 else None,
                    self._monitor.prior_scale,
                )
            else:
                variance = self._monitor.output_variance(call)
            parts = torch.stack(
                [
                    standardised_logit(self.likelihood, output, variance),
                    energy(self.likelihood, output),
                    self._bank.distance_to_neighbours(features.nan_to_num()),
                    self._bank.distance_to_classes(features.nan_to_num()),
                ],
                dim=1,
            )
        good = good & ~parts.isnan().any(1)
        return output.detach(), parts.masked_fill(~good[:, None], torch.inf)

    def _of_regression(self, batch: object) -> tuple[Tensor, Tensor]:
        found = self._monitor.evidence(batch)
        tiny = torch.finfo(torch.float64).tiny
        share = found.unexplained_share.nan_to_num(1.0)  # no weight changes it: nothing is open
        parts = [found.score.double().clamp_min(tiny).log(), share.clamp_min(tiny).log()]
        both = torch.stack(parts, dim=1)
        bad = found.score == torch.inf
        return found.output, both.masked_fill(bad[:, None], torch.inf)

    def _groups(self, output: Tensor) -> Tensor | None:
        return None if self._by is None else groups_of(self._by, output)

    def _ready(self) -> Any:
        if self._monitor._scorer is None:
            raise NotFittedError("expected a fitted Fused; type fused.fit(train_loader) first")
        return self._monitor._ready()

    def _calibrated(self) -> tuple[Standard, Calibration]:
        self._ready()
        if self._standard is None or self.calibration is None:
            raise NotFittedError(
                "expected a calibrated Fused, as parts are standardised on held-out data; type "
                "fused.calibrate(heldout_loader) first"
            )
        return self._standard, self.calibration


class _Tap:
    """The batches of a loader, each shown to a function before it is passed on.

    Args:
        loader: Says how many batches and samples there are.
        stream: All of its batches.
        see: Shown every batch; None for nobody.
    """

    def __init__(
        self, loader: Any, stream: Iterable[Any], see: Callable[[object], None] | None
    ) -> None:
        self._loader, self._stream, self._see = loader, stream, see
        if hasattr(loader, "dataset"):
            self.dataset = loader.dataset

    def __iter__(self) -> Iterator[Any]:
        for batch in self._stream:
            if self._see is not None:
                self._see(batch)
            yield batch

    def __len__(self) -> int:
        return len(self._loader)


def _keys(digests: Tensor) -> Tensor:
    """Return random numbers that depend on the samples alone, ``(B,)`` in int64."""
    return hashed(1, 0, digests) << 31 ^ hashed(1, 1, digests)


def _finite(call: Inputs, passed: ForwardPass) -> Tensor:
    good = finite_samples(call, passed.output)
    return good & passed.layer_input.flatten(1).isfinite().all(1)


def _predicted(likelihood: Likelihood, output: Tensor) -> Tensor:
    """Return the predicted class of each sample, ``(B,)``."""
    classes = num_classes(likelihood, output)
    if isinstance(likelihood, Categorical) and classes > 1:
        return likelihood.logits(output)[:, 0].argmax(1)
    return (output.flatten(1)[:, 0] > 0).long() * (classes - 1)
