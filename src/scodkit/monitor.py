"""The monitor: a trained network that knows when it is out of its depth."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from scodkit import fitting, storage
from scodkit import score as scoring
from scodkit.calibration import Calibration
from scodkit.eigenbasis import Eigenbasis
from scodkit.errors import NotFittedError
from scodkit.factors import FactorSource
from scodkit.fitted import Fitted
from scodkit.fitting import FitOptions, Recipe
from scodkit.likelihoods import Likelihood
from scodkit.network import Network
from scodkit.parameters import Selection, select
from scodkit.plan import Plan
from scodkit.scorer import Scorer
from scodkit.sketch import Nystrom, Sketch
from scodkit.stream import batches_of, num_batches, open_stream

_UNFITTED = "expected a fitted monitor; type monitor.fit(train_loader) first"
_UNCALIBRATED = "expected a calibrated monitor; type monitor.calibrate(heldout_loader) first"


class Monitor:
    """Equips a trained network with a task-relevant uncertainty score, without touching it.

    Args:
        model: Any trained ``nn.Module``. Its device, dtype, buffers, mode and gradients are
            left as found.
        likelihood: What distribution the output parametrises.
        rank: ``k``, how many directions of the training data's curvature to keep.
        sketch: How the curvature is summarised in one pass; `Nystrom` by default.
        parameters: Which weights: ``"all"``, ``LastLayers(...)``, names or glob patterns, or a
            callable on ``(name, parameter)``.
        prior_scale: ``eps``, standard deviation of the prior of a weight.
        inputs: Picks the model's inputs from a batch: a tensor, a tuple (positional) or a dict
            (keywords). Default: a tensor itself, the first of a tuple, what a dict has.
        outputs: Picks the prediction from what the model returns.

    Attributes:
        memory_budget: Bytes that per-sample gradients may take at a time.

    Examples:
        >>> from scodkit import Monitor, Gaussian
        >>> _ = torch.manual_seed(0)
        >>> net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))
        >>> monitor = Monitor(net, Gaussian(), rank=20)
        >>> _ = monitor.fit([torch.randn(64, 2)], progress=False)
        >>> near, far = monitor.score(torch.tensor([[0.1, -0.2], [9.0, 9.0]]))
        >>> bool(near < far)
        True
    """

    memory_budget: int = 2**30

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood,
        rank: int = 50,
        *,
        sketch: Sketch | None = None,
        parameters: Selection = "all",
        prior_scale: float = 1.0,
        inputs: Callable[[Any], Any] | None = None,
        outputs: Callable[[Any], Tensor] | None = None,
    ) -> None:
        sketch = Nystrom() if sketch is None else sketch
        fitting.check_options(model, likelihood, rank, sketch, prior_scale)
        self.likelihood = likelihood
        self.rank = rank
        self.sketch = sketch
        self.calibration: Calibration | None = None
        self._prior_scale = prior_scale
        self._selection = parameters
        self._functions = {"inputs": inputs is not None, "outputs": outputs is not None}
        self._network = Network(model, inputs, outputs)
        self._scorer: Scorer | None = None

    def fit(
        self,
        loader: Iterable[Any],
        *,
        progress: bool = True,
        on_bad: Literal["raise", "skip"] = "raise",
        check_deterministic: bool = True,
        checkpoint: str | Path | None = None,
        every: int = 100,
        precision: torch.dtype | None = None,
    ) -> Monitor:
        """Summarise the training data in one pass. Labels are not needed.

        Args:
            loader: Batches as the model takes them; any iterable, read once.
            progress: Show a progress bar.
            on_bad: Raise on a sample with a NaN or an infinity, or skip it and count it in
                ``monitor.skipped``.
            check_deterministic: Compare two runs of the model on the first batch, and two
                reads of the first item of the data set.
            checkpoint: A file for the unfinished fit: killed and started again with it, a fit
                goes on where it was and ends with the same result.
            every: Batches between two checkpoints.
            precision: ``torch.bfloat16`` to run the model and form gradients in it during the
                fit, for speed on GPUs, without certificates. None for the model's own.

        Returns:
            The monitor itself, fitted. An earlier calibration is dropped.

        Raises:
            ScodError: As a subclass from `scodkit.errors`; the monitor is then as before.
        """
        path = None if checkpoint is None else Path(checkpoint)
        options = FitOptions(progress, on_bad, check_deterministic, path, every, precision)
        return self._adopt(*fitting.fit(self._network, self._recipe, loader, options))

    def update(
        self,
        loader: Iterable[Any],
        *,
        progress: bool = True,
        on_bad: Literal["raise", "skip"] = "raise",
        check_deterministic: bool = True,
        precision: torch.dtype | None = None,
    ) -> Monitor:
        """Add new data to a fit: one pass over the new data only.

        Args:
            loader: Batches of new training data.
            progress: As in `fit`.
            on_bad: As in `fit`.
            check_deterministic: As in `fit`.
            precision: As in `fit`.

        Returns:
            The monitor itself; an earlier calibration is dropped. If anything goes wrong the
            monitor is as it was before.
        """
        before = self._ready().fitted
        before.check_weights(self.model, "an update")
        before.check_sketch()
        recipe = replace(self._recipe, selection=before.parameters)
        options = FitOptions(progress, on_bad, check_deterministic, precision=precision)
        fresh, source = fitting.fit(self._network, recipe, loader, options)
        return self._adopt(before.merged(fresh, self.rank, consume=True), source)

    def merge(self, other: Monitor) -> Monitor:
        """Add the data of a monitor fitted on another part of the training data.

        Args:
            other: A monitor of the same model, parameters and sketch; left alone.

        Returns:
            This monitor, as if fitted on both parts; an earlier calibration is dropped.
        """
        mine, theirs = self._ready(), other._ready().fitted
        mine.fitted.check_weights(self.model, "a merge")
        return self._adopt(mine.fitted.merged(theirs, self.rank), mine.source)

    def plan(self, batch: object, num_data: int | None = None) -> Plan:
        """Return how much memory a fit and scoring will take, without allocating it.

        Args:
            batch: A batch as the loader yields it, as large as the ones to come.
            num_data: Samples to come, where known (`Exact` needs it).
        """
        with self._network.evaluating():
            call = self._network.inputs_of(batch)
            parameters = select(self._selection, self._network, call)
            return self._recipe.plan(self._network, parameters, call, num_data)

    def calibrate(self, loader: Iterable[Any], *, progress: bool = True) -> Monitor:
        """Score held-out data, so that scores get p-values and flags a false-alarm rate.

        Args:
            loader: In-distribution batches that were not used for fitting.
            progress: Show a progress bar.

        Returns:
            The monitor itself, calibrated.
        """
        self._ready()
        stream, length = open_stream(loader)[1], num_batches(loader)
        batches = batches_of(stream, length, "calibrating", progress)
        self.calibration = Calibration(torch.cat([self.score(b).cpu() for b in batches]))
        return self

    def __call__(self, batch: object) -> scoring.Scored:
        """Predict and score.

        Args:
            batch: As the loader yields it: a tensor, a tuple or list, a dict.

        Returns:
            Output, score and, once calibrated, p-value.
        """
        found = self._ready()(batch, self.memory_budget)
        p_value = None if self.calibration is None else self.calibration.p_value(found.score)
        return scoring.Scored(found.output, found.score, p_value)

    def score(self, batch: object) -> Tensor:
        """Return the score ``(B,)``: nats (squared units), >= 0, larger = more atypical.

        Args:
            batch: As the loader yields it; a NaN or an infinity in a sample scores infinity.
        """
        return self._ready()(batch, self.memory_budget).score

    def flag(self, batch: object, false_alarm: float = 0.05) -> Tensor:
        """Return ``(B,)`` booleans: True where the score is too high for a known input.

        Args:
            batch: As the loader yields it.
            false_alarm: Accepted share of alarms on data like the held-out data.

        Raises:
            NotFittedError: If the monitor is not calibrated.
        """
        if self.calibration is None:
            raise NotFittedError(_UNCALIBRATED)
        return self.score(batch) > self.calibration.threshold(false_alarm)

    def certify(self, batch: object) -> scoring.Certificate:
        """Return bounds on the score the whole Fisher information would give.

        Args:
            batch: As the loader yields it.

        Returns:
            The score with its lower and upper bounds and the paper's bound, each ``(B,)``.
        """
        return self._ready().certificate(batch, self.memory_budget)

    def features(self, batch: object) -> Tensor:
        """Return ``U^T L`` as ``(B, p, k)``, for detectors built on top of this one.

        Args:
            batch: As the loader yields it.
        """
        return self._ready().features(batch, self.memory_budget)

    def compile(self, example: object, *, fuse: bool = False) -> Monitor:
        """Record the scored forward pass, so that batches of one shape cost far less.

        A CUDA graph, or on a CPU code from torch's compiler (it takes a while and a C++
        compiler, and stays if faster). A new fit or ``prior_scale`` drops the recording.

        Args:
            example: A batch of the shape to come.
            fuse: On CUDA, compile before recording: fewer kernels, after a longer wait.

        Returns:
            The monitor itself.
        """
        self._ready().compile(example, self.memory_budget, fuse=fuse)
        return self

    def compress(self, dtype: torch.dtype = torch.bfloat16) -> Monitor:
        """Hold the basis in half precision: half the memory, and no more certificates.

        Args:
            dtype: Of the vectors. Products are summed in float32; a calibration is dropped.

        Returns:
            The monitor itself.
        """
        fitted, source = self._ready().fitted, self._ready().source
        return self._adopt(replace(fitted, basis=fitted.basis.compress(dtype)), source)

    @property
    def basis(self) -> Eigenbasis:
        """The eigenbasis of the fit: eigenvalues, vectors, captured curvature, certificate."""
        return self._ready().fitted.basis

    @property
    def prior_scale(self) -> float:
        """``eps``. Setting it needs no new fit, but drops the calibration."""
        return self._prior_scale

    @prior_scale.setter
    def prior_scale(self, value: float) -> None:
        fitting.check_options(self.model, self.likelihood, self.rank, self.sketch, value)
        self._prior_scale, self.calibration = value, None
        if self._scorer is not None:
            self._adopt(self._scorer.fitted, self._scorer.source)

    @property
    def skipped(self) -> int:
        """Training samples left out of the fit because they were not finite."""
        return self._ready().fitted.skipped

    @property
    def model(self) -> nn.Module:
        """The model, without wrappers."""
        return self._network.model

    def __repr__(self) -> str:
        what = f"{type(self.model).__name__}, {self.likelihood}, rank={self.rank}"
        if self._scorer is None:
            return f"Monitor({what}, not fitted)"
        basis = self.basis
        return f"Monitor({what}, {basis.num_data} samples, captured={basis.captured:.3f})"

    @property
    def _recipe(self) -> Recipe:
        return Recipe(
            self.likelihood, self.rank, self.sketch, self._selection, self.memory_budget
        )

    def _ready(self) -> Scorer:
        if self._scorer is None:
            raise NotFittedError(_UNFITTED)
        return self._scorer

    def _adopt(self, fitted: Fitted, source: FactorSource | None) -> Monitor:
        recipe, network = self._recipe, self._network
        self._scorer = Scorer(network, recipe, fitted, source, self.prior_scale)
        self.calibration = None  # held-out scores belong to the basis they were computed with
        return self

    def to(self, device: torch.device | str) -> Monitor:
        """Return the monitor itself, with model, basis and sketch moved to a device.

        Args:
            device: Where to. A model that was moved by itself is followed without this.
        """
        self.model.to(device)
        if self._scorer is not None:
            self._scorer.fitted = self._scorer.fitted.to(device)
        return self

    def save(self, path: str | Path, *, sketch: bool = True) -> None:
        """Write the monitor to one file, atomically; the model itself is not in it.

        Args:
            path: Where to; by custom it ends in ``.scod``.
            sketch: Keep what `update` and `merge` need. Without it the file is several times
                smaller and good for scoring only.

        Raises:
            MismatchError: If the model's weights changed since the fit.
        """
        from scodkit import __version__

        fitted = self._ready().fitted
        fitted.check_weights(self.model, "saving")
        about = (self.likelihood, self.rank, self.sketch, self.prior_scale, self._functions)
        stored = storage.Stored(*about, fitted, self.calibration)
        storage.save(path, stored, sketch, __version__)

    @classmethod
    def load(
        cls,
        path: str | Path,
        model: nn.Module,
        *,
        likelihood: Likelihood | None = None,
        sketch: Sketch | None = None,
        inputs: Callable[[Any], Any] | None = None,
        outputs: Callable[[Any], Tensor] | None = None,
    ) -> Monitor:
        """Read a monitor written by `save`.

        Args:
            path: Where from.
            model: The model it was fitted on, with the same weights.
            likelihood: Needed only where a file cannot describe it: a `MonteCarlo` (its family
                cannot be checked) or a class of your own.
            sketch: Likewise.
            inputs: The same function the monitor was made with, if there was one.
            outputs: Likewise.

        Returns:
            The monitor, on the model's device.

        Raises:
            ArtifactError: As a subclass: other weights or functions, a file cut off or altered.
        """
        functions = {"inputs": inputs is not None, "outputs": outputs is not None}
        stored = storage.load(path, Network(model).model, likelihood, sketch, functions)
        monitor = cls(
            model,
            stored.likelihood,
            stored.rank,
            sketch=stored.sketch,
            parameters=stored.fitted.parameters,
            prior_scale=stored.prior_scale,
            inputs=inputs,
            outputs=outputs,
        )
        monitor._adopt(stored.fitted, None).calibration = stored.calibration
        return monitor
