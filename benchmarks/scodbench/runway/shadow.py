"""The aircraft's shadow on the ground: where rays to the sun meet its wing, body or tail."""

from __future__ import annotations

import torch
from torch import Tensor

from scodbench.runway.camera import Rays

Box = tuple[tuple[float, float], tuple[float, float], tuple[float, float]]

# metres forward, left and up: boxes from and to, and an ellipsoid's middle and radii
_BOXES: tuple[Box, ...] = (
    ((-1.3, 0.5), (-7.9, 7.9), (2.45, 2.7)),  # wing
    ((-9.0, -7.7), (-3.1, 3.1), (2.0, 2.15)),  # stabiliser
    ((-9.2, -7.6), (-0.1, 0.1), (2.0, 4.4)),  # fin
)
_FUSELAGE: Box = ((-2.6, 6.2), (0.0, 0.85), (1.6, 0.95))
_SOFTNESS_M = 0.1  # of the shadow's border near the camera; it grows with distance
_DARKEST = 0.9  # the rest comes back from the aircraft and the ground


def from_aircraft(sun: Tensor, heading: Tensor) -> Tensor:
    """Return the sun's direction as the aircraft sees it: forward, left, up.

    Args:
        sun: ``(B, 3, 1, 1)`` unit vectors in runway coordinates.
        heading: ``(B, 1, 1)`` radians, of the nose, to the left of the runway's direction.
    """
    cos, sin = heading.cos(), heading.sin()
    ahead, left, up = sun.unbind(dim=1)
    return torch.stack([ahead * cos + left * sin, left * cos - ahead * sin, up], dim=1)


def shadow(seen: Rays, sun: Tensor) -> Tensor:
    """Return how much of the sun the aircraft hides from the ground, ``(B, R, C)``, 0 to 1.

    Args:
        seen: The camera's rays.
        sun: ``(B, 3, 1, 1)`` unit vectors towards the sun: forward, left, up of the aircraft.
    """
    places = (seen.forward, seen.left, torch.zeros_like(seen.left))
    inside = _in_fuselage(places, sun)
    for box in _BOXES:
        inside = torch.maximum(inside, _in_box(places, sun, box))
    soft = _SOFTNESS_M * (1 + seen.distance / 8)
    return _DARKEST * (inside / soft).clamp(max=1.0)


def _in_fuselage(places: tuple[Tensor, Tensor, Tensor], sun: Tensor) -> Tensor:
    """Return about how deep below its skin rays pass the fuselage, in metres; 0 = beside it.

    In coordinates where it is the unit sphere, ``1 - (distance from the middle)^2`` of a ray
    is 0 at the skin and 1 in the middle.
    """
    away, step = [], []
    for place, towards, (middle, radius) in zip(places, sun.unbind(1), _FUSELAGE, strict=True):
        away.append((place - middle) / radius)
        step.append(towards / radius)
    along = away[0] * step[0] + away[1] * step[1] + away[2] * step[2]
    speed = step[0].square() + step[1].square() + step[2].square()
    distance = away[0].square() + away[1].square() + away[2].square() - along.square() / speed
    width = _FUSELAGE[1][1]
    return width * (1 - distance).clamp(min=0.0)


def _in_box(places: tuple[Tensor, Tensor, Tensor], sun: Tensor, box: Box) -> Tensor:
    """Return how long rays from the ground to the sun are inside a box, in metres."""
    enter = torch.zeros_like(places[0])
    leave = torch.full_like(places[0], torch.inf)
    for place, towards, (low, high) in zip(places, sun.unbind(1), box, strict=True):
        # a ray exactly along an axis would divide by zero
        step = torch.where(towards.abs() < 1e-6, 1e-6, towards)
        first, second = (low - place) / step, (high - place) / step
        enter = torch.maximum(enter, torch.minimum(first, second))
        leave = torch.minimum(leave, torch.maximum(first, second))
    return (leave - enter).clamp(min=0.0)
