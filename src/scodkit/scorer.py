"""A fitted network, ready to score batches: eagerly, or as one recorded call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from scodkit import score as scoring
from scodkit.capture import Captured, capture
from scodkit.eigenbasis import Eigenbasis
from scodkit.errors import BatchError, CaptureError
from scodkit.factors import FactorSource
from scodkit.fitted import Fitted
from scodkit.fitting import Recipe
from scodkit.network import Inputs, Network
from scodkit.score import Energies


@dataclass(frozen=True)
class Scores:
    """A batch's output ``(B, *shape)``, scores ``(B,)`` and, if asked for, their parts."""

    output: Tensor
    score: Tensor
    parts: Energies | None = None


class Scorer:
    """Scores batches with what a fit left behind.

    Args:
        network: The model.
        recipe: How it was fitted.
        fitted: The fit; its basis follows the model from device to device.
        source: The engine of the fit; None to choose one on the first batch.
        prior_scale: ``eps``.
    """

    def __init__(
        self,
        network: Network,
        recipe: Recipe,
        fitted: Fitted,
        source: FactorSource | None,
        prior_scale: float,
    ) -> None:
        self.fitted = fitted
        self.source = source
        self._network = network
        self._recipe = recipe
        self._prior_scale = prior_scale
        self._captured: Captured | None = None
        self._rest: object = None  # of the captured call: what is not a tensor

    def basis(self) -> Eigenbasis:
        """Return the basis on the model's device, following it if it was moved."""
        basis = self.fitted.basis.to(self._network.device)
        if basis is not self.fitted.basis:
            self.fitted = replace(self.fitted, basis=basis)
        return basis

    def __call__(self, batch: object, budget: int, *, parts: bool = False) -> Scores:
        """Return outputs and scores of a batch, from the recording where it fits.

        Args:
            batch: As the loader yields it.
            budget: Bytes that rows in weight space may take at a time.
            parts: Whether to say what the scores are made of.
        """
        call = self._network.inputs_of(batch)
        if self._captured and self._captured.fits(call.tensors()) and self._same_rest(call):
            output, score, *rest = self._captured(call.tensors(), 4 if parts else 2)
            return Scores(output, score, Energies(*rest) if rest else None)
        basis = self.basis()
        with self._network.evaluating():
            if call.batch_size == 0:
                none = Energies.none(basis)
                return Scores(self._network(call).detach(), none.total, none)
            return self._eager(call, basis, budget)

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
        basis = self.basis()
        if self._recipe.likelihood.draws:
            raise CaptureError(
                f"expected a likelihood without random draws, got {self._recipe.likelihood}; "
                "go on without monitor.compile"
            )
        with self._network.evaluating():
            call = self._network.inputs_of(batch)
            if call.batch_size == 0:
                raise BatchError("expected an example with samples, got none")
            self._source_for(call, budget)  # choosing an engine is not to be recorded

            def score(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
                found = self._eager(Inputs(*call.with_tensors(list(tensors))), basis, budget)
                assert found.parts is not None
                return found.output, found.score, found.parts.total, found.parts.along

            self._captured = capture(score, call.tensors(), fuse=fuse)
            self._rest = _rest(call)

    def certificate(self, batch: object, budget: int) -> scoring.Certificate:
        """Return bounds on the exact scores of a batch.

        Args:
            batch: As the loader yields it.
            budget: As in scoring.
        """
        parts = self(batch, budget, parts=True).parts
        assert parts is not None
        return scoring.certificate(parts, self.basis(), self._prior_scale)

    def features(self, batch: object, budget: int) -> Tensor:
        """Return ``U^T L`` as ``(B, p, k)``.

        Args:
            batch: As the loader yields it.
            budget: As in scoring.
        """
        basis = self.basis()
        with self._network.evaluating():
            call = self._network.inputs_of(batch)
            if call.batch_size == 0:
                return basis.values.new_empty(0, self.fitted.directions, basis.rank)
            return scoring.features(self._source_for(call, budget), call, basis)

    def _eager(self, call: Inputs, basis: Eigenbasis, budget: int) -> Scores:
        output, parts = scoring.score_batch(self._source_for(call, budget), call, basis)
        score = scoring.score(parts, basis, self._prior_scale).to(basis.values.dtype)
        return Scores(output, score, parts)

    def _source_for(self, call: Inputs, budget: int) -> FactorSource:
        """Return the engine, chosen on the first batch after a load or a change of device."""
        if self.source is None or self.source.engine.device != self._network.device:
            recipe, parameters = self._recipe, self.fitted.parameters
            self.source = recipe.source(self._network, parameters, call)
        return replace(self.source, budget=budget)

    def _same_rest(self, call: Inputs) -> bool:
        return _rest(call) == self._rest


def _rest(call: Inputs) -> list[object]:
    """Return what a call passes besides tensors: it is part of the recording."""
    named = [*enumerate(call.args), *call.kwargs.items()]
    return [(key, None if isinstance(value, Tensor) else value) for key, value in named]
