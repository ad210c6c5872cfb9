"""AUROC against runtime, a panel for each domain, with the front nothing beats on both."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from scodkit.bench.domains import DOMAINS
from scodkit.bench.figures.style import COLOURS, GREY, TITLES, panels
from scodkit.bench.measure import POOLED
from scodkit.bench.methods import PAPER
from scodkit.bench.paper_values import PAPER_SET
from scodkit.bench.rows import Row, select
from scodkit.bench.table import Mean, over_seeds

Point = tuple[float, Mean]


def draw(plt: Any, rows: Sequence[Row], sweeps: Sequence[Row]) -> Any:
    """Return the figure, None without rows."""
    domains = [d for d in DOMAINS.values() if any(select(rows, domain=d.name))]
    if not domains:
        return None
    figure, axes = panels(plt, [domain.title for domain in domains])
    for axis, domain in zip(axes, domains, strict=True):
        found = points(rows, domain.name, PAPER_SET.get(domain.name, POOLED))
        _draw_panel(axis, found)
    handles = [axes[0].plot([], [], "o", color=COLOURS[m], label=TITLES[m])[0] for m in PAPER]
    handles.append(
        axes[0].plot([], [], "--", color=GREY, label="front: the paper's methods")[0]
    )
    figure.legend(handles=handles, loc="lower center", ncols=4, bbox_to_anchor=(0.5, -0.06))
    figure.tight_layout()
    return figure


def points(rows: Sequence[Row], domain: str, ood: str) -> dict[str, Point]:
    """Return milliseconds a sample and AUROC of each of the paper's methods."""
    found = {}
    for method in PAPER:
        own = {"domain": domain, "method": method, "ood": ood}
        ms, auroc = over_seeds(rows, "ms_b1", **own), over_seeds(rows, "auroc", **own)
        if ms is not None and auroc is not None:
            found[method] = (ms.value, auroc)
    return found


def front(found: Mapping[str, Point]) -> list[str]:
    """Return the methods that no other one beats in time and AUROC, fastest first.

    Examples:
        >>> near, far = Mean(0.9, None, 1), Mean(0.8, None, 1)
        >>> front({"a": (1.0, far), "b": (2.0, near), "c": (3.0, far)})
        ['a', 'b']
    """
    best, kept = -math.inf, []
    for method, (_, auroc) in sorted(found.items(), key=lambda item: item[1][0]):
        if auroc.value > best:
            best = auroc.value
            kept.append(method)
    return kept


def _draw_panel(axis: Any, found: Mapping[str, Point]) -> None:
    for method, (ms, auroc) in found.items():
        spread = auroc.spread or 0.0
        axis.errorbar(ms, auroc.value, yerr=spread, fmt="o", color=COLOURS[method], capsize=2)
    steps = [found[method] for method in front(found)]
    axis.step(
        [ms for ms, _ in steps],
        [auroc.value for _, auroc in steps],
        "--",
        where="post",
        color=GREY,
        linewidth=1,
        zorder=1,
    )
    axis.set_xscale("log")
    axis.set_xlabel("ms a sample, batch 1")
    axis.set_ylabel("AUROC")
