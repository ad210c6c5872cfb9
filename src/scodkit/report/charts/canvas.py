"""What all charts have in common: paper, axes, colours by role, and words for what they show.

Colours are named here and chosen by the page's style sheet, light or dark: a tag such as
``fill:blue`` on a part of a plot says what the page's script has to paint.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from bokeh.models import FixedTicker, HoverTool, LogTickFormatter, Range1d
from bokeh.plotting import figure

from scodkit.report.scored_set import ScoredSet
from scodkit.report.table import Table

# told apart by colour-blind readers; known and unknown sets take turns in their own
KNOWN_COLOURS = ("blue", "green", "ink")
UNKNOWN_COLOURS = ("red", "purple", "ink")
DASHES: tuple[Literal["solid", "dashed", "dotted"], ...] = ("solid", "dashed", "dotted")

_HEIGHT = 300
_TOOLS = "box_zoom,pan,wheel_zoom,reset"
# where bokeh marks only the upper half of a logarithmic axis
_FEW_DECADES = (5, 500)
_ONE_TWO_FIVE = [float(f"{digit}e{power}") for power in range(-12, 13) for digit in (1, 2, 5)]
_TIP = "background:var(--paper);color:var(--ink);margin:-5px;padding:6px 8px;font-size:13px"


@dataclass(frozen=True)
class Key:
    """A line of a chart's legend.

    Args:
        label: Whose it is.
        colour: Role of its colour.
        look: ``area``, ``dot``, or a dash of `DASHES`.
    """

    label: str
    colour: str
    look: str


@dataclass(frozen=True)
class Chart:
    """A chart, with the same in words and in numbers for those who cannot see it.

    Args:
        name: Its place in the page: letters and dashes, once on a page.
        title: What it is.
        says: What it shows, in a sentence or two.
        plot: As bokeh draws it.
        keys: Its legend.
        numbers: What is drawn, as a table.
    """

    name: str
    title: str
    says: str
    plot: Any
    keys: tuple[Key, ...]
    numbers: Table


def new_plot(
    x: str,
    y: str,
    x_range: tuple[float, float],
    y_range: tuple[float, float],
    *,
    x_log: bool = False,
    y_log: bool = False,
) -> Any:
    """Return an empty plot, as wide as the page allows.

    Args:
        x: What is along the horizontal axis, with its unit.
        y: Along the vertical one.
        x_range: From where to where.
        y_range: Likewise.
        x_log: Whether the axis is logarithmic.
        y_log: Likewise.
    """
    plot: Any = figure(
        height=_HEIGHT,
        sizing_mode="stretch_width",
        tools=_TOOLS,
        active_drag="box_zoom",
        active_scroll=None,
        x_axis_type="log" if x_log else "linear",
        y_axis_type="log" if y_log else "linear",
        x_range=Range1d(start=x_range[0], end=x_range[1]),
        y_range=Range1d(start=y_range[0], end=y_range[1]),
        x_axis_label=x,
        y_axis_label=y,
        background_fill_color=None,
        border_fill_color=None,
        outline_line_color=None,
        toolbar_location="above",
        min_border_right=14,
    )
    plot.toolbar.logo = None
    axes = ((plot.xaxis[0], x_log, x_range), (plot.yaxis[0], y_log, y_range))
    for axis, is_log, ends in axes:
        axis.axis_label_text_font_style = "normal"
        axis.axis_label_text_font_size = axis.major_label_text_font_size = "12px"
        axis.minor_tick_line_color = None
        axis.ticker.desired_num_ticks = 5
        if is_log:
            axis.formatter = LogTickFormatter(min_exponent=4)
            if _FEW_DECADES[0] < ends[1] / ends[0] < _FEW_DECADES[1]:
                axis.ticker = FixedTicker(ticks=_ONE_TWO_FIVE)
    return plot


def paint(renderer: Any, **roles: str) -> Any:
    """Mark what a part of a plot is painted with.

    Args:
        renderer: What a method of a plot has returned.
        roles: ``line``, ``fill`` and their colours.

    Returns:
        The part itself.
    """
    renderer.glyph.tags = [f"{part}:{colour}" for part, colour in roles.items()]
    # a glyph that is not looked at must not fade into a colour of another theme
    renderer.nonselection_glyph = renderer.muted_glyph = None
    return renderer


def mark(plot: Any, x: Sequence[float], y: Sequence[float], dash: str = "dashed") -> None:
    """Draw a line that means a limit or a moment."""
    paint(plot.line(list(x), list(y), line_width=2, line_dash=dash), line="ink")


def add_hover(plot: Any, renderers: Sequence[Any], tips: Sequence[tuple[str, str]]) -> None:
    """Show numbers under the pointer.

    Args:
        plot: The plot.
        renderers: Its parts that have something to say.
        tips: Labels, and columns of the data as bokeh writes them: ``@x{0.00}``.
    """
    # bokeh's own rows are too pale to be read, and white in the dark
    rows = "".join(f"<div>{label} <strong>{value}</strong></div>" for label, value in tips)
    box = f'<div class="tip" style="{_TIP}">{rows}</div>'
    plot.add_tools(HoverTool(renderers=list(renderers), tooltips=box, visible=False))


def colours_of(sets: Sequence[ScoredSet]) -> list[str]:
    """Return a colour for each set, other ones for known and for unknown sets."""
    seen = {True: 0, False: 0}
    found = []
    for one in sets:
        palette = KNOWN_COLOURS if one.known else UNKNOWN_COLOURS
        found.append(palette[seen[one.known] % len(palette)])
        seen[one.known] += 1
    return found
