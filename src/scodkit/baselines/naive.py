"""The uncertainty the network itself states: the entropy of its prediction."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from scodkit.baselines.baseline import Baseline, State
from scodkit.baselines.cost import Cost
from scodkit.likelihoods import (
    Bernoulli,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    Likelihood,
)
from scodkit.network import Inputs

_LOG_TWO_PI_E = math.log(2 * math.pi * math.e)


class Naive(Baseline):
    """Entropy of the predicted distribution, in nats: no fit, one forward pass.

    Of several variables (pixels, independent logits) it is the sum. For regression with a fixed
    variance it is a constant, which cannot tell anything from anything.

    Args:
        model: The trained network.
        likelihood: What distribution its output parametrises.
        picks: ``inputs=``, ``outputs=``; see `Picks`.

    Examples:
        >>> from torch import nn
        >>> method = Naive(nn.Identity(), Categorical())
        >>> method.score(torch.tensor([[0.0, 0.0], [9.0, 0.0]]))
        tensor([0.6931, 0.0012])
    """

    handles: ClassVar = (Categorical, Bernoulli, Gaussian, HeteroscedasticGaussian)
    because: ClassVar = "its entropy has no closed form here"
    learns: ClassVar = False

    def _judge(self, call: Inputs, state: State) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            output = self._network(call)
            return output, entropy(self.likelihood, output)

    def _cost(self, call: Inputs, state: State) -> Cost:
        return Cost(forwards=1)


def entropy(likelihood: Likelihood, output: Tensor) -> Tensor:
    """Return the entropy ``(B,)`` of predicted distributions, in nats.

    Args:
        likelihood: One of those `Naive` handles.
        output: ``(B, *shape)``.
    """
    if isinstance(likelihood, Categorical):
        logs = likelihood.logits(output).log_softmax(-1)
        # 0 log 0 = 0, where the logarithm is -inf
        each = -(logs.exp() * logs.clamp_min(torch.finfo(logs.dtype).min)).sum(-1)
    elif isinstance(likelihood, Bernoulli):
        each = binary_cross_entropy_with_logits(output, output.sigmoid(), reduction="none")
    elif isinstance(likelihood, HeteroscedasticGaussian):
        each = 0.5 * (output.chunk(2, dim=1)[1] + _LOG_TWO_PI_E)
    else:
        assert isinstance(likelihood, Gaussian)
        variance = torch.as_tensor(likelihood.variance, dtype=output.dtype)
        total = 0.5 * (variance.log() + _LOG_TWO_PI_E).expand(output[0].numel()).sum()
        return total.to(output.device).expand(len(output)).clone()
    return each.flatten(1).sum(1)
