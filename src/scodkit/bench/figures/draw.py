"""All figures by name, drawn from rows to files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from scodkit.bench.figures import histograms, runtime
from scodkit.bench.figures.curves import Curves
from scodkit.bench.figures.style import save, style
from scodkit.bench.rows import Row

Figure = Callable[[Any, Sequence[Row], Sequence[Row]], Any]

FIGURES: dict[str, Figure] = {
    "auroc_against_runtime": runtime.draw,
    "auroc_against_rank": Curves("rank", "rank", "size", "rank k", log=2).draw,
    "auroc_against_prior": Curves(
        "prior", "prior_variance", "ood", "prior variance", log=10
    ).draw,
    "auroc_against_layers": Curves("layers", "share", "ood", "share of layers kept").draw,
    "auroc_against_memory": Curves("sketch", "size", "sketch", "memory T", log=2).draw,
    "captured_against_memory": Curves(
        "sketch", "size", "sketch", "memory T", figure="captured", log=2
    ).draw,
    "score_histograms": histograms.draw,
}


def draw(rows: Sequence[Row], sweeps: Sequence[Row], folder: Path) -> list[Path]:
    """Draw every figure there are rows for, as SVG and PNG.

    Args:
        rows: Of methods.
        sweeps: Of sweeps.
        folder: Where to.

    Returns:
        The files.
    """
    written = []
    for name, figure in FIGURES.items():
        with style() as plt:
            drawn = figure(plt, rows, sweeps)
            if drawn is not None:
                written += save(drawn, folder, name)
    return written
