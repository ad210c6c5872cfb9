"""A network, and what was learnt from its training data."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from typing_extensions import Self

from scodkit import fitting, recipe, storage
from scodkit.calibration import Calibration
from scodkit.distributed import Processes
from scodkit.eigenbasis import Eigenbasis
from scodkit.errors import MergeError, NotFittedError, OptionError
from scodkit.factors import CHECK_EVERY, FactorSource, MemoryBudget
from scodkit.fitted import UNFITTED, Fitted
from scodkit.fitting import FitOptions
from scodkit.likelihoods import Likelihood
from scodkit.network import Network, state_to_copy
from scodkit.parameters import Selection, select
from scodkit.parts import part_behind
from scodkit.plan import Plan
from scodkit.preparing import Preparation, check_first
from scodkit.probes import check_probes
from scodkit.recipe import Recipe
from scodkit.scorer import Question, Scorer
from scodkit.sketch import Nystrom, Sketch
from scodkit.state import StateWatch
from scodkit.suspicion import CrowdWatch
from scodkit.task import Task


class Learner:
    """What a `Monitor` knows of its training data; the arguments are explained there."""

    memory_budget = MemoryBudget()

    def __init__(  # noqa: PLR0913 (each a choice of its own)
        self,
        model: nn.Module,
        likelihood: Likelihood,
        rank: int = 50,
        *,
        sketch: Sketch | None = None,
        parameters: Selection = "all",
        prior_scale: float = 1.0,
        task: Task | None = None,
        inputs: Callable[[Any], Any] | None = None,
        outputs: Callable[[Any], Tensor] | None = None,
    ) -> None:
        sketch = Nystrom() if sketch is None else sketch
        recipe.check_options(model, likelihood, rank, sketch, prior_scale)
        _check_task(task)
        self.likelihood = likelihood
        self.sketch = sketch
        self.calibration: Calibration | None = None
        self.notes: dict[str, Any] = {}
        self._by: Callable[[Tensor], Tensor] | None = None
        self._check_every = CHECK_EVERY
        self._rank = rank
        self._prior_scale = prior_scale
        self._task = task
        self._selection = parameters
        self._functions = {"inputs": inputs is not None, "outputs": outputs is not None}
        self._network = Network(model, inputs, outputs)
        self._state_watch = StateWatch(self._network)
        self._scorer: Scorer | None = None
        self._crowd: CrowdWatch | None = None

    def fit(  # noqa: PLR0913 (each a choice of its own)
        self,
        loader: Iterable[Any],
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

        Inside a group of ``torch.distributed`` every process passes its own part of the data
        (`scodkit.parts.Shard`), and gets the fit of all of it.

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
            together: False to fit alone inside a group of ``torch.distributed``.
            products: True to take the sketch's columns through the network instead of forming
                gradients: the same sketch, sooner for hundreds of outputs and more, but
                without certificates, and with ``basis.trace`` estimated. None for the cheaper
                way, which `plan` tells.

        Returns:
            The monitor itself, fitted. An earlier calibration is dropped.

        Raises:
            ScodError: As a subclass from `scodkit.errors`; the monitor is then as before.
        """
        path = None if checkpoint is None else Path(checkpoint)
        how = (progress, on_bad, check_deterministic, path, every, precision, together)
        options = FitOptions(*how, products)
        watch = StateWatch(self._network)  # before the fit takes fingerprints of the model
        fitted, source = fitting.fit(self._network, self._recipe, loader, options)
        if not watch.unmoved():
            fitted = watch.settled(fitted, "the end of it")
        self._state_watch = watch
        return self._adopt(fitted, source)

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
            ScodError: As a subclass, also if it was fitted on some of the data already: that
                would count twice. The monitor is then as it was before.
        """
        processes = Processes.here(together)
        with processes.failing_together():
            before = self._ready().check("an update", contents=True)
            before.check_sketch()
            named = part_behind(loader)
            if named is not None:  # or it would be found out after the pass
                before.check_other_data((named,))
        same = replace(self._recipe, selection=before.parameters)
        how = (progress, on_bad, check_deterministic)
        options = FitOptions(*how, precision=precision, together=together)
        fresh, source = fitting.fit(self._network, same, loader, options)
        with processes.failing_together():  # buffers may be known by now to change in a call
            before = self._ready().check("an update")
        before.check_other_data(fresh.parts)
        before.check_other_samples(fresh.samples)
        return self._adopt(before.merged(fresh, self.rank, consume=True), source)

    def merge(self, other: Learner) -> Self:
        """Add the data of a monitor fitted on another part of the training data.

        Args:
            other: A monitor of the same model, parameters and sketch; left alone.

        Returns:
            This monitor, as if fitted on both parts; an earlier calibration is dropped.

        Raises:
            MergeError: If the fits are of other models, options, or of the same data.
        """
        mine, theirs = self._ready(), other._ready().fitted
        if self.prior_scale != other.prior_scale:
            raise MergeError(
                f"expected fits with one prior_scale, got {self.prior_scale} and "
                f"{other.prior_scale}; set the one that is meant in both: "
                f"other.prior_scale = {self.prior_scale}"
            )
        mine.check("a merge", contents=True)
        mine.fitted.check_other_data(theirs.parts)
        whole = mine.fitted.merged(theirs, self.rank)
        mine.fitted.check_other_samples(theirs.samples)
        return self._adopt(whole, mine.source)

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
        """Return how much memory a fit and scoring will take, before it is allocated.

        What a batch takes is counted on a few samples, which are computed as in `fit`: of
        tensors, not of what libraries of kernels take for themselves. With hundreds of outputs
        also what a batch costs in rows and in products with the curvature, and which of the
        two `fit` will take.

        Args:
            batch: A batch as the loader yields it, as large as the ones to come.
            num_data: Samples to come, where known (`Exact` needs it).
            precision: As in `fit`.
            products: As in `fit`.

        Raises:
            ScodError: As a subclass, if a fit would be refused for more than its size.
        """
        with self._network.evaluating():
            call = self._network.inputs_of(batch)
            check_first(self._network, self.likelihood, batch, call)
            parameters = select(self._selection, self._network, call)
            about = (self._recipe, self._network, parameters, call, num_data)
            return Preparation(*about, products, precision).plan()

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
        model, likelihood, sketch = self.model, self.likelihood, self.sketch
        recipe.check_options(model, likelihood, value, sketch, self.prior_scale)
        if self._scorer is None:
            self._rank = value
            return
        fitted, kept = self._scorer.fitted, self.basis.rank
        if value > max(kept, self.rank):
            raise OptionError(
                f"expected a rank of at most {kept}, as the fit has kept, got {value}; type "
                f"Monitor(..., rank={value}) and fit again"
            )
        self._rank = value
        self._adopt(replace(fitted, basis=fitted.basis.truncate(value)), self._scorer.source)

    @property
    def prior_scale(self) -> float:
        """``eps``. Setting it needs no new fit, but drops the calibration."""
        return self._prior_scale

    @prior_scale.setter
    def prior_scale(self, value: float) -> None:
        recipe.check_options(self.model, self.likelihood, self.rank, self.sketch, value)
        self._prior_scale = value
        self._ask_anew()

    @property
    def task(self) -> Task | None:
        """What of the prediction matters. Setting it needs no new fit, but a calibration."""
        return self._task

    @task.setter
    def task(self, value: Task | None) -> None:
        _check_task(value)
        self._task = value
        self._ask_anew()

    @property
    def check_every(self) -> int:
        """Rows of the first batch of every layout are checked, then of one batch in so many.

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
        asked = () if self.task is None else (self.task,)
        return state_to_copy(self, self._network, self.likelihood, *asked)

    def __repr__(self) -> str:
        what = f"{type(self.model).__name__}, {self.likelihood}, rank={self.rank}"
        if self._scorer is None:
            return f"Monitor({what}, not fitted)"
        basis = self.basis
        return f"Monitor({what}, {basis.num_data} samples, captured={basis.captured:.3f})"

    @property
    def _recipe(self) -> Recipe:
        about = (self.likelihood, self.rank, self.sketch, self._selection, self.memory_budget)
        return Recipe(*about, self.check_every)

    def _ready(self) -> Scorer:
        if self._scorer is None:
            raise NotFittedError(UNFITTED)
        return self._scorer

    def _adopt(self, fitted: Fitted, source: FactorSource | None) -> Self:
        question, before = Question(self.prior_scale, self.task), self._scorer
        about = (self._network, self._recipe, fitted, source, question)
        self._scorer = Scorer(*about, self._state_watch)
        if before is not None and before.watch.seen is fitted.input_range:
            self._scorer.watch = before.watch  # of the same data: no second warning
        self.calibration = self._by = None  # held-out scores belong to what they were asked of
        return self

    def _ask_anew(self) -> None:
        if self._scorer is not None:
            self._adopt(self._scorer.fitted, self._scorer.source)

    def to(self, device: torch.device | str) -> Self:
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
            sketch: Keep what `update` and `merge` need, and eight bytes of each sample, by
                which data of the fit is known again. Without it the file is several times
                smaller and good for scoring only.

        Raises:
            StaleMonitorError: If the model has changed since the fit.
        """
        fitted = self._ready().check("saving", contents=True)
        if fitted.probes is not None:
            probes = fitted.probes.answered(self._network, self.task, self._by)
            fitted = replace(fitted, probes=probes)
        others = {"task": self.task is not None, "by": self._by is not None}
        functions = {**self._functions, **others}
        about = (self.likelihood, self.rank, self.sketch, self.prior_scale, functions)
        stored = storage.Stored(*about, fitted, self.calibration, self.notes)
        storage.save(path, stored, sketch)

    @classmethod
    def load(
        cls,
        path: str | Path,
        model: nn.Module,
        *,
        likelihood: Likelihood | None = None,
        sketch: Sketch | None = None,
        task: Task | None = None,
        by: Callable[[Tensor], Tensor] | None = None,
        inputs: Callable[[Any], Any] | None = None,
        outputs: Callable[[Any], Tensor] | None = None,
    ) -> Self:
        """Read a monitor written by `save`.

        Args:
            path: Where from.
            model: The model it was fitted on, with the same weights.
            likelihood: Needed only where a file cannot describe it: a `MonteCarlo` (its family
                cannot be checked) or a class of your own.
            sketch: Likewise.
            task: The same task the monitor was made with, if there was one.
            by: The same function it was calibrated with, if there was one.
            inputs: The same function it was made with, if there was one.
            outputs: Likewise.

        Returns:
            The monitor, on the model's device.

        Raises:
            ArtifactError: As a subclass: other weights, functions or answers to probe inputs, a
                file cut off or altered.
        """
        given = {"inputs": inputs, "outputs": outputs, "task": task, "by": by}
        functions = {name: function is not None for name, function in given.items()}
        stored = storage.load(path, Network(model).model, likelihood, sketch, functions)
        monitor = cls(model, **stored.options, task=task, inputs=inputs, outputs=outputs)
        check_probes(stored.fitted.probes, monitor._network, task, by)
        monitor._adopt(stored.fitted, None)
        monitor.calibration, monitor._by = stored.calibration, by
        monitor.notes = dict(stored.notes)
        return monitor


def _check_task(task: object) -> None:
    if task is not None and not isinstance(task, Task):
        raise OptionError(
            f"expected a task object, got {task!r}; type task=Task(lambda output: ...)"
        )
