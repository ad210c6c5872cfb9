"""Maximum softmax probability (Hendrycks and Gimpel, 2017)."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from scodkit.baselines.baseline import Baseline, State, class_logits
from scodkit.likelihoods import Bernoulli, Categorical
from scodkit.model.network import Inputs


class MaxSoftmax(Baseline):
    """One minus the largest class probability: no fit, one forward pass. In [0, 1].

    Args:
        model: The trained network.
        likelihood: `Categorical`, or `Bernoulli` with one logit.
        picks: ``inputs=``, ``outputs=``; see `Picks`.

    Examples:
        >>> method = MaxSoftmax(torch.nn.Identity(), Categorical())
        >>> method.score(torch.zeros(1, 4))
        tensor([0.7500])
    """

    handles: ClassVar = (Categorical, Bernoulli)
    because: ClassVar = "it needs class probabilities"
    learns: ClassVar = False

    def _judge(self, call: Inputs, state: State) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            output = self._network(call)
            logits = class_logits(self.likelihood, output)
            # from the others' side: 1 - q would be rounded to zero for a confident prediction
            largest = logits.argmax(1, keepdim=True)
            others = logits.log_softmax(1).scatter(1, largest, -torch.inf)
            return output, others.exp().sum(1)
