"""How well scores tell where the network is wrong: ROC curves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from scodbench.figures.style import COLOURS, GREY, legend_below, panels
from scodbench.methods import PAPER, TITLES
from scodbench.rows import Row, select
from scodbench.tables.summaries import domains_in, over_seeds


def draw(plt: Any, rows: Sequence[Row], sweeps: Sequence[Row]) -> Any:
    """Return the figure, None without rows; curves are means over seeds along their way."""
    own = [row for row in select(sweeps, sweep="errors") if row.get("roc")]
    domains = domains_in(own)
    if not domains:
        return None
    figure, axes = panels(plt, [domain.title for domain in domains], height=4.2)
    for axis, domain in zip(axes, domains, strict=True):
        found = list(select(own, domain=domain.name))
        for method in (*PAPER, "fused"):
            curves = [row["roc"] for row in select(found, method=method)]
            if curves:
                false, true = np.mean(curves, axis=0)
                auroc = over_seeds(found, "auroc", method=method)
                networks = "1 network" if len(curves) == 1 else f"{len(curves)} networks"
                text = f"{TITLES[method]}: AUROC {auroc}, {networks}"
                axis.plot(false, true, color=COLOURS[method], lw=1.4, label=text)
        axis.plot([0, 1], [0, 1], ":", color=GREY, lw=1)
        share = over_seeds(found, "threshold_share", method=found[0]["method"])
        axis.set_xlabel("share of small errors flagged")
        axis.set_ylabel("share of large errors flagged")
        assert share is not None
        axis.set_title(f"{domain.title}: {share.value:.0%} large errors")
        axis.set_aspect("equal")
        legend_below(axis, columns=1)
    return figure
