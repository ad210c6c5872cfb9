"""Scores of known and unknown inputs, a panel for each domain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from scodkit.bench.domains import DOMAINS
from scodkit.bench.figures.style import GREY, PALETTE, panels
from scodkit.bench.measure import POOLED
from scodkit.bench.rows import Row, select


def draw(plt: Any, rows: Sequence[Row], sweeps: Sequence[Row]) -> Any:
    """Return the figure of the first network of each domain, None without rows."""
    own = [r for r in select(rows, method="scod", seed=0) if r.get("histogram")]
    domains = [d for d in DOMAINS.values() if any(select(own, domain=d.name))]
    if not domains:
        return None
    figure, axes = panels(plt, [domain.title for domain in domains])
    for axis, domain in zip(axes, domains, strict=True):
        for number, row in enumerate(select(own, domain=domain.name)):
            if row["ood"] == POOLED:
                continue
            edges, known, unknown = (row["histogram"][k] for k in ("edges", "known", "unknown"))
            if not number:
                axis.stairs(known, edges, fill=True, color=GREY, alpha=0.5, label="known")
            axis.stairs(unknown, edges, color=PALETTE[number], label=row["ood"], linewidth=1.3)
        axis.set_xlabel("score, powers of ten")
        axis.set_ylabel("share")
        axis.legend()
    figure.tight_layout()
    return figure
