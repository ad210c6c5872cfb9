"""AUROC over the share of layers that is kept, with the last linear layer alone beside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from scodbench.figures.curves import Curves, draw_line
from scodbench.figures.style import BLACK, PALETTE, legend_below, panels, words
from scodbench.measure import POOLED
from scodbench.rows import Row, select
from scodbench.tables.summaries import domains_in

_CURVES = Curves("layers", "share", "ood", "share of layers kept")


def draw(plt: Any, rows: Sequence[Row], sweeps: Sequence[Row]) -> Any:
    """Return the figure, None without rows: means over seeds, bands of all of them.

    A hollow mark at zero is the last linear layer alone; a line of dots is the choice the
    tables have.
    """
    own = [row for row in select(sweeps, sweep="layers") if row.get("auroc") is not None]
    own = [row for row in own if row["ood"] != POOLED]
    domains = domains_in(own)
    if not domains:
        return None
    figure, axes = panels(plt, [domain.title for domain in domains], height=3.1)
    for axis, domain in zip(axes, domains, strict=True):
        _draw_panel(axis, list(select(own, domain=domain.name)))
    return figure


def _draw_panel(axis: Any, rows: list[Row]) -> None:
    for number, ood in enumerate(dict.fromkeys(row["ood"] for row in rows)):
        own = list(select(rows, ood=ood))
        shares = [row for row in own if row["share"]]
        draw_line(axis, shares, _CURVES, number, words(ood))
        linear = [row["auroc"] for row in own if not row["share"]]
        if linear:
            middle = sum(linear) / len(linear)
            ends = [[middle - min(linear)], [max(linear) - middle]]
            colour = PALETTE[number]
            axis.errorbar(0, middle, ends, fmt="o", mfc="none", color=colour)
    axis.plot([], [], "o", mfc="none", color=BLACK, label="last linear layer alone")
    for share in {row["share"] for row in rows if row["chosen"]}:
        axis.axvline(share, color=BLACK, ls=":", lw=1, label="as in the tables")
    axis.set_xlim(-0.06, 1.05)
    axis.set_xlabel(_CURVES.label)
    axis.set_ylabel(_CURVES.shown)
    legend_below(axis)
