"""Some inputs of each domain: known ones, and those of each unknown set."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image

from scodbench.figures.style import panels
from scodbench.names import words
from scodbench.rows import Row, select
from scodbench.tables.summaries import domains_in

_GAP = 0.06  # between pictures, of their height


def draw(plt: Any, rows: Sequence[Row], sweeps: Sequence[Row]) -> Any:
    """Return the figure, None without rows."""
    own = [row for row in select(sweeps, sweep="examples") if row.get("pictures")]
    domains = domains_in(own)
    if not domains:
        return None
    figure, axes = panels(plt, [domain.title for domain in domains], height=1.3)
    for axis, domain in zip(axes, domains, strict=True):
        strips = {
            row["ood"]: [decoded(text) for text in row["pictures"]]
            for row in select(own, domain=domain.name)
        }
        height = len(next(iter(strips.values()))[0])
        gap = max(1, round(_GAP * height))
        axis.imshow(_sheet(list(strips.values()), gap), interpolation="nearest")
        middles = [number * (height + gap) + height / 2 for number in range(len(strips))]
        axis.set_yticks(middles, [words(name) for name in strips])
        axis.set_xticks([])
        axis.grid(visible=False)
        axis.spines[:].set_visible(False)
        axis.tick_params(length=0)
    return figure


def decoded(text: str) -> Any:
    """Return a picture of a row as ``(height, width, 3)`` bytes."""
    return np.array(Image.open(io.BytesIO(base64.b64decode(text))).convert("RGB"))


def _sheet(strips: Sequence[Sequence[Any]], gap: int) -> Any:
    """Return all pictures of a domain as one, a strip under the other."""
    height, width = strips[0][0].shape[:2]
    across, down = max(len(strip) for strip in strips), len(strips)
    shape = (down * (height + gap) - gap, across * (width + gap) - gap, 3)
    sheet = np.full(shape, 255, dtype=np.uint8)
    for row, strip in enumerate(strips):
        for column, picture in enumerate(strip):
            top, left = row * (height + gap), column * (width + gap)
            sheet[top : top + height, left : left + width] = picture
    return sheet
