"""The uncertainty score and its bounds, and a fitted network that computes them.

With ``c = 1 / (2 M eps^2)``, ``eps`` the prior scale, the score of an input with Fisher factor
``L`` is ``eps^2 (|L|_F^2 - |diag(sqrt(values / (values + c))) U^T L|_F^2)``: the expected
change of the prediction, in nats, under the Laplace posterior of the weights. It is a
squared quantity, never negative, and larger means more atypical.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scodkit.errors import (
    BatchError,
    CaptureError,
    CaptureWarning,
)
from scodkit.factors.alone import LoopEngine
from scodkit.factors.hooks import why_not_followed
from scodkit.factors.pieces import FactorSource, Whole, default_budget
from scodkit.fit.fitted import Fitted, Recipe
from scodkit.likelihoods import Likelihood
from scodkit.likelihoods.task import Task
from scodkit.model.failures import check_runs
from scodkit.model.inputs import Inputs, RangeWatch
from scodkit.model.network import Network, StateWatch
from scodkit.scoring.compiled import Captured, capture
from scodkit.scoring.energies import Energies, energies, finite_ones, group_energies, joined
from scodkit.sketch.eigenbasis import Eigenbasis

# squared norm of factors from which products with them may overflow in float32
_LONGEST = 1e70

_NOTHING = nullcontext()


@dataclass(frozen=True)
class Scored:
    """A batch of predictions with their scores and p-values.

    Args:
        output: The model's output, ``(B, *shape)``; of several heads by name.
        score: ``(B,)``, nats (squared units), >= 0, larger = more atypical; infinite for
            samples with a NaN or an infinity.
        p_value: ``(B,)`` in (0, 1], smaller = more atypical; None until calibrated.
    """

    output: Any
    score: Tensor
    p_value: Tensor | None


@dataclass(frozen=True)
class SelfTest:
    """Scores of a batch, and of each sample alone by plain autograd.

    Args:
        engine: Name of the engine that computed the scores.
        score: ``(B,)``, as `Monitor.score` returns them.
        alone: ``(B,)``, the reference: each sample alone, by plain autograd.
        precision: The dtype that gradients were computed in; None for that of the scores.
    """

    engine: str
    score: Tensor
    alone: Tensor
    precision: torch.dtype | None = None

    @property
    def distance(self) -> float:
        """Largest difference, relative to the reference score."""
        known = self.alone.isfinite()
        if not torch.equal(self.score.isfinite(), known):
            return float("inf")
        off, size = (self.score - self.alone)[known].abs(), self.alone[known].abs()
        least = 1e-6 * size.max() if len(size) else 0.0  # scores near zero are rounding error
        return float((off / size.clamp_min(least)).nan_to_num(0.0).max()) if len(size) else 0.0

    @property
    def ok(self) -> bool:
        """Whether the difference is no more than rounding error."""
        return self.distance <= {torch.float64: 1e-6, torch.float32: 1e-2}.get(
            self.precision or self.score.dtype, 2e-1
        )

    def __str__(self) -> str:
        verdict = "right" if self.ok else "WRONG"
        return (
            f"{verdict}: {len(self.score)} scores by {self.engine}, at most "
            f"{self.distance:.1e} from those of each sample alone by plain autograd"
        )


def score_batch(
    source: FactorSource, call: Inputs, basis: Eigenbasis, finite: bool = False
) -> tuple[Tensor, Energies]:
    """Return a batch's output ``(B, *shape)`` and the energies of its scores.

    Samples with a NaN or an infinity, in an input or the output, have infinite energies.

    Args:
        source: Computes the Fisher factors of batches.
        call: The batch; not empty.
        basis: The eigenbasis, on the model's device.
        finite: Whether the inputs are known to be finite.
    """
    whole = source.ways[call.shapes] if call.shapes in source.ways else source.whole(call)
    scored = None
    if whole is not None:
        scored = _score_whole(source, whole, call, basis, finite)
    elif source.ends_in_head:
        scored = _score_head(source, call, basis)
    if scored is not None:
        return scored
    outputs: dict[int, Tensor] = {}
    parts: dict[int, Energies] = {}
    good: dict[int, Tensor] = {}
    for piece in source.pieces(call):
        start = piece.samples.start
        part = energies(piece.factors, basis)
        parts[start] = parts[start] + part if start in parts else part
        outputs[start], good[start] = piece.output, piece.finite
    return joined(list(outputs.values())), finite_ones(
        list(parts.values()), joined(list(good.values()))
    )


def _score_whole(
    source: FactorSource, whole: Whole, call: Inputs, basis: Eigenbasis, finite: bool
) -> tuple[Tensor, Energies] | None:
    """Return the same in one piece; None if values on a CPU are not finite.

    Raises:
        BatchError: If samples interact.
    """
    copies = whole.copies
    try:
        linear = whole.engine.linearize(call.repeated(copies) if copies > 1 else call)
    except BatchError:
        if copies == 1:
            raise
        source.ways[call.shapes] = None  # fails for so many samples; fewer may work
        return None
    output = linear.output[::copies] if copies > 1 else linear.output
    good = None
    if output.is_cuda:  # reading values would synchronise
        good, rows = source.rows(output, call)
    elif not _all_finite(() if finite else call.tensors(), output):
        return None
    else:
        rows = source.likelihood.factor(output)
    count = rows.shape[:2]
    if copies not in (1, count[1]):  # a sequence of another length than in the fit
        source.ways[call.shapes] = None
        return None
    factors = linear.pull_back(rows.flatten(0, 1)[:, None] if copies > 1 else rows)
    total, along = factors.project(basis.vectors)
    if copies > 1:
        total, along = total.view(count).sum(1), along.view(*count, -1)
    squares = along.square()
    parts = Energies(total, squares.squeeze(1) if squares.shape[1] == 1 else squares.sum(1))
    if good is not None:
        return output, finite_ones([parts], good)
    # the basis is orthonormal: with norms like these no product has overflowed either
    longest = total if len(total) == 1 else total.sum()
    return (output, parts) if float(longest) < _LONGEST else None


def _all_finite(inputs: Sequence[Tensor], output: Tensor) -> bool:
    """Return whether all values are finite; a sum is infinite or NaN if one of them is."""
    total = 0.0
    for tensor in (*inputs, output):
        if tensor.is_floating_point():
            wide = torch.float32 if tensor.itemsize < torch.float32.itemsize else None
            total += float(tensor.sum(dtype=wide))
    return math.isfinite(total)


def _score_head(
    source: FactorSource, call: Inputs, basis: Eigenbasis
) -> tuple[Tensor, Energies] | None:
    """Return the same in closed form; None if the chosen layer is not the network's end."""
    outputs, parts, finite = [], [], []
    for piece in source.heads(call, basis.rank):
        lengths = piece.head.energies(piece.clean, source.likelihood, basis.vectors)
        parts.append(Energies(*lengths))
        outputs.append(piece.output)
        finite.append(piece.finite)
    if sum(map(len, outputs)) < call.batch_size:
        return None
    return joined(outputs), finite_ones(parts, joined(finite))


