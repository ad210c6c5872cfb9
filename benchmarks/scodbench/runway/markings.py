"""White paint on the runway, at fixed places, as the share of each pixel that it covers.

Widths and lengths follow the X-Plane frames where these show them (edge lines, the end of the
first dash of the centre line, the blocks beside it) and the usual American markings elsewhere.
"""

from __future__ import annotations

import torch
from torch import Tensor

from scodbench.runway.camera import Ground

LENGTH_M = 3048.0
HALF_WIDTH_M = 15.24
EDGE_LINE_M = 14.55  # from the centre line to the middle of an edge line
EDGE_LINE_WIDTH_M = 0.45
CENTRE_LINE_WIDTH_M = 0.75
DASH_M, GAP_M = 36.6, 24.4
FIRST_DASH_M = 34.0  # where the centre line begins, as far from the other end

_STRIPES = (4.0, 50.0)  # along the runway, at the threshold
_STRIPES_ACROSS = (1.0, 13.25)
_STRIPE_M = 1.75  # as wide as the gap to the next
_BLOCKS = ((150.0, 172.0), (300.0, 345.0), (450.0, 472.0), (600.0, 622.0))
_BLOCKS_ACROSS = (8.2, 12.65)


def paint(ground: Ground) -> Tensor:
    """Return the share of each pixel that is painted, ``(B, R, C)`` in [0, 1].

    Args:
        ground: Where the pixels meet the ground.
    """
    x, wide_x = ground.x, ground.width_x
    y, wide_y = ground.y.abs(), ground.width_y
    # from either end of the runway everything looks the same
    inward = torch.minimum(x, LENGTH_M - x)
    half = EDGE_LINE_WIDTH_M / 2
    edges = band(y, wide_y, EDGE_LINE_M - half, EDGE_LINE_M + half)
    edges = edges * band(x, wide_x, 0.0, LENGTH_M)
    dashes = repeated(x - FIRST_DASH_M, wide_x, DASH_M, DASH_M + GAP_M)
    half = CENTRE_LINE_WIDTH_M / 2
    dashes = dashes * band(ground.y, wide_y, -half, half)
    dashes = dashes * band(x, wide_x, FIRST_DASH_M, LENGTH_M - FIRST_DASH_M)
    stripes = repeated(y - _STRIPES_ACROSS[0], wide_y, _STRIPE_M, 2 * _STRIPE_M)
    stripes = stripes * band(y, wide_y, *_STRIPES_ACROSS) * band(inward, wide_x, *_STRIPES)
    blocks = sum((band(inward, wide_x, *block) for block in _BLOCKS), torch.zeros_like(x))
    blocks = blocks * band(y, wide_y, *_BLOCKS_ACROSS)
    return (edges + dashes + stripes + blocks).clamp(max=1.0)


def band(place: Tensor, width: Tensor, low: float, high: float) -> Tensor:
    """Return the share of pixels that lies between two places.

    Args:
        place: Middle of each pixel.
        width: Of each pixel.
        low: Where the band begins.
        high: Where it ends.
    """
    upper = torch.clamp(place + width / 2, low, high)
    return (upper - torch.clamp(place - width / 2, low, high)) / width


def repeated(place: Tensor, width: Tensor, length: float, period: float) -> Tensor:
    """Return the share of pixels that lies in bands ``[0, length)`` of a period.

    Args:
        place: Middle of each pixel.
        width: Of each pixel.
        length: Of each band.
        period: From the beginning of one to that of the next.
    """

    def filled(end: Tensor) -> Tensor:
        whole = (end / period).floor()
        return whole * length + (end - whole * period).clamp(max=length)

    return ((filled(place + width / 2) - filled(place - width / 2)) / width).clamp(0.0, 1.0)
