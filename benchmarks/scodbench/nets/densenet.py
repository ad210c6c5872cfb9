"""DenseNet-121 (Huang et al., 2017) for images of 32 x 32.

Parameters are named as in most public copies of the network, so that weights can be exchanged.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn

_GROWTH = 32
_DEPTHS = (6, 12, 24, 16)


class DenseLayer(nn.Module):
    """Appends 32 channels to its input.

    Args:
        inputs: Channels in.
    """

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(inputs)
        self.conv1 = nn.Conv2d(inputs, 4 * _GROWTH, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(4 * _GROWTH)
        self.conv2 = nn.Conv2d(4 * _GROWTH, _GROWTH, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` with the new channels behind it."""
        inner = self.conv1(torch.relu_(self.norm1(x)))
        return torch.cat([x, self.conv2(torch.relu_(self.norm2(inner)))], dim=1)


class Transition(nn.Sequential):
    """Halves channels, height and width.

    Args:
        inputs: Channels in.
    """

    def __init__(self, inputs: int) -> None:
        super().__init__(
            OrderedDict(
                norm=nn.BatchNorm2d(inputs),
                relu=nn.ReLU(inplace=True),
                conv=nn.Conv2d(inputs, inputs // 2, 1, bias=False),
                pool=nn.AvgPool2d(2),
            )
        )


class DenseNet121(nn.Module):
    """The network with a 3x3 first convolution of stride 1; 6,956,426 weights with 10 outputs.

    Args:
        outputs: ``d``.

    Examples:
        >>> sum(p.numel() for p in DenseNet121(10).parameters())
        6956426
    """

    def __init__(self, outputs: int) -> None:
        super().__init__()
        width = 2 * _GROWTH
        layers: OrderedDict[str, nn.Module] = OrderedDict(
            conv0=nn.Conv2d(3, width, 3, padding=1, bias=False),
            norm0=nn.BatchNorm2d(width),
            relu0=nn.ReLU(inplace=True),
            pool0=nn.MaxPool2d(3, 2, 1),
        )
        for number, depth in enumerate(_DEPTHS, start=1):
            if number > 1:
                layers[f"transition{number - 1}"] = Transition(width)
                width //= 2
            block: OrderedDict[str, nn.Module] = OrderedDict()
            for layer in range(1, depth + 1):
                block[f"denselayer{layer}"] = DenseLayer(width)
                width += _GROWTH
            layers[f"denseblock{number}"] = nn.Sequential(block)
        layers["norm5"] = nn.BatchNorm2d(width)
        self.features = nn.Sequential(layers)
        self.classifier = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits ``(B, outputs)`` of images ``(B, 3, h, w)``."""
        features = torch.relu_(self.features(x))
        logits: Tensor = self.classifier(features.mean((2, 3)))
        return logits
