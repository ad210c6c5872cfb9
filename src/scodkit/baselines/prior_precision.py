"""How precise the prior of the weights is: by the evidence, or by held-out targets.

The prior of each weight is a Gaussian around zero with a variance of one over the precision.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from scodkit.baselines.entropy import noise_variance
from scodkit.baselines.predictive import Predictive
from scodkit.baselines.targets import check_targets
from scodkit.errors import NonFiniteError
from scodkit.likelihoods import Bernoulli, Categorical, Gaussian

# halvings of the bracket, which spans a few decades: below rounding
_HALVINGS = 60


def most_evident(values: Tensor, squared_norm: float) -> float:
    """Return the prior precision with the largest marginal likelihood of the training data.

    Under Laplace's approximation (MacKay, 1992) its logarithm is, up to a constant,
    ``-1/2 (sum log(1 + values / t) + t squared_norm)``. That has one stationary point, where
    ``sum values / (values + t) = t squared_norm``: the left side falls with ``t``, the right
    one grows.

    Args:
        values: Eigenvalues of the Fisher information, summed over the data, in any order.
        squared_norm: Of the trained weights.

    Raises:
        NonFiniteError: If there is no such point, as weights or Fisher information are zero.
    """
    values = values.double()

    def too_small(precision: float) -> bool:
        return float((values / (values + precision)).sum()) > precision * squared_norm

    if not 0 < squared_norm < math.inf or not 0 < float(values.max()) < math.inf:
        raise NonFiniteError(
            "expected weights and Fisher information other than zero to choose a prior "
            "precision by, got zero or infinity; type prior_precision=1.0"
        )
    # no more than all of the weights can be determined by the data
    high = math.log(values.numel() / squared_norm)
    low = high - 1
    while not too_small(math.exp(low)):
        low -= 2 * (high - low)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if too_small(math.exp(middle)) else (low, middle)
    return math.exp(low)


def excess_surprise(predictive: Predictive, targets: Tensor) -> Tensor:
    """Return how much worse targets are predicted than they can be, ``(B,)`` in nats, >= 0.

    The best is the same at every prior precision: to be certain of a class, or to be right and
    certain of everything but the noise. So a sum over some targets is a bound on that over all.

    Args:
        predictive: Of a batch.
        targets: As for `surprise`.
    """
    found = surprise(predictive, targets)
    if not isinstance(predictive.likelihood, Gaussian):
        return found
    noise = noise_variance(predictive.likelihood, predictive.output)
    return found - 0.5 * torch.log(2 * math.pi * noise).sum()


def surprise(predictive: Predictive, targets: Tensor) -> Tensor:
    """Return how badly targets are predicted, ``(B,)`` in nats.

    For regression each output is taken to be Gaussian with its total variance.

    Args:
        predictive: Of a batch.
        targets: Classes ``(B,)``, or numbers of the shape of the output.
    """
    likelihood, output, variance = (
        predictive.likelihood,
        predictive.output,
        predictive.variance,
    )
    check_targets(likelihood, output, targets)
    if isinstance(likelihood, Categorical):
        return cross_entropy(output, targets.flatten().long(), reduction="none")
    targets = targets.reshape(output.shape).to(output.dtype)
    if isinstance(likelihood, Bernoulli):
        each = binary_cross_entropy_with_logits(output, targets, reduction="none")
        return each.flatten(1).sum(1)
    assert variance is not None
    squares = (output - targets).flatten(1).square()
    return 0.5 * (squares / variance + torch.log(2 * math.pi * variance)).sum(1)
