"""ResNet-18 (He et al., 2016)."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions around a shortcut.

    Args:
        inputs: Channels in.
        outputs: Channels out.
        stride: Of the first convolution, and of the shortcut.
    """

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Return ``(B, outputs, h, w)``."""
        inner = self.bn2(self.conv2(torch.relu_(self.bn1(self.conv1(x)))))
        return torch.relu_(inner + self.shortcut(x))


class ResNet18(nn.Sequential):
    """The network with a number of outputs; 11,177,538 weights with two.

    Args:
        outputs: ``d``.

    Examples:
        >>> sum(p.numel() for p in ResNet18(2).parameters())
        11177538
    """

    def __init__(self, outputs: int) -> None:
        blocks: list[nn.Module] = []
        width = 64
        for channels, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
            blocks += [
                ResidualBlock(width, channels, stride),
                ResidualBlock(channels, channels, 1),
            ]
            width = channels
        super().__init__(
            nn.Conv2d(3, 64, 7, 2, 3, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
            *blocks,
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(width, outputs),
        )
