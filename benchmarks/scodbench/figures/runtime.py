"""AUROC against runtime, a panel for each domain: every method, and the front nothing beats."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence, Set
from typing import Any

import numpy as np

from scodbench.domain import Domain
from scodbench.figures.curves import ends
from scodbench.figures.style import (
    GREY,
    LOOKS,
    legend_below,
    panels,
    plain_ticks,
)
from scodbench.measure import POOLED
from scodbench.methods import TITLES
from scodbench.names import networks, words
from scodbench.rows import Row, select
from scodbench.tables.summaries import Mean, domains_in, over_seeds

Point = tuple[float, Mean]

# those there is room for are shown, the first ones first
_TICKS = (0.5, 1.0, 0.9, 0.95, 0.99, 0.98, 0.8, 0.97, 0.995, 0.96, 0.94, 0.92, 0.93, 0.91)
_APART = 0.12  # of the height of a panel
_BELOW_ONE = 0.002  # so that an AUROC of 1 has its place on an axis that is logarithmic near it
_WRAP = 31  # letters side by side in the smaller print over a panel
_RULE = (
    "Filled: on the front. Hollow: another method is at least as fast and as good.\n"
    "Bars of the front: 95 % interval over networks, of one network over test inputs."
)


def draw(plt: Any, rows: Sequence[Row], sweeps: Sequence[Row]) -> Any:
    """Return the figure, None without rows; AUROCs are those of the headline table."""
    found = {domain: points(rows, domain.name) for domain in domains_in(rows)}
    found = {domain: own for domain, own in found.items() if own}
    if not found:
        return None
    titles = [_title(rows, domain, own) for domain, own in found.items()]
    figure, axes = panels(plt, titles, height=3.3)
    for axis, (domain, own) in zip(axes, found.items(), strict=True):
        bars = {method: interval(rows, domain.name, method) for method in front(own)}
        _draw_panel(axis, own, bars)
        device = next(select(rows, domain=domain.name))["device"]
        where = "one core" if device == "cpu" else device.removeprefix("NVIDIA ")
        axis.set_xlabel(f"forward passes,\nbatch 1, {where}")
    _draw_legend(figure, axes[0], {method for own in found.values() for method in own})
    return figure


def _title(rows: Sequence[Row], domain: Domain, found: Mapping[str, Point]) -> str:
    seeds = [auroc.seeds for _, auroc in found.values()]
    sets = dict.fromkeys(row["ood"] for row in select(rows, domain=domain.name))
    unknown = ", ".join(words(name) for name in sets if name != POOLED)
    small = [
        f"unknown: {unknown}" if unknown else "",
        networks(min(seeds), max(seeds)),
        "Front: " + "; ".join(TITLES[method] for method in front(found)),
    ]
    wrapped = [line for text in small for line in textwrap.wrap(text, _WRAP)]
    return "\n".join([domain.title, *wrapped])


def points(rows: Sequence[Row], domain: str) -> dict[str, Point]:
    """Return the time of a score and the AUROC of each method, all unknown inputs together.

    Times are in bare forward passes, timed in turns with the score: milliseconds of rows that
    were made on different days, or machines, cannot be compared.

    Args:
        rows: That may stand side by side.
        domain: Its name.
    """
    found = {}
    for method in TITLES:
        own = select(rows, domain=domain, method=method, ood=POOLED)
        timed = [{**r, "passes": r["ms_b1"] / r["forward_ms_b1"]} for r in own if "ms_b1" in r]
        passes, auroc = over_seeds(timed, "passes"), over_seeds(timed, "auroc")
        if passes is not None and auroc is not None:
            found[method] = (passes.value, auroc)
    return found


def interval(rows: Sequence[Row], domain: str, method: str) -> tuple[float, float] | None:
    """Return the ends of the bar of a method's AUROC, all unknown inputs together."""
    own = select(rows, domain=domain, method=method, ood=POOLED)
    return ends([row for row in own if "ms_b1" in row and row["auroc"] is not None], "auroc")


def front(found: Mapping[str, Point]) -> list[str]:
    """Return the methods that no other one beats in time and AUROC, fastest first.

    Examples:
        >>> near, far = Mean(0.9, None, 1), Mean(0.8, None, 1)
        >>> front({"a": (1.0, far), "b": (2.0, near), "c": (3.0, far), "d": (2.0, far)})
        ['a', 'b']
    """
    best, kept = -math.inf, []
    fastest = sorted(found.items(), key=lambda item: (item[1][0], -item[1][1].value))
    for method, (_, auroc) in fastest:
        if auroc.value > best:
            best = auroc.value
            kept.append(method)
    return kept


def _draw_panel(
    axis: Any, found: Mapping[str, Point], bars: Mapping[str, tuple[float, float] | None]
) -> None:
    from matplotlib import ticker

    axis.set_yscale("function", functions=(_stretched, _unstretched))
    for method, (passes, auroc) in found.items():
        axis.plot(passes, auroc.value, **_marker(method, is_unbeaten=method in bars))
    for method, bar in bars.items():
        if bar is not None:
            axis.vlines(found[method][0], *bar, color=LOOKS[method][0], lw=1.2, alpha=0.7)
    axis.step(
        [found[method][0] for method in bars],
        [found[method][1].value for method in bars],
        where="post",
        color=GREY,
        linewidth=1.2,
        zorder=1,
    )
    axis.set_xscale("log")
    plain_ticks(axis.xaxis)
    axis.margins(x=0.08, y=0.1)
    axis.yaxis.set_major_locator(ticker.FixedLocator(_ticks(*axis.get_ylim())))
    axis.yaxis.set_major_formatter("{x:g}")
    axis.set_ylabel("AUROC")


def _ticks(low: float, high: float) -> list[float]:
    """Return ticks between two AUROCs that can be told apart."""
    from_, to = _stretched(low), _stretched(high)
    shown: dict[float, float] = {}
    for tick in _TICKS:
        place = float((_stretched(tick) - from_) / (to - from_))
        if 0 <= place <= 1 and all(abs(place - other) > _APART for other in shown.values()):
            shown[tick] = place
    return sorted(shown)


def _marker(method: str, *, is_unbeaten: bool) -> dict[str, Any]:
    colour, marker = LOOKS[method]
    return {
        "marker": marker,
        "linestyle": "none",
        "label": TITLES[method],
        "markeredgecolor": colour,
        "markerfacecolor": colour if is_unbeaten else "none",
        "markersize": 7 if is_unbeaten else 5,
        "zorder": 3 if is_unbeaten else 2,
    }


def _stretched(auroc: Any) -> Any:
    """Return where an AUROC goes: equal steps for equal ratios of what is lacking to one."""
    return -np.log(1 + _BELOW_ONE - np.asarray(auroc))


def _unstretched(place: Any) -> Any:
    return 1 + _BELOW_ONE - np.exp(-np.asarray(place))


def _draw_legend(figure: Any, axis: Any, shown: Set[str]) -> None:
    handles = [
        axis.plot([], [], **_marker(method, is_unbeaten=True))[0]
        for method in LOOKS
        if method in shown
    ]
    handles += axis.plot([], [], color=GREY, linewidth=1.2, label="front")
    legend_below(figure, handles=handles, title=_RULE)
