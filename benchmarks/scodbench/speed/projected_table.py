"""Table and figure of what projected weights cost, from rows of `scodbench speed`."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from scodbench.figures.style import BLACK, BLUE, ORANGE, panels, save, style

Row = dict[str, Any]

_TIMES = ("forward", "forward, backward", "score", "fit")
# of the encoders, which have nothing but their size apart
_SIZES = "encoder"


def read(file: Path) -> list[list[Row]]:
    """Return rows by network, projected or whole."""
    rows: dict[tuple[str, bool], list[Row]] = {}
    for line in file.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        rows.setdefault((row["net"], row["projected"]), []).append(row)
    return list(rows.values())


def table(nets: Sequence[Sequence[Row]]) -> str:
    """Return times as Markdown, in milliseconds a batch and in floors, and memory."""
    lines = [
        "| network | weights | batch | directions | forward ms | floor ms | score ms | floors "
        "| fit ms | floors | score GB | fit GB | kept MB | whole fit |",
        "| --- |" + " --: |" * 13,
    ]
    for rows in nets:
        by = {row["method"]: row for row in rows}
        row, score, fit = rows[0], by["score"], by.get("fit")
        times = [f"{by[name]['ms']:.1f}" if name in by else "" for name in _TIMES]
        kind = "" if row["projected"] else ", whole"
        cells = [
            f"{row['net']}{kind}",
            f"{row['weights'] / 1e6:,.0f} M",
            str(row["batch"]),
            str(row["directions"]),
            *times[:3],
            f"{score['floors']:.2f}",
            times[3],
            f"{fit['floors']:.2f}" if fit else "",
            *(f"{at['peak'] / 1e9:.2f}" if at and at["peak"] else "" for at in (score, fit)),
            f"{row['kept'] / 1e6:,.0f}",
            f"{row['fit_on']:,} in {by['whole fit']['ms'] / 1e3:.0f} s",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Return the exponent of a power law through points, by least squares of logarithms.

    Examples:
        >>> slope([(1, 3), (10, 30), (100, 300)])
        1.0
    """
    x, y = (np.log([point[i] for point in points]) for i in range(2))
    return round(float(np.polyfit(x, y, 1)[0]), 6)


def figure(nets: Sequence[Sequence[Row]], folder: Path) -> list[Path]:
    """Draw cost against the number of weights, whole beside projected, with slopes.

    A slope of times is fitted to the networks that ran in batches: one that ran sample by
    sample has its own mark.

    Args:
        nets: From `read`.
        folder: Where to.

    Returns:
        The files.
    """
    sized = [{row["method"]: row for row in net} for net in nets if _SIZES in net[0]["net"]]
    batch = sized[0]["fit"]["batch"]
    views = {
        f"Fit, ms a sample (batch {batch})": lambda at: at["fit"]["ms"] / batch,
        f"Score, ms a sample (batch {batch})": lambda at: at["score"]["ms"] / batch,
        "Kept, MB": lambda at: at["fit"]["kept"] / 1e6,
    }
    with style() as plt:
        drawn, axes = panels(plt, list(views), columns=1, height=2.1)
        for axis, (title, value) in zip(axes, views.items(), strict=True):
            for projected, colour, name in (
                (False, ORANGE, "whole weights"),
                (True, BLUE, "projected"),
            ):
                own = [at for at in sized if at["fit"]["projected"] == projected]
                alone = [at for at in own if "ms" in title and _is_loop(at["fit"])]
                points = _points([at for at in own if at not in alone], value)
                label = f"{name}, slope {slope(points):.2f} ({len(points)} points)"
                axis.loglog(*zip(*points, strict=True), "o-", color=colour, label=label)
                if alone:
                    label = f"{name}, run sample by sample: in no slope"
                    look = {"color": colour, "mfc": "none", "ms": 6, "label": label}
                    axis.loglog(*zip(*_points(alone, value), strict=True), "s", **look)
            if "ms" in title:
                passes = [at for at in sized if at["fit"]["projected"]]
                floor = _points(passes, lambda at: at["forward, backward"]["ms"] / batch)
                label = "floor: the passes alone"
                axis.loglog(*zip(*floor, strict=True), "--", color=BLACK, label=label)
            top = axis.get_ylim()
            axis.set_ylim(top[0], 10 ** (math.log10(top[1]) + 1.1))  # room for the legend
            axis.legend(loc="upper left")
        axes[-1].set_xlabel("weights")
        return save(drawn, folder, "projected_cost")


def _is_loop(row: Row) -> bool:
    return str(row["engine"]).startswith("LoopEngine")


def _points(
    nets: Sequence[dict[str, Row]], value: Callable[[dict[str, Row]], float]
) -> list[tuple[float, float]]:
    """Return numbers of weights, each with a value."""
    return [(at["fit"]["weights"], value(at)) for at in nets]


def write(file: Path) -> str:
    """Write table and figure beside the rows; return the table.

    Args:
        file: Of the rows.
    """
    nets = read(file)
    text = table(nets)
    (file.parent / "projected_cost.md").write_text(text, encoding="utf-8")
    if any(_SIZES in net[0]["net"] for net in nets):
        figure(nets, file.parent)
    return text
