"""Any family of distributions, by sampling."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.distributions import Distribution

from scodkit.errors import OptionError
from scodkit.likelihoods.likelihood import Likelihood

# torch.distributions draws from the global generator only: one draw at a time, then restored
_GLOBAL_GENERATOR = threading.Lock()


@dataclass(frozen=True)
class MonteCarlo(Likelihood):
    """Any ``torch.distributions`` family, by sampling its score function; unbiased.

    Row ``s`` is the gradient of ``log p(y_s)`` in theta over ``sqrt(samples)``, with ``y_s``
    drawn from the prediction itself. Its cost does not depend on the number of outputs.

    Args:
        family: Maps an output ``(B, *shape)`` to a distribution with ``B`` as its first batch
            axis; log-probabilities are summed over all other axes. It is called on the CPU
            too (draws must not depend on the device), so tensors of its own must follow
            ``output.device``.
        samples: Draws per sample; the standard error falls with its root.
        seed: With a sample's key it fixes that sample's draws.

    Examples:
        >>> poisson = MonteCarlo(lambda out: torch.distributions.Poisson(out.exp()), samples=4)
        >>> poisson.factor(torch.zeros(3, 2)).shape
        torch.Size([3, 4, 2])
    """

    draws: ClassVar[bool] = True

    family: Callable[[Tensor], Distribution]
    samples: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise OptionError(f"expected samples >= 1, got {self.samples}")

    def factor(self, output: Tensor, keys: Tensor | None = None) -> Tensor:
        """See `Likelihood.factor`; ``p = samples``.

        Returns:
            Rows ``(B, samples, d)``.
        """
        if keys is None:
            keys = torch.arange(output.shape[0])
        with torch.inference_mode(False), torch.enable_grad():
            # a clone: what was made under inference_mode cannot be differentiated
            output = output.detach().clone()
            drawn = self._draw(output, keys.tolist()).to(output.device)
            # one copy of theta per draw: a single backward pass gives every gradient
            theta = output.expand(self.samples, *output.shape)
            theta = theta.reshape(-1, *output.shape[1:]).clone().requires_grad_()
            log_probability = self.family(theta).log_prob(drawn.flatten(0, 1))
            (gradient,) = torch.autograd.grad(log_probability.sum(), theta)
        rows = gradient.reshape(self.samples, output.shape[0], -1).transpose(0, 1)
        return rows / math.sqrt(self.samples)

    def _draw(self, output: Tensor, keys: list[int]) -> Tensor:
        # on the CPU, so that a draw does not depend on the device
        on_cpu = output.cpu()
        draws = []
        with _GLOBAL_GENERATOR:
            state = torch.default_generator.get_state()
            try:
                for i, key in enumerate(keys):
                    torch.default_generator.manual_seed(
                        (self.seed * 0x9E3779B97F4A7C15 + key) % 2**63
                    )
                    draws.append(self.family(on_cpu[i : i + 1]).sample((self.samples,)))
            finally:
                torch.default_generator.set_state(state)
        return torch.cat(draws, dim=1)

    def num_directions(self, shape: Sequence[int]) -> int:
        """Return ``samples``."""
        return self.samples
