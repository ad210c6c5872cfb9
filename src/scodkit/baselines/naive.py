"""The uncertainty the network itself states: the entropy of its prediction."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from scodkit.baselines.baseline import Baseline, State
from scodkit.baselines.entropy import entropy
from scodkit.likelihoods import (
    Bernoulli,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
)
from scodkit.model.network import Inputs


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
