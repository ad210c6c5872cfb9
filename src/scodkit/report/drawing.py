"""A plot of a report as bokeh draws it.

Colours are named here and chosen by the page's style sheet, light or dark: a tag such as
``fill:blue`` on a part of a plot tells the page's script what to paint. ``theme.json`` has the
rest of the style.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from bokeh.models import FixedTicker, HoverTool, LogTickFormatter, Range1d, TapTool
from bokeh.models.annotations import Label
from bokeh.plotting import figure

from scodkit.metrics import Array
from scodkit.report.page import Key
from scodkit.report.report import ScoredSet

Indices = npt.NDArray[np.intp]
Ends = tuple[float, float]
Tips = Mapping[str, str]

# colour-blind readers can tell these apart; known and unknown sets cycle through their own
KNOWN_COLOURS = ("blue", "green", "ink")
UNKNOWN_COLOURS = ("red", "purple", "ink")
DASHES = ("solid", "dashed", "dotted")

_LINEAR = (False, False)
# where bokeh marks only the upper half of a logarithmic axis
_FEW_DECADES = (5, 500)
_ONE_TWO_FIVE = [float(f"{digit}e{power}") for power in range(-12, 13) for digit in (1, 2, 5)]
_TIP = "background:var(--paper);color:var(--ink);margin:-5px;padding:6px 8px;font-size:13px"


class Drawing:
    """A plot as wide as the page allows, and the legend of what has been drawn.

    Args:
        x: Label of the horizontal axis, with its unit.
        y: Of the vertical one.
        x_range: Ends of the horizontal axis.
        y_range: Of the vertical one.
        log: Whether the horizontal and the vertical axis are logarithmic.
    """

    def __init__(
        self, x: str, y: str, x_range: Ends, y_range: Ends, log: tuple[bool, bool] = _LINEAR
    ) -> None:
        self.keys: list[Key] = []
        self._pressed: list[Any] = []
        self.plot: Any = figure(
            tools="box_zoom,pan,wheel_zoom,reset",
            active_drag="box_zoom",
            active_scroll=None,
            x_axis_type="log" if log[0] else "linear",
            y_axis_type="log" if log[1] else "linear",
            x_range=Range1d(start=x_range[0], end=x_range[1]),
            y_range=Range1d(start=y_range[0], end=y_range[1]),
            x_axis_label=x,
            y_axis_label=y,
        )
        for axis, ends, is_log in zip(self.plot.axis, (x_range, y_range), log, strict=True):
            if is_log:
                axis.formatter = LogTickFormatter(min_exponent=4)
                if _FEW_DECADES[0] < ends[1] / ends[0] < _FEW_DECADES[1]:
                    axis.ticker = FixedTicker(ticks=_ONE_TWO_FIVE)

    def add(
        self,
        kind: str,
        colour: str,
        look: str,
        source: Mapping[str, Any],
        label: str = "",
        tips: Tips | None = None,
        name: str | None = None,
        **glyph: Any,
    ) -> None:
        """Draw something, tag it with its colour, and show numbers under the pointer.

        Args:
            kind: Method of bokeh's plots that draws it.
            colour: Role of its colour.
            look: In the legend, as of `Key`.
            source: Columns of the data.
            label: In the legend; empty for no entry.
            tips: Columns of the data as bokeh writes them, ``@x{0.00}``, by label.
            name: For the page's script; ``click:`` and more for what may be clicked.
            glyph: Arguments of the method.
        """
        renderer = getattr(self.plot, kind)(source=source, **glyph)
        parts = {"line": ["line"], "varea": ["fill"]}.get(kind, ["fill", "line"])
        renderer.glyph.tags = [f"{part}:{colour}" for part in parts]
        # a glyph that is not selected must not fade into a colour of another theme
        renderer.nonselection_glyph = renderer.selection_glyph = None
        renderer.muted_glyph, renderer.name = None, name
        if name is not None and name.startswith("click:"):
            self._pressed.append(renderer)
            if len(self._pressed) == 1:  # only one such tool of a plot is active
                self.plot.add_tools(TapTool(renderers=self._pressed, visible=False))
            self.plot.select_one(TapTool).renderers = self._pressed
        if label:
            self.keys.append((label, colour, look))
        if tips:
            # bokeh's own rows are too pale to be read, and white in the dark
            rows = [
                f"<div>{name} <strong>{value}</strong></div>" for name, value in tips.items()
            ]
            box = f'<div class="tip" style="{_TIP}">{"".join(rows)}</div>'
            self.plot.add_tools(HoverTool(renderers=[renderer], tooltips=box, visible=False))

    def line(self, source: Mapping[str, Any], colour: str, dash: str, **more: Any) -> None:
        """Draw a curve through the columns ``x`` and ``y`` of a source, as `add` does."""
        options = {"x": "x", "y": "y", "line_width": 2.5, "line_dash": dash, **more}
        self.add("line", colour, dash, source, **options)

    def dots(self, source: Mapping[str, Any], label: str, tips: Tips, size: int) -> None:
        """Draw the points ``x`` and ``y`` of a source in blue."""
        self.add("scatter", "blue", "dot", source, label, tips, x="x", y="y", size=size)

    def mark(
        self, x: Ends, y: Ends, label: str, dash: str = "dashed", name: str | None = None
    ) -> None:
        """Draw a straight line that means a limit or a moment."""
        source = {"x": list(x), "y": list(y)}
        self.line(source, "ink", dash, label=label, line_width=2, name=name)

    def point(self, x: float, y: float, colour: str, label: str, name: str) -> None:
        """Draw one large dot."""
        source = {"x": [x], "y": [y]}
        self.add("scatter", colour, "dot", source, label, name=name, x="x", y="y", size=12)

    def write(self, x: float, y: float, text: str, name: str, *, left: bool) -> None:
        """Write a word beside a place, to the left or the right of it."""
        side = {"text_align": "right", "x_offset": -5} if left else {"x_offset": 5}
        label = Label(x=x, y=y, text=text, text_font_size="12px", name=name, **side)
        label.tags, label.text_baseline = ["text:ink"], "top"
        self.plot.add_layout(label)


def colours_of(sets: Sequence[ScoredSet]) -> list[str]:
    """Return the role of a colour for each set: known and unknown sets have their own."""
    known, unknown = itertools.cycle(KNOWN_COLOURS), itertools.cycle(UNKNOWN_COLOURS)
    return [next(known if one.known else unknown) for one in sets]


def even(length: int, most: int) -> Indices:
    """Return at most ``most`` evenly spaced indices, the first and the last among them."""
    return np.unique(np.linspace(0, length - 1, min(length, most)).round().astype(np.intp))


def extremes(values: Array, most: int) -> Indices:
    """Return at most about ``most`` indices: the lowest and highest value of each stretch."""
    if len(values) <= most:
        return np.arange(len(values))
    extremes = {0, len(values) - 1}
    for stretch in np.array_split(np.arange(len(values)), most // 2):
        part = values[stretch]
        extremes |= {int(stretch[part.argmin()]), int(stretch[part.argmax()])}
    return np.array(sorted(extremes), dtype=np.intp)
