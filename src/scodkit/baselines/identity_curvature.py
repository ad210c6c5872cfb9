"""SCOD without its sketch: the squared length of the Fisher factor alone."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from scodkit.baselines.baseline import State
from scodkit.baselines.weight_space import WeightSpaceBaseline, squared_lengths
from scodkit.model.network import Inputs


class IdentityCurvature(WeightSpaceBaseline):
    """``|L|_F^2``: how much any change of the weights would change this prediction.

    What a `Monitor` scores before it has seen data, at ``prior_scale=1``: the ablation that
    says what the training data's curvature is worth. No fit; as many backward passes as the
    likelihood has directions. Nats (squared units), >= 0.

    Args:
        model: The trained network.
        likelihood: What distribution its output parametrises; any.
        parameters: Which weights, as for `Monitor`.
        picks: ``inputs=``, ``outputs=``; see `Picks`.

    Examples:
        >>> import torch
        >>> from scodkit import Gaussian
        >>> method = IdentityCurvature(torch.nn.Linear(2, 1), Gaussian())
        >>> method.score(torch.tensor([[3.0, 4.0]]))  # 3^2 + 4^2, and 1 for the bias
        tensor([26.])
    """

    learns: ClassVar = False

    def _judge(self, call: Inputs, state: State) -> tuple[Tensor, Tensor]:
        return squared_lengths(self._source(call), call)
