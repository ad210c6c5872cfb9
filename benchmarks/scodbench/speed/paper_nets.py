"""The networks of the SCOD paper's six domains, with the sketch size and rank it uses.

Weights are random: what is timed does not depend on them. Parameter counts are the paper's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from scodbench.nets import DenseNet121, FirstOutputs, ResNet18, digits_net, wine_net
from scodkit.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood


@dataclass(frozen=True)
class Domain:
    """A domain of the paper: network, likelihood, input shape, sketch size and rank."""

    name: str
    build: Callable[[], nn.Module]
    likelihood: Likelihood
    shape: tuple[int, ...]
    size: int
    rank: int
    outputs: int

    def model(self, device: str = "cpu") -> nn.Module:
        """Return the network in eval mode."""
        torch.manual_seed(0)
        return self.build().to(device).eval()

    def batch(self, size: int, device: str = "cpu") -> Tensor:
        """Return a batch of random inputs."""
        generator = torch.Generator().manual_seed(size)
        return torch.randn(size, *self.shape, generator=generator).to(device)


WINE = Domain("wine", wine_net, Gaussian(), (11,), 604, 100, 1)
ROTATED = Domain(
    "rotated mnist",
    lambda: digits_net(nn.Linear(288, 10), nn.ReLU(), nn.Linear(10, 1)),
    Gaussian(),
    (1, 28, 28),
    304,
    50,
    1,
)
BINARY = Domain(
    "binary mnist", lambda: digits_net(nn.Linear(288, 1)), Bernoulli(), (1, 28, 28), 304, 50, 1
)
MNIST = Domain(
    "mnist 0-4", lambda: digits_net(nn.Linear(288, 5)), Categorical(), (1, 28, 28), 604, 100, 5
)
TAXINET = Domain("taxinet resnet-18", lambda: ResNet18(2), Gaussian(), (3, 260, 300), 46, 7, 2)
CIFAR = Domain(
    "cifar densenet-121",
    lambda: FirstOutputs(DenseNet121(10), 5),
    Categorical(),
    (3, 32, 32),
    76,
    12,
    5,
)

CONVOLUTIONAL = (ROTATED, BINARY, MNIST)
SMALL = (WINE, *CONVOLUTIONAL)
