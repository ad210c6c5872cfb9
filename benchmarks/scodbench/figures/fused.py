"""Every method on every domain, with intervals over networks: where `Fused` wins and loses."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from scodbench.figures.style import BLACK, GREY, RED, panels, save, style
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
        figure, axes = panels(plt, [domain.title for domain in domains], height=3.4)
        for domain, axis in zip(domains, axes, strict=True):
            own = list(select(judged, domain=domain.name))
            found = {m: over_seeds(own, "auroc", method=m) for m in TITLES}
            known = {m: value for m, value in found.items() if value is not None}
            ordered = sorted(known, key=lambda method: known[method].value)
            for place, method in enumerate(ordered):
                value, colour = known[method], RED if method == "fused" else GREY
                axis.errorbar(
                    value.value, place, xerr=value.spread, fmt="o", color=colour, capsize=2
                )
            axis.set_yticks(range(len(ordered)), [TITLES[method] for method in ordered])
            for label, method in zip(axis.get_yticklabels(), ordered, strict=True):
                label.set_color(RED if method == "fused" else BLACK)
            seeds = len({row["seed"] for row in own})
            axis.set_xlabel(f"AUROC, {seeds} network{'s' if seeds > 1 else ''}")
        return save(figure, folder, "fused_methods")
