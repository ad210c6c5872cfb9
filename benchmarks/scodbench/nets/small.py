"""Networks small enough for a CPU."""

from __future__ import annotations

from torch import nn


def wine_net() -> nn.Module:
    """Return the net for wine quality: 11 features to 1 number, 11,401 weights.

    Examples:
        >>> sum(p.numel() for p in wine_net().parameters())
        11401
    """
    return nn.Sequential(
        nn.Linear(11, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 1)
    )


def digits_net(*head: nn.Module, width: float = 1.0) -> nn.Module:
    """Return the backbone for digits ``(B, 1, 28, 28)`` with a head on its 288 features.

    Args:
        head: What comes after the features.
        width: So many times the channels, and the features.

    Examples:
        >>> sum(p.numel() for p in digits_net(nn.Linear(288, 5)).parameters())
        15493
    """
    first, second, third = (round(width * channels) for channels in (16, 32, 32))
    return nn.Sequential(
        nn.Conv2d(1, first, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(first, second, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(second, third, 3),
        nn.ReLU(),
        nn.Flatten(),
        *head,
    )


def frames_net() -> nn.Module:
    """Return the net for camera frames ``(B, 1, 8, 16)``: to 2 numbers, 13,090 weights.

    Examples:
        >>> sum(p.numel() for p in frames_net().parameters())
        13090
    """
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(256, 32),
        nn.ReLU(),
        nn.Linear(32, 2),
    )
