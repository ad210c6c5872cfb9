"""A fitted network, ready to score batches: eagerly, or as one recorded call."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from scodkit.errors import BatchError, CaptureError, CaptureWarning
from scodkit.factors import FactorSource, LoopEngine
from scodkit.fit.fitted import Fitted
from scodkit.fit.recipe import Recipe
from scodkit.likelihoods.task import Task
from scodkit.model.network import Inputs, Network
from scodkit.model.ranges import RangeWatch
from scodkit.model.state import StateWatch
from scodkit.scoring import score as scoring
from scodkit.scoring.compiled import Captured, capture
from scodkit.scoring.score import Energies
from scodkit.sketch.eigenbasis import Eigenbasis


@dataclass(frozen=True)
class Scores:
    """A batch's output ``(B, *shape)``, scores ``(B,)`` and, if asked for, their parts."""

    output: Tensor
    score: Tensor
    parts: Energies | None = None


@dataclass(frozen=True)
class Question:
    """What is asked of a fit.

    Args:
        prior_scale: ``eps``.
        task: What of the prediction matters; None for all of it.
    """

    prior_scale: float
    task: Task | None


class Scorer:
    """Scores batches with what a fit left behind.

    Args:
        network: The model.
        recipe: How it was fitted.
        fitted: The fit; its basis follows the model from device to device.
        source: The engine of the fit; None to choose one on the first batch.
        question: What is asked of it.
        state_watch: Notices that the model is not that of the fit any more.
    """

    def __init__(
        self,
        network: Network,
        recipe: Recipe,
        fitted: Fitted,
        source: FactorSource | None,
        question: Question,
        state_watch: StateWatch,
    ) -> None:
        self.fitted = fitted
        self._asked: FactorSource | None = None  # the source, for what is asked of the fit
        self.source = source
        self.check_every = recipe.check_every
        self._network = network
        self._recipe = recipe
        self._prior_scale, self._task = question.prior_scale, question.task
        self.watch = RangeWatch(fitted.input_range)
        self._state_watch = state_watch
        self._captured: Captured | None = None
        # of the recorded call: what is not a tensor, what the model held besides, and where
        # weights and basis lay
        self._rest: list[object] = []
        self._storage: tuple[int, ...] = ()

    def basis(self) -> Eigenbasis:
        """Return the basis on the model's device, following it if it was moved."""
        basis = self.fitted.basis.to(self._network.device)
        if basis is not self.fitted.basis:
            self.fitted = replace(self.fitted, basis=basis)
        return basis

    def check(self, doing: str = "a score", *, contents: bool = False) -> Fitted:
        """Make sure the model is the one of the fit.

        Args:
            doing: What is about to be done, for the message.
            contents: Look at all its numbers, even if no counter says that they changed.

        Returns:
            The fit.
        """
        if contents or not self._state_watch.unmoved():
            with self._network.evaluating():  # nobody else is in the middle of a call
                moved = not self._state_watch.unmoved()
                if moved or contents:
                    self.fitted = self.fitted.settled(self._state_watch, doing)
                if moved:
                    self.source = None  # its engine may know layers that are no more
        return self.fitted

    def __call__(self, batch: object, budget: int, *, parts: bool = False) -> Scores:
        """Return outputs and scores of a batch, from the recording where it fits.

        Args:
            batch: As the loader yields it.
            budget: Bytes that rows in weight space may take at a time.
            parts: Whether to say what the scores are made of.
        """
        self.check()
        call = self._inputs_of(batch)
        recording = self._captured
        if recording and recording.fits(call.tensors()) and self._is_current(call):
            output, score, *rest = recording(call.tensors(), 4 if parts else 2)
            return Scores(output, score, Energies(*rest) if rest else None)
        basis = self.basis()
        with self._network.evaluating():
            if call.batch_size == 0:
                none = Energies.none(basis)
                return Scores(self._network(call).detach(), none.total, none)
            return self._scores(call, basis, self._source_for(call, budget))

    def compile(self, batch: object, budget: int, *, fuse: bool) -> None:
        """Record the scored forward pass for batches of this shape.

        Args:
            batch: As the loader yields it.
            budget: As in scoring.
            fuse: Compile before recording on a GPU, too.

        Raises:
            BatchError: If the batch is empty.
            CaptureError: If the pass cannot be recorded.
        """
        self.check("a recording")
        basis = self.basis()
        with self._network.evaluating():
            call = self._network.inputs_of(batch, self.fitted.form)
            if call.batch_size == 0:
                raise BatchError("expected an example with samples, got none")
            source = self._source_for(call, budget)  # choosing one is not to be recorded
            self._scores(call, basis, source)  # nor are its checks
        if basis.vectors.device != basis.values.device:
            raise CaptureError(
                "expected a basis on the model's device, got one that was offloaded; go on "
                "without monitor.compile, or fit or load again without monitor.offload"
            )
        if source.likelihood.draws or self._network.changes_buffers:
            raise CaptureError(
                f"expected a likelihood without random draws, got {source.likelihood}, "
                "and a model that leaves its buffers alone; go on without monitor.compile"
            )
        source = replace(source, engine=source.engine.for_recording())
        with self._network.evaluating():

            def score(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
                found = self._scores(Inputs(*call.with_tensors(list(tensors))), basis, source)
                assert found.parts is not None
                return found.output, found.score, found.parts.total, found.parts.along

            self._captured = capture(score, call.tensors(), fuse=fuse)
            self._rest, self._storage = _rest(call), self._where()

    def selftest(self, batch: object, budget: int) -> scoring.SelfTest:
        """Compare scores of a batch with those of each sample alone, by plain autograd.

        Args:
            batch: As the loader yields it.
            budget: As in scoring.

        Returns:
            Both.
        """
        self.check("a self-test", contents=True)
        basis = self.basis()
        with self._network.evaluating():
            call = self._network.inputs_of(batch, self.fitted.form)
            call.check_some()
            source = self._source_for(call, budget)
            plain = replace(source, engine=LoopEngine(self._network, self.fitted.parameters))
            fast = self._scores(call, basis, source).score
            alone = [call.samples(slice(i, i + 1)) for i in range(call.batch_size)]
            slow = torch.cat([self._scores(one, basis, plain).score for one in alone])
        return scoring.SelfTest(type(source.engine).__name__, fast, slow)

    def certificate(self, batch: object, budget: int) -> scoring.Certificate:
        """Return bounds on the exact scores of a batch.

        Args:
            batch: As the loader yields it.
            budget: As in scoring.
        """
        parts = self(batch, budget, parts=True).parts
        assert parts is not None
        return scoring.certificate(parts, self.basis(), self._prior_scale)

    @contextmanager
    def prepared(
        self, batch: object, budget: int, doing: str
    ) -> Iterator[tuple[Inputs, FactorSource, Eigenbasis]]:
        """Hold the model for other questions about a batch.

        Args:
            batch: As the loader yields it.
            budget: As in scoring.
            doing: What is asked, for the message if the model is another now.

        Yields:
            The inputs, what turns them into factors, and the basis.

        Raises:
            BatchError: If the batch is empty.
        """
        self.check(doing)
        basis = self.basis()
        with self._network.evaluating():
            call = self._inputs_of(batch)
            if call.batch_size == 0:
                raise BatchError(f"expected samples for {doing}, got none")
            yield call, self._source_for(call, budget), basis

    def features(self, batch: object, budget: int) -> Tensor:
        """Return ``U^T L`` as ``(B, p, k)``.

        Args:
            batch: As the loader yields it.
            budget: As in scoring.
        """
        self.check("features")
        basis = self.basis()
        with self._network.evaluating():
            call = self._inputs_of(batch)
            if call.batch_size == 0:
                asked = (self._task or self.fitted.likelihood).named()
                directions = asked.num_directions(self.fitted.shape)
                return basis.values.new_empty(0, directions, basis.rank)
            return scoring.features(self._source_for(call, budget).named(), call, basis)

    def _inputs_of(self, batch: object) -> Inputs:
        call = self._network.inputs_of(batch, self.fitted.form)
        self.watch.look(call)
        return call

    def _scores(self, call: Inputs, basis: Eigenbasis, source: FactorSource) -> Scores:
        output, parts = scoring.score_batch(source, call, basis)
        score = scoring.score(parts, basis, self._prior_scale).to(basis.values.dtype)
        return Scores(output, score, parts)

    def _source_for(self, call: Inputs, budget: int) -> FactorSource:
        """Return the engine, chosen on the first batch after a load or a change of device."""
        device, asked = self._network.device, self._asked
        if asked is not None and (asked.budget, asked.engine.device) == (budget, device):
            return asked
        source = self.source
        if source is None or source.engine.device != device:
            about, fitted = (self._network, self.fitted.parameters), self.fitted
            if fitted.engine is not None:
                source = self._recipe.source_again(*about, fitted.engine, fitted.shape)
            self.source = source or self._recipe.source(*about, call)
        assert self.source is not None
        self.source.engine.check_every = self._check_every
        likelihood = self._task or self.source.likelihood
        self._asked = replace(self.source, likelihood=likelihood, budget=budget)
        return self._asked

    @property
    def source(self) -> FactorSource | None:
        """The engine of the fit; None until one is chosen anew."""
        return self._source

    @source.setter
    def source(self, value: FactorSource | None) -> None:
        self._source, self._asked = value, None

    @property
    def check_every(self) -> int:
        """See `Monitor.check_every`."""
        return self._check_every

    @check_every.setter
    def check_every(self, value: int) -> None:
        self._check_every, self._asked = value, None

    def _is_current(self, call: Inputs) -> bool:
        """Return whether the recording is of such a call, of the weights the model has now."""
        if self._storage != self._where():
            self._captured = None
            warnings.warn(
                "weights, buffers or basis have been replaced or moved, or attributes or hooks "
                "of the model changed, since monitor.compile: the recording is dropped; type "
                "monitor.compile(example) again",
                CaptureWarning,
                stacklevel=4,
            )
            return False
        return _rest(call) == self._rest

    def _where(self) -> tuple[int, ...]:
        return (*self._network.storage(), self.fitted.basis.vectors.data_ptr())


def _rest(call: Inputs) -> list[object]:
    """Return what a call passes besides tensors: it is part of the recording."""
    named = [*enumerate(call.args), *call.kwargs.items()]
    return [(key, None if isinstance(value, Tensor) else value) for key, value in named]
