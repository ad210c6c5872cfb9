"""How uncertain a predicted distribution says it is."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from scodkit.errors import BatchError
from scodkit.likelihoods import (
    Bernoulli,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    Likelihood,
)

_LOG_TWO_PI_E = math.log(2 * math.pi * math.e)


def wide(output: Tensor) -> Tensor:
    """Return numbers in float32 at least: half precision ties what differs."""
    return output.to(torch.promote_types(output.dtype, torch.float32))


def entropy(likelihood: Likelihood, output: Tensor) -> Tensor:
    """Return the entropy ``(B,)`` of predicted distributions, in nats.

    It keeps its digits where a class is all but certain: no difference of near-equals.

    Args:
        likelihood: `Categorical`, `Bernoulli`, `Gaussian` or `HeteroscedasticGaussian`.
        output: ``(B, *shape)``.
    """
    output = wide(output)
    if isinstance(likelihood, Categorical):
        return _class_entropy(likelihood.logits(output)).sum(1)
    if isinstance(likelihood, Bernoulli):
        z = output.flatten(1)
        return -(z.sigmoid() * logsigmoid(z) + (-z).sigmoid() * logsigmoid(-z)).sum(1)
    if isinstance(likelihood, HeteroscedasticGaussian):
        log_variance = halves(output, axis=1)[1]
        return 0.5 * (log_variance.flatten(1) + _LOG_TWO_PI_E).sum(1)
    assert isinstance(likelihood, Gaussian)
    total = 0.5 * (noise_variance(likelihood, output).log() + _LOG_TWO_PI_E).sum()
    return total.expand(len(output)).clone()


def _class_entropy(logits: Tensor) -> Tensor:
    """Return the entropies of logits ``(..., C)``, as sums of terms that are not negative."""
    largest, which = logits.max(-1, keepdim=True)
    below = logits - largest
    odds = below.exp().scatter(-1, which, 0.0)  # of the other classes, to the largest
    total = odds.sum(-1)
    return total.log1p() + (odds * -below).sum(-1) / (1 + total)


def noise_variance(likelihood: Gaussian, output: Tensor) -> Tensor:
    """Return the variance of the noise on each output, ``(d,)`` in squared output units.

    Args:
        likelihood: With one variance, or one per output.
        output: ``(B, *shape)``.

    Raises:
        BatchError: If there are as many variances as do not fit the outputs.
    """
    variance = torch.as_tensor(likelihood.variance, dtype=output.dtype, device=output.device)
    outputs = math.prod(output.shape[1:])
    if variance.numel() not in (1, outputs):
        raise BatchError(
            f"expected {variance.numel()} outputs, one per variance given to Gaussian, got "
            f"{outputs}; pass one variance or {outputs} of them"
        )
    return variance.expand(outputs)


def halves(outputs: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    """Return means and log-variances, which share an axis.

    Args:
        outputs: ``(B, ...)``, or those of several networks.
        axis: The axis they share.

    Raises:
        BatchError: If they are not as many.
    """
    if outputs.shape[axis] % 2:
        raise BatchError(
            "expected an even number of outputs (means, then log-variances) along axis 1, got "
            f"{outputs.shape[axis]}; for a known noise level use Gaussian(variance=...)"
        )
    means, log_variances = outputs.chunk(2, dim=axis)
    return means, log_variances
