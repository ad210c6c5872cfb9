"""How well scores tell where the network is wrong: ROC curves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from scodbench.figures.style import COLOURS, GREY, legend_beside, panels
from scodbench.methods import PAPER, TITLES
from scodbench.names import networks
from scodbench.rows import Row, select
from scodbench.tables.summaries import domains_in, mean

_MOST_ALONE = 2  # networks whose curves and values are shown one by one


def draw(plt: Any, rows: Sequence[Row], sweeps: Sequence[Row]) -> Any:
    """Return the figure, None without rows.

    Of one or two networks each has its curve and value; of more the mean along the way.
    """
    own = [row for row in select(sweeps, sweep="errors") if row.get("roc")]
    domains = domains_in(own)
    if not domains:
        return None
    titles = [f"{d.title}\n{_large(list(select(own, domain=d.name)))}" for d in domains]
    figure, axes = panels(plt, titles, columns=1, height=2.45)
    for axis, domain in zip(axes, domains, strict=True):
        found = list(select(own, domain=domain.name))
        drawn: set[str] = set()
        for method in (*PAPER, "fused"):
            curves = [row["roc"] for row in select(found, method=method)]
            if curves:
                text = f"{TITLES[method]}: {_values(found, method)}"
                alone = curves if len(curves) <= _MOST_ALONE else [np.mean(curves, axis=0)]
                # of two methods of a family the second one is dashed
                line = "--" if COLOURS[method] in drawn else "-"
                drawn.add(COLOURS[method])
                for number, (false, true) in enumerate(alone):
                    label = None if number else text
                    axis.plot(false, true, line, color=COLOURS[method], lw=1.2, label=label)
        axis.plot([0, 1], [0, 1], ":", color=GREY, lw=1)
        axis.set_xlabel("share of small errors flagged")
        axis.set_ylabel("share of large\nerrors flagged")
        axis.set_aspect("equal")
        legend_beside(axis, title=_values_are(found))
    return figure


def _values(rows: Sequence[Row], method: str) -> str:
    found = [row["auroc"] for row in select(rows, method=method)]
    if len(found) <= _MOST_ALONE:
        return ", ".join(f"{value:.3f}" for value in found)
    return str(mean(found))


def _values_are(rows: Sequence[Row]) -> str:
    """Return what the numbers of a panel's legend are."""
    count = len({row["seed"] for row in rows})
    if count <= _MOST_ALONE:
        return "AUROC" if count == 1 else "AUROC of each network"
    return f"AUROC, mean of {count} networks\n± half of the 95 % interval"


def _large(rows: Sequence[Row]) -> str:
    """Return how many networks there are, and which shares of their errors are large."""
    shares = {row["seed"]: row["threshold_share"] for row in rows}
    count = networks(len(shares), len(shares))
    if len(shares) <= _MOST_ALONE:
        told = " and ".join(f"{share:.0%}" for share in shares.values())
    else:
        told = f"{min(shares.values()):.0%} to {max(shares.values()):.0%}"
    return f"{count}; large errors: {told}"
