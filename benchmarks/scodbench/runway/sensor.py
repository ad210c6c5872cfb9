"""From light to a picture: exposure, vignette, response curve and noise."""

from __future__ import annotations

import torch
from torch import Tensor

from scodbench.runway.noise import hashed
from scodbench.runway.sunlight import Light

_VIGNETTE = 0.12  # light lost in the corners
_NOISE = 0.007  # standard deviation, of white = 1
_KNEE = 0.75  # light above it is compressed


def expose(picture: Tensor, light: Light) -> Tensor:
    """Return a picture as a camera stores it, ``(B, 3, H, W)`` in [0, 1].

    Args:
        picture: ``(B, 3, H, W)`` linear colours.
        light: The frames' light, with the camera's gain.
    """
    rows, columns = picture.shape[-2:]
    device = picture.device
    y = torch.arange(rows, dtype=torch.int32, device=device)[:, None]
    x = torch.arange(columns, dtype=torch.int32, device=device)
    radius = ((y + 0.5) / rows - 0.5).square() + ((x + 0.5) / columns - 0.5).square()
    exposed = picture * light.gain * (1 - 2 * _VIGNETTE * radius)
    rest = 1 - _KNEE
    bright = 1 - rest * torch.exp(-(exposed - _KNEE).clamp(min=0.0) / rest)
    stored = torch.where(exposed < _KNEE, exposed, bright).clamp(min=0.0) ** (1 / 2.2)
    grain = torch.stack([_grain(x, y, light.pattern + 50 + 2 * c) for c in range(3)], dim=1)
    return (stored + _NOISE * grain).clamp(0.0, 1.0)


def _grain(x: Tensor, y: Tensor, seed: Tensor) -> Tensor:
    """Return noise of mean 0 and standard deviation 1, without long tails."""
    return (hashed(x, y, seed) + hashed(x, y, seed + 1) - 1) * 6**0.5