def of_worst_group(
    source: FactorSource, call: Inputs, basis: Eigenbasis, left_over: Tensor
) -> tuple[Tensor, Energies]:
    """Return what `score_batch` does, of the group of rows with the largest score alone.

    Args:
        source: As in `group_energies`.
        call: Likewise.
        basis: Likewise.
        left_over: ``c / (values + c)``, ``(k,)`` in float64.
    """
    output, each, good = group_energies(source, call, basis)
    worst = unexplained(each, left_over, 1.0).argmax(1, keepdim=True)
    along = each.along.take_along_dim(worst[..., None], 1)
    own = Energies(each.total.take_along_dim(worst, 1)[:, 0], along[:, 0])
    return output, finite_ones([own], good)


def features(source: FactorSource, call: Inputs, basis: Eigenbasis) -> Tensor:
    """Return ``U^T L`` of a batch that is not empty, ``(B, p, k)``."""
    parts: dict[int, list[Tensor]] = {}
    for piece in source.pieces(call):
        _, along = piece.factors.project(basis.vectors)
        parts.setdefault(piece.samples.start, []).append(along.to(basis.values.dtype))
    return torch.cat([torch.cat(directions, dim=1) for directions in parts.values()])


def score(parts: Energies, basis: Eigenbasis, prior_scale: float) -> Tensor:
    """Return the score ``(b,)`` in float64, squared units, larger = more atypical.

    Args:
        parts: From `energies`.
        basis: The same basis.
        prior_scale: ``eps``, the standard deviation of the prior of a weight.
    """
    return unexplained(parts, _left_over(basis, prior_scale), prior_scale**2)


