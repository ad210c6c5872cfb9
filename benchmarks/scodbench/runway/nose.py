"""The aircraft's nose, at the left of every image: cowling, belly and a wheel, lit by the day.

The outlines were read off X-Plane's frames of a Cessna 208.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from scodbench.runway.camera import Camera
from scodbench.runway.colour import cover, plane
from scodbench.runway.sunlight import Light

# rows of 72, and columns of 128: the right outline of the cowling, and of what is below it
_COWLING_ROWS = (14.5, 15, 16, 17, 18, 19, 20, 22, 26, 30, 33, 36, 40, 44, 48, 52.5)
_COWLING = (0, 4, 8, 11, 13.5, 16, 17.8, 18.8, 18.8, 18.4, 17.2, 15.5, 13.2, 9.8, 5.2, 0)
_BELLY_ROWS = (36, 37, 42, 46, 50, 54, 58, 64)
_BELLY = (0, 15, 13.2, 12.4, 11.2, 10, 8.6, 6)
_WHEEL_MIDDLE, _WHEEL_RADII = (66.0, 1.5), (6.5, 5.0)  # rows and columns
# which way the cowling's skin faces at a row, in degrees above level
_FACING_ROWS, _FACING = (14.5, 18, 22, 34, 44, 52.5), (80, 45, 20, 0, -25, -60)
_SKIN, _UNDERSIDE, _TYRE = (0.84, 0.75, 0.64), (0.13, 0.10, 0.08), (0.012, 0.013, 0.015)
_SAMPLES = 4  # per pixel and axis


@dataclass(frozen=True)
class Nose:
    """The part of the aircraft that the camera sees, the same in every frame.

    Attributes:
        cowling: ``(H, W)`` share of each pixel.
        belly: ``(H, W)`` share of each pixel.
        wheel: ``(H, W)`` share of each pixel.
        up: ``(H, W)`` how much the cowling's skin faces up, from -1 to 1.
    """

    cowling: Tensor
    belly: Tensor
    wheel: Tensor
    up: Tensor


def nose(camera: Camera, device: torch.device) -> Nose:
    """Return what the camera sees of its aircraft.

    Args:
        camera: The camera; the outlines keep their angles to its axis.
        device: Where the tensors shall be.
    """
    usual = Camera()
    down = (np.arange(camera.rows * _SAMPLES) + 0.5) / _SAMPLES - camera.rows / 2
    right = (np.arange(camera.columns * _SAMPLES) + 0.5) / _SAMPLES - camera.columns / 2
    row = 36 + 72 * down * (usual.focal_rows / usual.rows / camera.focal_rows)
    column = 64 + 128 * right * (usual.focal_columns / usual.columns / camera.focal_columns)
    outside = {"left": -np.inf, "right": -np.inf}
    cowling = column < np.interp(row, _COWLING_ROWS, _COWLING, **outside)[:, None]
    belly = column < np.interp(row, _BELLY_ROWS, _BELLY, **outside)[:, None]
    high = (row - _WHEEL_MIDDLE[0])[:, None] / _WHEEL_RADII[0]
    wheel = high**2 + ((column - _WHEEL_MIDDLE[1]) / _WHEEL_RADII[1]) ** 2 < 1
    up = np.sin(np.radians(np.interp(row, _FACING_ROWS, _FACING)))[:, None]
    up = np.broadcast_to(up, wheel.shape)

    def pixels(picture: npt.NDArray[Any]) -> Tensor:
        parts = picture.reshape(camera.rows, _SAMPLES, camera.columns, _SAMPLES)
        return torch.from_numpy(parts.mean(axis=(1, 3))).float().to(device)

    return Nose(pixels(cowling), pixels(belly), pixels(wheel), pixels(up))


def draw_nose(picture: Tensor, seen: Nose, sun: Tensor, light: Light) -> Tensor:
    """Return a picture with the aircraft's nose in front.

    Args:
        picture: ``(B, 3, H, W)`` linear colours.
        seen: The camera's part of the aircraft.
        sun: ``(B, 3, 1, 1)`` unit vectors towards the sun: forward, left, up of the aircraft.
        light: The frames' light.
    """
    aside = (1 - seen.up.square()).sqrt()
    # the skin that the camera sees faces it: to the right, and a little back
    facing = sun[:, 2:] * seen.up - (0.97 * sun[:, 1:2] + 0.24 * sun[:, :1]) * aside
    beam = light.beam * light.unclouded
    # light from the ground comes from below, and has lost most of its strength
    bounced = 0.3 * (light.sky + beam * sun[:, 2:])
    diffuse = torch.lerp(bounced, light.sky, 0.5 + 0.5 * seen.up)
    device = picture.device
    skin = plane(_SKIN, device) * (beam * facing.clamp(min=0.0) + 1.3 * diffuse)
    picture = cover(picture, plane(_UNDERSIDE, device) * 2 * diffuse, seen.belly)
    picture = cover(picture, plane(_TYRE, device) * (light.sky + diffuse), seen.wheel)
    return cover(picture, skin, seen.cowling)
