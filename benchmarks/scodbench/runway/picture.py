"""Draw rendered runway frames, by condition: ``python -m scodbench.runway.picture runway.png``.

Where the variable SCODKIT_DATA names a folder with the TaxiNet frames, two more rows show real
ones, and rendered ones at the poses that they are labelled with.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import matplotlib as mpl
import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from scodbench.runway import (
    AFTERNOON,
    CLOUDY,
    EVENING,
    MORNING,
    all_day,
    render,
    sample_poses,
)

COLUMNS = 6
CONDITIONS = {
    "morning": MORNING,
    "afternoon": AFTERNOON,
    "evening": EVENING,
    "cloudy": CLOUDY,
    "all day": all_day(),
}
REAL = "taxinet/taxinet_xplane_morning_72x128.npz"


def real_frames() -> tuple[Tensor, Tensor] | None:
    """Return real frames ``(6, 3, 260, 300)`` in [0, 1] and their poses, or None."""
    path = Path(os.environ.get("SCODKIT_DATA", "")) / REAL
    if not path.is_file():
        return None
    with np.load(path) as held:
        chosen = np.linspace(0, len(held["images"]) - 1, COLUMNS).round().astype(int)
        frames = torch.from_numpy(held["images"][chosen]).permute(0, 3, 1, 2) / 255
        poses = np.column_stack([held["labels"][chosen], held["downtrack_m"][chosen]])
    # resizing squeezes them as the camera of the renderer does
    wide = functional.interpolate(frames, size=(260, 300), mode="bilinear")
    return wide.clamp(0, 1), torch.from_numpy(poses)


def draw(path: Path) -> None:
    """Render every condition at the same poses, and draw them row by row.

    Args:
        path: Where the picture goes.
    """
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    poses, seeds = sample_poses(COLUMNS, seed=5), torch.arange(COLUMNS)
    rows = {name: (render(poses, c, seeds), poses) for name, c in CONDITIONS.items()}
    found = real_frames()
    if found is not None:
        frames, labelled = found
        rows["real, morning"] = (frames, labelled)
        rows["rendered there"] = (render(labelled, MORNING, seeds), labelled)

    size = (2.0 * COLUMNS, 1.95 * len(rows))
    figure, axes = plt.subplots(len(rows), COLUMNS, figsize=size, dpi=130)
    for line, (name, (pictures, places)) in zip(axes, rows.items(), strict=True):
        line[0].set_ylabel(name, fontsize=9)
        for axis, picture, place in zip(line, pictures, places.tolist(), strict=True):
            axis.imshow(picture.permute(1, 2, 0).numpy())
            axis.set(xticks=[], yticks=[])
            axis.set_title(f"{place[0]:+.1f} m, {place[1]:+.0f}°", fontsize=8)
    figure.tight_layout(pad=0.4)
    figure.savefig(path)


if __name__ == "__main__":
    draw(Path(sys.argv[1]))
