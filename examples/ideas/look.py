"""How the figures of ``docs/ideas`` look: one column, so that they can be read on a phone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from scodkit.explain import plots

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito (2008), which colour-blind readers can tell apart
BLUE, RED, GREEN, GREY = plots.LOWERS, plots.RAISES, plots.GREEN, plots.OTHERS
ORANGE = plots.YELLOW
WIDTH, SIZE = 5.0, 9.5  # inches, points: ten pixels on a phone that is 390 wide
LABEL = {"fontsize": SIZE}
SMALL = {"fontsize": SIZE - 1}


def panels(heights: Sequence[float], columns: int = 1) -> tuple[Figure, list[Axes]]:
    """Return a figure with rows of panels.

    Args:
        heights: Of the rows, in inches.
        columns: Panels side by side.
    """
    figure = plots.new_figure(WIDTH, sum(heights))
    grid = figure.subplots(len(heights), columns, height_ratios=heights, squeeze=False)
    for axes in grid.flat:
        axes.tick_params(labelsize=SIZE - 1)
        axes.spines[["top", "right"]].set_visible(False)
    return figure, list(grid.flat)


def title(axes: Axes, text: str) -> None:
    """Say above a panel, from its left edge, what it shows."""
    axes.set_title(text, loc="left", fontsize=SIZE, fontweight="bold")


def name_axes(axes: Axes, x: str, y: str, **others: Any) -> None:
    """Label both axes with quantity and unit.

    Args:
        axes: Of the panel.
        x: Label of the horizontal axis.
        y: Label of the vertical axis.
        **others: Further settings of the panel.
    """
    axes.set_xlabel(x, fontsize=SIZE)
    axes.set_ylabel(y, fontsize=SIZE)
    axes.set(**others)


def key(axes: Axes, **options: Any) -> None:
    """Draw the legend."""
    axes.legend(fontsize=SIZE - 1, frameon=False, handlelength=1.6, **options)
