"""Length of the features outside the training data's principal components.

As a score by itself: Ndiour et al. (2020); as part of ViM: Wang et al. (2022).

To add a baseline, copy this file: it has an option, a fit, a score, and the two names that
`Baseline` needs to save and load it.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from scodkit.baselines.baseline import Picks, State, TrainingData, whole_number
from scodkit.baselines.features import FeatureBaseline, Moments, principal_components
from scodkit.errors import OptionError
from scodkit.likelihoods import Likelihood
from scodkit.model.network import Inputs


class Residual(FeatureBaseline):
    """Length of the centred features' part outside ``dim`` principal components; >= 0.

    Units of the features. Directions in which the training features do not vary at all always
    count as outside. One pass over the data, one forward pass a sample.

    Args:
        model: The trained network.
        likelihood: What distribution its output parametrises; any.
        dim: Number of components, less than there are features ``m``. None for 1000 from
            ``m = 2048`` on and 512 from 768 on, as in the paper of ViM, and ``m // 2`` below.
        layer: Name of the module whose input are the features; None for the last Linear one.
        picks: ``inputs=``, ``outputs=``; see `Picks`.

    Examples:
        >>> from scodkit import Gaussian
        >>> x = torch.tensor([[-3.0, 0.1], [-3.0, -0.1], [3.0, 0.1], [3.0, -0.1]])
        >>> method = Residual(nn.Linear(2, 1), Gaussian(), dim=1).fit([x], progress=False)
        >>> method.score(torch.tensor([[100.0, 0.5]]))
        tensor([0.5000])
    """

    learnt: ClassVar[tuple[str, ...]] = ("mean", "outside")
    options: ClassVar = ("dim", "layer")

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood,
        *,
        dim: int | None = None,
        layer: str | None = None,
        **picks: Unpack[Picks],
    ) -> None:
        super().__init__(model, likelihood, layer=layer, **picks)
        self.dim = None if dim is None else whole_number("dim", dim)

    def _learn(self, data: TrainingData) -> State:
        moments = Moments()
        for forward, _ in self._training_passes(data):
            moments.add(forward.features, precision=forward.precision)
        dim = settled_dim(self.dim, moments.means.shape[1])
        _, directions, rank = principal_components(moments.covariance(), moments.rounding())
        outside = directions[:, min(dim, rank) :].contiguous()  # frees the other directions
        return {"mean": moments.means[0], "outside": outside}

    def _judge(self, call: Inputs, state: State) -> tuple[Tensor, Tensor]:
        forward = self._pass(call, len(state["mean"]))
        return forward.output, length_outside(forward.features, state["mean"], state["outside"])


def length_outside(features: Tensor, centre: Tensor, outside: Tensor) -> Tensor:
    """Return the length ``(B,)`` of the features' part outside the principal components.

    Args:
        features: ``(B, m)``.
        centre: Where the components start, ``(m,)``.
        outside: The other directions, orthonormal: ``(m, r)``.
    """
    length: Tensor = torch.linalg.vector_norm((features - centre) @ outside, dim=1)
    return length


def settled_dim(dim: int | None, width: int) -> int:
    """Return the number of principal components to use.

    Args:
        dim: The option; None for the rule.
        width: Number of features.

    Raises:
        OptionError: If no direction would be left outside.
    """
    if dim is None:
        return 1000 if width >= 2048 else 512 if width >= 768 else width // 2
    if dim >= width:
        raise OptionError(
            f"expected dim below the number of features, {width}, got {dim}; type "
            f"dim={width // 2}, or None for the rule"
        )
    return dim
