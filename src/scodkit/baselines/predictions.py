"""Predicted distributions: entropies, mixtures, and the loss and the draws of targets."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from scodkit import likelihoods
from scodkit.baselines.baseline import wide
from scodkit.errors import BatchError
from scodkit.likelihoods import Bernoulli, Categorical, HeteroscedasticGaussian, Likelihood

# the likelihoods for which all of this has a closed form
CLOSED_FORM = (Categorical, Bernoulli, likelihoods.Gaussian, HeteroscedasticGaussian)

_LOG_TWO_PI_E = math.log(2 * math.pi * math.e)


def entropy(likelihood: Likelihood, output: Tensor) -> Tensor:
    """Return the entropy ``(B,)`` of predicted distributions, in nats.

    Precise also where a class is all but certain: no difference of near-equal numbers.

    Args:
        likelihood: One of `CLOSED_FORM`.
        output: ``(B, *shape)``.
    """
    output = wide(output)
    if isinstance(likelihood, Categorical):
        return _class_entropy(likelihood.logits(output)).sum(1)
    if isinstance(likelihood, Bernoulli):
        z = output.flatten(1)
        return -(z.sigmoid() * logsigmoid(z) + (-z).sigmoid() * logsigmoid(-z)).sum(1)
    _, log_variance = _gaussian(likelihood, output)
    return 0.5 * (log_variance + _LOG_TWO_PI_E).sum(1)


def _class_entropy(logits: Tensor) -> Tensor:
    """Return the entropies of logits ``(..., C)``, as sums of terms that are not negative."""
    largest, index = logits.max(-1, keepdim=True)
    below = logits - largest
    odds = below.exp().scatter(-1, index, 0.0)  # of the other classes, to the largest
    total = odds.sum(-1)
    return total.log1p() + (odds * -below).sum(-1) / (1 + total)


def _gaussian(likelihood: Likelihood, output: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean and the log-variance of each target, ``(B, d)``."""
    if isinstance(likelihood, HeteroscedasticGaussian):
        mean, log_variance = likelihood.halves(output)
        return mean.flatten(1), log_variance.flatten(1)
    assert isinstance(likelihood, likelihoods.Gaussian)
    mean = output.flatten(1)
    return mean, likelihood.noise_variance(output).log().expand_as(mean)


