"""The monitor: a trained network with an out-of-distribution score."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from typing_extensions import Self

from scodkit import monitor_file as storage
from scodkit.calibration import Calibration, groups_of
from scodkit.errors import CalibrationWarning, MergeError, NotFittedError, OptionError
from scodkit.explain import Explanation, References, explain
from scodkit.explain.words import Names
from scodkit.factors.choose import CHECK_EVERY
from scodkit.factors.pieces import FactorSource, MemoryBudget
from scodkit.fit import data
from scodkit.fit import fit as fitting
from scodkit.fit.first_batch import Preparation
from scodkit.fit.fitted import UNFITTED, FitOptions, Fitted, Recipe, check_options
from scodkit.fit.memory import Plan
from scodkit.fit.probes import check_probes
from scodkit.fit.processes import Processes
from scodkit.likelihoods import Likelihood
from scodkit.likelihoods.heads import as_likelihood
from scodkit.likelihoods.task import Task
from scodkit.model.kinds import as_given, over_batches
from scodkit.model.network import Network, StateWatch, state_to_copy
from scodkit.model.parameters import ParameterSet, Selection
from scodkit.model.projected import Projected, Projections
from scodkit.numerics import artifact
from scodkit.scoring import score as scoring
from scodkit.scoring.boxes import BoxScores, box_scores, has_boxes
from scodkit.scoring.certificate import Certificate, certified
from scodkit.scoring.evidence import (
    Evidence,
    OutputVariances,
    is_classifier,
    standardised_logit,
    unexplained_share,
)
from scodkit.scoring.positions import PositionScores, position_scores
from scodkit.sketch import Nystrom, Sketch
from scodkit.sketch.eigenbasis import Eigenbasis
from scodkit.summary import Summary, summarise

_Found = TypeVar("_Found")
_Parts = TypeVar("_Parts", BoxScores, PositionScores)

_UNCALIBRATED = "expected a calibrated monitor; type monitor.calibrate(heldout_loader) first"


class Monitor:
    """Equips a trained network with a task-relevant uncertainty score, without changing it.

    Args:
        model: Any trained ``nn.Module``. Its device, dtype, buffers, mode and gradients are
            not modified.
        likelihood: The distribution that the output parametrises; for several heads one each,
            by name, as `Heads`.
        rank: ``k``, the number of directions of the training data's curvature to keep.
        sketch: How the curvature is summarised in one pass; `Nystrom` by default.
        parameters: Which weights: ``"all"``, ``LastLayers(...)``, names or glob patterns, or a
            callable on ``(name, parameter)``; or ``Projected(...)`` for any of these in
            projected coordinates.
        prior_scale: ``eps``, standard deviation of the prior of a weight.
        task: The part of the prediction that matters downstream; all of it by default.
        inputs: Picks the model's inputs from a batch: a tensor, a tuple (positional) or a dict
            (keywords). Default: a tensor itself, the first element of a tuple or list, the
            arguments of ``forward`` from a dict.
        outputs: Picks the prediction from the model's result.

    Attributes:
        memory_budget: Bytes for per-sample gradients at a time: by default 1 GiB, on a GPU an
            eighth of its memory.
        calibration: Held-out scores; None until calibrated.
        notes: Anything that JSON can represent; saved and loaded with the monitor.

    Examples:
        >>> from torch import nn
        >>> from scodkit import Monitor, Gaussian
        >>> _ = torch.manual_seed(0)
        >>> net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))
        >>> monitor = Monitor(net, Gaussian(), rank=20)
        >>> _ = monitor.fit([torch.randn(64, 2)], progress=False)
        >>> near, far = monitor.score(torch.tensor([[0.1, -0.2], [9.0, 9.0]]))
        >>> bool(near < far)
        True
    """

    memory_budget = MemoryBudget()

    def __init__(  # noqa: PLR0913 (each a choice of its own)
        self,
        model: nn.Module,
        likelihood: Likelihood | Mapping[str, Likelihood] | Sequence[Likelihood | None],
        rank: int = 50,
        *,
        sketch: Sketch | None = None,
        parameters: Selection | Projected = "all",
        prior_scale: float = 1.0,
        task: Task | None = None,
        inputs: Callable[[Any], Any] | None = None,
        outputs: Callable[[Any], Any] | None = None,
    ) -> None:
        self.likelihood = as_likelihood(likelihood)
        sketch = Nystrom() if sketch is None else sketch
        check_options(model, self.likelihood, rank, sketch, prior_scale, task)
        self.sketch = sketch
        self.calibration: Calibration | None = None
        self.notes: dict[str, Any] = {}
        self._by: Callable[[Any], Tensor] | None = None
        self._check_every = CHECK_EVERY
        self._rank = rank
        self._prior_scale = prior_scale
        self._task = task
        self._selection = parameters
        self._functions = storage.given(inputs=inputs, outputs=outputs)
        self._network = Network(model, inputs, self.likelihood.picking(outputs))
        self._state_watch = StateWatch(self._network)
        self._scorer: scoring.Scorer | None = None
        self._memory_budget: int | None = None  # None for the default of the device
        self._output_variances = OutputVariances()

    def fit(  # noqa: PLR0913 (each a choice of its own)
        self,
        loader: Iterable[Any],
        labels: object = None,
        *,
        progress: bool = True,
        on_bad: Literal["raise", "skip"] = "raise",
        check_deterministic: bool = True,
        checkpoint: str | Path | None = None,
        every: int = 100,
        precision: torch.dtype | None = None,
        together: bool = True,
        products: bool | None = None,
    ) -> Self:
        """Summarise the training data in one pass. Labels are not needed.

        Inside a process group of ``torch.distributed`` every process passes its own part of
        the data (`scodkit.parts.Shard`), and gets the fit of all of it.

        Args:
            loader: Batches as the model takes them; any iterable, read once. Or all samples as
                one tensor, numpy array, table or list of rows. Columns of data frames are known
                by name from then on, in whatever order they come.
            labels: Not used; here for who types ``fit(x, y)``.
            progress: Show a progress bar.
            on_bad: Raise on a sample with a NaN or an infinity, or skip it and count it in
                ``monitor.skipped``.
            check_deterministic: Compare two runs of the model on the first batch, and two
                reads of the first item of the data set.
            checkpoint: A file for the unfinished fit: if a fit is killed and started again
                with it, it resumes there and ends with the same result.
            every: Batches between two checkpoints.
            precision: ``torch.bfloat16`` to run the model and compute gradients in it during
                the fit, for speed on GPUs, without certificates. None for the model's own.
            together: False to fit alone inside a process group of ``torch.distributed``.
            products: True to multiply the curvature with the sketch's columns matrix-free,
                without per-sample gradients: the same sketch, faster for hundreds of outputs
                and more, but without certificates, and with ``basis.trace`` estimated. None
                for the cheaper method, which `plan` reports.

        Returns:
            The monitor itself, fitted. An earlier calibration is dropped.

        Raises:
            ScodError: As a subclass from `scodkit.errors`; the monitor is then unchanged.
        """
        data.tell_of_labels(labels)
        options = FitOptions(
            progress=progress,
            on_bad=on_bad,
            check_deterministic=check_deterministic,
            checkpoint=None if checkpoint is None else Path(checkpoint),
            every=every,
            precision=precision,
            together=together,
            products=products,
        )
        watch = StateWatch(self._network)  # before the fit takes fingerprints of the model
        fitted, source = fitting.fit(self._network, self._recipe, loader, options)
        if not watch.unmoved():
            fitted = fitted.settled(watch, "the end of it")
        self._state_watch = watch
        return self._adopt(replace(fitted, precision=self.precision), source)

    def update(
        self,
        loader: Iterable[Any],
        *,
        progress: bool = True,
        on_bad: Literal["raise", "skip"] = "raise",
        check_deterministic: bool = True,
        precision: torch.dtype | None = None,
        together: bool = True,
    ) -> Self:
        """Add new data to a fit: one pass over the new data only.

        Args:
            loader: Batches of new training data.
            progress: As in `fit`.
            on_bad: As in `fit`.
            check_deterministic: As in `fit`.
            precision: As in `fit`.
            together: As in `fit`.

        Returns:
            The monitor itself; an earlier calibration is dropped.

        Raises:
            ScodError: As a subclass, also if some of the data was fitted already: it would
                count twice. The monitor is then unchanged.
        """
        processes = Processes.here(together)
        with processes.failing_together():
            before = self._ready().check("an update", contents=True)
            before.needed_state()  # raises before any data is read
        same = replace(self._recipe, selection=before.parameters)
        options = FitOptions(
            progress=progress,
            on_bad=on_bad,
            check_deterministic=check_deterministic,
            precision=precision,
            together=together,
            columns=before.column_names,
        )
        fresh, source = fitting.fit(self._network, same, loader, options)
        with processes.failing_together():  # the fit may have found buffers to be volatile
            before = self._ready().check("an update")
        before.check_other_samples(fresh.samples)
        return self._adopt(before.merged(fresh, self.rank, consume=True), source)

    def merge(self, other: Monitor) -> Self:
        """Add the data of a monitor fitted on another part of the training data.

        Args:
            other: A monitor of the same model, parameters and sketch; not modified.

        Returns:
            This monitor, as if fitted on both parts; an earlier calibration is dropped.

        Raises:
            MergeError: If the fits are of other models, options, or of the same data.
        """
        scorer, fitted = self._ready(), other._ready().fitted
        if self.prior_scale != other.prior_scale:
            raise MergeError(
                f"expected fits with one prior_scale, got {self.prior_scale} and "
                f"{other.prior_scale}; set the one that is meant in both: "
                f"other.prior_scale = {self.prior_scale}"
            )
        scorer.check("a merge", contents=True)
        merged = scorer.fitted.merged(fitted, self.rank)
        scorer.fitted.check_other_samples(fitted.samples)
        return self._adopt(merged, scorer.source)

    def calibrate(
        self,
        loader: Iterable[Any],
        labels: object = None,
        *,
        by: Callable[[Any], Tensor] | None = None,
        progress: bool = True,
    ) -> Self:
        """Score held-out data, so that scores get p-values and flags a false-alarm rate.

        Args:
            loader: In-distribution batches that were not used for fitting.
            labels: Not used, as in `fit`.
            by: Maps outputs, as a call returns them, to integer groups ``(B,)`` that are
                calibrated separately, for instance `predicted_class`; then the rate holds in
                each group.
            progress: Show a progress bar.

        Returns:
            The monitor itself, calibrated. If the calibration raises, it is unchanged.
        """
        data.tell_of_labels(labels)
        self._ready().check("a calibration", contents=True)
        scores, groups = [torch.empty(0)], [torch.empty(0, dtype=torch.int64)]
        boxes, samples = [torch.empty(0)], data.Seen()
        for batch in self._batches(loader, "calibrating", progress):
            call = self._network.inputs_of(batch)
            samples.add(data.digests_of(call))
            scored = self._ready()(call, self._memory_budget)
            scores.append(scored.score.cpu())
            if by is not None:
                groups.append(groups_of(by, self.likelihood.shown(scored.output)))
            if has_boxes(self.likelihood) and call.batch_size:
                boxes.append(self._boxes(call).worst.cpu())
        group = None if by is None else torch.cat(groups)
        worst = Calibration(torch.cat(boxes), group) if len(boxes) > 1 else None
        self.calibration, self._by = Calibration(torch.cat(scores), group, worst), by
        again = self.fitted.warn_of_held_out(samples.all())
        self.notes.pop("held_out_fitted", None)
        self.notes |= {} if again is None else {"held_out_fitted": str(again)}  # for reports
        return self

    def renew(
        self, loader: Iterable[Any], heldout: Iterable[Any] | None = None, **options: Any
    ) -> Self:
        """Fit and calibrate again, with the same options, on the model's current state.

        The remedy for a `scodkit.errors.StaleMonitorError`.

        Args:
            loader: Batches of training data, as for `fit`.
            heldout: Batches of held-out data, as for `calibrate`, with the same groups.
            **options: Of `fit`.

        Returns:
            The monitor itself. If anything raises, it is unchanged.
        """
        before = dict(vars(self))
        try:
            if isinstance(self._selection, ParameterSet):  # from a file, with outdated shapes
                self._selection = self._selection.selection
            self.fit(loader, **options)
            if heldout is not None:
                progress = options.get("progress", True)
                self.calibrate(heldout, by=before["_by"], progress=progress)
        except BaseException:
            vars(self).update(before)
            raise
        if heldout is None and before["calibration"] is not None:
            warnings.warn(
                "the monitor is not calibrated any more: no held-out data was given; type "
                "monitor.calibrate(heldout_loader)",
                CalibrationWarning,
                stacklevel=2,
            )
        return self

    def __call__(self, batch: object, *, progress: bool = True) -> scoring.Scored:
        """Predict and score.

        Args:
            batch: As the loader yields it: a tensor, an array, a tuple or list, a dict. Or a
                whole loader, whose results are joined, on the CPU.
            progress: Show a progress bar for a loader.

        Returns:
            Output, score and, once calibrated, p-value; arrays where arrays came.
        """
        return self._over(self._scored, batch, progress)

    def _over(self, run: Callable[[Any], _Found], batch: object, progress: bool) -> _Found:
        """Return what is found in a batch or in those of a loader; see `over_batches`."""
        if isinstance(batch, Tensor):
            return run(batch)
        whole = self._network.is_loader(batch)
        reading = partial(self._batches, doing="scoring", progress=progress)
        return over_batches(run, batch, reading if whole else None)

    def _scored(self, batch: object) -> scoring.Scored:
        scored, p_value = self._ready()(batch, self._memory_budget), None
        if self.calibration is not None:
            score = scored.score.cpu()  # one transfer for both uses
            p_value = self._p_value(score, scored.output)
            self.calibration.crowd.look(score)
        return scoring.Scored(self.likelihood.shown(scored.output), scored.score, p_value)

    def _p_value(self, score: Tensor, output: Tensor) -> Tensor | None:
        """Return p-values of scores on the CPU, where the output is; None if uncalibrated."""
        if self.calibration is None:
            return None
        groups = self._by and groups_of(self._by, self.likelihood.shown(output))
        return self.calibration.p_value(score, groups).to(output.device)

    def score(self, batch: object, *, progress: bool = True) -> Tensor:
        """Return the score ``(B,)``: nats (squared units), >= 0, larger = more atypical.

        Args:
            batch: As for a call; a NaN or an infinity in a sample scores infinity.
            progress: Show a progress bar for a loader.
        """
        scorer = self._ready()
        return self._over(lambda b: scorer(b, self._memory_budget).score, batch, progress)

    def boxes(self, batch: object, *, progress: bool = True) -> BoxScores:
        """Predict, and score every box, of a model whose `Heads` are of boxes.

        Args:
            batch: As for a call.
            progress: Show a progress bar for a loader.

        Returns:
            The boxes with their scores and, once calibrated, p-values: of images like the
            held-out ones, at most a share ``a`` has any box with a p-value up to ``a``.
        """
        return self._over(self._boxes, batch, progress)

    def _boxes(self, batch: object) -> BoxScores:
        return self._parts(box_scores, batch, self.calibration and self.calibration.boxes)

    def positions(self, batch: object, *, progress: bool = True) -> PositionScores:
        """Predict, and score every position: token of a sequence, pixel of a map.

        Args:
            batch: As for a call.
            progress: Show a progress bar for a loader.

        Returns:
            The positions with their scores and, once calibrated, with ``pool="max"``, p-values:
            of samples like the held-out ones, at most a share ``a`` has any position with a
            p-value up to ``a``.
        """
        calibration = self.calibration if (self.task or self.likelihood).worst else None
        run = partial(self._parts, position_scores, calibration=calibration)
        return self._over(run, batch, progress)

    def _parts(
        self,
        scores: Callable[..., _Parts],
        batch: object,
        calibration: Calibration | None,
    ) -> _Parts:
        """Return the scores of boxes or positions, with p-values if there is a calibration."""
        with self._ready().prepared(batch, self._memory_budget, "scores of parts") as prepared:
            found = scores(*prepared, self.prior_scale)
        groups = None if self._by is None else groups_of(self._by, found.output)
        return found.judged(calibration, groups)

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
            confidence: Probability with which that share holds for this particular set of
                held-out data; None for on average over such sets.
            progress: Show a progress bar for a loader.

        Raises:
            NotFittedError: If the monitor is not calibrated.
        """
        scorer, calibration, by = self._ready(), self.calibration, self._by
        if calibration is None:
            raise NotFittedError(_UNCALIBRATED)

        def flags(each: object) -> Tensor:
            scored = scorer(each, self._memory_budget)
            score = scored.score.cpu()
            groups = by and groups_of(by, self.likelihood.shown(scored.output))
            found = calibration.flag(score, false_alarm, groups=groups, confidence=confidence)
            calibration.crowd.look(score)
            return found.to(scored.score.device)

        return self._over(flags, batch, progress)

    def selftest(self, batch: object) -> scoring.SelfTest:
        """Compare the scores of a batch with those of each sample alone, by plain autograd.

        Args:
            batch: As the loader yields it; each sample takes a backward pass per direction.

        Returns:
            Both scores, their largest difference, and whether that is rounding error.
        """
        return self._ready().selftest(batch, self.memory_budget)

    def certify(self, batch: object) -> Certificate:
        """Return bounds on the exact score, the one from the whole Fisher information.

        Args:
            batch: As the loader yields it.

        Returns:
            The score with its lower and upper bounds and the paper's bound, each ``(B,)``.
        """
        return certified(self._ready(), batch, self.memory_budget, self.prior_scale)

    def features(self, batch: object) -> Tensor:
        """Return ``U^T L`` as ``(B, p, k)``, for detectors built on top of this one.

        Args:
            batch: As the loader yields it.
        """
        return self._ready().features(batch, self.memory_budget)

    def output_variance(self, batch: object) -> Tensor:
        """Return the trace of the outputs' covariance under the posterior of the weights.

        Takes one backward pass per output, or eight if there are more than 32 outputs.

        Args:
            batch: As the loader yields it.

        Returns:
            ``(B,)`` in float64, squared units of the output, >= 0; infinite for samples with a
            NaN or an infinity.
        """
        with self._ready().prepared(batch, self._memory_budget, "a variance") as prepared:
            return self._output_variances(*prepared, self.prior_scale)

    def evidence(self, batch: object) -> Evidence:
        """Return the score with other evidence from the curvature: see `Evidence`.

        For classifiers this takes a second set of backward passes, as `output_variance` does.

        Args:
            batch: As the loader yields it.
        """
        scored = self._ready()(batch, self._memory_budget, parts=True)
        assert scored.parts is not None
        share = unexplained_share(scored.score, scored.parts, self.prior_scale)
        logit = None
        if is_classifier(self.likelihood):
            variance = self.output_variance(batch) if len(share) else share
            logit = standardised_logit(self.likelihood, scored.output, variance)
        return Evidence(self.likelihood.shown(scored.output), scored.score, share, logit)

    def explain(
        self,
        batch: object,
        *,
        saliency: bool = False,
        references: References | None = None,
        columns: Sequence[str] | None = None,
        classes: Sequence[str] | None = None,
    ) -> Explanation:
        """Return the decomposition of a batch's scores; print it for words.

        Args:
            batch: As the loader yields it.
            saliency: Also differentiate the scores by the inputs: as many backward passes
                again, through the first ones (second derivatives).
            references: Samples to search for the nearest ones, from `references`.
            columns: Names of the columns of a table. By default those of a data frame, or else
                ``monitor.notes["columns"]``, or those of the fit.
            classes: Names of the classes, or of the outputs of a regression. By default
                ``monitor.notes["classes"]``.

        Returns:
            Shares of parameters, layers and output directions that sum to the scores, the
            columns of a table, and whatever else was requested; each with a ``plot()``.
        """
        names = Names.of(batch, self.notes, columns, classes, self.fitted.form)
        with self._ready().prepared(batch, self.memory_budget, "an explanation") as prepared:
            told = explain(prepared, self.fitted, self.prior_scale, names, saliency, references)
        p_value, shown = self._p_value(told.score.cpu(), told.output), self.likelihood.shown
        found = as_given(scoring.Scored(shown(told.output), told.score, p_value), batch)
        return replace(told, **vars(found))

    def references(self, loader: Iterable[Any], *, progress: bool = True) -> References:
        """Compute the features of samples, among which `explain` finds the nearest ones.

        Args:
            loader: Batches of training or held-out data.
            progress: Show a progress bar.

        Returns:
            The features, numbered in the loader's order.
        """
        batches = self._batches(loader, "looking", progress)
        return References(torch.cat([self.features(batch).cpu() for batch in batches]))

    def summary(self, batch: object | None = None) -> Summary:
        """Return statistics of the fit, and warnings of possible problems with it.

        Args:
            batch: Samples that were not fitted, whose scores are examined; by default those
                of the calibration are.
        """
        scorer, calibration = self._ready(), self.calibration
        scored = None if batch is None else scorer(batch, self.memory_budget, parts=True)
        scores = None if calibration is None else calibration.scores
        return summarise(
            self.basis,
            self.prior_scale,
            scorer.fitted.parameters.sizes,
            self.skipped,
            scores if scored is None else scored.score,
            None if scored is None else scored.parts,
        )

    def compile(self, example: object, *, fuse: bool = False) -> Self:
        """Record the scored forward pass, which makes batches of one shape much faster.

        A CUDA graph, or on a CPU code from torch's compiler (takes a while, needs a C++
        compiler, and is used if faster). A new fit or ``prior_scale`` drops the recording.

        Args:
            example: A batch of the shape to come.
            fuse: On CUDA, compile before recording: fewer kernels, after a longer wait.

        Returns:
            The monitor itself.
        """
        self._ready().compile(example, self.memory_budget, fuse=fuse)
        return self

    def compress(self, dtype: torch.dtype = torch.bfloat16) -> Self:
        """Convert the basis to half precision: half the memory, and no more certificates.

        Args:
            dtype: Of the vectors. Products are summed in float32; a calibration is dropped.

        Returns:
            The monitor itself.
        """
        return self._change(basis=self.basis.compress(dtype))

    def offload(self, path: str | Path | None = None) -> Self:
        """Move basis and sketch from a GPU to CPU memory, or the basis to a file.

        Scoring then copies the basis to the GPU block by block, and is slower.

        Args:
            path: Location of a memory-mapped file with the basis, for bases larger than CPU
                memory. The file is unlinked, so that nobody can change it, and disappears with
                the process.

        Returns:
            The monitor itself, with the same scores.

        Raises:
            OptionError: If the path is one of our files, as a saved monitor, or not a file.
        """
        calibration, by, state = self.calibration, self._by, self.fitted.state
        path = None if path is None else Path(path)
        if path is not None:
            artifact.check_place(path)
            if artifact.header_of(path):
                raise OptionError(
                    f"expected a path of its own for the basis, got {path}, where something "
                    "was saved; choose another"
                )
        self._change(basis=self.basis.offload(path), state=state and state.to("cpu"))
        self.calibration, self._by = calibration, by
        return self

    def _batches(self, loader: Iterable[Any], doing: str, progress: bool) -> Iterable[Any]:
        order = self._network.ordering(self.fitted.column_names)  # raises before it is read
        return map(order, data.batches_of(loader, doing, progress))

    @property
    def fitted(self) -> Fitted:
        """The result of the fit: the chosen weights, the basis, the sketch, fingerprints."""
        return self._ready().fitted

    def plan(
        self,
        batch: object,
        num_data: int | None = None,
        *,
        precision: torch.dtype | None = None,
        products: bool | None = None,
    ) -> Plan:
        """Return how much memory a fit and scoring will need, before it is allocated.

        The memory of a batch is measured by computing one piece of it as in `fit`, if that
        fits: tensors are counted, the workspace of kernel libraries is not. With hundreds of
        outputs the plan also has the cost of a batch in rows and in products with the
        curvature, and which of the two `fit` will use.

        Args:
            batch: A batch as the loader yields it, as large as the ones to come.
            num_data: Samples to come, if known (`Exact` needs it).
            precision: As in `fit`.
            products: As in `fit`.

        Raises:
            ScodError: As a subclass, if a fit would be refused for more than its size.
        """
        options = FitOptions(precision=precision, products=products)
        with self._network.evaluating():
            return Preparation(self._network, self._recipe, options, batch, num_data).plan()

    @property
    def projections(self) -> Projections:
        """The projections of `Projected` weights, to be given to fits to be merged with."""
        return self.fitted.projections

    @property
    def basis(self) -> Eigenbasis:
        """The eigenbasis of the fit: eigenvalues, vectors, captured curvature, certificate."""
        return self._ready().fitted.basis

    @property
    def rank(self) -> int:
        """``k``. Setting a lower one needs no new fit, but drops the calibration."""
        return self._rank

    @rank.setter
    def rank(self, value: int) -> None:
        check_options(self.model, self.likelihood, value, self.sketch, self.prior_scale)
        if self._scorer is not None and value > max(self.basis.rank, self.rank):
            raise OptionError(
                f"expected a rank of at most {self.basis.rank}, as the fit has kept, got "
                f"{value}; type Monitor(..., rank={value}) and fit again"
            )
        self._rank = value
        if self._scorer is not None:
            self._change(basis=self.basis.truncate(value))

    @property
    def prior_scale(self) -> float:
        """``eps``. Setting it needs no new fit, but drops the calibration."""
        return self._prior_scale

    @prior_scale.setter
    def prior_scale(self, value: float) -> None:
        check_options(self.model, self.likelihood, self.rank, self.sketch, value)
        self._prior_scale = value
        if self._scorer is not None:
            self._change()

    @property
    def precision(self) -> torch.dtype | None:
        """The dtype that scores are computed in; None for the model's own.

        Setting it to ``torch.bfloat16`` runs the model and its backward passes under autocast,
        with sums in float32. It needs a new calibration, and there are no certificates.
        """
        return None if self._scorer is None else self._scorer.fitted.precision

    @precision.setter
    def precision(self, value: torch.dtype | None) -> None:
        self._change(precision=value)

    @property
    def task(self) -> Task | None:
        """The part of the prediction that matters. Setting it needs only a new calibration."""
        return self._task

    @task.setter
    def task(self, value: Task | None) -> None:
        check_options(
            self.model, self.likelihood, self.rank, self.sketch, self.prior_scale, value
        )
        self._task = value
        if self._scorer is not None:
            self._change()

    @property
    def check_every(self) -> int:
        """Check the rows of the first batch of every layout, and of one in so many later ones.

        0 for no checks. A batch of one sample needs none.
        """
        return self._check_every

    @check_every.setter
    def check_every(self, value: int) -> None:
        if type(value) is not int or value < 0:
            raise OptionError(f"expected check_every >= 0 batches, got {value!r}")
        self._check_every = value
        if self._scorer is not None:
            self._scorer.check_every = value

    @property
    def skipped(self) -> int:
        """Training samples left out of the fit because they were not finite."""
        return self._ready().fitted.skipped

    @property
    def model(self) -> nn.Module:
        """The model, without wrappers."""
        return self._network.model

    def __getstate__(self) -> dict[str, Any]:
        return state_to_copy(self, self._network, self.likelihood, self.task)

    def __repr__(self) -> str:
        what = f"{type(self.model).__name__}, {self.likelihood}, rank={self.rank}"
        if self._scorer is None:
            return f"Monitor({what}, not fitted)"
        basis = self.basis
        return f"Monitor({what}, {basis.num_data} samples, captured={basis.captured:.3f})"

    def _of_shown(
        self, by: Callable[[Any], Tensor] | None
    ) -> Callable[[Tensor], Tensor] | None:
        """Return a function of outputs as users see them, as one of those that are scored."""
        return None if by is None else lambda output: by(self.likelihood.shown(output))

    @property
    def _recipe(self) -> Recipe:
        return Recipe(
            likelihood=self.likelihood,
            rank=self.rank,
            sketch=self.sketch,
            selection=self._selection,
            budget=self.memory_budget,
            check_every=self.check_every,
        )

    def _ready(self) -> scoring.Scorer:
        if self._scorer is None:
            raise NotFittedError(UNFITTED)
        return self._scorer

    def _adopt(self, fitted: Fitted, source: FactorSource | None) -> Self:
        before = self._scorer
        self._scorer = scoring.Scorer(
            network=self._network,
            recipe=self._recipe,
            fitted=fitted,
            source=source,
            prior_scale=self.prior_scale,
            task=self.task,
            state_watch=self._state_watch,
        )
        if before is not None and before.watch.seen is fitted.input_range:
            self._scorer.watch = before.watch  # of the same data: no second warning
        self.calibration = self._by = None  # held-out scores are of the previous fit
        return self

    def _change(self, **changes: Any) -> Self:
        """Return the monitor itself, with fields of the fit, or options, changed."""
        scorer = self._ready()
        return self._adopt(replace(scorer.fitted, **changes), scorer.source)

    def to(self, device: torch.device | str) -> Self:
        """Return the monitor itself, with model, basis and sketch moved to a device.

        Args:
            device: The target. A basis follows a model that was moved by itself without this.
        """
        self.model.to(device)
        if self._scorer is not None:
            self._scorer.fitted = self._scorer.fitted.to(device)
        return self

    def save(self, path: str | Path, *, sketch: bool = True) -> None:
        """Write the monitor to one file, atomically; the model itself is not in it.

        Args:
            path: The file; by convention it ends in ``.scod``.
            sketch: Include the state that `update` and `merge` need, and an 8-byte digest of
                each sample, to recognise data of the fit. Without it the file is several times
                smaller and usable for scoring only.

        Raises:
            StaleMonitorError: If the model has changed since the fit.
        """
        fitted = self._ready().check("saving", contents=True)
        if fitted.probes is not None:
            probes = fitted.probes.answered(self._network, self.task, self._of_shown(self._by))
            fitted = replace(fitted, probes=probes)
        storage.save(
            path,
            fitted,
            self._recipe,
            prior_scale=self.prior_scale,
            functions=self._functions | storage.given(task=self.task, by=self._by),
            calibration=self.calibration,
            notes=self.notes,
            with_sketch=sketch,
        )

    @classmethod
    def load(
        cls,
        path: str | Path,
        model: nn.Module,
        *,
        likelihood: Likelihood | Mapping[str, Likelihood] | None = None,
        sketch: Sketch | None = None,
        task: Task | None = None,
        by: Callable[[Any], Tensor] | None = None,
        inputs: Callable[[Any], Any] | None = None,
        outputs: Callable[[Any], Any] | None = None,
    ) -> Self:
        """Read a monitor written by `save`.

        Args:
            path: The file.
            model: The model it was fitted on, with the same weights.
            likelihood: Needed only if a file cannot describe it: a `MonteCarlo` (its family
                cannot be checked) or a class of your own.
            sketch: Needed only if a file cannot describe it: a class of your own.
            task: The task the monitor was created with, if there was one.
            by: The function it was calibrated with, if there was one.
            inputs: The function it was created with, if there was one.
            outputs: The function it was created with, if there was one.

        Returns:
            The monitor, on the model's device.

        Raises:
            ArtifactError: As a subclass: other weights, functions or outputs on probe inputs,
                or a file that is truncated or altered.
        """
        functions = storage.given(inputs=inputs, outputs=outputs, task=task, by=by)
        given = None if likelihood is None else as_likelihood(likelihood)
        options, fitted, calibration, notes = storage.load(
            path, Network(model).model, given, sketch, functions
        )
        monitor = cls(model, **options, task=task, inputs=inputs, outputs=outputs)
        check_probes(fitted.probes, monitor._network, task, monitor._of_shown(by))
        monitor._adopt(fitted, None)
        monitor.calibration, monitor._by, monitor.notes = calibration, by, notes
        return monitor
