"""Textures without stored pictures: smooth noise made by hashing integer grid points.

Integers hash to the same numbers on every device, so that a texture is a function of place and
seed and of nothing else. Noise is cut off where its grains are finer than a pixel.
"""

from __future__ import annotations

import torch
from torch import Tensor

# odd constants with well spread bits; int32 products wrap around, which is what a hash wants
_X, _Y, _SEED = 0x27D4EB2D, 0x165667B1, 0x1B873593
_MIX = (0x2C1B3C6D, 0x297A2D39)


def hashed(x: Tensor, y: Tensor, seed: Tensor | int) -> Tensor:
    """Return a number in [0, 1) for each integer point.

    Args:
        x: int32.
        y: int32, of a shape that broadcasts with ``x``.
        seed: int32, one for all points or a tensor that broadcasts with them.
    """
    return _scrambled((x * _X) ^ (y * _Y) ^ _start(seed, x.device))


def value_noise(x: Tensor, y: Tensor, seed: Tensor | int) -> Tensor:
    """Return smooth noise in [0, 1) that takes a random value at each integer point.

    Args:
        x: Coordinates, in grid cells.
        y: Coordinates, in grid cells, of the same shape.
        seed: int32, one for all points or a tensor that broadcasts with them.
    """
    left, low = x.floor(), y.floor()
    across, up = _eased(x - left), _eased(y - low)
    start = _start(seed, x.device)
    near, row = left.to(torch.int32) * _X, low.to(torch.int32) * _Y
    below, above = row ^ start, (row + _Y) ^ start
    far = near + _X
    bottom = torch.lerp(_scrambled(near ^ below), _scrambled(far ^ below), across)
    top = torch.lerp(_scrambled(near ^ above), _scrambled(far ^ above), across)
    return torch.lerp(bottom, top, up)


def visible(footprint: Tensor) -> Tensor:
    """Return how much of a grain is left when a pixel is that many grains wide, 0 to 1."""
    return ((0.9 - footprint) / 0.6).clamp(0.0, 1.0)


def fractal(
    x: Tensor,
    y: Tensor,
    footprint: Tensor,
    seed: Tensor | int,
    octaves: int,
    roughness: float = 0.5,
) -> Tensor:
    """Return a sum of noises, each twice as fine as the one before; 0 on average.

    Args:
        x: ``(B, R, C)`` coordinates, in cells of the coarsest noise.
        y: ``(B, R, C)`` coordinates, in cells of the coarsest noise.
        footprint: ``(B, R, C)`` width of a pixel, in the same cells; noise finer than a pixel
            is left out.
        seed: int32, one for all points or a tensor that broadcasts with them.
        octaves: How many noises.
        roughness: How strong each is, relative to the one before.

    Returns:
        ``(B, R, C)`` within (-0.5, 0.5).
    """
    total = torch.zeros_like(x)
    whole = sum(roughness**octave for octave in range(octaves))
    for octave in range(octaves):
        scale = 2.0**octave
        weight = visible(footprint * scale) * (roughness**octave / whole)
        # most rows are too far away for the finest noises: leave them out
        rows = weight.amax(dim=(0, 2)).nonzero()
        if len(rows) == 0:
            break
        part = slice(int(rows[0]), int(rows[-1]) + 1)
        # the shift keeps the grid points of one noise off those of the next
        noise = value_noise(
            x[:, part] * scale + 7.3 * octave, y[:, part] * scale + 3.1 * octave, seed + octave
        )
        total[:, part] += (noise - 0.5) * weight[:, part]
    return total


def _start(seed: Tensor | int, device: torch.device) -> Tensor:
    return torch.as_tensor(seed, dtype=torch.int32, device=device) * _SEED


def _scrambled(bits: Tensor) -> Tensor:
    """Return numbers in [0, 1) that depend on every bit of the integers, a new tensor."""
    bits = bits ^ (bits >> 15)
    bits *= _MIX[0]
    bits ^= bits >> 12
    bits *= _MIX[1]
    bits ^= bits >> 15
    bits &= 0xFFFFFF
    return bits * 2.0**-24


def _eased(t: Tensor) -> Tensor:
    return t * t * (3 - 2 * t)
