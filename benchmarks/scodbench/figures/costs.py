"""What a scored prediction costs beside a bare one, on one core: a mark for each way."""

from __future__ import annotations

import json
from pathlib import Path

from scodbench.figures.style import (
    COLOURS,
    GREY,
    legend_below,
    panels,
    plain_ticks,
    save_png,
    style,
)

# as rows name them, as people read them, with colours, markers and their filling
_WAYS = {
    "scodkit": ("SCOD, eager", COLOURS["scod"], "s", "none"),
    "floor": ("floor: plain backward passes", GREY, "|", "none"),
    "scodkit, compiled": ("SCOD, compiled", COLOURS["scod"], "o", "full"),
    "scodkit, last layer, compiled": (
        "SCOD, last layer, compiled",
        COLOURS["scod_ll"],
        "D",
        "full",
    ),
}
_APART = 0.14  # marks of a network; networks are one apart


def draw_costs(folder: Path) -> None:
    """Draw ``cost.png`` from the rows of one core.

    Args:
        folder: Of the rows, and for the picture.
    """
    lines = (folder / "speed_cpu.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if row["task"] == "score"]
    times = {(row["net"], row["batch"], row["method"]): row["ms"] for row in rows}
    nets = list(dict.fromkeys(row["net"] for row in rows))
    batches = sorted({row["batch"] for row in rows})
    names = [net.replace("mnist", "MNIST").replace("wine", "Wine") for net in nets]
    with style() as plt:
        titles = [f"Batch {batch}\none core" for batch in batches]
        figure, axes = panels(plt, titles, height=3.0)
        for axis, batch in zip(axes, batches, strict=True):
            for number, (way, (label, colour, marker, fill)) in enumerate(_WAYS.items()):
                places = [i + _APART * (number - 1.5) for i in range(len(nets))]
                passes = [times[net, batch, way] / times[net, batch, "forward"] for net in nets]
                look = {"color": colour, "ms": 6, "mew": 2, "label": label, "fillstyle": fill}
                axis.plot(passes, places, marker, **look)
            axis.axvline(1, color="black", lw=1, ls=":")
            axis.set_xscale("log")
            plain_ticks(axis.xaxis)
            axis.set_xlabel("forward passes (dotted: one)")
            axis.set_yticks(range(len(nets)), names if axis is axes[0] else [""] * len(nets))
            axis.invert_yaxis()
        handles, _ = axes[0].get_legend_handles_labels()
        legend_below(figure, handles=handles)
        save_png(figure, folder / "cost.png")
