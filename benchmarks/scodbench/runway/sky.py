"""Above the horizon: the sky, its clouds, and hills and trees at the end of the fields."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from scodbench.runway import clouds
from scodbench.runway.camera import Rays
from scodbench.runway.colour import cover, plane
from scodbench.runway.noise import hashed, value_noise
from scodbench.runway.sunlight import Light

# brightness near the horizon, per light that the whole sky gives on level ground
_CLEAR_RADIANCE, _CLOUD_RADIANCE = 4.4, 1.5
_HILLS, _TREES = 1000, 1100  # seeds
_HILL = (0.20, 0.22, 0.20)
_TREE = (0.10, 0.11, 0.08)


def horizon_colour(light: Light) -> Tensor:
    """Return the colour that the air takes on in the distance, ``(B, 3, 1, 1)``.

    Args:
        light: The frames' light.
    """
    low = torch.exp(-light.sun[:, 2:] / 0.2)
    clear = _CLEAR_RADIANCE * light.clear_sky * (1 - 0.35 * low) + 0.9 * low * light.glow
    return torch.lerp(clear, _CLOUD_RADIANCE * light.sky, light.cloud_cover[:, None])


def sky_colour(seen: Rays, heading: Tensor, light: Light) -> Tensor:
    """Return what is seen above the horizon, ``(B, 3, S, C)`` in linear colours.

    Args:
        seen: The camera's rays.
        heading: ``(B, 1, 1)`` radians, of the nose, to the left of the runway's direction.
        light: The frames' light.
    """
    azimuth, elevation = seen.sky_azimuth + heading, seen.sky_elevation
    distant = horizon_colour(light)
    height = 1 - torch.exp(-elevation / math.radians(5.0))
    colour = distant + (0.86 * _CLEAR_RADIANCE * light.clear_sky - distant) * height
    colour = colour + _halo(azimuth, elevation, light)[:, None] * light.glow
    place = clouds.overhead(azimuth, elevation, seen.row_angle)
    thick = clouds.thickness(*place, light.cloud_cover, light.pattern)
    clear_air = torch.exp(
        -clouds.HEIGHT_M / elevation.clamp(min=0.005) / (3 * light.visibility_m)
    )
    amount = clouds.opacity(thick) * clear_air
    # thin parts let sunlight through, thick ones are grey from below
    thin = 1.2 * _CLOUD_RADIANCE * light.sky + 0.5 * light.beam * light.unclouded
    grey = _CLOUD_RADIANCE * light.sky
    heavy = (0.35 + thick / 2.5).clamp(0.0, 1.3)
    cloud = torch.lerp(thin, grey, heavy[:, None])
    return _with_land(cover(colour, cloud, amount), azimuth, seen, light)


def _halo(azimuth: Tensor, elevation: Tensor, light: Light) -> Tensor:
    """Return the brightness that the air has towards the sun, clouds permitting."""
    level = elevation.cos()
    towards = light.sun[:, 0] * level * azimuth.cos() + light.sun[:, 1] * level * azimuth.sin()
    towards = (towards + light.sun[:, 2] * elevation.sin()).clamp(min=0.0)
    near = towards.square().square()
    wide, disc = near * near, ((towards - 0.9985) / 0.001).clamp(0.0, 1.0)
    close = wide**16
    return (0.5 * wide + 1.2 * close + 8 * disc) * (1 - light.cloud_cover)


def _with_land(colour: Tensor, azimuth: Tensor, seen: Rays, light: Light) -> Tensor:
    """Return the sky with hills in front of it, and trees and sheds in front of those."""
    degrees, height = torch.rad2deg(azimuth), torch.rad2deg(seen.sky_elevation)
    pixel, distant = math.degrees(seen.row_angle), horizon_colour(light)
    flat = torch.zeros_like(degrees)
    ridge = 0.7 * value_noise(degrees / 9, flat, _HILLS) * value_noise(degrees / 2, flat, 1001)
    hills = _below(height, 0.1 + ridge, pixel)
    cell = (degrees / 0.45).floor().to(torch.int32)
    zero = torch.zeros_like(cell)
    groves = (value_noise(degrees / 11, flat, _TREES) - 0.5).clamp(min=0.0) * 2
    tall = 0.6 * hashed(cell, zero, 1101) * groves
    ground_light = light.sky + 0.5 * light.beam * light.sun[:, 2:] * light.unclouded
    hill = torch.lerp(plane(_HILL, colour.device) * ground_light, distant, 0.45)
    tree = torch.lerp(plane(_TREE, colour.device) * ground_light, distant, 0.15)
    colour = cover(colour, hill, hills)
    return cover(colour, tree, _below(height, tall, pixel))


def _below(height: Tensor, top: Tensor, pixel: float) -> Tensor:
    return ((top - height) / pixel + 0.5).clamp(0.0, 1.0)
