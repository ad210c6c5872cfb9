"""All figures by name, drawn from rows to files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from scodbench.figures import errors, examples, histograms, layers, runtime, size
from scodbench.figures.curves import Curves
from scodbench.figures.style import save, style
from scodbench.rows import Row
from scodbench.tables.summaries import comparable

Figure = Callable[[Any, Sequence[Row], Sequence[Row]], Any]

_RANK = Curves(
    "rank",
    "rank",
    "size",
    "rank k",
    lambda domain: domain.all_layers.rank,
    "k as in the tables",
    log=2,
    note="Rendered TaxiNet, CIFAR-10: not measured.",
    joined=lambda domain: domain.all_layers.size,
)
_PRIOR = Curves(
    "prior",
    "prior_variance",
    "ood",
    "prior variance $\\epsilon^2$",
    lambda domain: 1.0,
    "default",
)
_MEMORY = Curves(
    "sketch",
    "size",
    "sketch",
    "memory T, in vectors\nof a number per weight",
    lambda domain: domain.all_layers.size,
    "T as in the tables",
    log=2,
    note="Frequent Directions holds 128 vectors at least. TaxiNet, CIFAR-10: not measured.",
)
_CAPTURED = replace(_MEMORY, figure="captured", shown="captured curvature")

FIGURES: dict[str, Figure] = {
    "auroc_against_runtime": runtime.draw,
    "auroc_against_rank": _RANK.draw,
    "auroc_against_prior": _PRIOR.draw,
    "auroc_against_layers": layers.draw,
    "auroc_against_memory": _MEMORY.draw,
    "captured_against_memory": _CAPTURED.draw,
    "score_histograms": histograms.draw,
    "error_roc": errors.draw,
    "runtime_against_size": size.draw,
    "example_inputs": examples.draw,
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
    rows, sweeps = comparable(rows), comparable(sweeps)
    written = []
    for name, figure in FIGURES.items():
        with style() as plt:
            drawn = figure(plt, rows, sweeps)
            if drawn is not None:
                written += save(drawn, folder, name)
    return written