def determined(basis: Eigenbasis, prior_scale: float) -> Tensor:
    """Return the fraction to which data determines the weights along each basis vector.

    Args:
        basis: The eigenbasis.
        prior_scale: ``eps``.

    Returns:
        ``values / (values + c)``, ``(k,)`` in float64, in [0, 1): 0 is the prior alone.
    """
    values = basis.values.double()
    return values / (values + regulariser(basis, prior_scale))


def regulariser(basis: Eigenbasis, prior_scale: float) -> float:
    """Return ``c``.

    Args:
        basis: The eigenbasis.
        prior_scale: ``eps``.
    """
    return 1.0 / (2.0 * max(1, basis.num_data) * prior_scale**2)


def _left_over(basis: Eigenbasis, prior_scale: float) -> Tensor:
    """Return ``c / (values + c)``, ``(k,)`` in float64: 1 where data adds no information."""
    c = regulariser(basis, prior_scale)
    return c / (basis.values.double() + c)


def unexplained(parts: Energies, left_over: Tensor, times: float) -> Tensor:
    """Return ``times tr L^T c (F_hat + c)^-1 L`` as two sums, neither of them negative.

    Args:
        parts: From `energies`, or `group_energies`.
        left_over: ``c / (values + c)``, ``(k,)`` in float64.
        times: A factor.
    """
    outside = (parts.total - parts.along.sum(-1)).clamp_min(0)
    if outside.ndim > 1:
        return times * (outside + parts.along @ left_over)
    return torch.addmv(outside, parts.along, left_over, beta=times, alpha=times)


class Scores(NamedTuple):
    """A batch's output ``(B, *shape)``, scores ``(B,)`` and, if requested, their energies."""

    output: Tensor
    score: Tensor
    parts: Energies | None = None