@dataclass(frozen=True)
class Predictive:
    """The prediction for a batch, the uncertainty of the weights included.

    Args:
        likelihood: What distribution the output parametrises.
        output: Parameters of the mean prediction, as the model would give them,
            ``(B, *shape)``.
        variance: Total variance of each target, ``(B, d)`` in squared output units; None for
            classes, where the output determines it.
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
    """Return the prediction of a mixture of networks, each with the same weight.

    Args:
        likelihood: What distribution each output parametrises.
        outputs: Of all networks, ``(K, B, *shape)``.

    Returns:
        Mean of the means, or the mean probabilities as logits; computed in logarithms.
    """
    outputs, count = wide(outputs), math.log(len(outputs))
    if isinstance(likelihood, Categorical):
        # the networks are one more axis, before the others
        logs = outputs.log_softmax(likelihood.class_axis(outputs.ndim - 1) + 1)
        return Predictive(likelihood, logs.logsumexp(0) - count, None)
    if isinstance(likelihood, Bernoulli):
        # in the odds the number of networks cancels
        odds = logsigmoid(outputs).logsumexp(0) - logsigmoid(-outputs).logsumexp(0)
        return Predictive(likelihood, odds, None)
    if isinstance(likelihood, HeteroscedasticGaussian):
        means, log_variances = likelihood.halves(outputs, axis=2)
        # the variance of the means plus the mean variance, in logarithms as the outputs are
        spread = means.var(0, correction=0).log()
        log_total = torch.logaddexp(spread, log_variances.logsumexp(0) - count)
        output = torch.cat([means.mean(0), log_total], dim=1)
        return Predictive(likelihood, output, log_total.flatten(1).exp())
    assert isinstance(likelihood, likelihoods.Gaussian)
    variance = outputs.var(0, correction=0).flatten(1) + likelihood.noise_variance(outputs[0])
    return Predictive(likelihood, outputs.mean(0), variance)


def negative_log_likelihood(likelihood: Likelihood, output: Tensor, targets: Tensor) -> Tensor:
    """Return the training loss of each sample, ``(B,)`` in nats, up to a constant.

    Half the squared error over the variance, cross entropy, or the loss of mean and
    log-variance; summed over a sample's variables. Its gradient is precise also where the
    prediction is confident and right.

    Args:
        likelihood: One of `CLOSED_FORM`.
        output: ``(B, *shape)``.
        targets: Numbers, or class indices for Categorical: ``(B, ...)``, in the outputs' order.
    """
    if isinstance(likelihood, Categorical):
        logits = likelihood.logits(output)
        labels = targets.reshape(logits.shape[:2])[..., None].long()
        # log(q / (1 - q)) of the target's class, without 1 - q
        others = logits.scatter(-1, labels, -torch.inf).logsumexp(-1)
        return -logsigmoid(logits.gather(-1, labels)[..., 0] - others).sum(1)
    if isinstance(likelihood, Bernoulli):
        z = output.flatten(1)
        y = targets.reshape(z.shape).to(z)
        return -(y * logsigmoid(z) + (1 - y) * logsigmoid(-z)).sum(1)
    mean, log_variance = _gaussian(likelihood, output)
    squares = (mean - targets.reshape(mean.shape).to(mean)).square()
    if isinstance(likelihood, likelihoods.Gaussian):
        return 0.5 * (squares / likelihood.noise_variance(output)).sum(1)
    return 0.5 * (squares * (-log_variance).exp() + log_variance).sum(1)


def variables(likelihood: Likelihood, shape: Sequence[int]) -> tuple[int, int]:
    """Return how many targets a sample has, and how many values each can take.

    Args:
        likelihood: One of `CLOSED_FORM`.
        shape: Of a sample's output.

    Returns:
        Numbers of targets and of values; 0 values for any number.
    """
    outputs = math.prod(shape)
    if isinstance(likelihood, Categorical):
        classes = likelihood.logits(torch.empty(1, *shape, device="meta")).shape[2]
        return outputs // classes, classes
    if isinstance(likelihood, Bernoulli):
        return outputs, 2
    return outputs // 2 if isinstance(likelihood, HeteroscedasticGaussian) else outputs, 0


def targets_at(likelihood: Likelihood, output: Tensor, noise: Tensor) -> Tensor:
    """Return draws from predicted distributions, by random numbers, ``(B, q, targets)``.

    Args:
        likelihood: One of `CLOSED_FORM`.
        output: ``(B, *shape)``.
        noise: ``(B, q, targets)``: uniform in [0, 1) for classes, else normal.
    """
    if isinstance(likelihood, Categorical):
        cumulated = likelihood.logits(output).softmax(-1).cumsum(-1)[:, None]
        # probabilities may sum to a little less than 1: the last class gets the rest
        return (noise[..., None] > cumulated[..., :-1]).sum(-1)
    if isinstance(likelihood, Bernoulli):
        return (noise < output.flatten(1).sigmoid()[:, None]).double()
    mean, log_variance = _gaussian(likelihood, output)
    return mean[:, None] + (0.5 * log_variance).exp()[:, None] * noise


def check_targets(likelihood: Likelihood, output: Tensor, targets: Tensor) -> None:
    """Raise if the loss is not defined for targets.

    Args:
        likelihood: Whose loss.
        output: Of the model, ``(B, *shape)``.
        targets: ``(B, ...)``.

    Raises:
        BatchError: If number, type or range do not fit.
    """
    likelihood.factor(output[:1])  # raises if the output itself does not fit the likelihood
    count, values = variables(likelihood, output.shape[1:])
    form, fits = "finite numbers", True
    if isinstance(likelihood, Categorical):
        form = f"class indices from 0 to {values - 1}"
        inside = (targets >= 0) & (targets < values)
        fits = not targets.is_floating_point() and bool(inside.all())
    elif isinstance(likelihood, Bernoulli):
        form = "numbers from 0 to 1"
        fits = bool(((targets >= 0) & (targets <= 1)).all())
    if not fits or targets[0].numel() != count:
        raise BatchError(
            f"expected {count} target(s) a sample, {form}, for {likelihood!r} and an output "
            f"of shape {tuple(output.shape)}, got a {targets.dtype} of shape "
            f"{tuple(targets.shape)} from {targets.min()} to {targets.max()}; say which they "
            "are: targets=lambda batch: ..."
        )
