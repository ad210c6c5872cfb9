"""A page as one file of HTML that needs nothing from anywhere, and the parts it is made of."""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any, TypeAlias

from bokeh.core.types import ID
from bokeh.embed import json_item
from bokeh.resources import Resources
from jinja2 import Environment, StrictUndefined
from jinja2.utils import htmlsafe_json_dumps
from markupsafe import Markup

from scodkit import __version__

_PERCENT = "\N{NO-BREAK SPACE}%"

# a row as callers write it: numbers are shown with three digits, None is a blank cell
Row: TypeAlias = "Sequence[Cell | str | float | None]"


@dataclass(frozen=True)
class Cell:
    """A cell of a table: its text, and the number it is sorted by.

    Args:
        text: As it is read.
        order: The number to sort by; None to sort by the text, with blank cells last.
        bar: Length of a bar behind the text, in [-1, 1]; None for no bar.
        colour: Role of the bar's colour.
    """

    text: str
    order: float | None = None
    bar: float | None = None
    colour: str = "blue"

    @property
    def sorted_by(self) -> str | None:
        """The number to sort by, as a browser reads it; None to sort by the text."""
        if self.order is None or math.isnan(self.order):
            return None
        return repr(self.order).replace("inf", "Infinity")


@dataclass(frozen=True)
class Table:
    """A table.

    Args:
        caption: What it shows.
        columns: Their titles; the first column names the rows.
        rows: As many cells each.
        sortable: Whether readers may sort it.
    """

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    sortable: bool

    def numeric(self, column: int) -> bool:
        """Return whether a column holds numbers, which are set flush right."""
        return any(row[column].order is not None for row in self.rows)


def table(
    caption: str, columns: Sequence[str], rows: Sequence[Row], *, sortable: bool = False
) -> Table:
    """Return a table without the columns that are blank throughout.

    Args:
        caption: What it shows.
        columns: Their titles.
        rows: As many cells, words, numbers or None each.
        sortable: Whether readers may sort it.

    Examples:
        >>> table("t", ("a", "b"), [("x", None)]).columns
        ('a',)
    """
    cells = [[_as_cell(value) for value in row] for row in rows]
    shown = [i for i in range(len(columns)) if any(row[i].text for row in cells)]
    return Table(
        caption,
        tuple(columns[i] for i in shown),
        tuple(tuple(row[i] for i in shown) for row in cells),
        sortable,
    )


def _as_cell(value: Cell | str | float | None) -> Cell:
    if isinstance(value, Cell):
        return value
    return Cell(value) if isinstance(value, str) else number(value)


def number(value: float | None, form: str = ".3g") -> Cell:
    r"""Return a number as a cell; blank for None.

    Args:
        value: The number; infinity is fine.
        form: Of Python's format language.

    Examples:
        >>> number(0.12345).text, number(0.05, ".1%").text, number(None).text
        ('0.123', '5.0\xa0%', '')
    """
    if value is None:
        return Cell("")
    if math.isinf(value):
        return Cell("∞" if value > 0 else "-∞", value)
    return Cell(format(value, form).replace("%", _PERCENT), value)


def percent(share: float, digits: int = 1) -> str:
    """Return a share as a percentage, with a no-break space before the sign.

    Args:
        share: In [0, 1], as a rule.
        digits: After the point.
    """
    return f"{100 * share:.{digits}f}{_PERCENT}"


@dataclass(frozen=True)
class Key:
    """An entry of a chart's legend.

    Args:
        label: Whose it is.
        colour: Role of its colour.
        look: ``area``, ``dot``, or a dash: ``solid``, ``dashed``, ``dotted``.
    """

    label: str
    colour: str
    look: str


@dataclass(frozen=True)
class Chart:
    """A chart, with the same in words and in numbers for those who cannot see it.

    Args:
        name: Its id in the page: letters and dashes, once on a page.
        title: What it is.
        says: What it shows, in a sentence or two.
        plot: As bokeh draws it.
        keys: Its legend.
        numbers: The data that is drawn, as a table.
    """

    name: str
    title: str
    says: str
    plot: Any
    keys: Sequence[Key]
    numbers: Table


@dataclass(frozen=True)
class Picture:
    """One input of the gallery: an image or a vector, with the slopes of its score.

    Args:
        name: Its set and index.
        says: Label, prediction and score.
        image: Data URI; None for a vector.
        slopes: Data URI of the map of slopes; None for a vector, or where there are none.
        bars: Heights of a vector's numbers in [-1, 1]; empty for an image.
        slope_bars: Likewise of its slopes.
    """

    name: str
    says: Sequence[str]
    image: str | None = None
    slopes: str | None = None
    bars: Sequence[float] = ()
    slope_bars: Sequence[float] = ()


@dataclass(frozen=True)
class Section:
    """A part of the page, with a heading.

    Args:
        name: Its id in the page: letters and dashes, once on a page.
        title: Its heading.
        says: What it shows.
        charts: Side by side where there is room.
        tables: One below the other.
        note: Why something is missing from the gallery.
        gallery: Rows of pictures, by their titles.
        folded: Tables that are shown when asked for.
    """

    name: str
    title: str
    says: str
    charts: Sequence[Chart] = ()
    tables: Sequence[Table] = ()
    note: str = ""
    gallery: Mapping[str, Sequence[Picture]] | None = None
    folded: Sequence[Table] = ()


def render(
    *,
    title: str,
    lead: str,
    facts: Mapping[str, str],
    notes: Sequence[str],
    sections: Sequence[Section],
) -> str:
    """Return a page as HTML.

    Scripts, style and pictures are inside. Words from outside are escaped; and were one to
    get through, the page's policy lets no script run but the two whose hashes it names, and
    nothing be fetched.

    Args:
        title: Its heading.
        lead: A sentence or two below it.
        facts: Numbers to see first, with their units, by label.
        notes: What looks wrong.
        sections: The rest.
    """
    charts = [chart for section in sections for chart in section.charts]
    plots = [json_item(chart.plot, ID(chart.name)) for chart in charts]
    bokeh, script = _bokeh_script(), _read("page.js")
    template = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, keep_trailing_newline=True
    ).from_string(_read("page.html"))
    return template.render(
        title=title,
        lead=lead,
        facts=facts,
        notes=notes,
        sections=sections,
        version=__version__,
        policy=_policy(bokeh, script),
        style=Markup(_read("page.css")),
        plots=htmlsafe_json_dumps(plots),
        bokeh=Markup(bokeh),
        script=Markup(script),
    )


def _read(name: str) -> str:
    return resources.files("scodkit.report").joinpath(name).read_text(encoding="utf-8")


def _bokeh_script() -> str:
    inline = Resources(mode="inline", components=["bokeh"], minified=True, log_level="error")
    return "\n".join(inline.js_raw).replace("</script", "<\\/script")


def _policy(*scripts: str) -> str:
    """Return a Content-Security-Policy: these scripts, styles and pictures inside, no more."""
    hashes = [
        "'sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() + "'"
        for script in scripts
    ]
    # bokeh puts its own styles into the page
    return (
        f"default-src 'none'; script-src {' '.join(hashes)}; style-src 'unsafe-inline'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
