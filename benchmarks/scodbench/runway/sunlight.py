"""The sun's path and the light it gives: direct, from the sky, and as the camera meters it.

Colours are linear red, green and blue. The unit is the light on level ground on a clear
morning at nine, for which the camera's white balance is set: it stays there all day, as it does
in a fixed camera, so that an evening is warm and an overcast day cool.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from scodbench.runway import clouds
from scodbench.runway.camera import per_frame
from scodbench.runway.conditions import Drawn

# Grant County airport, runway 04, late April
_LATITUDE, _DECLINATION, _RUNWAY_AZIMUTH = map(math.radians, (47.2, 15.0, 40.0))
_REFERENCE_HOUR = 9.0
# optical depth of clear air towards the zenith, for red, green and blue
_DEPTH = torch.tensor([0.09, 0.15, 0.28], dtype=torch.float64)
# light of the clear sky on level ground, in units of the sun above the air
_SKY = torch.tensor([0.087, 0.115, 0.128], dtype=torch.float64)
# how much of a change of light the camera's exposure makes up for, as an exponent
_ADAPTATION = 0.55


@dataclass(frozen=True)
class Light:
    """The light in each frame, float32 on the device that renders.

    Attributes:
        sun: ``(B, 3, 1, 1)`` unit vector towards the sun, in runway coordinates.
        beam: ``(B, 3, 1, 1)`` colour of the sun's light on a surface that faces it, unclouded.
        sky: ``(B, 3, 1, 1)`` colour of the sky's light on level ground, clouds included.
        clear_sky: ``(B, 3, 1, 1)`` the same without clouds.
        glow: ``(B, 3, 1, 1)`` colour of sunlight after a long way through the air.
        gain: ``(B, 3, 1, 1)`` what the camera multiplies colours by.
        cloud_cover: ``(B, 1, 1)`` share of the sky, 0 to 1.
        unclouded: ``(B, 1, 1, 1)`` share of the beam that passes the clouds, on average.
        visibility_m: ``(B, 1, 1)`` metres.
        pattern: ``(B, 1, 1)`` int32 seeds of the frame's clouds and sensor noise.
    """

    sun: Tensor
    beam: Tensor
    sky: Tensor
    clear_sky: Tensor
    glow: Tensor
    gain: Tensor
    cloud_cover: Tensor
    unclouded: Tensor
    visibility_m: Tensor
    pattern: Tensor


def sun_direction(hour: Tensor) -> Tensor:
    """Return the unit vector towards the sun, in runway coordinates (ahead, left, up).

    Args:
        hour: ``(B,)`` local solar time, 12 = noon.

    Returns:
        ``(B, 3)`` of the same type.
    """
    angle = (hour - 12) * math.pi / 12
    north = math.cos(_LATITUDE) * math.sin(_DECLINATION) - math.sin(_LATITUDE) * math.cos(
        _DECLINATION
    ) * torch.cos(angle)
    east = -math.cos(_DECLINATION) * torch.sin(angle)
    up = math.sin(_LATITUDE) * math.sin(_DECLINATION) + math.cos(_LATITUDE) * math.cos(
        _DECLINATION
    ) * torch.cos(angle)
    cos, sin = math.cos(_RUNWAY_AZIMUTH), math.sin(_RUNWAY_AZIMUTH)
    return torch.stack([north * cos + east * sin, north * sin - east * cos, up], dim=-1)


def light(drawn: Drawn, device: torch.device) -> Light:
    """Return the light in each frame, and how the camera exposes for it.

    Args:
        drawn: The frames' hour, clouds and exposure.
        device: Where the tensors shall be.
    """
    sun = sun_direction(drawn.hour)
    beam, clear, glow = _clear_light(sun[:, 2])
    cover = drawn.cloud_cover[:, None]
    level = beam * sun[:, 2:]
    # clouds let a third of all light through, without much of a colour of its own
    overcast = 0.34 * (level + clear).mean(dim=1, keepdim=True) * _tint(0.98, 1.0, 0.97)
    sky = (1 - cover) * clear + cover * overcast
    reference = sun_direction(torch.tensor([_REFERENCE_HOUR], dtype=torch.float64))
    reference_beam, reference_sky, _ = _clear_light(reference[:, 2])
    unit = reference_beam * reference[:, 2:] + reference_sky
    unclouded = 1 - clouds.DARKNESS * cover
    metered = ((level * unclouded + sky) / unit).mean(dim=1, keepdim=True)
    balance = 1 + drawn.warmth[:, None] * _tint(1.0, 0.0, -1.0)
    gain = drawn.exposure[:, None] * balance * metered**-_ADAPTATION / unit
    return Light(
        sun=per_frame(sun, device),
        beam=per_frame(beam, device),
        sky=per_frame(sky, device),
        clear_sky=per_frame(clear, device),
        glow=per_frame(glow, device),
        gain=per_frame(gain, device),
        cloud_cover=per_frame(drawn.cloud_cover, device),
        unclouded=per_frame(unclouded, device),
        visibility_m=per_frame(drawn.visibility_m, device),
        pattern=drawn.pattern.to(device)[:, None, None],
    )


def _clear_light(up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the colours of the sun's beam, of the sky's light, and of the low sun's glow."""
    degrees = torch.rad2deg(torch.asin(up))
    # Kasten and Young's air mass, which stays finite at the horizon
    mass = 1 / (up + 0.50572 * (degrees + 6.07995) ** -1.6364)
    beam = torch.exp(-_DEPTH * mass[:, None])
    sky = _SKY * (up / 0.65)[:, None] ** 0.7
    return beam, sky, torch.exp(-_DEPTH * (1.5 * mass[:, None] + 1))


def _tint(red: float, green: float, blue: float) -> Tensor:
    return torch.tensor([red, green, blue], dtype=torch.float64)
