"""Norm of the last layer's gradient (Huang et al., 2021)."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from scodkit.baselines.baseline import State, class_logits
from scodkit.baselines.features import FeatureBaseline
from scodkit.likelihoods import Categorical
from scodkit.model.network import Inputs


class GradNorm(FeatureBaseline):
    """Minus the L1 norm of the gradient of KL(uniform || prediction) in the last weight; <= 0.

    Larger norms are typical of training data (so the paper), hence the minus. The gradient is
    the outer product of ``softmax - 1/C`` and the features, and its norm the product of
    theirs: no fit, one forward pass and no backward pass. Units of the features.

    Args:
        model: The trained network; its output is what the last Linear layer returns, or the
            first of it.
        likelihood: `Categorical`.
        layer: Name of the Linear layer that makes the logits; None for the one called last.
        picks: ``inputs=``, ``outputs=``; see `Picks`.

    Examples:
        >>> import torch
        >>> model = torch.nn.Linear(2, 2, bias=False)
        >>> model.weight.data = torch.tensor([[0.0, 0.0], [0.0, 9.0]])
        >>> GradNorm(model, Categorical()).score(torch.tensor([[3.0, 0.0], [3.0, 5.0]]))
        tensor([-0., -8.])
    """

    handles: ClassVar = (Categorical,)
    because: ClassVar = "it compares class probabilities with equal ones"
    learns: ClassVar = False

    def _judge(self, call: Inputs, state: State) -> tuple[Tensor, Tensor]:
        seen = self._pass(call)
        seen.head()
        logits = class_logits(self.likelihood, seen.output).double()
        slope = logits.softmax(1) - 1 / logits.shape[1]
        return seen.output, -slope.abs().sum(1) * seen.features.abs().sum(1)
