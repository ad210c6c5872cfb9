"""The angle of a turned digit 2; the digit 5, and twos upside down, are unknown."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import affine_grid, grid_sample

from scodbench.data import load
from scodbench.domain import Domain, SketchSize, Splits
from scodbench.domains.digits import recipe, standardised
from scodbench.domains.splitting import order
from scodbench.nets import digits_net
from scodbench.samples import TensorSamples
from scodkit.likelihoods import Gaussian
from scodkit.model.parameters import LastLayers

_SELECTION = 500


def build() -> nn.Module:
    """Return the network, 16,949 weights."""
    return digits_net(nn.Linear(288, 10), nn.ReLU(), nn.Linear(10, 1))


def turned(images: Tensor, angles: Tensor) -> Tensor:
    """Return images turned about their middle, by bilinear interpolation.

    Args:
        images: ``(n, 28, 28)`` of bytes.
        angles: ``(n,)`` in radians, counter-clockwise as seen.

    Returns:
        ``(n, 28, 28)`` of bytes, black where nothing was.
    """
    cos, sin, zero = angles.cos(), angles.sin(), torch.zeros_like(angles)
    # where a place of the result comes from: turned the other way; the second axis points down
    back = torch.stack([cos, -sin, zero, sin, cos, zero], dim=1).view(-1, 2, 3)
    source = images.float().unsqueeze(1)
    grid = affine_grid(back, list(source.shape), align_corners=False)
    found = grid_sample(source, grid, align_corners=False)
    return found.squeeze(1).round().clamp(0, 255).to(torch.uint8)


def _digit(
    folder: Path | None, split: str, digit: int, around: float, seed: int
) -> TensorSamples:
    images, labels = load.mnist(split, folder)
    images = images[labels == digit]
    generator = torch.Generator().manual_seed(seed)
    angles = around + math.pi / 4 * torch.randn(len(images), generator=generator)
    return TensorSamples(turned(images, angles), angles[:, None], standardised)


def splits(folder: Path | None = None) -> Splits:
    """Return the digit 2 turned by angles around 0 (standard deviation pi/4), in radians.

    Unknown are the digit 5 turned likewise, and the digit 2 turned around pi.
    """
    learnt = _digit(folder, "train", 2, 0.0, seed=0)
    which = order(len(learnt))
    return Splits(
        learnt.take(which[_SELECTION:]),
        learnt.take(which[:_SELECTION]),
        _digit(folder, "test", 2, 0.0, seed=1),
        {
            "digit_5": _digit(folder, "test", 5, 0.0, seed=2),
            "upside_down": _digit(folder, "test", 2, math.pi, seed=3),
        },
    )


ROTATED_MNIST = Domain(
    name="rotated_mnist",
    title="Rotated MNIST",
    likelihood=Gaussian(),
    build=build,
    splits=splits,
    recipe=recipe(epochs=20),
    all_layers=SketchSize(304, 50),
    last_layers=LastLayers(count=3),
    last=SketchSize(304, 50),
    local_rank=50,
)
