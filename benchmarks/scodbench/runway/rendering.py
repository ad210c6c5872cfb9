"""Pictures from a wing camera: the ground and the sky, lit, hazed and exposed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from scodbench.runway import clouds
from scodbench.runway.camera import Camera, Ground, Rays, look_down, per_frame, rays
from scodbench.runway.colour import cover
from scodbench.runway.conditions import Condition, draw
from scodbench.runway.nose import Nose, draw_nose, nose
from scodbench.runway.poses import check_poses
from scodbench.runway.sensor import expose
from scodbench.runway.shadow import from_aircraft, shadow
from scodbench.runway.sky import horizon_colour, sky_colour
from scodbench.runway.sunlight import Light, light
from scodbench.runway.surface import surface_colour
from scodkit.errors import BatchError

# frames rendered at once: on a CPU one stays in the cache, and cannot depend on its neighbours;
# a GPU wants many
_CPU_CHUNK, _GPU_CHUNK = 1, 48
_WING = Camera()


@dataclass(frozen=True)
class _Fixed:
    """What all frames of a camera share."""

    camera: Camera
    seen: Rays
    nose: Nose


@torch.no_grad()
def render(
    poses: Tensor,
    condition: Condition,
    seeds: Tensor,
    camera: Camera = _WING,
    device: torch.device | str | None = None,
) -> Tensor:
    """Return pictures of a runway from the wing of a taxiing aircraft.

    A frame is a function of its pose, its seed, the condition and the camera: not of the other
    frames of its batch, and up to rounding not of the device.

    Args:
        poses: ``(B, 3)`` cross-track m, positive to the left of the centre line; heading deg,
            positive with the nose to the left; down-track m from the threshold.
        condition: Times of day and weather that the frames draw from.
        seeds: ``(B,)`` int64, at least 0: what frame i draws from the condition, its clouds and
            its sensor noise.
        camera: Where it sits and how it looks at the world.
        device: Where to render; None for where the poses are.

    Returns:
        ``(B, 3, rows, columns)`` float32 in [0, 1], red, green, blue, gamma-encoded; 260 rows
        and 300 columns unless the camera says otherwise.

    Raises:
        BatchError: If poses or seeds have another form or are out of range.

    Examples:
        >>> from scodbench.runway import MORNING, sample_poses
        >>> render(sample_poses(2, seed=0), MORNING, torch.arange(2)).shape
        torch.Size([2, 3, 260, 300])
    """
    check_poses(poses)
    _check_seeds(seeds, len(poses))
    device = torch.device(device) if device is not None else poses.device
    held, seeds = poses.detach().double().cpu(), seeds.detach().long().cpu()
    fixed = _Fixed(camera, rays(camera, device), nose(camera, device))
    pictures = torch.empty(len(poses), 3, camera.rows, camera.columns, device=device)
    chunk = _CPU_CHUNK if device.type == "cpu" else _GPU_CHUNK
    for start in range(0, len(poses), chunk):
        part = slice(start, start + chunk)
        shining = light(draw(condition, seeds[part]), device)
        pictures[part] = _frames(held[part], shining, fixed)
    return pictures


def _frames(poses: Tensor, shining: Light, fixed: _Fixed) -> Tensor:
    """Return a few frames; poses ``(B, 3)`` in float64 on the CPU."""
    seen = fixed.seen
    heading = per_frame(torch.deg2rad(poses[:, 1]), seen.ahead.device)
    sun = from_aircraft(shining.sun, heading)
    ground = look_down(seen, fixed.camera, poses)
    # the clouds come with the aircraft, so that those above it are those that shade it
    place = per_frame(poses[:, 2], seen.ahead.device)
    overhead = clouds.towards_sun(ground.x - place, ground.y, shining.sun)
    width = torch.maximum(ground.width_x, ground.width_y)
    cloud = clouds.thickness(*overhead, width, shining.cloud_cover, shining.pattern)
    direct = (1 - clouds.DARKNESS * clouds.opacity(cloud)) * (1 - shadow(seen, sun))
    below = _lit_ground(ground, seen, direct, shining)
    above = sky_colour(seen, heading, shining)
    picture = torch.cat([above, below], dim=2)
    return expose(draw_nose(picture, fixed.nose, sun, shining), shining)


def _lit_ground(ground: Ground, seen: Rays, direct: Tensor, shining: Light) -> Tensor:
    """Return the ground as the camera sees it, ``(B, 3, R, C)`` in linear colours.

    ``direct``, ``(B, R, C)``, is the share of the sun's beam that arrives.
    """
    level = shining.beam * shining.sun[:, 2:]
    colour = surface_colour(ground) * (level * direct[:, None] + shining.sky)
    haze = 1 - torch.exp(-seen.distance / (0.4 * shining.visibility_m))
    return cover(colour, horizon_colour(shining), haze)


def _check_seeds(seeds: Tensor, count: int) -> None:
    whole = not (seeds.is_floating_point() or seeds.is_complex() or seeds.dtype == torch.bool)
    if not whole or seeds.shape != (count,) or bool((seeds < 0).any()):
        raise BatchError(
            f"expected seeds ({count},) of integers >= 0, one for each pose, got "
            f"{tuple(seeds.shape)} of {seeds.dtype}; type torch.arange({count})"
        )
