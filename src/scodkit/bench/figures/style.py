"""How all figures look: colours that colour-blind people can tell apart, light grids."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

# Okabe and Ito, 2008
BLUE, ORANGE, GREEN, RED = "#0072B2", "#E69F00", "#009E73", "#D55E00"
PURPLE, SKY, BLACK, GREY = "#CC79A7", "#56B4E9", "#000000", "#999999"
PALETTE = (BLUE, ORANGE, GREEN, RED, PURPLE, SKY, BLACK)

COLOURS = {
    "scod": BLUE,
    "scod_ll": SKY,
    "naive": GREY,
    "deep_ensemble": GREEN,
    "local_ensemble": ORANGE,
    "kfac_laplace": RED,
}
TITLES = {
    "scod": "SCOD",
    "scod_ll": "SCOD, last layers",
    "naive": "Naive",
    "deep_ensemble": "Deep Ensemble",
    "local_ensemble": "Local Ensemble",
    "kfac_laplace": "KFAC Laplace",
}

_STYLE: Any = {
    "figure.dpi": 120,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e6e6",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "axes.labelsize": 9,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "svg.hashsalt": "scodkit",  # so that the same rows give the same file
    "font.family": "DejaVu Sans",
}


@contextlib.contextmanager
def style() -> Iterator[Any]:
    """Yield matplotlib's pyplot, drawing to files, in the style of all figures."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    with plt.rc_context(_STYLE):
        yield plt
    plt.close("all")


def panels(plt: Any, titles: Sequence[str], columns: int = 3) -> tuple[Any, list[Any]]:
    """Return a figure with a panel for each title.

    Args:
        plt: Matplotlib's pyplot.
        titles: Of the panels.
        columns: Side by side, at most.
    """
    columns = min(columns, len(titles))
    rows = -(-len(titles) // columns)
    size = (3.6 * columns, 2.9 * rows)
    figure, axes = plt.subplots(rows, columns, figsize=size, squeeze=False)
    flat = list(axes.flat)
    for spare in flat[len(titles) :]:
        spare.set_visible(False)
    for axis, title in zip(flat, titles, strict=False):
        axis.set_title(title)
    return figure, flat[: len(titles)]


def save(figure: Any, folder: Path, name: str) -> list[Path]:
    """Write a figure as SVG and PNG.

    Args:
        figure: The figure.
        folder: Where to; it is made if it is not there.
        name: Without an ending.

    Returns:
        The two files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.{ending}" for ending in ("svg", "png")]
    for path in paths:
        metadata = {"Date": None} if path.suffix == ".svg" else {"Software": None}
        figure.savefig(path, bbox_inches="tight", metadata=metadata)
    return paths
