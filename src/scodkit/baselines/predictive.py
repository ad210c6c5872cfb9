"""A prediction that is a mixture or has been widened: its mean, and how uncertain it is."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from scodkit.baselines.entropy import entropy, halves, noise_variance, wide
from scodkit.likelihoods import (
    Bernoulli,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    Likelihood,
)


@dataclass(frozen=True)
class Predictive:
    """What is predicted for a batch, the uncertainty of the weights included.

    Args:
        likelihood: What distribution the output parametrises.
        output: Parameters of the mean prediction, as the model would give them,
            ``(B, *shape)``.
        variance: Total variance of each target, ``(B, d)`` in squared output units; None for
            classes, whose probabilities say it all.
    """

    likelihood: Likelihood
    output: Tensor
    variance: Tensor | None

    @property
    def score(self) -> Tensor:
        """Total variance summed over outputs, or entropy in nats: ``(B,)``, >= 0."""
        if self.variance is None:
            return entropy(self.likelihood, self.output)
        return self.variance.sum(1)


def mixture(likelihood: Likelihood, outputs: Tensor) -> Predictive:
    """Return the prediction that several networks make together, each with the same weight.

    Args:
        likelihood: What distribution each output parametrises.
        outputs: Of all networks, ``(K, B, *shape)``.

    Returns:
        Mean of the means, or the mean probabilities as logits; computed in logarithms.
    """
    outputs, count = wide(outputs), math.log(len(outputs))
    if isinstance(likelihood, Categorical):
        likelihood.logits(outputs[0])  # refuses outputs that have no such axis
        axis = 1 if likelihood.class_dim is None else likelihood.class_dim
        logs = outputs.log_softmax(axis if axis < 0 else axis + 1)
        return Predictive(likelihood, logs.logsumexp(0) - count, None)
    if isinstance(likelihood, Bernoulli):
        # the number of networks cancels in the odds
        odds = logsigmoid(outputs).logsumexp(0) - logsigmoid(-outputs).logsumexp(0)
        return Predictive(likelihood, odds, None)
    if isinstance(likelihood, HeteroscedasticGaussian):
        means, log_variances = halves(outputs, axis=2)
        # of squared means and variances; in logarithms, as the model's own variance is
        spread = means.var(0, correction=0).log()
        log_total = torch.logaddexp(spread, log_variances.logsumexp(0) - count)
        output = torch.cat([means.mean(0), log_total], dim=1)
        return Predictive(likelihood, output, log_total.flatten(1).exp())
    assert isinstance(likelihood, Gaussian)
    variance = outputs.var(0, correction=0).flatten(1)
    return Predictive(
        likelihood, outputs.mean(0), variance + noise_variance(likelihood, outputs[0])
    )
