"""One layer of clouds, seen from below and as shadows on the ground: the same pattern."""

from __future__ import annotations

import torch
from torch import Tensor

from scodbench.runway.noise import fractal

HEIGHT_M = 1500.0
_GRAIN_M = 2600.0
DARKNESS = 0.93  # share of the sun's beam that a cloud takes away
_SPREAD = 0.13  # standard deviation of the sum of noises


def thickness(x: Tensor, y: Tensor, width: Tensor, cover: Tensor, pattern: Tensor) -> Tensor:
    """Return how thick the clouds are over a place; 0 and less where there are none.

    Args:
        x: ``(B, R, C)`` metres along the runway, from the aircraft, at the clouds' height.
        y: ``(B, R, C)`` metres to the left.
        width: ``(B, R, C)`` how many metres a pixel covers.
        cover: ``(B, 1, 1)`` share of the sky with clouds, 0 to 1.
        pattern: ``(B, 1, 1)`` int32 seeds.
    """
    scale = 1 / _GRAIN_M
    level = fractal(x * scale, y * scale, width * scale, pattern, octaves=4)
    # the sum of noises is close to normal, so that this share of it is above the threshold
    threshold: Tensor = -torch.special.ndtri(cover.clamp(0.003, 0.997))
    return level / _SPREAD - threshold


def opacity(thick: Tensor) -> Tensor:
    """Return how much of the light behind clouds is lost, 0 to 1; their edges are soft."""
    return (thick / 0.9 + 0.5).clamp(0.0, 1.0)


def overhead(
    azimuth: Tensor, elevation: Tensor, row_angle: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return where lines of sight pass the clouds, and how wide they are there.

    Args:
        azimuth: ``(B, R, C)`` radians to the left of the runway's direction.
        elevation: ``(R, C)`` radians above the horizon.
        row_angle: Radians from one row to the next.

    Returns:
        Metres ahead, metres to the left, and metres per pixel.
    """
    distance = HEIGHT_M / torch.tan(elevation.clamp(min=0.005))
    width = (distance.square() / HEIGHT_M * row_angle).expand_as(azimuth)
    return distance * azimuth.cos(), distance * azimuth.sin(), width


def towards_sun(x: Tensor, y: Tensor, sun: Tensor) -> tuple[Tensor, Tensor]:
    """Return where the sun's rays that reach the ground have passed the clouds.

    Args:
        x: ``(B, R, C)`` metres along the runway, from the aircraft.
        y: ``(B, R, C)`` metres to the left.
        sun: ``(B, 3, 1, 1)`` unit vectors towards the sun.
    """
    reach = HEIGHT_M / sun[:, 2]
    return x + reach * sun[:, 0], y + reach * sun[:, 1]
