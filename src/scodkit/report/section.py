"""What a page is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from scodkit.report.gallery import Gallery
from scodkit.report.table import Table

if TYPE_CHECKING:
    from scodkit.report.charts.canvas import Chart


@dataclass(frozen=True)
class Fact:
    """A number to see first.

    Args:
        label: What it is.
        value: The number, with its unit.
    """

    label: str
    value: str


@dataclass(frozen=True)
class Section:
    """A part of the page, with a heading.

    Args:
        name: Its place in the page: letters and dashes, once on a page.
        title: Its heading.
        says: What is to be seen in it.
        charts: Side by side where there is room.
        tables: Sortable, one below the other.
        gallery: Pictures of inputs.
        folded: Tables that are shown when asked for.
    """

    name: str
    title: str
    says: str
    charts: tuple[Chart, ...] = ()
    tables: tuple[Table, ...] = ()
    gallery: Gallery | None = None
    folded: tuple[Table, ...] = ()


@dataclass(frozen=True)
class Page:
    """All that is on a page.

    Args:
        title: Its heading.
        lead: A sentence or two below it.
        facts: Numbers to see first.
        notes: What looks wrong.
        sections: The rest.
    """

    title: str
    lead: str
    facts: tuple[Fact, ...]
    notes: tuple[str, ...]
    sections: tuple[Section, ...]
