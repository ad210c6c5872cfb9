"""Draw the figures of ``docs/ideas``: ``python examples/ideas docs/images``, half a minute.

Each module has a function `find`, which trains and measures with fixed seeds, and a function
`draw`, which draws what was found and nothing else. ``tests/test_ideas.py`` asserts what the
pages say of the figures.
"""

from __future__ import annotations

import sys
import time
from importlib import import_module
from pathlib import Path

import torch

from scodkit.explain import plots

DPI = 160
FIGURES = ("weight_space", "regressor", "moons", "certificate", "sketches", "directions")
FIGURES += ("conformal", "classes")


def main(folder: Path) -> None:
    """Write every figure to a folder.

    Args:
        folder: It must be there.
    """
    torch.set_num_threads(1)  # the same numbers on all machines
    for name in FIGURES:
        start = time.perf_counter()
        module = import_module(name)
        figure = module.draw(module.find())
        metadata = plots.png_metadata(figure, dpi=DPI)
        figure.savefig(folder / f"ideas_{name}.png", dpi=DPI, metadata=metadata)
        print(f"{name}: {time.perf_counter() - start:.1f} s")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
