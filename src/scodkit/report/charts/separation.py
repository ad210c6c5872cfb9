"""ROC and precision-recall curves of every unknown set, with their bands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from scodkit.report.charts.canvas import (
    DASHES,
    UNKNOWN_COLOURS,
    Chart,
    Key,
    add_hover,
    mark,
    new_plot,
    paint,
)
from scodkit.report.curves import Curve, Curves
from scodkit.report.table import Table, percent, plain

_SQUARE = ((-0.01, 1.01), (-0.01, 1.03))
_ROC_ROWS = (0.01, 0.05, 0.1, 0.2, 0.5)
_RECALL_ROWS = (0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 1.0)


def roc_chart(found: Mapping[str, Curves]) -> Chart:
    """Return the ROC curves.

    Args:
        found: Curves by name of the unknown set.
    """
    own = {name: curves.roc for name, curves in found.items()}
    axes = ("known inputs that raise an alarm", "unknown inputs caught")
    plot, keys = _drawn(own, axes, "false alarms", (0, 1))
    says = "; ".join(
        f"{name}: area {_interval(curve)}, and {percent(curve.at(0.05)[0])} caught at 5 % "
        "false alarms"
        for name, curve in own.items()
    )
    numbers = _numbers(axes[0].capitalize(), "caught", own, _ROC_ROWS)
    return Chart("roc", "ROC curve", says + ".", plot, keys, numbers)


def precision_recall_chart(found: Mapping[str, Curves]) -> Chart:
    """Return the precision-recall curves, for as many known as unknown inputs.

    Args:
        found: Curves by name of the unknown set.
    """
    own = {name: curves.precision_recall for name, curves in found.items()}
    axes = ("unknown inputs caught", "alarms that are right")
    plot, keys = _drawn(own, axes, "caught", (0.5, 0.5))
    says = "; ".join(f"{name}: area {_interval(curve)}" for name, curve in own.items())
    says += ". Known and unknown inputs count the same, however many there are of each."
    numbers = _numbers(axes[0].capitalize(), "right", own, _RECALL_ROWS)
    return Chart("precision-recall", "Precision and recall", says, plot, keys, numbers)


def _drawn(
    found: Mapping[str, Curve], axes: tuple[str, str], across: str, chance: tuple[float, float]
) -> tuple[Any, tuple[Key, ...]]:
    """Return a plot of curves, and its key; chance is where a score that tells nothing is."""
    plot = new_plot(f"{axes[0]}, share", f"{axes[1]}, share", *_SQUARE)
    keys = []
    for i, (name, curve) in enumerate(found.items()):
        colour = UNKNOWN_COLOURS[i % len(UNKNOWN_COLOURS)]
        dash = DASHES[i // len(UNKNOWN_COLOURS) % len(DASHES)]
        columns = {"low": curve.low, "y": curve.y, "high": curve.high, "x": curve.x}
        source = {key: values.round(5).tolist() for key, values in columns.items()}
        source["set"] = [name] * len(curve.x)
        band = plot.varea(x="x", y1="low", y2="high", fill_alpha=0.25, source=source)
        paint(band, fill=colour)
        line = plot.line(x="x", y="y", line_width=2.5, line_dash=dash, source=source)
        paint(line, line=colour)
        tips = [("set", "@set"), (across, "@x{0.000}"), ("curve", "@y{0.000}")]
        add_hover(plot, [line], [*tips, ("band of 95 %", "@low{0.000} to @high{0.000}")])
        keys.append(Key(f"{name}, with a band of 95 %", colour, dash))
    mark(plot, (0, 1), chance, "dotted")
    return plot, (*keys, Key("a score that tells nothing", "ink", "dotted"))


def _interval(curve: Curve) -> str:
    return f"{curve.area:.3f} ({curve.area_low:.3f} to {curve.area_high:.3f})"


def _numbers(first: str, what: str, found: Mapping[str, Curve], at: Sequence[float]) -> Table:
    titles = [first]
    for name in found:
        titles += [f"{name}: {what}", "from", "to"]
    rows: list[list[str | float]] = []
    for x in at:
        row: list[str | float] = [percent(x, 0)]
        for curve in found.values():
            row += list(curve.at(x))
        rows.append(row)
    return plain("Points of the curves, with bands of 95 %", titles, rows)
