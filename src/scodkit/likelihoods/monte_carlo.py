"""Any family of distributions, by sampling."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.distributions import Categorical, Distribution

from scodkit.errors import OptionError
from scodkit.likelihoods.likelihood import Likelihood
from scodkit.numerics.hashing import shares

# torch.distributions draws from the global generator only: one thread at a time may seed it,
# and restores it
_GLOBAL_GENERATOR = threading.Lock()

# spreads seeds that are close to each other
_GOLDEN = 0x9E3779B97F4A7C15


@dataclass(frozen=True)
class MonteCarlo(Likelihood):
    """Any ``torch.distributions`` family, by sampling its score function; unbiased.

    Row ``s`` is the gradient of ``log p(y_s)`` in theta over ``sqrt(samples)``, with ``y_s``
    drawn from the prediction itself. Its cost does not depend on the number of outputs.

    Args:
        family: Maps an output ``(B, *shape)`` to a distribution with ``B`` as its first batch
            axis; log-probabilities are summed over all other axes. Classes are drawn where the
            output is; all else on the CPU (draws must not depend on the device), so tensors
            of its own must follow ``output.device``.
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
            drawn = self._draw(output, seeds_of(keys, self.seed))
            # one copy of theta per draw: a single backward pass gives every gradient
            theta = output.expand(self.samples, *output.shape)
            theta = theta.reshape(-1, *output.shape[1:]).clone().requires_grad_()
            log_probability = self.family(theta).log_prob(drawn.flatten(0, 1))
            (gradient,) = torch.autograd.grad(log_probability.sum(), theta)
        rows = gradient.reshape(self.samples, output.shape[0], -1).transpose(0, 1)
        return rows / math.sqrt(self.samples)

    def _draw(self, output: Tensor, seeds: list[int]) -> Tensor:
        """Return draws ``(samples, B, ...)``."""
        with _GLOBAL_GENERATOR, torch.random.fork_rng(devices=[]):
            predicted = self.family(output)
            if type(predicted) is Categorical and predicted.batch_shape[:1] == (len(output),):
                return self._classes(predicted.probs, seeds)
            on_cpu, draws = output.cpu(), []
            for i, seed in enumerate(seeds):
                torch.default_generator.manual_seed(seed)
                draws.append(self.family(on_cpu[i : i + 1]).sample((self.samples,)))
        return torch.cat(draws, dim=1).to(output.device)

    def _classes(self, probabilities: Tensor, seeds: list[int]) -> Tensor:
        """Return the classes at which running sums of ``(B, ..., C)`` pass a random share."""
        sums = probabilities.cumsum(-1)
        places = torch.arange(self.samples * sums[0, ..., 0].numel(), device=sums.device)
        drawn = torch.empty(self.samples, *sums.shape[:-1], dtype=torch.int64).to(sums.device)
        for i, seed in enumerate(seeds):
            each = shares(seed, 0, places).view(self.samples, *sums.shape[1:-1])
            for draw, share in zip(drawn[:, i], each, strict=True):
                # of the last sum, so that it is never reached: rounding may keep it from 1
                limit = share.to(sums.dtype) * sums[i, ..., -1]
                torch.sum(sums[i] <= limit[..., None], dim=-1, out=draw)
        return drawn

    def num_directions(self, shape: Sequence[int]) -> int:
        """Return ``samples``."""
        return self.samples


def seeds_of(keys: Tensor, seed: int) -> list[int]:
    """Return a seed for each sample, by its key and the seed of a likelihood."""
    found: list[int] = [(seed * _GOLDEN + key) % 2**63 for key in keys.tolist()]
    return found
