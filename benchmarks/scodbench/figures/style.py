"""How all figures look: colours that colour-blind people can tell apart, light grids."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from scodkit.numerics.files import replacing

# Okabe and Ito, 2008
BLUE, ORANGE, GREEN, RED = "#0072B2", "#E69F00", "#009E73", "#D55E00"
PURPLE, SKY, BLACK, GREY = "#CC79A7", "#56B4E9", "#000000", "#999999"
PALETTE = (BLUE, ORANGE, GREEN, RED, PURPLE, SKY, BLACK)
# beside colours, for those who see few of them
MARKERS = ("o", "s", "^", "D", "v", "P", "X")

COLOURS = {
    "scod": BLUE,
    "scod_ll": SKY,
    "naive": BLACK,
    "deep_ensemble": GREEN,
    "local_ensemble": ORANGE,
    "kfac_laplace": RED,
    "fused": PURPLE,
}
# inches of a panel, by how many are side by side: together as wide as a page shows well
_WIDTHS = {1: 4.6, 2: 3.7, 3: 3.0}
_HEIGHT = 2.6

_STYLE: Any = {
    "figure.dpi": 140,
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
    "legend.columnspacing": 1.2,
    "legend.handletextpad": 0.5,
    "lines.markersize": 4,
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


def panels(
    plt: Any, titles: Sequence[str], columns: int = 3, height: float = _HEIGHT
) -> tuple[Any, list[Any]]:
    """Return a figure with a panel for each title.

    Args:
        plt: Matplotlib's pyplot.
        titles: Of the panels.
        columns: Side by side, at most.
        height: Of a panel, in inches.
    """
    columns = min(columns, len(titles))
    rows = -(-len(titles) // columns)
    size = (_WIDTHS[columns] * columns, height * rows)
    # this layout makes room for legends outside of the axes
    figure, axes = plt.subplots(
        rows, columns, figsize=size, squeeze=False, layout="constrained"
    )
    flat = list(axes.flat)
    for spare in flat[len(titles) :]:
        spare.set_visible(False)
    for axis, title in zip(flat, titles, strict=False):
        axis.set_title(title)
    return figure, flat[: len(titles)]


def legend_below(axis: Any, columns: int = 2) -> None:
    """Put the legend of a panel under it, where it hides nothing."""
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.24), ncols=columns)


def plain_ticks(axis: Any, base: int = 10) -> None:
    """Mark a logarithmic axis with plain numbers, few enough to be told apart.

    Args:
        axis: Matplotlib's x or y axis of a panel.
        base: Of the logarithm, 10 or 2.
    """
    from matplotlib import ticker

    axis.set_major_locator(ticker.LogLocator(base, subs=(1, 2, 5) if base == 10 else (1,)))
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_locator(ticker.NullLocator())


def words(name: str) -> str:
    """Return a name of rows as it is read.

    Examples:
        >>> words("white_wine"), words("classes_5_9")
        ('white wine', 'classes 5-9')
    """
    return re.sub(r"(\d)_(\d)", r"\1-\2", name).replace("_", " ")


def save(figure: Any, folder: Path, name: str) -> list[Path]:
    """Write a figure as SVG and PNG, each whole or not at all.

    Args:
        figure: The figure.
        folder: Where to; it is made if it is not there.
        name: Without an ending.

    Returns:
        The two files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for ending, metadata in (("svg", {"Date": None}), ("png", {"Software": None})):
        path = folder / f"{name}.{ending}"
        with replacing(path) as temporary:
            figure.savefig(temporary, format=ending, metadata=metadata)
        paths.append(path)
    return paths
