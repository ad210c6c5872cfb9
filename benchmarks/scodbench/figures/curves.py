"""Figures of sweeps: one choice along the axis, a line for each of another."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from scodbench.figures.style import (
    MARKERS,
    PALETTE,
    legend_below,
    panels,
    plain_ticks,
    words,
)
from scodbench.measure import POOLED
from scodbench.rows import Row, select
from scodbench.tables.summaries import domains_in


@dataclass(frozen=True)
class Curves:
    """AUROC (or another figure) over a choice: the mean over seeds, in a band of all of them.

    Where lines are not the sets of unknown inputs, it is over all of these.

    Args:
        sweep: Of which rows.
        along: The choice on the axis.
        lines: The choice that tells lines apart; ``ood`` for the unknown sets.
        label: Of the axis.
        figure: What is drawn.
        shown: Of the figure, on the other axis.
        log: Whether the axis is logarithmic, to which base.
        mark: Where a line of dashes goes, from the value that tells the lines apart.
        mark_label: What it is.
    """

    sweep: str
    along: str
    lines: str
    label: str
    figure: str = "auroc"
    shown: str = "AUROC"
    log: int | None = None
    mark: Callable[[Any], float] | None = None
    mark_label: str = ""

    def draw(self, plt: Any, rows: Sequence[Row], sweeps: Sequence[Row]) -> Any:
        """Return the figure, None without rows."""
        own = [r for r in select(sweeps, sweep=self.sweep) if r.get(self.figure) is not None]
        own = [row for row in own if (row["ood"] == POOLED) != (self.lines == "ood")]
        domains = domains_in(own)
        if not domains:
            return None
        figure, axes = panels(plt, [domain.title for domain in domains], height=3.0)
        for axis, domain in zip(axes, domains, strict=True):
            self._draw_panel(axis, list(select(own, domain=domain.name)))
        return figure

    def _draw_panel(self, axis: Any, rows: list[Row]) -> None:
        names = list(dict.fromkeys(row[self.lines] for row in rows))
        for number, name in enumerate(names):
            text = f"T = {name}" if self.lines == "size" else words(str(name))
            draw_line(axis, list(select(rows, **{self.lines: name})), self, number, text)
            if self.mark is not None:
                axis.axvline(self.mark(name), color=PALETTE[number], ls="--", lw=0.8, alpha=0.8)
        if self.mark is not None:
            axis.plot([], [], color="k", ls="--", lw=0.8, label=self.mark_label)
        if self.log:
            axis.set_xscale("log", base=self.log)
        if self.log == 2:  # whole numbers, which one wants to read
            plain_ticks(axis.xaxis, base=2)
        axis.set_xlabel(self.label)
        axis.set_ylabel(self.shown)
        legend_below(axis)


def draw_line(axis: Any, rows: Sequence[Row], curves: Curves, number: int, text: str) -> None:
    """Draw the mean over seeds as a line, and a band from the least to the greatest.

    Args:
        axis: Where.
        rows: Of this line.
        curves: What is drawn over what.
        number: Of the line, which gives its colour.
        text: For the legend.
    """
    places = sorted({row[curves.along] for row in rows})
    groups = [
        [row[curves.figure] for row in select(rows, **{curves.along: place})]
        for place in places
    ]
    colour, marker = PALETTE[number % len(PALETTE)], MARKERS[number % len(MARKERS)]
    means = [statistics.fmean(group) for group in groups]
    axis.plot(places, means, f"{marker}-", color=colour, lw=1.2, label=text)
    low, high = ([end(group) for group in groups] for end in (min, max))
    axis.fill_between(places, low, high, color=colour, alpha=0.18, lw=0)
