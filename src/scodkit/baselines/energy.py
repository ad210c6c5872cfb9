"""Energy (Liu et al., 2020)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from scodkit.baselines.baseline import Baseline, Picks, State, class_logits
from scodkit.errors import OptionError
from scodkit.likelihoods import Categorical, Likelihood
from scodkit.model.network import Inputs


class Energy(Baseline):
    """``-T log sum exp(logits / T)``: no fit, one forward pass. Units of logits, any sign.

    Args:
        model: The trained network.
        likelihood: `Categorical`.
        temperature: ``T``.
        picks: ``inputs=``, ``outputs=``; see `Picks`.

    Examples:
        >>> method = Energy(nn.Identity(), Categorical())
        >>> method.score(torch.tensor([[9.0, 0.0], [0.0, 0.0]]))
        tensor([-9.0001, -0.6931])
    """

    handles: ClassVar = (Categorical,)
    because: ClassVar = "it needs one logit per class, whose common offset means something"
    learns: ClassVar = False

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood,
        *,
        temperature: float = 1.0,
        **picks: Unpack[Picks],
    ) -> None:
        super().__init__(model, likelihood, **picks)
        if not 0 < temperature < float("inf"):
            raise OptionError(f"expected a positive, finite temperature, got {temperature!r}")
        self.temperature = temperature

    def _judge(self, call: Inputs, state: State) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            output = self._network(call)
            logits = class_logits(self.likelihood, output)
            return output, energy(logits, self.temperature)

    def _options(self) -> Mapping[str, Any]:
        return {"temperature": self.temperature}


def energy(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Return ``-T log sum exp(logits / T)`` of logits ``(B, C)``: ``(B,)``."""
    return -temperature * (logits / temperature).logsumexp(1)
