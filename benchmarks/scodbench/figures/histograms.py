"""Scores of known and unknown inputs, a panel for each domain and a strip for each set."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from scodbench.figures.style import BLACK, GREY, PALETTE, note_below, panels
from scodbench.measure import POOLED
from scodbench.names import words
from scodbench.rows import Row, select
from scodbench.tables.summaries import domains_in

_FALSE_ALARMS = 0.05
_FULL = 0.85  # height of the highest bin of a strip
_RULE = f"Dashed: {_FALSE_ALARMS:.0%} of known inputs are above. Each strip has its own height."


def draw(plt: Any, rows: Sequence[Row], sweeps: Sequence[Row]) -> Any:
    """Return the figure of the first network of each domain, None without rows."""
    own = [r for r in select(rows, method="scod", seed=0) if r.get("histogram")]
    domains = domains_in(list(select(own, ood=POOLED)))
    if not domains:
        return None
    titles = [f"{domain.title}\nSCOD, 1 network" for domain in domains]
    figure, axes = panels(plt, titles, height=2.4)
    for axis, domain in zip(axes, domains, strict=True):
        found = {row["ood"]: row["histogram"] for row in select(own, domain=domain.name)}
        known = found.pop(POOLED)
        strips = {"known": density(known, "known")}
        strips |= {words(ood): density(own, "unknown") for ood, own in found.items()}
        colours = (GREY, *PALETTE)
        for place, (name, (heights, edges)) in enumerate(strips.items()):
            shown = place + _FULL * heights / heights.max()
            axis.stairs(
                shown,
                edges,
                baseline=place,
                fill=True,
                color=colours[place],
                alpha=0.6,
                label=name,
            )
        axis.set_yticks(range(len(strips)), list(strips))
        axis.set_ylim(-0.1, len(strips))
        axis.axvline(upper_quantile(known, _FALSE_ALARMS), color=BLACK, ls="--", lw=1)
        axis.tick_params(axis="y", length=0)
        axis.set_xlabel("$\\log_{10}$ of the score in nats")
    note_below(figure, _RULE)
    return figure


def density(histogram: dict[str, list[float]], which: str) -> tuple[Any, Any]:
    """Return densities and edges: rows have bins of their own, which only these make alike.

    Args:
        histogram: Of a row: edges of bins, shares in them.
        which: ``known`` or ``unknown``.
    """
    edges = np.array(histogram["edges"])
    return np.array(histogram[which]) / np.diff(edges), edges


def upper_quantile(histogram: dict[str, list[float]], share: float) -> float:
    """Return where this share of known inputs is above, by interpolation within a bin.

    Examples:
        >>> upper_quantile({"edges": [0, 1, 2], "known": [0.5, 0.5]}, 0.25)
        1.5
    """
    below = np.concatenate([[0], np.cumsum(histogram["known"])])
    return float(np.interp((1 - share) * below[-1], below, histogram["edges"]))
