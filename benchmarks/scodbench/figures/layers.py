"""AUROC over the share of layers that is kept, with the last linear layer alone beside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from scodbench.figures.curves import BARS, Curves, count, draw_line, ends
from scodbench.figures.style import (
    BLACK,
    MARKERS,
    PALETTE,
    legend_below,
    note_below,
    panels,
    widen,
)
from scodbench.measure import POOLED
from scodbench.names import words
from scodbench.rows import Row, select
from scodbench.tables.summaries import domains_in

_ALONE = -0.2  # where the last linear layer alone has its place, left of the axis of shares
_CURVES = Curves("layers", "share", "ood", "share of layers kept", lambda domain: 0)


def draw(plt: Any, rows: Sequence[Row], sweeps: Sequence[Row]) -> Any:
    """Return the figure, None without rows.

    Hollow marks at the left are the last linear layer alone; a line of dots is the choice the
    tables have.
    """
    own = [row for row in select(sweeps, sweep="layers") if row.get("auroc") is not None]
    own = [row for row in own if row["ood"] != POOLED]
    domains = domains_in(own)
    if not domains:
        return None
    titles = [f"{domain.title}\n{count(own, domain)}" for domain in domains]
    figure, axes = panels(plt, titles, height=3.3)
    for axis, domain in zip(axes, domains, strict=True):
        _draw_panel(axis, list(select(own, domain=domain.name)))
    note_below(figure, BARS)
    return figure


def _draw_panel(axis: Any, rows: list[Row]) -> None:
    for number, ood in enumerate(dict.fromkeys(row["ood"] for row in rows)):
        own = list(select(rows, ood=ood))
        shares = [row for row in own if row["share"]]
        draw_line(axis, shares, _CURVES, number, words(ood), joined=True)
        linear = [row for row in own if not row["share"]]
        if linear:
            middle = sum(row["auroc"] for row in linear) / len(linear)
            place, colour = _ALONE + 0.03 * number, PALETTE[number]
            axis.plot(place, middle, MARKERS[number], mfc="none", color=colour)
            bar = ends(linear, "auroc")
            if bar is not None:
                axis.vlines(place, *bar, color=colour, lw=1, alpha=0.7)
    for share in {row["share"] for row in rows if row["chosen"]}:
        axis.axvline(share, color=BLACK, ls=":", lw=1, label="as in the tables")
    axis.set_xticks([_ALONE + 0.05, 0.25, 0.5, 0.75, 1], ["linear", "¼", "½", "¾", "all"])
    axis.set_xlim(_ALONE - 0.08, 1.05)
    axis.set_xlabel("last linear layer alone;\nshare of layers kept")
    axis.set_ylabel(_CURVES.shown)
    widen(axis)
    legend_below(axis, columns=1)