class Scorer:
    """Scores batches with the result of a fit.

    Args:
        network: The model.
        recipe: How it was fitted.
        fitted: The fit; its basis is moved along with the model between devices.
        source: The engine of the fit; None to choose one on the first batch.
        prior_scale: ``eps``.
        task: The part of the prediction that matters; None for all of it.
        state_watch: Detects changes of the model since the fit.
    """

    def __init__(
        self,
        network: Network,
        recipe: Recipe,
        fitted: Fitted,
        source: FactorSource | None,
        prior_scale: float,
        task: Task | None,
        state_watch: StateWatch,
    ) -> None:
        self.fitted = fitted
        self._asked: FactorSource | None = None  # the source, with the task and the budget
        self._budget: int | None = None  # the budget argument of that source
        self._of: Eigenbasis | None = None  # the basis of the cached value below
        self._left_over: Tensor | None = None
        self.source = source
        self.check_every = recipe.check_every
        self._network = network.at_precision(fitted.precision)
        self._recipe = recipe
        self._prior_scale, self._task = prior_scale, task
        self.watch = RangeWatch(fitted.input_range)
        self._state_watch = state_watch
        self._captured: Captured | None = None
        # of the recorded call: arguments that are not tensors; the twin's revision and the
        # addresses of weights and basis
        self._rest: list[object] = []
        self._storage: tuple[int, ...] = ()

    def basis(self) -> Eigenbasis:
        """Return the basis on the model's device, moved there if the model was."""
        basis, device = self.fitted.basis, self._network.device
        if basis.values.device != device:
            basis = basis.to(device)
            self.fitted = replace(self.fitted, basis=basis)
        return basis

    def check(self, doing: str = "a score", *, contents: bool = False) -> Fitted:
        """Make sure the model is the one of the fit.

        Args:
            doing: What is about to be done, for the message.
            contents: Compare all its values, even if no version counter has changed.

        Returns:
            The fit.
        """
        if contents or not self._state_watch.unmoved():
            with self._network.evaluating():  # no other thread is inside a call
                moved = not self._state_watch.unmoved()
                if moved or contents:
                    self.fitted = self.fitted.settled(self._state_watch, doing)
                if moved:
                    self.source = None  # its engine may refer to layers that are gone
        return self.fitted

    def __call__(self, batch: object, budget: int | None, *, parts: bool = False) -> Scores:
        """Return outputs and scores of a batch, from the recording if it applies.

        Args:
            batch: As the loader yields it.
            budget: Bytes for rows in weight space at a time; None for the device's default.
            parts: Whether to return the energies of the scores, too.
        """
        recording = self._captured
        with self._network.evaluating() if recording is None else _NOTHING:
            self.check()
            call = self._network.inputs_of(batch, self.fitted.form)
            finite = self.watch.look(call)
            if recording is None:
                return self._eager(call, budget, finite)
            if recording.fits(call.tensors()) and self._is_current(call):
                output, score, *rest = recording(call.tensors(), 4 if parts else 2)
                return Scores(output, score, Energies(*rest) if rest else None)
        with self._network.evaluating():
            return self._eager(call, budget, finite)

    def _eager(self, call: Inputs, budget: int | None, finite: bool) -> Scores:
        basis = self.fitted.basis
        if basis.values.device != self._network.device:
            basis = self.basis()
        try:
            if call.batch_size == 0:
                none = Energies.none(basis)
                return Scores(self._network(call).detach(), none.total, none)
            return self._scores(call, basis, self._source_for(call, budget, basis), finite)
        except Exception as error:
            check_runs(self._network, call, error, self.fitted.form)
            raise

    @contextmanager
    def _inputs(self, batch: object) -> Iterator[Inputs]:
        """Hold the model in eval mode, for computations on the inputs in a batch."""
        with self._network.evaluating():
            call = self._network.inputs_of(batch, self.fitted.form)
            try:
                yield call
            except Exception as error:
                check_runs(self._network, call, error, self.fitted.form)
                raise

    def compile(self, batch: object, budget: int | None, *, fuse: bool) -> None:
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
        with self._inputs(batch) as call:
            if call.batch_size == 0:
                raise BatchError("expected an example with samples, got none")
            source = self._source_for(call, budget, basis)  # its choice must not be recorded
            self._scores(call, basis, source)  # nor must its checks
        if basis.vectors.device != basis.values.device:
            raise CaptureError(
                "expected a basis on the model's device, got one that was offloaded; go on "
                "without monitor.compile, or fit or load again without monitor.offload"
            )
        if source.likelihood.draws or source.likelihood.worst or self._network.volatile:
            raise CaptureError(
                "expected a likelihood without random draws or pool='max', and a model that "
                f"leaves its buffers alone, got {source.likelihood}, or another model; go on "
                "without monitor.compile"
            )
        source = replace(source, engine=source.engine.for_recording())
        with self._network.evaluating():

            def score(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
                scores = self._scores(call.with_tensors(tensors), basis, source)
                assert scores.parts is not None
                return scores.output, scores.score, scores.parts.total, scores.parts.along

            try:
                self._captured = capture(score, call.tensors(), fuse=fuse)
            except CaptureError as error:
                reason = why_not_followed(source.engine, call)
                if reason is None:
                    raise
                raise CaptureError(
                    "expected a model whose samples can be followed through its layers, got "
                    f"{reason}; change that, or go on without monitor.compile"
                ) from error
            self._rest, self._storage = rest_of(call), self._where()

    def selftest(self, batch: object, budget: int | None) -> SelfTest:
        """Compare scores of a batch with those of each sample alone, by plain autograd.

        Args:
            batch: As the loader yields it.
            budget: As in scoring.

        Returns:
            Both scores.
        """
        self.check("a self-test", contents=True)
        basis = self.basis()
        with self._inputs(batch) as call:
            call.check_some()
            source = self._source_for(call, budget, basis)
            plain = replace(source, engine=LoopEngine(self._network, self.fitted.parameters))
            fast = self._scores(call, basis, source).score
            alone = [call.samples(slice(i, i + 1)) for i in range(call.batch_size)]
            slow = torch.cat([self._scores(sample, basis, plain).score for sample in alone])
        return SelfTest(type(source.engine).__name__, fast, slow, self.fitted.precision)

    @contextmanager
    def prepared(
        self, batch: object, budget: int | None, doing: str
    ) -> Iterator[tuple[Inputs, FactorSource, Eigenbasis]]:
        """Hold the model in eval mode, for computations on a batch other than scoring.

        Args:
            batch: As the loader yields it.
            budget: As in scoring.
            doing: What is computed, for the message if the model has changed.

        Yields:
            The inputs, the source of their factors, and the basis.

        Raises:
            BatchError: If the batch is empty.
        """
        self.check(doing)
        basis = self.basis()
        with self._inputs(batch) as call:
            self.watch.look(call)
            if call.batch_size == 0:
                raise BatchError(f"expected samples for {doing}, got none")
            yield call, self._source_for(call, budget, basis), basis

    def features(self, batch: object, budget: int | None) -> Tensor:
        """Return ``U^T L`` as ``(B, p, k)``.

        Args:
            batch: As the loader yields it.
            budget: As in scoring.
        """
        self.check("features")
        basis = self.basis()
        with self._inputs(batch) as call:
            self.watch.look(call)
            if call.batch_size == 0:
                likelihood = self.likelihood.named()
                directions = likelihood.num_directions(self.fitted.shape)
                return basis.values.new_empty(0, directions, basis.rank)
            return features(self._source_for(call, budget, basis).named(), call, basis)

    def _scores(
        self, call: Inputs, basis: Eigenbasis, source: FactorSource, finite: bool = False
    ) -> Scores:
        if self._left_over is None or self._of is not basis:
            self._of, self._left_over = basis, _left_over(basis, self._prior_scale)
        if source.likelihood.worst:
            output, parts = of_worst_group(source, call, basis, self._left_over)
        else:
            output, parts = score_batch(source, call, basis, finite)
        scores = unexplained(parts, self._left_over, self._prior_scale**2)
        return Scores(output, scores.to(basis.values.dtype), parts)

    @property
    def likelihood(self) -> Likelihood:
        """What is scored: the task, or all that the fit was of."""
        return self._task or self.fitted.likelihood

    def _source_for(self, call: Inputs, budget: int | None, basis: Eigenbasis) -> FactorSource:
        """Return the source, its engine chosen on the first batch after a load or a move."""
        device, cached = basis.values.device, self._asked  # the basis is on the model's device
        if cached is not None and self._budget == budget and cached.engine.device == device:
            return cached
        source = self.source
        if source is None or source.engine.device != device:
            fitted = self.fitted
            self.source = self._recipe.source(
                self._network, fitted.parameters, call, fitted.shape, fitted.engine
            )
        assert self.source is not None
        self.source.engine.check_every = self._check_every
        likelihood = self._task or self.source.likelihood
        allowed = default_budget(device) if budget is None else budget
        engine = self.source.engine
        if engine.network.precision != self._network.precision:
            engine = engine.of(self._network)
        self._asked = replace(self.source, engine=engine, likelihood=likelihood, budget=allowed)
        self._budget = budget
        return self._asked

    @property
    def source(self) -> FactorSource | None:
        """The engine of the fit; None until one is chosen again."""
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
        """Return whether the recording is of the same call, with the current weights."""
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
        return rest_of(call) == self._rest

    def _where(self) -> tuple[int, ...]:
        return (*self._network.storage(), self.fitted.basis.vectors.data_ptr())


def rest_of(call: Inputs) -> list[object]:
    """Return the arguments of a call without its tensors: they are part of the recording."""
    named = [*enumerate(call.args), *call.kwargs.items()]
    return [(key, None if isinstance(value, Tensor) else value) for key, value in named]
