"""Inputs and slopes as pictures inside the page: images as PNG, vectors as bars."""

from __future__ import annotations

import base64
import io

import torch
from PIL import Image, ImageColor
from torch import Tensor

from scodkit.explain import plots

_LARGEST = 160  # pixels along a side
_MOST_BARS = 96


def is_image(shape: torch.Size) -> bool:
    """Return whether samples of a shape are shown as images: ``(H, W)`` or ``(C, H, W)``."""
    return len(shape) == 2 or (len(shape) == 3 and shape[0] in (1, 3))


def is_vector(shape: torch.Size) -> bool:
    """Return whether samples of a shape are shown as bars: ``(n,)`` with more than one."""
    return len(shape) == 1 and shape[0] > 1


def image(sample: Tensor) -> str:
    """Return an image as a data URI, its own range of values from black to white.

    Args:
        sample: ``(H, W)`` or ``(C, H, W)``; what is not finite is black.
    """
    pixels = (plots.scaled_image(_finite(sample)) * 255).round().to(torch.uint8)
    return _data_uri(Image.fromarray(pixels.contiguous().numpy()))


def slope_map(gradient: Tensor) -> str:
    """Return slopes as a data URI: orange where more raises the score, blue where it lowers it.

    Args:
        gradient: ``(H, W)`` or ``(C, H, W)``; summed over channels. Zero is transparent.
    """
    slopes = plots.image_planes(_finite(gradient)).sum(0)
    strength = slopes.abs() / slopes.abs().max().clamp_min(1e-300)
    pixels = torch.empty(*slopes.shape, 4, dtype=torch.uint8)
    pixels[..., :3] = torch.tensor(ImageColor.getrgb(plots.LOWERS), dtype=torch.uint8)
    pixels[slopes > 0, :3] = torch.tensor(ImageColor.getrgb(plots.RAISES), dtype=torch.uint8)
    pixels[..., 3] = (strength * 255).round().to(torch.uint8)
    return _data_uri(Image.fromarray(pixels.numpy()))


def bars(values: Tensor) -> list[float]:
    """Return a vector as heights in [-1, 1]; of long ones the largest of each stretch.

    Args:
        values: ``(n,)``; what is not finite has no height.

    Examples:
        >>> bars(torch.tensor([1.0, -2.0, float("nan")]))
        [0.5, -1.0, 0.0]
    """
    held = _finite(values)
    if len(held) > _MOST_BARS:
        stretches = held.tensor_split(_MOST_BARS)
        held = torch.stack([part[part.abs().argmax()] for part in stretches])
    return [round(v, 4) for v in (held / held.abs().max().clamp_min(1e-300)).tolist()]


def _finite(values: Tensor) -> Tensor:
    return values.detach().double().cpu().nan_to_num(0.0, 0.0, 0.0)


def _data_uri(picture: Image.Image) -> str:
    picture.thumbnail((_LARGEST, _LARGEST))
    held = io.BytesIO()
    picture.save(held, format="PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(held.getvalue()).decode()
