"""Every method on every domain, with intervals over networks: where `Fused` wins and loses."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from scodbench.figures.curves import BARS, count, ends
from scodbench.figures.style import COLOURS, GREY, note_below, panels, save, style, widen
from scodbench.measure import POOLED
from scodbench.methods import TITLES
from scodbench.rows import Row, select
from scodbench.tables.summaries import domains_in, over_seeds


def draw_fused(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Draw the AUROC of all methods, a panel for each domain; the best at the top.

    Args:
        rows: Of methods.
        folder: Where to.

    Returns:
        The files written.
    """
    judged = [row for row in select(rows, ood=POOLED) if row.get("auroc") is not None]
    domains = domains_in(judged)
    with style() as plt:
        methods = [{r["method"] for r in select(judged, domain=d.name)} for d in domains]
        titles = [f"{d.title}\n{count(judged, d)}" for d in domains]
        heights = [0.8 + 0.145 * len(own) for own in methods]
        figure, axes = panels(plt, titles, columns=1, height=heights)
        for domain, axis in zip(domains, axes, strict=True):
            own = list(select(judged, domain=domain.name))
            found = {m: over_seeds(own, "auroc", method=m) for m in TITLES}
            known = {m: value for m, value in found.items() if value is not None}
            ordered = sorted(known, key=lambda method: known[method].value)
            for place, method in enumerate(ordered):
                colour = COLOURS[method] if method == "fused" else GREY
                axis.plot(known[method].value, place, "o", color=colour)
                bar = ends(list(select(own, method=method)), "auroc")
                if bar is not None:
                    axis.hlines(place, *bar, color=colour, lw=1.2)
            axis.set_yticks(range(len(ordered)), [TITLES[method] for method in ordered])
            for label, method in zip(axis.get_yticklabels(), ordered, strict=True):
                label.set_weight("bold" if method == "fused" else "normal")
            axis.set_xlabel("AUROC")
            widen(axis, "x")
        note_below(figure, BARS)
        return save(figure, folder, "fused_methods")
