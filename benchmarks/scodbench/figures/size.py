"""What a fit and a score cost over the number of weights."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from scodbench.figures.style import BLUE, GREY, MARKERS, ORANGE, legend_below, panels
from scodbench.rows import Row, select
from scodbench.sweeps.size import RANK, SIZE

_SCORES = {
    "ms_b1": ("scored prediction, batch 1", BLUE, "-"),
    "ms_b64": ("scored prediction, batch 64", ORANGE, "-"),
    "forward_ms_b1": ("bare prediction, batch 1", BLUE, "--"),
    "forward_ms_b64": ("bare prediction, batch 64", ORANGE, "--"),
}


def draw(plt: Any, rows: Sequence[Row], sweeps: Sequence[Row]) -> Any:
    """Return the figure, None without rows; lines are means over seeds."""
    own = [row for row in select(sweeps, sweep="size") if "weights" in row]
    if not own:
        return None
    device = own[0]["device"]
    where = "one core" if device == "cpu" else device
    about = f"MNIST networks of\ngrowing width\nT = {SIZE}, rank {RANK}, {where},\none run"
    figure, axes = panels(plt, [f"Scoring\n{about}", f"Fitting\n{about}"], height=3.4)
    for number, (key, (text, colour, line)) in enumerate(_SCORES.items()):
        places, values = _means(own, key)
        axes[0].plot(places, values, MARKERS[number] + line, color=colour, label=text, lw=1.2)
    places, values = _means(own, "fit_s")
    count = own[0]["fit_on"]
    axes[1].plot(places, values, "o-", color=BLUE, lw=1.2, label="measured")
    in_line = [values[0] * place / places[0] for place in places]
    axes[1].plot(places, in_line, ":", color=GREY, lw=1, label="in proportion to the weights")
    for axis, unit in zip(axes, ("ms per sample", f"seconds, {count} samples"), strict=True):
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_xlabel("number of weights N")
        axis.set_ylabel(unit)
        legend_below(axis, columns=1)
    return figure


def _means(rows: Sequence[Row], key: str) -> tuple[list[int], list[float]]:
    places = sorted({row["weights"] for row in rows})
    return places, [
        statistics.fmean(row[key] for row in select(rows, weights=place)) for place in places
    ]
