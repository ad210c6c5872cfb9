"""Evidence beside the score: the unexplained share, the standardised logit, the energy.

With ``J`` the Jacobian of the outputs in the weights, outputs have the covariance
``V = eps^2 (J J^T - J U diag(values / (values + c)) U^T J^T)`` under the posterior of the
weights. The score is ``tr F_theta V``. Where a softmax saturates ``F_theta`` vanishes, and the
score with it, however strange the input is; ``V`` does not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from scodkit.factors.pieces import FactorSource
from scodkit.likelihoods import Bernoulli, Categorical, Likelihood
from scodkit.model.inputs import Inputs
from scodkit.numerics.hashing import signs
from scodkit.scoring.energies import Energies
from scodkit.scoring.score import score, score_batch
from scodkit.sketch.eigenbasis import Eigenbasis

# outputs up to which the trace of their covariance is exact, and probes that estimate it for
# more; each takes a backward pass
_EXACT, _PROBES = 32, 8

# rounding errors of the largest logit that a normalised one may have
_ROUNDINGS = 8


@dataclass(frozen=True)
class Evidence:
    """What speaks for or against a prediction, beside its score.

    Args:
        output: What the model returned, ``(B, *shape)``; of several heads by name.
        score: As `Monitor.score` returns it, ``(B,)`` in nats, larger = more atypical.
        unexplained_share: Share of the prediction's sensitivity to the weights that the
            training data leaves open, ``(B,)`` in [0, 1], larger = more atypical; NaN for a
            prediction that no weight changes.
        standardised_logit: For classifiers, minus the posterior standard deviations that the
            winning logit stands above the mean logit, ``(B,)``, at most 0, larger = more
            atypical, 0 for samples with a NaN or an infinity; None for other likelihoods.
    """

    output: Any
    score: Tensor
    unexplained_share: Tensor
    standardised_logit: Tensor | None


class OutputVariance(Likelihood):
    """Counts every output alike: scores are then ``tr V``, in squared units of the output.

    Exact for up to 32 outputs. Beyond that it is estimated by eight vectors of random signs
    (Hutchinson 1990), the same ones for every input.
    """

    def factor(self, output: Tensor, keys: Tensor | None = None) -> Tensor:
        """See `Likelihood.factor`.

        Returns:
            Rows ``(B, p, d)``, the same for each sample: unit vectors, or signs.
        """
        outputs = math.prod(output.shape[1:])
        rows = torch.eye(outputs, dtype=output.dtype, device=output.device)
        if outputs > _EXACT:
            places = torch.arange(_PROBES * outputs, device=output.device)
            rows = signs(0, 0, places).view(_PROBES, outputs).to(output.dtype)
            rows = rows / math.sqrt(_PROBES)
        return rows.expand(len(output), *rows.shape)

    def num_directions(self, shape: Sequence[int]) -> int:
        """Return ``p``: as many as outputs, or as probes."""
        outputs = math.prod(shape)
        return outputs if outputs <= _EXACT else _PROBES


class OutputVariances:
    """Traces of the outputs' covariance; keeps the source of their rows between batches."""

    def __init__(self) -> None:
        self._of: FactorSource | None = None  # what the source below is made of
        self._source: FactorSource | None = None

    def __call__(
        self, call: Inputs, source: FactorSource, basis: Eigenbasis, prior_scale: float
    ) -> Tensor:
        """Return ``tr V`` of a batch that is not empty, ``(B,)`` in float64.

        Infinite for samples with a NaN or an infinity.

        Args:
            call: The batch.
            source: Of the rows of scores.
            basis: The eigenbasis, on the model's device.
            prior_scale: ``eps``.
        """
        if self._source is None or self._of is not source:
            self._of, self._source = source, replace(source, likelihood=OutputVariance())
        return score(score_batch(self._source, call, basis)[1], basis, prior_scale)


def unexplained_share(score: Tensor, energies: Energies, prior_scale: float) -> Tensor:
    """Return ``score / (eps^2 |L|^2)``, ``(B,)`` in float64, in [0, 1]; NaN where both are 0.

    Args:
        score: ``(B,)``, >= 0.
        energies: What it is made of.
        prior_scale: ``eps``.
    """
    share = score.double() / (prior_scale**2 * energies.total)
    return torch.where(energies.total == torch.inf, 1.0, share).clamp_max(1.0)


def is_classifier(likelihood: Likelihood) -> bool:
    """Return whether outputs are logits, of classes or of labels."""
    return isinstance(likelihood, (Categorical, Bernoulli))


def standardised_logit(likelihood: Likelihood, output: Tensor, variance: Tensor) -> Tensor:
    """Return minus the margin of the prediction in posterior standard deviations, ``(B,)``.

    ``-(max z - mean z) / sqrt(tr V)`` for classes, ``-|z| / sqrt(V)`` for a label. Several
    variables (pixels, tokens, labels) have the mean of their margins, and of their variances.

    Args:
        likelihood: `Categorical` or `Bernoulli`.
        output: Logits, ``(B, *shape)``.
        variance: ``tr V``, ``(B,)``; infinite for samples that are not finite.
    """
    if isinstance(likelihood, Categorical):
        logits = likelihood.logits(output).double()
        margins = logits.amax(2) - logits.mean(2)
    else:
        margins = output.flatten(1).double().abs()
    least = torch.finfo(torch.float64).tiny  # no weight changes the logits: finite all the same
    found = -margins.mean(1) / (variance / margins.shape[1]).clamp_min(least).sqrt()
    return found.masked_fill(variance == torch.inf, 0.0)


def energy(likelihood: Likelihood, output: Tensor) -> Tensor:
    """Return ``-log sum exp(logits)``, ``(B,)`` in float64, larger = more atypical.

    A single logit ``z`` stands for the two logits ``z/2`` and ``-z/2``: neither of its classes
    comes first. Several variables have the mean of their energies. Logarithms of probabilities
    have none: what rounding leaves of it is 0.

    Args:
        likelihood: `Categorical` or `Bernoulli`.
        output: Logits, ``(B, *shape)``.
    """
    if isinstance(likelihood, Categorical):
        logits = likelihood.logits(output)
        rounding = _ROUNDINGS * torch.finfo(logits.dtype).eps * logits.abs().amax(2).double()
        energies = -logits.double().logsumexp(2)
        return energies.masked_fill(energies.abs() <= rounding, 0.0).mean(1)
    half = output.flatten(1).double() / 2
    return -torch.logaddexp(half, -half).mean(1)
