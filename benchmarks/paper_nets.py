"""The networks of the SCOD paper's six domains, with the sketch size and rank it uses.

Weights are random: what is timed does not depend on them. Parameter counts are the paper's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from scodkit.bench.nets import digits_net, wine_net
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


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions around a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output, ``(B, outputs, h, w)``."""
        inner = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(inner + self.shortcut(x))


def resnet18() -> nn.Module:
    """Return ResNet-18 with two outputs, 11,177,538 weights (He et al., 2016)."""
    stages = []
    width = 64
    for outputs, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        stages += [ResidualBlock(width, outputs, stride), ResidualBlock(outputs, outputs, 1)]
        width = outputs
    return nn.Sequential(
        nn.Conv2d(3, 64, 7, 2, 3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
        *stages,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(512, 2),
    )


class DenseLayer(nn.Module):
    """Appends 32 channels to its input."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(inputs)
        self.conv1 = nn.Conv2d(inputs, 128, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(128)
        self.conv2 = nn.Conv2d(128, 32, 3, padding=1, bias=False)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` with the new channels behind it."""
        inner = self.conv1(self.relu(self.norm1(x)))
        return torch.cat([x, self.conv2(self.relu(self.norm2(inner)))], dim=1)


class FirstOutputs(nn.Module):
    """A network of which only the first outputs count."""

    def __init__(self, model: nn.Module, count: int) -> None:
        super().__init__()
        self.model = model
        self.count = count

    def forward(self, x: Tensor) -> Tensor:
        """Return the first outputs, ``(B, count)``."""
        return self.model(x)[:, : self.count]


def densenet121() -> nn.Module:
    """Return DenseNet-121 for 32 x 32 images, 6,956,426 weights (Huang et al., 2017)."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 3, padding=1, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
    ]
    width = 64
    for block, depth in enumerate((6, 12, 24, 16)):
        if block:
            layers += [
                nn.BatchNorm2d(width),
                nn.ReLU(inplace=True),
                nn.Conv2d(width, width // 2, 1, bias=False),
                nn.AvgPool2d(2),
            ]
            width //= 2
        for _ in range(depth):
            layers.append(DenseLayer(width))
            width += 32
    head = [
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(width, 10),
    ]
    return FirstOutputs(nn.Sequential(*layers, *head), 5)


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
TAXINET = Domain("taxinet resnet-18", resnet18, Gaussian(), (3, 260, 300), 46, 7, 2)
CIFAR = Domain("cifar densenet-121", densenet121, Categorical(), (3, 32, 32), 76, 12, 5)

CONVOLUTIONAL = (ROTATED, BINARY, MNIST)
SMALL = (WINE, *CONVOLUTIONAL)
LARGE = (TAXINET, CIFAR)
