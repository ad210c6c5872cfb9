"""A page as one file of HTML that needs nothing from anywhere, and the parts it is made of."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any, TypeAlias

from bokeh.core.types import ID
from bokeh.embed import json_item
from bokeh.resources import Resources
from bokeh.themes import Theme
from jinja2 import Environment, StrictUndefined
from jinja2.utils import htmlsafe_json_dumps
from markupsafe import Markup, escape

from scodkit import __version__
from scodkit.report.rates import PERCENT

# a row as callers write it: numbers are shown with three digits, None is a blank cell
Row: TypeAlias = "Sequence[Cell | str | float | None]"

# an entry of a chart's legend: its label, the role of its colour, and its look: "area", "dot",
# or a dash, which is "solid", "dashed" or "dotted"
Key: TypeAlias = tuple[str, str, str]


_HYPHENATED = re.compile(r"(?<![\w-])(\w{1,8}(?:-\w{1,8})+)(?![\w-])")


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


class Table:
    """A table without the columns that are blank throughout.

    Args:
        caption: What it shows.
        columns: Their titles; the first column names the rows.
        rows: As many cells, words, numbers or None each.
        sortable: Whether readers may sort it.
        attributes: Of each row, by name, for the page's script.

    Attributes:
        numeric: Whether each column holds numbers, which are set flush right.

    Examples:
        >>> Table("t", ("a", "b"), [("x", None)]).columns
        ['a']
    """

    def __init__(
        self,
        caption: str,
        columns: Sequence[str],
        rows: Sequence[Row],
        sortable: bool = False,
        attributes: Sequence[Mapping[str, str]] = (),
    ) -> None:
        cells = [[cell(value) for value in row] for row in rows]
        shown = [i for i in range(len(columns)) if any(row[i].text for row in cells)]
        self.caption, self.sortable = caption, sortable
        self.attributes = attributes or [{}] * len(rows)
        self.columns = [columns[i] for i in shown]
        self.rows = [[row[i] for i in shown] for row in cells]
        self.numeric = [any(row[i].order is not None for row in cells) for i in shown]


def cell(value: Cell | str | float | None, form: str = ".3g") -> Cell:
    r"""Return a value as a cell; blank for None.

    Args:
        value: Words, or a number; infinity is fine.
        form: Of a number, in Python's format language.

    Examples:
        >>> cell(0.12345).text, cell(0.05, ".1%").text, cell(None).text
        ('0.123', '5.0\xa0%', '')
    """
    if isinstance(value, Cell):
        return value
    if value is None or isinstance(value, str):
        return Cell(value or "")
    if math.isinf(value):
        return Cell("∞" if value > 0 else "-∞", value)
    return Cell(format(value, form).replace("%", PERCENT), value)


@dataclass(frozen=True)
class Chart:
    """A chart, with the same in words and in numbers for those who cannot see it.

    Args:
        name: Its id in the page, where its title is, too.
        says: What it shows, in a sentence or two.
        plot: As bokeh draws it.
        keys: Its legend.
        numbers: The data that is drawn, as a table.
    """

    name: str
    says: str
    plot: Any
    keys: Sequence[Key]
    numbers: Table


@dataclass(frozen=True)
class Picture:
    """One input of the gallery: an image, a vector or columns, with the slopes of its score.

    Args:
        name: Its set and index.
        says: Label, prediction and score.
        values: Data URI of an image, or heights of a vector's numbers in [-1, 1]; None where
            columns are shown.
        slopes: Likewise of the slopes; None where there are none.
        scale: The largest slope of an image, in nats per unit; empty for a vector.
        columns: Of a row of a table.
        marks: "alarm", "mistake".
        attributes: For the page's script, by name.
    """

    name: str
    says: Sequence[str]
    values: str | Sequence[float] | None
    slopes: str | Sequence[float] | None
    scale: str = ""
    columns: Table | None = None
    marks: Sequence[str] = ()
    attributes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Section:
    """A part of the page, with a heading; false where there is nothing to show.

    Args:
        name: Its id in the page, where its heading and introduction are, too.
        says: What it shows, in place of that introduction.
        charts: Side by side where there is room.
        stacked: One chart below the other instead.
        tables: One below the other.
        note: Why something is missing from the gallery.
        slider: Other thresholds; see `scodkit.report.numbers.thresholds`.
        filters: Values that inputs may be chosen by, by what they are.
        gallery: Rows of pictures, by their titles.
        folded: Tables that are shown when asked for.
    """

    name: str
    says: str = ""
    charts: Sequence[Chart] = ()
    stacked: bool = False
    tables: Sequence[Table] = ()
    note: str = ""
    slider: Mapping[str, Any] | None = None
    filters: Mapping[str, Sequence[str]] | None = None
    gallery: Mapping[str, Sequence[Picture]] | None = None
    folded: Sequence[Table] = ()

    def __bool__(self) -> bool:
        return bool(self.charts or self.gallery or any(one.rows for one in self.tables))


def render(sections: Sequence[Section], slider: object, **heading: object) -> str:
    """Return the page as HTML.

    Charts, script, style and pictures are inside. Words from outside are escaped; and were
    one to get through, the page's policy lets no script run but the two whose hashes it
    names, and nothing be fetched.

    Args:
        sections: The page below its heading.
        slider: What other thresholds would do, for the page's script.
        heading: ``title``, ``lead``: sentences below it, ``made``: when and by what,
            ``checks``, ``verdicts``: how many have each, ``levels``: what chance does to them,
            ``facts``: numbers to see first, each with what is known of it, by label, and
            ``notes``: what looks wrong.
    """
    charts = [chart for section in sections for chart in section.charts]
    theme = Theme(json=json.loads(_read("theme.json")))
    plots = [json_item(chart.plot, ID(chart.name), theme) for chart in charts]
    bokeh, script = _bokeh_script(), _read("page.js")
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, keep_trailing_newline=True
    )
    environment.filters["whole"] = _whole
    return environment.from_string(_read("page.html")).render(
        **heading,
        sections=sections,
        version=__version__,
        policy=_policy(bokeh, script),
        style=Markup(_read("page.css")),
        data=htmlsafe_json_dumps({"plots": plots, "slider": slider}),
        bokeh=Markup(bokeh),
        script=Markup(script),
    )


def _whole(text: str) -> Markup:
    """Return a text whose short words do not break after a hyphen, as in "digits 5-9"."""
    return Markup(_HYPHENATED.sub(r'<span class="whole">\1</span>', str(escape(text))))


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
