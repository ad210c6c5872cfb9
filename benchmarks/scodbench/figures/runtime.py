"""AUROC against runtime, a panel for each domain: every method, and the front nothing beats."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence, Set
from typing import Any

import numpy as np

from scodbench.figures.style import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    MARKERS,
    ORANGE,
    PURPLE,
    RED,
    SKY,
    panels,
    plain_ticks,
)
from scodbench.measure import POOLED
from scodbench.methods import TITLES
from scodbench.rows import Row, select
from scodbench.tables.summaries import Mean, domains_in, over_seeds

Point = tuple[float, Mean]

# what a method looks at has a colour, the method itself a marker
FAMILIES: dict[str, tuple[str, ...]] = {
    BLUE: ("scod", "scod_ll", "scod_two_sided", "scod_frequent_directions"),
    RED: (
        "kfac_laplace",
        "kfac_laplace_glm",
        "kfac_laplace_ll",
        "local_ensemble",
        "sketched_lanczos",
    ),
    PURPLE: ("identity_curvature", "grad_norm"),
    BLACK: ("naive", "max_softmax", "max_logit", "energy"),
    ORANGE: ("mahalanobis", "knn", "vim", "residual"),
    GREEN: ("deep_ensemble",),
    SKY: ("fused",),
}
_LOOKS = {
    method: (colour, marker)
    for colour, methods in FAMILIES.items()
    for method, marker in zip(methods, MARKERS, strict=False)
}
_TICKS = (0.5, 0.8, 0.9, 0.95, 0.97, 0.98, 0.99, 0.995, 1.0)
_BELOW_ONE = 0.002  # so that an AUROC of 1 has its place on an axis that is logarithmic near it
_WRAP = 58  # letters side by side in the smaller print over a panel


def draw(plt: Any, rows: Sequence[Row], sweeps: Sequence[Row]) -> Any:
    """Return the figure, None without rows; AUROCs are those of the headline table."""
    found = {domain: points(rows, domain.name) for domain in domains_in(rows)}
    found = {domain: own for domain, own in found.items() if own}
    if not found:
        return None
    # one place more than there are domains, for the legend
    figure, axes = panels(plt, [""] * (len(found) + 1), columns=2, height=2.7)
    for axis, (domain, own) in zip(axes, found.items(), strict=False):
        _draw_panel(axis, own, f"{domain.title}, {_networks(own)}")
        device = next(select(rows, domain=domain.name))["device"]
        where = "one core" if device == "cpu" else device
        axis.set_xlabel(f"forward passes, batch 1, {where}")
    _draw_legend(axes[-1], {method for own in found.values() for method in own})
    return figure


def _networks(found: Mapping[str, Point]) -> str:
    most = max(auroc.seeds for _, auroc in found.values())
    return "1 network" if most == 1 else f"{most} networks"


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


def _draw_panel(axis: Any, found: Mapping[str, Point], title: str) -> None:
    from matplotlib import ticker

    unbeaten = front(found)
    for method, (passes, auroc) in found.items():
        axis.plot(passes, auroc.value, **_marker(method, is_unbeaten=method in unbeaten))
    axis.step(
        [found[method][0] for method in unbeaten],
        [found[method][1].value for method in unbeaten],
        where="post",
        color=GREY,
        linewidth=1.2,
        zorder=1,
    )
    names = textwrap.wrap("Front: " + "; ".join(TITLES[m] for m in unbeaten), _WRAP)
    axis.set_title(title, loc="left", weight="bold", pad=6 + 9 * len(names))
    axis.annotate(
        "\n".join(names), (0, 1), (0, 4), "axes fraction", "offset points", fontsize=7
    ).set_in_layout(False)  # the title has made room above, and beside the panel none is to be
    axis.set_yscale("function", functions=(_stretched, _unstretched))
    axis.yaxis.set_major_locator(ticker.FixedLocator(_TICKS))
    axis.yaxis.set_major_formatter("{x:g}")
    axis.set_xscale("log")
    plain_ticks(axis.xaxis)
    axis.margins(x=0.08, y=0.1)
    axis.set_ylabel("AUROC")


def _marker(method: str, *, is_unbeaten: bool) -> dict[str, Any]:
    colour, marker = _LOOKS[method]
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


def _draw_legend(axis: Any, shown: Set[str]) -> None:
    axis.set_axis_off()
    handles = [
        axis.plot([], [], **_marker(method, is_unbeaten=True))[0]
        for method in _LOOKS
        if method in shown
    ]
    handles += axis.plot([], [], color=GREY, linewidth=1.2, label="front")
    title = (
        "Filled: on the front. Hollow: another method\n"
        "is at least as fast and at least as good."
    )
    axis.legend(handles=handles, loc="center", ncols=2, title=title, title_fontsize=8)
