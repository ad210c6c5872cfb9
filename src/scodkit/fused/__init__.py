"""One score for people who do not want to choose: evidence of several kinds, fused."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from types import NoneType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from typing_extensions import Self

from scodkit.calibration import Calibration, groups_of
from scodkit.errors import (
    CalibrationError,
    EmptyLoaderError,
    MergeError,
    NotFittedError,
    OptionError,
)
from scodkit.explain.columns import Columns
from scodkit.explain.words import Names
from scodkit.fit import data
from scodkit.fit.processes import Processes
from scodkit.fused import fused_file
from scodkit.fused.choose import Budget as Budget
from scodkit.fused.choose import choose
from scodkit.fused.parts import Parts, part_names, split_keys
from scodkit.fused.standard import FusedExplanation as FusedExplanation
from scodkit.fused.standard import Standard
from scodkit.likelihoods import Heads, Likelihood
from scodkit.model.kinds import as_given
from scodkit.model.parameters import Selection
from scodkit.model.projected import Projected
from scodkit.monitor import Monitor
from scodkit.scoring.score import Scored, Scorer

# one in so many held-out samples standardises the parts; p-values are of the others
_STANDARDISE = 4
_FEWEST = 8


class Fused:
    """A score fused from several kinds of evidence, for when none is known to be the best.

    Classifiers: how many posterior standard deviations the winning logit stands above the mean
    logit, the energy, the distance to the nearest training features and to the nearest class.
    All others: the SCOD score, and the share of it that the training data leaves open. For
    both: how far the input is outside the range of training inputs. Labels are not needed.
    Scores are in standard deviations of held-out data, so `calibrate` comes before them.

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
        parameters: Selection | Projected | None = None,
        rank: int | None = None,
        prior_scale: float = 1.0,
        layer: str | None = None,
        budget: Budget | None = None,
        inputs: Callable[[Any], Any] | None = None,
        outputs: Callable[[Any], Tensor] | None = None,
    ) -> None:
        picks: dict[str, Any] = {"inputs": inputs, "outputs": outputs}
        self._options: dict[str, Any] = {"prior_scale": prior_scale, **picks}
        # refuses what cannot be right at once; a fit makes another, of the weights it chooses
        self._unfitted = Monitor(
            model, likelihood, 1 if rank is None else rank, **self._options
        )
        if isinstance(self._unfitted.likelihood, Heads):
            raise OptionError(
                f"expected the likelihood of one output, got {self._unfitted.likelihood}; type "
                "Monitor(model, ...) for several heads, or Fused(..., outputs=lambda out: ...)"
            )
        modules = dict(self.model.named_modules())
        if layer is not None and layer not in modules:
            listed = ", ".join(map(repr, list(modules)[-8:]))
            raise OptionError(
                f"expected the name of a module of the model, got layer={layer!r}; type one of "
                f"{listed}, or None for the one that is called last"
            )
        if not isinstance(budget, (Budget, NoneType)):
            raise OptionError(f"expected a Budget, got {budget!r}; type Budget(bytes=2**28)")
        self.likelihood = likelihood
        self.layer, self.budget = layer, Budget() if budget is None else budget
        self.calibration: Calibration | None = None
        self._parameters, self._rank = parameters, rank
        self._parts: Parts | None = None  # until it is fitted
        self._standard: Standard | None = None
        self._by: Callable[[Tensor], Tensor] | None = None
        self._scorer: Scorer | None = None  # what the calibration is of

    @property
    def model(self) -> nn.Module:
        """The model, without wrappers."""
        return self._unfitted.model

    @property
    def monitor(self) -> Monitor:
        """The monitor whose curvature the score rests on, over the weights that were chosen."""
        return self._ready().monitor

    @property
    def layer_name(self) -> str | None:
        """Name of the module whose input are the features; None if there are none."""
        return self._ready().layer

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the parts, in the order of `parts`."""
        return part_names(self.likelihood)

    def fit(
        self,
        loader: Iterable[Any],
        labels: object = None,
        *,
        progress: bool = True,
        on_bad: Literal["raise", "skip"] = "raise",
    ) -> Self:
        """Summarise the training data in one pass. Labels are not needed.

        Args:
            loader: Batches as the model takes them; any iterable, read once. Or all samples as
                one tensor, numpy array, table or list of rows.
            labels: Not used; here for who types ``fit(x, y)``.
            progress: Show a progress bar.
            on_bad: Raise on a sample with a NaN or an infinity, or skip it.

        Returns:
            The detector itself, fitted. An earlier calibration is dropped; a fit that raises
            leaves it as it was before.

        Raises:
            EmptyLoaderError: If there is no data, in any process.
        """
        data.tell_of_labels(labels)
        processes = Processes.here()
        loader, choice = data.as_loader(loader), None
        with processes.failing_together():
            first, stream = _opened(loader, processes, self._unfitted._network.ordering())
            if stream is not None:
                choice = choose(
                    self._unfitted,
                    first,
                    parameters=self._parameters,
                    rank=self._rank,
                    layer=self.layer,
                    budget=self.budget,
                    **self._options,
                )
        choices = [each for each in processes.gathered(choice) if each is not None]
        if not choices:
            raise EmptyLoaderError(
                "expected data in one of the processes, got empty loaders in all"
            )
        # times are measured, and differ between processes
        parts = choices[0].parts(self._unfitted, **self._options)
        parts.fit(loader, stream or (), progress=progress, on_bad=on_bad)
        with processes.failing_together():
            once = stream is None or not parts.closed or parts.used_once(first)
        parts.closed = parts.closed and all(processes.gathered(once))
        return self._adopt(parts)

    def update(self, loader: Iterable[Any], *, progress: bool = True) -> Self:
        """Add new data to a fit: one pass over the new data only.

        Args:
            loader: Batches of new training data.
            progress: Show a progress bar.

        Returns:
            The detector itself; an earlier calibration is dropped. If anything goes wrong, it
            is as it was before.
        """
        parts, processes = self._ready(), Processes.here()
        loader = data.as_loader(loader)
        order = self.monitor._network.ordering(self.monitor.fitted.column_names)
        with processes.failing_together():
            _, stream = _opened(loader, processes, order)
        return self._adopt(parts.update(loader, stream or (), progress=progress))

    def merge(self, other: Fused) -> Self:
        """Add the data of a detector fitted on another part of the training data.

        Args:
            other: One of the same model and options; left alone.

        Returns:
            This detector, as if fitted on both parts; an earlier calibration is dropped.

        Raises:
            MergeError: If the fits are of other models, options or layers, or of the same data.
        """
        if not isinstance(other, Fused):
            raise MergeError(
                f"expected a Fused to merge with, got a {type(other).__name__}; fit one on the "
                "other part of the data: Fused(model, likelihood).fit(loader)"
            )
        return self._adopt(self._ready().merge(other._ready()))

    def calibrate(
        self,
        loader: Iterable[Any],
        labels: object = None,
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
            labels: Not used, as in `fit`.
            by: Maps outputs to groups that are calibrated apart, as for `Monitor.calibrate`.
            progress: Show a progress bar.

        Returns:
            The detector itself, calibrated. If anything goes wrong it is as it was before.

        Raises:
            CalibrationError: If there are fewer than 8 samples, some are not finite, or all
                are alike.
        """
        data.tell_of_labels(labels)
        monitor = self.monitor
        monitor._ready().check("a calibration", contents=True)
        parts, keys, groups = [], [], [torch.empty(0, dtype=torch.int64)]
        samples, scorer = data.Seen(), monitor._ready()
        for batch in monitor._batches(loader, "calibrating", progress):
            call = monitor._network.inputs_of(batch)
            digests = data.digests_of(call)
            samples.add(digests)
            keys.append(digests.cpu())
            output, own = self._ready()(call)
            parts.append(own.cpu())
            if by is not None:
                groups.append(groups_of(by, output))
        all_parts, order = torch.cat(parts), split_keys(torch.cat(keys)).argsort(stable=True)
        self._check_held_out(all_parts)
        count = max(2, len(order) // _STANDARDISE)
        chosen, others = order[:count], order[count:]
        rounding = torch.finfo(monitor.basis.values.dtype).eps
        standard = Standard.of(all_parts[chosen], rounding)
        if standard.says_nothing:
            raise CalibrationError(
                f"expected held-out samples that differ, got the same parts of the score for "
                f"all {count} that standardise them; pass about 1,000 different ones to "
                "fused.calibrate"
            )
        scores = standard.contributions(all_parts[others]).sum(1)
        calibration = Calibration(scores, None if by is None else torch.cat(groups)[others])
        self._standard, self.calibration, self._by = standard, calibration, by
        self._scorer = scorer
        monitor.fitted.warn_of_held_out(samples.all())
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

    def __call__(self, batch: object, *, progress: bool = True) -> Scored:
        """Predict and score.

        Args:
            batch: As for a `Monitor`: a batch or a whole loader, of tensors or arrays.
            progress: Show a progress bar for a loader.

        Returns:
            Output, score and p-value; arrays where arrays came.
        """
        _, calibration = self._calibrated()

        def scored(each: object) -> Scored:
            output, score = self._output_and_score(each)
            return Scored(output, score, calibration.p_value(score, self._groups(output)))

        return self.monitor._over(scored, batch, progress)

    def _output_and_score(self, batch: object) -> tuple[Tensor, Tensor]:
        standard, _ = self._calibrated()
        output, parts = self._ready()(batch)
        return output, standard.contributions(parts).sum(1)

    def score(self, batch: object, *, progress: bool = True) -> Tensor:
        """Return the score ``(B,)`` in float64: larger = more atypical, any sign.

        In robust standard deviations of held-out data, summed over the parts.

        Args:
            batch: As for a call; a NaN or an infinity in a sample scores infinity.
            progress: Show a progress bar for a loader.
        """
        self._calibrated()
        return self.monitor._over(lambda b: self._output_and_score(b)[1], batch, progress)

    def p_value(self, batch: object, *, progress: bool = True) -> Tensor:
        """Return p-values ``(B,)`` in (0, 1]; smaller = more atypical.

        Args:
            batch: As for a call.
            progress: Show a progress bar for a loader.
        """
        found = self(batch, progress=progress).p_value
        assert found is not None
        return found

    def flag(
        self,
        batch: object,
        false_alarm: float = 0.05,
        *,
        confidence: float | None = None,
        progress: bool = True,
    ) -> Tensor:
        """Return ``(B,)`` booleans: True where the score is too high for a known input.

        Args:
            batch: As for a call.
            false_alarm: Accepted share of alarms on data like the held-out data.
            confidence: As for `Monitor.flag`.
            progress: Show a progress bar for a loader.
        """
        _, calibration = self._calibrated()

        def flags(each: object) -> Tensor:
            output, score = self._output_and_score(each)
            groups = self._groups(output)
            return calibration.flag(score, false_alarm, groups=groups, confidence=confidence)

        return self.monitor._over(flags, batch, progress)

    def parts(self, batch: object) -> dict[str, Tensor]:
        """Return the parts of the score by name, each ``(B,)``, larger = more atypical.

        Args:
            batch: As the loader yields it.
        """
        self._ready()
        _, parts = self._ready()(batch)
        return dict(zip(self.names, parts.unbind(1), strict=True))

    def explain(
        self, batch: object, *, columns: Sequence[str] | None = None
    ) -> FusedExplanation:
        """Return which part accuses each sample, and how strongly; print it for words.

        Args:
            batch: As the loader yields it.
            columns: Names of the columns of a table, as for `Monitor.explain`.
        """
        standard, calibration = self._calibrated()
        output, parts = self._ready()(batch)
        form = self.monitor.fitted.form
        names = Names.of(batch, self.monitor.notes, columns, form=form)
        call = self.monitor._network.inputs_of(batch, form)
        table = Columns.of(self._ready().range, call, names)
        contributions = standard.contributions(parts)
        score = contributions.sum(1)
        p_value = calibration.p_value(score, self._groups(output))
        told = FusedExplanation(self.names, parts, contributions, score, p_value, table)
        return replace(told, score=as_given(score, batch), p_value=as_given(p_value, batch))

    def summary(self) -> str:
        """Return what was chosen, why, and how parts are weighed, as lines of text."""
        chosen, basis = self._ready(), self.monitor.basis
        lines = [*chosen.why]
        lines.append(
            f"rank {basis.rank} of {len(basis.vectors):,} weights, fitted on "
            f"{basis.num_data:,} samples; curvature captured: {basis.captured:.3f}"
        )
        if chosen.bank is not None:
            size = chosen.bank.samples
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

    def compile(self, example: object, *, fuse: bool = False) -> Self:
        """Record the scored forward pass, so that batches of one shape cost far less.

        Args:
            example: A batch of the shape to come.
            fuse: On CUDA, compile before recording, as in `Monitor.compile`.

        Returns:
            The detector itself.

        Raises:
            CaptureError: If the pass cannot be recorded.
        """
        self._ready().compile(example, fuse=fuse)
        return self

    def to(self, device: torch.device | str) -> Self:
        """Return the detector itself, with its model on a device; what it keeps follows.

        Args:
            device: The target.
        """
        self.model.to(device)
        return self

    def save(self, path: str | Path, *, sketch: bool = True) -> None:
        """Write the detector to one file, atomically; the model itself is not in it.

        Args:
            path: Where to.
            sketch: Keep what `update` and `merge` need, as in `Monitor.save`.
        """
        fused_file.save(
            path,
            self._ready(),
            self._standard,
            self.calibration,
            by=self._by,
            budget=self.budget.bytes,
            sketch=sketch,
        )

    @classmethod
    def load(
        cls,
        path: str | Path,
        model: nn.Module,
        *,
        likelihood: Likelihood | None = None,
        by: Callable[[Tensor], Tensor] | None = None,
        inputs: Callable[[Any], Any] | None = None,
        outputs: Callable[[Any], Tensor] | None = None,
    ) -> Self:
        """Read a detector written by `save`.

        Args:
            path: Where from.
            model: The model it was fitted on, with the same weights.
            likelihood: Needed only where a file cannot describe it, as for `Monitor.load`.
            by: The same function it was calibrated with, if there was one.
            inputs: The same function it was made with, if there was one.
            outputs: Likewise.

        Returns:
            The detector, on the model's device.
        """
        picks: dict[str, Any] = {"inputs": inputs, "outputs": outputs}
        parts, standard, calibration, budget = fused_file.load(
            path, model, likelihood=likelihood, by=by, **picks
        )
        monitor = parts.monitor
        fused = cls(
            model,
            monitor.likelihood,
            # what was chosen is chosen again, and what was given was chosen
            parameters=None if parts.closed else monitor.fitted.parameters.selection,
            rank=monitor.rank,
            prior_scale=monitor.prior_scale,
            layer=parts.layer,
            budget=Budget(budget),
            **picks,
        )
        fused._parts, fused._by = parts, by
        fused._standard, fused.calibration = standard, calibration
        fused._scorer = monitor._ready()
        return fused

    def memory(self) -> dict[str, int]:
        """Return the bytes of what is kept for scoring, besides the model, by name."""
        bank = self._ready().bank
        kept = {
            "basis": self.monitor.basis.nbytes,
            "input range": sum(own.nbytes for own in self._ready().range.pack().values()),
        }
        if bank is not None:
            kept["features"] = sum(tensor.nbytes for tensor in bank.pack().values())
        return kept

    def __repr__(self) -> str:
        fitted = "not fitted" if self._parts is None else "fitted"
        state = "calibrated" if self.calibration else fitted
        return f"Fused({type(self.model).__name__}, {self.likelihood}, {state})"

    def _adopt(self, parts: Parts) -> Self:
        self._parts = parts
        self.calibration = self._standard = self._by = self._scorer = None
        return self

    def _groups(self, output: Tensor) -> Tensor | None:
        return None if self._by is None else groups_of(self._by, output)

    def _ready(self) -> Parts:
        if self._parts is None:
            raise NotFittedError("expected a fitted Fused; type fused.fit(train_loader) first")
        return self._parts

    def _calibrated(self) -> tuple[Standard, Calibration]:
        scorer = self.monitor._ready()
        if self._standard is None or self.calibration is None:
            raise NotFittedError(
                "expected a calibrated Fused, as parts are standardised on held-out data; type "
                "fused.calibrate(heldout_loader) first"
            )
        if scorer is not self._scorer:
            raise NotFittedError(
                "expected a Fused as it was calibrated, got one whose monitor has been changed "
                "since: fitted, updated, compressed or offloaded, or given another rank, "
                "prior_scale or task; type fused.calibrate(heldout_loader) again"
            )
        return self._standard, self.calibration


def _opened(
    loader: Iterable[Any], processes: Processes, order: Callable[[Any], Any]
) -> tuple[Any, Iterable[Any] | None]:
    """Return the first batch and all of them; None where only other processes may have any.

    Raises:
        EmptyLoaderError: If there are none, and no other process.
    """
    try:
        return data.open_stream(loader, order)
    except EmptyLoaderError:
        if processes.count == 1:
            raise
        return None, None
