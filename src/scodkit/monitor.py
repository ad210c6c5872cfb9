"""The monitor: a trained network that knows when it is out of its depth."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self

from scodkit import artifact
from scodkit import score as scoring
from scodkit.calibration import Calibration, groups_of
from scodkit.errors import CalibrationWarning, NotFittedError, OptionError
from scodkit.explain import Explanation, References
from scodkit.learner import Learner
from scodkit.parameters import ParameterSet
from scodkit.scorer import Scores
from scodkit.seen import digests_of, nothing, seen_again
from scodkit.stream import batches_of, num_batches, open_stream
from scodkit.summary import Summary, summarise
from scodkit.suspicion import CrowdWatch

_UNCALIBRATED = "expected a calibrated monitor; type monitor.calibrate(heldout_loader) first"


class Monitor(Learner):
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
        task: What of the prediction matters downstream; all of it by default.
        inputs: Picks the model's inputs from a batch: a tensor, a tuple (positional) or a dict
            (keywords). Default: a tensor itself, the first of a tuple, what a dict has.
        outputs: Picks the prediction from what the model returns.

    Attributes:
        memory_budget: Bytes that per-sample gradients may take at a time: 1 GiB, on a GPU an
            eighth of its memory, until it is set.
        calibration: Held-out scores; None until calibrated.
        notes: Anything JSON can hold; saved and loaded with the monitor.

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

    def calibrate(
        self,
        loader: Iterable[Any],
        *,
        by: Callable[[Tensor], Tensor] | None = None,
        progress: bool = True,
    ) -> Self:
        """Score held-out data, so that scores get p-values and flags a false-alarm rate.

        Args:
            loader: In-distribution batches that were not used for fitting.
            by: Maps outputs ``(B, *shape)`` to integer groups ``(B,)`` that are calibrated
                apart, `predicted_class` for instance; then the rate holds in each of them.
            progress: Show a progress bar.

        Returns:
            The monitor itself, calibrated. If anything goes wrong it is as it was before.
        """
        self._ready().check("a calibration", contents=True)
        scores, groups = [torch.empty(0)], [torch.empty(0, dtype=torch.int64)]
        samples = nothing()
        for batch in self._batches(loader, "calibrating", progress):
            call = self._network.inputs_of(batch)
            samples.add(digests_of(call))
            found = self._ready()(call, self.memory_budget)
            scores.append(found.score.cpu())
            if by is not None:
                groups.append(groups_of(by, found.output))
        calibration = Calibration(torch.cat(scores), None if by is None else torch.cat(groups))
        self.calibration, self._by = calibration, by
        again = seen_again(self.fitted.samples, samples.all())
        if again is not None:
            warnings.warn(
                f"{again} held-out samples were fitted: a network knows those best, so that "
                "alarms on other data may be far too many; calibrate with data that was not "
                "used for training or fitting",
                CalibrationWarning,
                stacklevel=2,
            )
        return self

    def renew(
        self, loader: Iterable[Any], heldout: Iterable[Any] | None = None, **options: Any
    ) -> Self:
        """Fit and calibrate anew, with the same options, on the model as it is now.

        The way out of a `scodkit.errors.StaleMonitorError`.

        Args:
            loader: Batches of training data, as for `fit`.
            heldout: Batches of held-out data, as for `calibrate`, in the groups of before.
            **options: Of `fit`.

        Returns:
            The monitor itself. If anything goes wrong it is as it was before.
        """
        before = dict(vars(self))
        try:
            if isinstance(self._selection, ParameterSet):  # of a file: with shapes of that time
                self._selection = self._selection.names
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

    def __call__(self, batch: object) -> scoring.Scored:
        """Predict and score.

        Args:
            batch: As the loader yields it: a tensor, a tuple or list, a dict.

        Returns:
            Output, score and, once calibrated, p-value.
        """
        found = self._ready()(batch, self.memory_budget)
        p_value = None
        if self.calibration is not None:
            score = found.score.cpu()  # once
            p_value = self.calibration.p_value(score, self._groups(found)).to(
                found.score.device
            )
            self._crowd_watch(self.calibration).look(score)
        return scoring.Scored(found.output, found.score, p_value)

    def score(self, batch: object) -> Tensor:
        """Return the score ``(B,)``: nats (squared units), >= 0, larger = more atypical.

        Args:
            batch: As the loader yields it; a NaN or an infinity in a sample scores infinity.
        """
        return self._ready()(batch, self.memory_budget).score

    def flag(
        self, batch: object, false_alarm: float = 0.05, *, confidence: float | None = None
    ) -> Tensor:
        """Return ``(B,)`` booleans: True where the score is too high for a known input.

        Args:
            batch: As the loader yields it.
            false_alarm: Accepted share of alarms on data like the held-out data.
            confidence: With what probability that share is to hold for this very set of
                held-out data; None for on average over such sets.

        Raises:
            NotFittedError: If the monitor is not calibrated.
        """
        if self.calibration is None:
            raise NotFittedError(_UNCALIBRATED)
        found = self._ready()(batch, self.memory_budget)
        score = found.score.cpu()
        flags = self.calibration.flag(
            score, false_alarm, groups=self._groups(found), confidence=confidence
        )
        self._crowd_watch(self.calibration).look(score)
        return flags.to(found.score.device)

    def selftest(self, batch: object) -> scoring.SelfTest:
        """Compare the scores of a batch with those of each sample alone, by plain autograd.

        Args:
            batch: As the loader yields it; each sample takes a backward pass a direction.

        Returns:
            What was found: both scores, how far they are apart, and whether that is rounding.
        """
        return self._ready().selftest(batch, self.memory_budget)

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

    def explain(
        self, batch: object, *, saliency: bool = False, references: References | None = None
    ) -> Explanation:
        """Return what the scores of a batch are made of.

        Args:
            batch: As the loader yields it.
            saliency: Differentiate the scores by the inputs, too: as many backward passes
                again, through the first ones.
            references: Samples to look for the nearest among, from `references`.

        Returns:
            Shares of parameters, layers and output directions that sum to the scores, and
            what else was asked for; each with a ``plot()``.
        """
        return self._ready().explanation(
            batch, self.memory_budget, saliency=saliency, references=references
        )

    def references(self, loader: Iterable[Any], *, progress: bool = True) -> References:
        """Keep the features of samples, for `explain` to find those nearest to a new one.

        Args:
            loader: Batches of training or held-out data.
            progress: Show a progress bar.

        Returns:
            The features, numbered in the loader's order.
        """
        batches = self._batches(loader, "looking", progress)
        return References(torch.cat([self.features(batch).cpu() for batch in batches]))

    def summary(self, batch: object | None = None) -> Summary:
        """Return what the fit has found, and what looks wrong with it.

        Args:
            batch: Samples that were not fitted, to look at their scores; without them, those
                of the calibration are looked at.
        """
        scorer, calibration = self._ready(), self.calibration
        blocks = scorer.fitted.parameters.blocks
        found = None if batch is None else scorer(batch, self.memory_budget, parts=True)
        scores = None if calibration is None else calibration.scores
        return summarise(
            self.basis,
            self.prior_scale,
            {block.name: math.prod(block.shape) for block in blocks},
            self.skipped,
            scores if found is None else found.score,
            None if found is None else found.parts,
        )

    def compile(self, example: object, *, fuse: bool = False) -> Self:
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

    def compress(self, dtype: torch.dtype = torch.bfloat16) -> Self:
        """Hold the basis in half precision: half the memory, and no more certificates.

        Args:
            dtype: Of the vectors. Products are summed in float32; a calibration is dropped.

        Returns:
            The monitor itself.
        """
        fitted, source = self._ready().fitted, self._ready().source
        return self._adopt(replace(fitted, basis=fitted.basis.compress(dtype)), source)

    def offload(self, path: str | Path | None = None) -> Self:
        """Hold basis and sketch in the CPU's memory, or the basis in a file, not on a GPU.

        Scoring then sends the basis to the GPU piece by piece, and takes longer for it.

        Args:
            path: Where to keep a file of the basis, mapped into memory: for bases larger than
                that. It has no name there, so that nobody can change it, and is gone with the
                process.

        Returns:
            The monitor itself, with the same scores.

        Raises:
            OptionError: If that is a file of ours, as a saved monitor, or no file at all.
        """
        scorer, calibration, by = self._ready(), self.calibration, self._by
        if path is not None:
            artifact.check_place(Path(path))
            if artifact.is_ours(Path(path)):
                raise OptionError(
                    f"expected a path of its own for the basis, got {path}, where something "
                    "was saved; choose another"
                )
        basis = scorer.fitted.basis.offload(None if path is None else Path(path))
        state = scorer.fitted.state
        fitted = replace(
            scorer.fitted, basis=basis, state=None if state is None else state.to("cpu")
        )
        self._adopt(fitted, scorer.source)
        self.calibration, self._by = calibration, by
        return self

    def _batches(self, loader: Iterable[Any], doing: str, progress: bool) -> Iterable[Any]:
        self._ready()  # before anything of the loader is read
        return batches_of(open_stream(loader)[1], num_batches(loader), doing, progress)

    def _crowd_watch(self, calibration: Calibration) -> CrowdWatch:
        if self._crowd is None or self._crowd.calibration is not calibration:
            self._crowd = CrowdWatch(calibration)
        return self._crowd

    def _groups(self, found: Scores) -> Tensor | None:
        return None if self._by is None else groups_of(self._by, found.output)
