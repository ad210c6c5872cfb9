"""Figures of sweeps: one choice along the axis, a line for each of another."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from scodbench.domain import Domain
from scodbench.figures.style import (
    BLACK,
    MARKERS,
    PALETTE,
    SKETCHES,
    legend_below,
    note_below,
    panels,
    widen,
)
from scodbench.measure import POOLED
from scodbench.names import networks, words
from scodbench.rows import Row, select
from scodbench.tables.summaries import domains_in, mean

BARS = "Bars: 95 % interval over networks; of one network, over test inputs."


@dataclass(frozen=True)
class Curves:
    """AUROC (or another figure) over a choice, with intervals.

    Where lines are not the sets of unknown inputs, it is over all of these together.

    Args:
        sweep: Of which rows.
        along: The choice on the axis.
        lines: The choice that tells lines apart; ``ood`` for the unknown sets.
        label: Of the axis.
        default: The choice that is marked by dots.
        default_label: What it is.
        figure: What is drawn.
        shown: Of the figure, on the other axis.
        log: Base of the axis, which is logarithmic.
        note: Stands below.
        joined: The one of ``lines`` whose points are joined, the others have none; None for
            all of them.
    """

    sweep: str
    along: str
    lines: str
    label: str
    default: Callable[[Domain], float]
    default_label: str = "as in the tables"
    figure: str = "auroc"
    shown: str = "AUROC"
    log: int = 10
    note: str = ""
    joined: Callable[[Domain], object] | None = None

    def draw(self, plt: Any, rows: Sequence[Row], sweeps: Sequence[Row]) -> Any:
        """Return the figure, None without rows."""
        own = [r for r in select(sweeps, sweep=self.sweep) if r.get(self.figure) is not None]
        own = [row for row in own if (row["ood"] == POOLED) != (self.lines == "ood")]
        domains = domains_in(own)
        if not domains:
            return None
        about = "" if self.lines == "ood" else "all unknown sets, "
        titles = [f"{d.title}\n{about}{count(own, d)}" for d in domains]
        figure, axes = panels(plt, titles, height=3.0 if self.lines == "ood" else 2.4)
        for axis, domain in zip(axes, domains, strict=True):
            self._draw_panel(axis, list(select(own, domain=domain.name)), domain)
            if self.lines == "ood":
                legend_below(axis, columns=1)
        has_bars = any(f"{self.figure}_low" in row for row in own)
        below = "\n".join([BARS] * has_bars + [self.note] * bool(self.note))
        if self.lines == "ood":
            note_below(figure, below)
        else:  # the same lines in all panels
            handles, _ = axes[0].get_legend_handles_labels()
            legend_below(figure, handles=handles, title=below)
        return figure

    def _draw_panel(self, axis: Any, rows: list[Row], domain: Domain) -> None:
        names = list(dict.fromkeys(row[self.lines] for row in rows))
        joined = None if self.joined is None else self.joined(domain)
        for number, name in enumerate(names):
            text = words(str(name))
            if self.lines == "size":
                parts = round(domain.all_layers.size / name)
                text = f"T / {parts}" if parts > 1 else "T as in the tables"
            own = list(select(rows, **{self.lines: name}))
            draw_line(axis, own, self, number, text, joined=joined in (None, name))
        axis.axvline(self.default(domain), color=BLACK, ls=":", lw=1, label=self.default_label)
        places = sorted({row[self.along] for row in rows})
        axis.set_xscale("log", base=self.log)
        if (
            self.log == 2
        ):  # whole numbers, which one wants to read; as many as there is room for
            shown = places[-1:]
            for place in reversed(places):
                if place * (places[-1] / places[0]) ** 0.17 <= shown[0]:
                    shown.insert(0, place)
            axis.set_xticks(shown, [f"{place:g}" for place in shown])
            axis.minorticks_off()
        axis.set_xlabel(self.label)
        axis.set_ylabel(self.shown)
        widen(axis)


def count(rows: Sequence[Row], domain: Domain) -> str:
    """Return in words how many networks the rows of a domain are of."""
    number = len({row["seed"] for row in select(rows, domain=domain.name)})
    return networks(number, number)


def ends(rows: Sequence[Row], figure: str) -> tuple[float, float] | None:
    """Return the ends of a bar: an interval, or the two values of two networks.

    Args:
        rows: Of one choice, a row for each network.
        figure: What is drawn.

    Returns:
        None of one network whose row has no interval.

    Examples:
        >>> ends([{"auroc": 0.9, "auroc_low": 0.8, "auroc_high": 0.95}], "auroc")
        (0.8, 0.95)
        >>> ends([{"auroc": 0.9}, {"auroc": 0.7}], "auroc")
        (0.7, 0.9)
        >>> [round(end, 3) for end in ends([{"auroc": v} for v in (0.90, 0.92, 0.94)], "auroc")]
        [0.87, 0.97]
    """
    values = [row[figure] for row in rows]
    if len(rows) == 1:
        return (
            (rows[0][f"{figure}_low"], rows[0][f"{figure}_high"])
            if (f"{figure}_low" in rows[0])
            else None
        )
    if len(rows) == 2:
        return min(values), max(values)
    found = mean(values)
    assert found is not None
    assert found.spread is not None
    return found.value - found.spread, min(1.0, found.value + found.spread)


def draw_line(
    axis: Any, rows: Sequence[Row], curves: Curves, number: int, text: str, *, joined: bool
) -> None:
    """Draw means over networks, with bars.

    Args:
        axis: Where.
        rows: Of this line.
        curves: What is drawn over what.
        number: Of the line, which gives its colour and marker.
        text: For the legend.
        joined: Join the points, and draw their bars; others are hollow, and have none.
    """
    places = sorted({row[curves.along] for row in rows})
    groups = [list(select(rows, **{curves.along: place})) for place in places]
    means = [statistics.fmean(row[curves.figure] for row in group) for group in groups]
    alone = PALETTE[number % len(PALETTE)], MARKERS[number % len(MARKERS)]
    colour, marker = SKETCHES.get(str(rows[0].get(curves.lines)), alone)
    if not joined:
        axis.plot(places, means, marker, color=colour, mfc="none", ms=6, label=text, zorder=3)
        return
    axis.plot(places, means, f"{marker}-", color=colour, lw=1.2, label=text)
    for place, group in zip(places, groups, strict=True):
        bar = ends(group, curves.figure)
        if bar is not None:
            axis.vlines(place, *bar, color=colour, lw=1, alpha=0.7)
