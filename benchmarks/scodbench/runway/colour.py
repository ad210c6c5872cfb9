"""Linear red, green and blue, and painting one colour over another."""

from __future__ import annotations

import torch
from torch import Tensor

RGB = tuple[float, float, float]


def plane(colour: RGB, device: torch.device) -> Tensor:
    """Return a colour as ``(3, 1, 1)``, ready to meet pictures ``(B, 3, R, C)``."""
    return torch.tensor(colour, device=device)[:, None, None]


def cover(under: Tensor, over: Tensor, amount: Tensor) -> Tensor:
    """Return a picture with another over it.

    Args:
        under: Picture or colour that broadcasts to ``(B, 3, R, C)``.
        over: Picture or colour that broadcasts to ``(B, 3, R, C)``.
        amount: ``(B, R, C)`` or ``(R, C)``, cut to [0, 1]: how much of what is under is hidden.
    """
    return torch.lerp(under, over, amount.clamp(0.0, 1.0).unsqueeze(-3))
