"""Colours of the ground: asphalt, rubber, paint, and the fields beside the runway.

Colours are linear red, green and blue, as X-Plane's frames show them on a clear morning.
"""

from __future__ import annotations

import torch
from torch import Tensor

from scodbench.runway.camera import Ground
from scodbench.runway.colour import cover, plane
from scodbench.runway.markings import HALF_WIDTH_M, LENGTH_M, band, paint
from scodbench.runway.noise import fractal, value_noise

_ASPHALT = (0.325, 0.293, 0.245)
_PAINT = (0.600, 0.560, 0.485)
_RUBBER = (0.036, 0.034, 0.028)
_GRAVEL = (0.385, 0.350, 0.260)
_DRY_GRASS = (0.300, 0.262, 0.150)
_GREEN_GRASS = (0.190, 0.210, 0.090)
# one seed per texture: the same world in every frame
_COARSE, _FINE, _STREAKS, _PATCHES, _CRACKS, _FIELDS = range(100, 700, 100)


def surface_colour(ground: Ground) -> Tensor:
    """Return the share of light the ground gives back, ``(B, 3, R, C)``.

    Args:
        ground: Where the pixels meet the ground.
    """
    x, y, device = ground.x, ground.y, ground.x.device
    wide = torch.maximum(ground.width_x, ground.width_y)
    coarse = fractal(x / 8, y / 8, wide / 8, _COARSE, octaves=2)
    fine = fractal(x * 2, y * 2, wide * 2, _FINE, octaves=5, roughness=1.3)
    rubber = _rubber(ground)
    crack = _cracks(ground)

    runway = plane(_ASPHALT, device) * (1 + 0.25 * coarse + 1.1 * fine)[:, None]
    painted = paint(ground) * (0.9 + 0.5 * coarse + 1.0 * fine)
    runway = cover(runway, plane(_PAINT, device), painted)
    runway = cover(runway, plane(_RUBBER, device), torch.maximum(rubber, crack))
    beside = 1 - band(y, ground.width_y, -HALF_WIDTH_M, HALF_WIDTH_M) * band(
        x, ground.width_x, 0.0, LENGTH_M
    )
    return cover(runway, _fields(ground, wide, coarse, fine), beside)


def _rubber(ground: Ground) -> Tensor:
    """Return how much tyres have left on the runway, ``(B, R, C)`` in [0, 1].

    Streaks run along the runway, close together in its middle and rare towards its edges.
    """
    x, y = ground.x, ground.y
    wide = torch.maximum(ground.width_x / 30, ground.width_y / 1.2)
    streaks = fractal(x / 30, y / 1.2, wide, _STREAKS, octaves=4, roughness=0.8)
    worn = value_noise(x / 170, torch.zeros_like(x), _PATCHES)
    middle = (0.85 + 0.25 * worn) * torch.exp(-(((y - 0.6) / 5.8).square().square()))
    rare = 0.35 + 0.07 * (y.abs() - 5).clamp(min=0.0)
    layers = 4.8 * streaks + 2.0 * middle - rare
    return 1 - torch.exp(-1.3 * layers.clamp(min=0.0))


def _cracks(ground: Ground) -> Tensor:
    """Return thin dark lines: cracks across the runway, and the seams between its lanes."""
    x, y = ground.x, ground.y
    wander = value_noise(y / 2.3, (x / 19).floor(), _CRACKS)
    wander = wander + 4 * value_noise(y / 17, x / 400, _CRACKS + 1)
    across = torch.remainder(x + wander, 19.0) - 9.5
    broken = ((value_noise(x / 5, y / 3, _CRACKS + 2) - 0.45) * 6).clamp(0.0, 1.0)
    crack = band(across, ground.width_x, -0.025, 0.025) * broken
    lane = torch.remainder(y + 1.9, 3.8) - 1.9
    seam = band(lane, ground.width_y, -0.02, 0.02)
    return 0.5 * torch.maximum(crack, seam)


def _fields(ground: Ground, wide: Tensor, coarse: Tensor, fine: Tensor) -> Tensor:
    """Return the colour beside the runway: gravel near it, grass in patches farther out."""
    device = ground.x.device
    patches = fractal(ground.x / 260, ground.y / 140, wide / 200, _FIELDS, octaves=3)
    away = ((ground.y.abs() - 18) / 60).clamp(0.0, 1.0)
    grass = (0.35 + 2.0 * coarse + 0.5 * away).clamp(0.0, 1.0)
    green = ((patches - 0.02) * 6).clamp(0.0, 1.0) * (0.15 + 0.5 * away)
    colour = plane(_GRAVEL, device) * (1 + 0.9 * fine)[:, None]
    colour = cover(colour, plane(_DRY_GRASS, device), grass * (0.8 + 1.6 * fine))
    return cover(colour, plane(_GREEN_GRASS, device), green)
