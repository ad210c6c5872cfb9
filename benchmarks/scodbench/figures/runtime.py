"""AUROC against runtime, a panel for each domain, with the front nothing beats on both."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from scodbench.domains import DOMAINS
from scodbench.figures.style import COLOURS, GREY, MARKERS, panels, plain_ticks
from scodbench.measure import POOLED
from scodbench.methods import PAPER, TITLES
from scodbench.rows import Row, select
from scodbench.tables.paper_values import PAPER_DOMAINS, PAPER_SET
from scodbench.tables.summaries import Mean, over_seeds

Point = tuple[float, Mean]

# a method this far below all others would press them together, and goes to the edge
_FAR = 0.15


def draw(plt: Any, rows: Sequence[Row], sweeps: Sequence[Row]) -> Any:
    """Return the figure, None without rows; bars are 95 % intervals over networks."""
    found = {
        DOMAINS[name]: points(rows, name, PAPER_SET.get(name, POOLED)) for name in PAPER_DOMAINS
    }
    domains = [domain for domain, own in found.items() if own]
    if not domains:
        return None
    titles = [f"{domain.title}, {_networks(found[domain])}" for domain in domains]
    figure, axes = panels(plt, titles)
    for axis, domain in zip(axes, domains, strict=True):
        _draw_panel(axis, found[domain])
        device = next(select(rows, domain=domain.name))["device"]
        where = "one core" if device == "cpu" else device
        axis.set_xlabel(f"forward passes, batch 1, {where}")
    handles = [
        axes[0].plot([], [], marker, color=COLOURS[method], label=TITLES[method])[0]
        for method, marker in zip(PAPER, MARKERS, strict=False)
    ]
    handles += axes[0].plot([], [], "--", color=GREY, label="nothing is better in both")
    figure.legend(handles=handles, loc="outside lower center", ncols=4)
    return figure


def _networks(found: Mapping[str, Point]) -> str:
    most = max(auroc.seeds for _, auroc in found.values())
    return "1 network" if most == 1 else f"{most} networks"


def points(rows: Sequence[Row], domain: str, ood: str) -> dict[str, Point]:
    """Return the time of a score and the AUROC of each of the paper's methods.

    Times are in bare forward passes, timed in turns with the score: milliseconds of rows that
    were made on different days, or machines, cannot be compared.
    """
    found = {}
    for method in PAPER:
        own = select(rows, domain=domain, method=method, ood=ood)
        timed = [{**r, "passes": r["ms_b1"] / r["forward_ms_b1"]} for r in own if "ms_b1" in r]
        passes, auroc = over_seeds(timed, "passes"), over_seeds(timed, "auroc")
        if passes is not None and auroc is not None:
            found[method] = (passes.value, auroc)
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
    floor = _floor(found)
    for method, marker in zip(PAPER, MARKERS, strict=False):
        if method not in found:
            continue
        passes, auroc = found[method]
        if auroc.value < floor:
            axis.plot(passes, floor, marker, color=COLOURS[method], clip_on=False)
            axis.annotate(
                f"{auroc.value:.2f}, off the axis",
                (passes, floor),
                (7, 4),
                textcoords="offset points",
                fontsize=7,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},
            )
            continue
        # an interval of a few networks' means may pass one, which no AUROC does
        ends = [[auroc.spread], [min(auroc.spread, 1 - auroc.value)]] if auroc.spread else None
        axis.errorbar(passes, auroc.value, ends, fmt=marker, color=COLOURS[method], capsize=2)
    steps = [found[method] for method in front(found)]
    axis.step(
        [passes for passes, _ in steps],
        [auroc.value for _, auroc in steps],
        "--",
        where="post",
        color=GREY,
        linewidth=1,
        zorder=1,
    )
    if floor > -math.inf:
        axis.set_ylim(bottom=floor)
    axis.set_xscale("log")
    plain_ticks(axis.xaxis)
    axis.margins(x=0.12)
    axis.set_ylabel("AUROC")


def _floor(found: Mapping[str, Point]) -> float:
    """Return where the axis is to begin, minus infinity where it may as it likes."""
    values = sorted(auroc.value for _, auroc in found.values())
    if len(values) < 3 or values[1] - values[0] < _FAR:
        return -math.inf
    lowest = [a.value - (a.spread or 0) for _, a in found.values() if a.value > values[0]]
    return max(values[0] + 0.02, min(lowest) - 0.03)
