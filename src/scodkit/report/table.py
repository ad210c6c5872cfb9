"""Tables of a page: cells that know how they are sorted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

_PERCENT = "\N{NO-BREAK SPACE}%"


@dataclass(frozen=True)
class Cell:
    """What is read in a cell, and what it is sorted by.

    Args:
        text: What is read.
        order: What it is sorted by; None for its text, or last if it is blank.
        bar: Length of a bar behind it, in [-1, 1]; None for no bar.
        colour: Role of the bar's colour.
    """

    text: str
    order: float | None = None
    bar: float | None = None
    colour: str = "blue"

    @property
    def sorted_by(self) -> str | None:
        """The number it is sorted by, as a browser reads it; None for its text."""
        if self.order is None or math.isnan(self.order):
            return None
        return repr(self.order).replace("inf", "Infinity")


@dataclass(frozen=True)
class Table:
    """A table.

    Args:
        caption: What is in it.
        columns: Their titles; the first names the rows.
        rows: As many cells each.
        sortable: Whether readers may sort it.
    """

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    sortable: bool = True

    def numeric(self, column: int) -> bool:
        """Return whether a column holds numbers, which are set flush right."""
        return any(row[column].order is not None for row in self.rows)

    def without_blank_columns(self) -> Table:
        """Return the table without the columns that are blank throughout.

        Examples:
            >>> table = Table("t", ("a", "b"), ((Cell("x"), Cell("")),))
            >>> table.without_blank_columns().columns
            ('a',)
        """
        kept = [i for i in range(len(self.columns)) if any(row[i].text for row in self.rows)]
        rows = tuple(tuple(row[i] for i in kept) for row in self.rows)
        return replace(self, columns=tuple(self.columns[i] for i in kept), rows=rows)


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
    """Return a share as a percentage whose sign stays on its line.

    Args:
        share: In [0, 1], as a rule.
        digits: After the point.
    """
    return f"{100 * share:.{digits}f}{_PERCENT}"


def plain(caption: str, columns: Sequence[str], rows: Sequence[Sequence[str | float]]) -> Table:
    """Return a table of words and numbers that stays in its order.

    Args:
        caption: What is in it.
        columns: Their titles.
        rows: Words, and numbers shown with three digits.
    """
    return Table(
        caption,
        tuple(columns),
        tuple(
            tuple(Cell(value) if isinstance(value, str) else number(value) for value in row)
            for row in rows
        ),
        sortable=False,
    )
