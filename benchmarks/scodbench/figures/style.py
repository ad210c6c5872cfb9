"""How all figures look: colours that colour-blind people can tell apart, light grids."""

from __future__ import annotations

import contextlib
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from scodkit.explain.plots import png_metadata
from scodkit.numerics.files import replacing

# Okabe and Ito, 2008
BLUE, ORANGE, GREEN, RED = "#0072B2", "#E69F00", "#009E73", "#D55E00"
PURPLE, SKY, BLACK, GREY = "#CC79A7", "#56B4E9", "#000000", "#999999"
PALETTE = (BLUE, ORANGE, GREEN, RED, PURPLE, SKY, BLACK)
# beside colours, for those who see few of them
MARKERS = ("o", "s", "^", "D", "v", "P", "X")

# what a method looks at has a colour, the method itself a marker, in every figure
FAMILIES: dict[str, tuple[str, ...]] = {
    BLUE: (
        "scod",
        "scod_two_sided",
        "scod_frequent_directions",
        "identity_curvature",
        "grad_norm",
    ),
    SKY: ("scod_ll",),
    PURPLE: ("fused",),
    RED: (
        "kfac_laplace",
        "kfac_laplace_glm",
        "kfac_laplace_ll",
        "local_ensemble",
        "sketched_lanczos",
    ),
    BLACK: ("naive", "max_softmax", "max_logit", "energy"),
    ORANGE: ("mahalanobis", "knn", "vim", "residual"),
    GREEN: ("deep_ensemble",),
}
LOOKS = {
    method: (colour, marker)
    for colour, methods in FAMILIES.items()
    for method, marker in zip(methods, MARKERS, strict=False)
}
COLOURS = {method: colour for method, (colour, _) in LOOKS.items()}
# the sketches of sweeps, by class
SKETCHES = {
    "Nystrom": (BLUE, "o"),
    "TwoSided": (RED, "s"),
    "FrequentDirections": (GREEN, "^"),
}
# inches and points: on a phone, where a figure is 358 pixels wide, letters have 8 of them
_WIDTH = 4.6
SMALL = 7.5
_LETTERS = 84  # of that size, side by side in a figure
_HEIGHT = 2.5
_LEAST_SPAN = 0.05  # of an axis: what is smaller than that looks small

_STYLE: Any = {
    "figure.dpi": 200,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e6e6",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "font.size": SMALL,
    "axes.titlesize": 9,
    "axes.labelsize": 8,
    "xtick.labelsize": SMALL,
    "ytick.labelsize": SMALL,
    "legend.fontsize": SMALL,
    "legend.title_fontsize": SMALL,
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
    plt: Any,
    titles: Sequence[str],
    columns: int = 2,
    height: float | Sequence[float] = _HEIGHT,
) -> tuple[Any, list[Any]]:
    """Return a figure with a panel for each title.

    Args:
        plt: Matplotlib's pyplot.
        titles: Of the panels; what follows a line break is in smaller print.
        columns: Side by side, at most.
        height: Of a panel, in inches; or of each row of them.
    """
    columns = min(columns, len(titles))
    rows = -(-len(titles) // columns)
    heights = [height] * rows if isinstance(height, float) else list(height)
    # this layout makes room for legends outside of the axes
    figure, axes = plt.subplots(
        rows,
        columns,
        figsize=(_WIDTH, sum(heights)),
        height_ratios=heights,
        squeeze=False,
        layout="constrained",
    )
    figure.get_layout_engine().set(hspace=0.06, wspace=0.06)
    flat = list(axes.flat)
    for spare in flat[len(titles) :]:
        spare.set_visible(False)
    for axis, title in zip(flat, titles, strict=False):
        entitle(axis, title)
    return figure, flat[: len(titles)]


def entitle(axis: Any, title: str) -> None:
    """Write a title over a panel: the first line large, all others in smaller print."""
    first, *rest = title.split("\n")
    axis.set_title(first, loc="left", weight="bold", pad=5 + 9.2 * len(rest))
    axis.annotate(
        "\n".join(rest), (0, 1), (0, 3), "axes fraction", "offset points", fontsize=SMALL
    ).set_in_layout(False)  # the title has made room above, and beside the panel none is to be


def legend_beside(axis: Any, **options: Any) -> None:
    """Put a legend to the right of a panel.

    Args:
        axis: The panel.
        options: Of matplotlib's own call.
    """
    axis.legend(loc="upper left", bbox_to_anchor=(1.02, 1), alignment="left", **options)


def legend_below(owner: Any, columns: int = 2, **options: Any) -> None:
    """Put a legend under a panel or a figure, where it hides nothing.

    Args:
        owner: An axis or a figure.
        columns: Of the legend.
        options: Of matplotlib's own call.
    """
    if "title" in options:
        options["title"] = _wrapped(options["title"])
    if hasattr(owner, "add_subplot"):
        owner.legend(loc="outside lower center", ncols=columns, **options)
    else:
        lines = 1 + owner.get_xlabel().count("\n")
        below = (20 + 10 * lines) / SMALL  # ticks and label of the axis, in letters
        place = {"loc": "upper center", "bbox_to_anchor": (0.5, 0), "borderaxespad": below}
        owner.legend(ncols=columns, **place, **options)


def note_below(figure: Any, text: str) -> None:
    """Write what holds for all panels under a figure."""
    figure.supxlabel(_wrapped(text), fontsize=SMALL)


def _wrapped(text: str) -> str:
    """Return text whose lines are no longer than a figure is wide."""
    return "\n".join(textwrap.fill(line, _LETTERS) for line in text.splitlines())


def widen(axis: Any, which: str = "y") -> None:
    """Let an axis of shares span so much that differences of no importance look small.

    Args:
        axis: A panel.
        which: Its axis, ``x`` or ``y``.
    """
    low, high = getattr(axis, f"get_{which}lim")()
    middle, half = (low + high) / 2, max(high - low, _LEAST_SPAN) / 2
    top = min(middle + half, 1 + 0.04 * 2 * half)  # there is nothing beyond one
    getattr(axis, f"set_{which}lim")(min(low, top - 2 * half), top)


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


def save_png(figure: Any, path: Path) -> None:
    """Write a figure as PNG, with the size of its smallest letters.

    Args:
        figure: The figure.
        path: Where to.
    """
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png", metadata=png_metadata(figure))


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
    svg, png = (folder / f"{name}.{ending}" for ending in ("svg", "png"))
    with replacing(svg) as temporary:
        figure.savefig(temporary, format="svg", metadata={"Date": None})
    save_png(figure, png)
    return [svg, png]
