"""Scores of known and unknown inputs, a panel for each domain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from scodbench.figures.style import GREY, PALETTE, legend_below, panels, words
from scodbench.measure import POOLED
from scodbench.rows import Row, select
from scodbench.tables.summaries import domains_in


def draw(plt: Any, rows: Sequence[Row], sweeps: Sequence[Row]) -> Any:
    """Return the figure of the first network of each domain, None without rows."""
    own = [r for r in select(rows, method="scod", seed=0) if r.get("histogram")]
    domains = domains_in(list(select(own, ood=POOLED)))
    if not domains:
        return None
    figure, axes = panels(plt, [domain.title for domain in domains], height=3.0)
    for axis, domain in zip(axes, domains, strict=True):
        found = {row["ood"]: row["histogram"] for row in select(own, domain=domain.name)}
        known = density(found.pop(POOLED), "known")
        axis.stairs(*known, fill=True, color=GREY, alpha=0.5, label="known")
        for colour, (ood, histogram) in zip(PALETTE, found.items(), strict=False):
            shares = density(histogram, "unknown")
            axis.stairs(*shares, color=colour, label=words(ood), linewidth=1.3)
        axis.set_xlabel("$\\log_{10}$ of the score in nats")
        axis.set_ylabel("density")
        legend_below(axis)
    return figure


def density(histogram: dict[str, list[float]], which: str) -> tuple[Any, Any]:
    """Return densities and edges: rows have bins of their own, which only these make alike.

    Args:
        histogram: Of a row: edges of bins, shares in them.
        which: ``known`` or ``unknown``.
    """
    edges = np.array(histogram["edges"])
    return np.array(histogram[which]) / np.diff(edges), edges
