"""Example inputs of a domain, small enough to be kept in rows."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from scodbench.domains.splitting import some
from scodbench.measure import Setup
from scodbench.rows import Row
from scodbench.samples import Samples
from scodbench.sweeps.points import sweep_row

KNOWN = "known"
_SHOWN = 6  # of each set
_WIDEST = 64  # pixels


def example_sweep(setup: Setup) -> Iterator[Row]:
    """Yield some known inputs, and some of each unknown set, as pictures.

    They do not depend on the network: only the first seed has them.

    Args:
        setup: Data whose inputs are pictures ``(channels, height, width)``, 1 or 3 channels.
    """
    if setup.seed:
        return
    sets = {KNOWN: setup.splits.test, **setup.splits.novel}
    shown = {name: _shown(samples) for name, samples in sets.items()}
    # networks want their inputs standardised one way or another; this takes any of them back
    low = min(float(x.min()) for x in shown.values())
    high = max(float(x.max()) for x in shown.values())
    for name, x in shown.items():
        pixels = ((x - low) / (high - low) * 255).round().to(torch.uint8)
        pictures = [_png(picture) for picture in pixels]
        yield sweep_row(setup, "examples", name, {}, pictures=pictures)


def _shown(samples: Samples) -> Tensor:
    """Return some inputs ``(n, channels, height, width)``, shrunk where they are wide."""
    x, _ = samples.take(some(len(samples), _SHOWN)).read()
    height, width = x.shape[2:]
    if width <= _WIDEST:
        return x
    return adaptive_avg_pool2d(x, (round(height * _WIDEST / width), _WIDEST))


def _png(pixels: Tensor) -> str:
    """Return a picture ``(channels, height, width)`` of bytes as PNG, in letters."""
    from PIL import Image

    channels_last = pixels.permute(1, 2, 0).numpy()
    picture = Image.fromarray(channels_last[..., 0] if len(pixels) == 1 else channels_last)
    file = io.BytesIO()
    picture.save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()
