"""Figures of sweeps: one choice along the axis, a line for each of another."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from scodkit.bench.domains import DOMAINS
from scodkit.bench.figures.style import PALETTE, panels
from scodkit.bench.rows import Row, select


@dataclass(frozen=True)
class Curves:
    """AUROC (or another figure) over a choice.

    Args:
        sweep: Of which rows.
        along: The choice on the axis.
        lines: The choice that tells lines apart; ``ood`` for the unknown sets.
        label: Of the axis.
        figure: What is drawn.
        log: Whether the axis is logarithmic, to which base.
    """

    sweep: str
    along: str
    lines: str
    label: str
    figure: str = "auroc"
    log: int | None = None

    def draw(self, plt: Any, rows: Sequence[Row], sweeps: Sequence[Row]) -> Any:
        """Return the figure, None without rows."""
        own = list(select(sweeps, sweep=self.sweep))
        domains = [d for d in DOMAINS.values() if any(select(own, domain=d.name))]
        if not domains:
            return None
        figure, axes = panels(plt, [domain.title for domain in domains])
        for axis, domain in zip(axes, domains, strict=True):
            self._draw_panel(axis, list(select(own, domain=domain.name)))
        figure.tight_layout()
        return figure

    def _draw_panel(self, axis: Any, rows: list[Row]) -> None:
        names = list(dict.fromkeys(row[self.lines] for row in rows))
        for number, name in enumerate(names):
            line = list(select(rows, **{self.lines: name}))
            places = sorted({row[self.along] for row in line})
            # over seeds, and over unknown sets where these are not the lines
            groups = [
                [row[self.figure] for row in select(line, **{self.along: place})]
                for place in places
            ]
            colour = PALETTE[number % len(PALETTE)]
            means = [statistics.fmean(group) for group in groups]
            text = f"T = {name}" if self.lines == "size" else str(name)
            axis.plot(places, means, "o-", color=colour, markersize=3, label=text)
        if self.log:
            axis.set_xscale("log", base=self.log)
        axis.set_xlabel(self.label)
        axis.set_ylabel("AUROC" if self.figure == "auroc" else "captured curvature")
        axis.legend()
