"""Maximum logit (Hendrycks et al., 2022)."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from scodkit.baselines.baseline import Baseline, State, class_logits
from scodkit.likelihoods import Categorical
from scodkit.model.network import Inputs


class MaxLogit(Baseline):
    """Minus the largest logit: no fit, one forward pass. Units of logits, any sign.

    Args:
        model: The trained network.
        likelihood: `Categorical`.
        picks: ``inputs=``, ``outputs=``; see `Picks`.

    Examples:
        >>> method = MaxLogit(torch.nn.Identity(), Categorical())
        >>> method.score(torch.tensor([[9.0, 0.0], [1.0, 0.0]]))
        tensor([-9., -1.])
    """

    handles: ClassVar = (Categorical,)
    because: ClassVar = "it needs one logit per class, whose common offset means something"
    learns: ClassVar = False

    def _judge(self, call: Inputs, state: State) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            output = self._network(call)
            return output, -class_logits(self.likelihood, output).amax(1)
