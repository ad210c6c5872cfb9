"""Charts of scores: histogram, promise, ROC and precision-recall, error of what is kept."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from scodkit.metrics import Array, Curve
from scodkit.report import rates
from scodkit.report.drawing import DASHES, UNKNOWN_COLOURS, Drawing, Ends, colours_of, even
from scodkit.report.findings import Findings
from scodkit.report.page import Chart, Row, Table, cell
from scodkit.report.rates import asked, percent

_BINS = 36
_UNIT_SQUARE = ((-0.01, 1.01), (-0.01, 1.03))
_ROC_ROWS = (0.01, 0.05, 0.1, 0.2, 0.5)
_RECALL_ROWS = (0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 1.0)
_ASKED = np.unique(np.append(np.linspace(0.005, 0.3, 60), [0.01, 0.02]).round(4))
_ASKED_ROWS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3)
_KEPT = 200  # points of the curve of errors
_KEPT_ROWS = (0.25, 0.5, 0.75, 0.9, 1.0)


def histogram(found: Findings) -> list[Chart]:
    """Return histograms of all sets, each in percent of its set; none without finite scores.

    Args:
        found: Infinite scores count as a part of their set that is not drawn.
    """
    sets, threshold = found.report.sets, found.threshold
    if not sets:
        return []
    scores = torch.cat([one.scores for one in sets])
    finite = scores[scores.isfinite()].tolist() + ([] if threshold is None else [threshold])
    if not finite:
        return []
    low, high = min(finite), max(finite)
    is_log = 0 < low < high
    high = high if high > low else low + 1.0
    edges = (np.geomspace if is_log else np.linspace)(low, high, _BINS + 1)
    counts = [np.histogram(one.scores, edges)[0] for one in sets]
    shares = [own * (100 / len(one)) for own, one in zip(counts, sets, strict=True)]
    top = 1.2 * max(float(share.max()) for share in shares)
    room = (high / low) ** 0.02 if is_log else 0.02 * (high - low)
    ends = (low / room, high * room) if is_log else (low - room, high + room)
    drawing = Drawing("score, nats", "% of the set", ends, (0.0, top), (is_log, False))
    bars: dict[str, Any] = {"left": "left", "right": "right", "top": "share", "bottom": 0}
    bars |= {"fill_alpha": 0.45, "line_width": 1.5}
    tips = {"set": "@set", "scores": "@left{0.0000} to @right{0.0000}"}
    tips |= {"inputs": "@count", "share": "@share{0.0} %"}
    left, right = edges[:-1].tolist(), edges[1:].tolist()
    columns = zip(sets, counts, shares, colours_of(sets), strict=True)
    for i, (one, count, share, colour) in enumerate(columns):
        source = {"left": left, "right": right, "share": share.tolist()}
        source |= {"count": count.tolist(), "set": [one.name] * _BINS}
        label = f"{one.name}, {len(one)} inputs"
        drawing.add("quad", colour, "area", source, label, tips, name=f"click:{i}", **bars)
    medians = [f"{one.name}: median {float(one.scores.median()):.3g} nats" for one in sets]
    says = "; ".join(medians) + ". Press a bar to see its inputs."
    if threshold is not None:
        wanted = f"{asked(found.report.false_alarm)} false alarms asked for"
        drawing.mark((threshold, threshold), (0.0, top), f"alarm, {wanted}", name="threshold")
        in_middle = np.sqrt(low * high) if is_log else (low + high) / 2
        text = f"alarm above {threshold:.3g}"
        drawing.write(threshold, top, text, "threshold-label", left=threshold > in_middle)
    infinite = int(scores.isinf().sum())
    if infinite:
        says += f" {infinite} infinite scores lie beyond the right end."
    titles = ["from", "to", *(f"{one.name}, %" for one in sets)]
    rows = list(zip(left, right, *(share.tolist() for share in shares), strict=True))
    numbers = Table("Shares of the sets between scores", titles, rows)
    return [Chart("histogram", says, drawing.plot, drawing.keys, numbers)]


def promise(found: Findings) -> tuple[list[Chart], list[dict[str, float]]]:
    """Return the rate of false alarms found at each rate asked for, as a chart and as data.

    Args:
        found: Without known inputs that have p-values there is nothing.
    """
    if not found.groups:
        return [], []
    own = found.report.false_alarm
    p_values = torch.cat([found.p_values[one.name] for one in found.known]).numpy()
    sizes = [group.sizes for group in found.groups]
    rows = []
    for rate in np.unique(np.append(_ASKED, own)).tolist():
        by_chance = rates.alarms_by_chance(rate, sizes)
        low, high = rates.within(by_chance)
        share = float((p_values <= rate).mean())
        total = len(by_chance) - 1
        rows.append({"asked": rate, "found": share, "low": low / total, "high": high / total})
    data: dict[str, list[float]] = {key: [row[key] for row in rows] for key in rows[0]}
    top = 1.08 * max(*data["high"], *data["found"])
    ends = (0.0, 1.02 * max(data["asked"]))
    axes = ("false alarms asked for, share", "false alarms found, share")
    drawing = Drawing(*axes, ends, (0.0, top))
    source = {"x": data["asked"], **data}
    band: dict[str, Any] = {"x": "x", "y1": "low", "y2": "high", "fill_alpha": 0.2}
    label = "95 % of monitors that keep their promise lie here"
    drawing.add("varea", "green", "area", source, label, **band)
    drawing.mark((0.0, ends[1]), (0.0, ends[1]), "found as asked for", "dotted")
    tips = {
        "asked for": "@x{0.000}",
        "found": "@found{0.000}",
        "band": "@low{0.000} to @high{0.000}",
    }
    drawing.line(source, "blue", "solid", y="found", label="found on known inputs", tips=tips)
    at_own = float((p_values <= own).mean())
    drawing.point(own, at_own, "blue", f"this page: {asked(own)} asked for", "own")
    inside = sum(row["low"] <= row["found"] <= row["high"] for row in rows)
    held_out = sum(size for size, _ in sizes)
    says = (
        f"{percent(at_own)} found where {asked(own)} are asked for. The band is for "
        f"{len(p_values)} known and {held_out} held-out inputs, one rate at a time; the "
        f"curve lies inside at {inside} of {len(rows)} rates."
    )
    listed = [row for row in rows if row["asked"] in {*_ASKED_ROWS, own}]
    cells = [[percent(row[key]) for key in rows[0]] for row in listed]
    titles = ("asked for", "found", "band from", "to")
    numbers = Table("False alarms asked for and found", titles, cells)
    return [Chart("promise", says, drawing.plot, drawing.keys, numbers)], rows


def errors(found: Findings) -> tuple[list[Chart], list[dict[str, float]]]:
    """Return the error among known inputs with the lowest scores, as charts and as data.

    Args:
        found: Without right outputs there is nothing.
    """
    sets = [one for one in found.known if one.name in found.losses]
    if not sets:
        return [], []
    order = torch.cat([one.scores for one in sets]).argsort(stable=True)
    losses = torch.cat([found.losses[one.name] for one in sets])[order]
    is_share = bool(found.mistakes)
    rows = _errors_of_kept(losses.numpy(), is_share)
    what = "mistakes, share" if is_share else "mean squared error"
    top = 1.15 * max(*(row["error"] for row in rows), rows[-1]["high"]) or 1.0
    x = "inputs kept, those with the lowest scores, share"
    drawing = Drawing(x, what, (0.0, 1.02), (0.0, top))
    source: dict[str, Any] = {"x": [row["kept"] for row in rows]}
    source |= {key: [row[key] for row in rows] for key in ("error", "low", "high")}
    band: dict[str, Any] = {"x": "x", "y1": "low", "y2": "high", "fill_alpha": 0.25}
    drawing.add("varea", "blue", "area", source, **band)
    tips = {
        "kept": "@x{0.000}",
        what: "@error{0.0000}",
        "from": "@low{0.0000} to @high{0.0000}",
    }
    label = "error of the inputs kept, with 95 % intervals"
    drawing.line(source, "blue", "solid", y="error", label=label, tips=tips)
    whole = rows[-1]["error"]
    drawing.mark((0.0, 1.0), (whole, whole), "kept at random", "dotted")

    def shows(value: float) -> str:
        return percent(value) if is_share else cell(value).text

    def at(share: float) -> dict[str, float]:
        return min(rows, key=lambda row: abs(row["kept"] - share))

    half = shows(at(0.5)["error"])
    says = f"All {len(losses)} inputs: {shows(whole)}; the half with the lowest scores: {half}."
    flags = [found.flags[one.name] for one in sets if one.name in found.flags]
    if len(flags) == len(sets):
        raised = torch.cat(flags)[order]
        if raised.any() and not raised.all():
            says += (
                f" Inputs without an alarm: {shows(float(losses[~raised].mean()))}; with one: "
            )
            says += f"{shows(float(losses[raised].mean()))}."
    cells = [
        [percent(row["kept"], 0), *(shows(row[key]) for key in ("error", "low", "high"))]
        for row in map(at, _KEPT_ROWS)
    ]
    titles = ("kept", what, "from", "to")
    numbers = Table(f"{what.capitalize()}, of the inputs kept", titles, cells)
    return [Chart("errors", says, drawing.plot, drawing.keys, numbers)], rows


def _errors_of_kept(losses: Array, is_share: bool) -> list[dict[str, float]]:
    """Return the mean of the first losses, with intervals of 95 %, for several numbers of them.

    Args:
        losses: ``(n,)``, in the order of the scores.
        is_share: Whether they are 0 or 1: then intervals are exact, else normal.
    """
    kept = even(len(losses), _KEPT) + 1
    sums, squares = losses.cumsum()[kept - 1], np.square(losses).cumsum()[kept - 1]
    error = sums / kept
    spread = 1.96 * np.sqrt(np.maximum(squares / kept - error**2, 0) / kept)
    low, high = np.maximum(error - spread, 0), error + spread
    if is_share:
        low, high = rates.exact_intervals(sums, kept)
    names = ("kept", "error", "low", "high")
    columns = (kept / len(losses), error, low, high)
    return [
        dict(zip(names, map(float, row), strict=True)) for row in zip(*columns, strict=True)
    ]


def separation(found: Findings) -> list[Chart]:
    """Return the ROC curves and the precision-recall curves.

    Args:
        found: Without curves there are no charts.
    """
    by_set = found.curves
    if not by_set:
        return []
    rocs = {name: curves.roc for name, curves in by_set.items()}
    caught = "; ".join(
        f"{name}: area {_area(roc)}, and {percent(roc.at(0.05)[0])} caught at 5 % false alarms"
        for name, roc in rocs.items()
    )
    axes = {
        "known inputs that raise an alarm": "false alarms",
        "unknown inputs caught": "caught",
    }
    drawing, numbers = _curves(rocs, axes, (0, 1), _ROC_ROWS)
    known = [found.flags[one.name] for one in found.known if one.name in found.flags]
    if len(known) == len(found.known):
        wrong = float(torch.cat(known).double().mean())
        for i, name in enumerate(name for name in rocs if name in found.alarms):
            right = found.alarms[name].share
            colour = UNKNOWN_COLOURS[list(rocs).index(name) % len(UNKNOWN_COLOURS)]
            label = f"{name}, at the threshold"
            drawing.point(wrong, right, colour, label, f"operating:{i}")
        caught += (
            f" on these inputs. The threshold comes from held-out inputs, and raises alarms on "
            f"{percent(wrong)} of these known ones"
        )
    roc_chart = Chart("roc", caught + ".", drawing.plot, drawing.keys, numbers)
    precisions = {name: curves.precision_recall for name, curves in by_set.items()}
    areas = "; ".join(f"{name}: area {_area(curve)}" for name, curve in precisions.items())
    areas += ". Known and unknown inputs have equal weight, however many there are of each."
    axes = {"unknown inputs caught": "caught", "alarms that are right": "right"}
    drawing, numbers = _curves(precisions, axes, (0.5, 0.5), _RECALL_ROWS)
    return [
        roc_chart,
        Chart("precision-recall", areas, drawing.plot, drawing.keys, numbers),
    ]


def _area(curve: Curve) -> str:
    return f"{curve.area:.3f} ({curve.area_low:.3f} to {curve.area_high:.3f})"


def _curves(
    by_set: Mapping[str, Curve], axes: Mapping[str, str], chance: Ends, at: Sequence[float]
) -> tuple[Drawing, Table]:
    """Return a drawing of curves, and points of them.

    Args:
        by_set: Curves by name of the unknown set.
        axes: Labels of the horizontal and the vertical axis, each with a word for short.
        chance: Where the curve of an uninformative score begins and ends.
        at: Places of the points.
    """
    (x_label, y_label), (across, height) = axes.keys(), axes.values()
    drawing = Drawing(f"{x_label}, share", f"{y_label}, share", *_UNIT_SQUARE)
    tips = {"set": "@set", across: "@x{0.000}", "curve": "@y{0.000}"}
    tips["95 % band"] = "@low{0.000} to @high{0.000}"
    titles = [x_label.capitalize()]
    for i, (name, curve) in enumerate(by_set.items()):
        cycle, place = divmod(i, len(UNKNOWN_COLOURS))
        colour, dash = UNKNOWN_COLOURS[place], DASHES[cycle % len(DASHES)]
        columns = {"low": curve.low, "y": curve.y, "high": curve.high, "x": curve.x}
        source = {key: values.round(5).tolist() for key, values in columns.items()}
        source["set"] = [name] * len(curve.x)
        band: dict[str, Any] = {"x": "x", "y1": "low", "y2": "high", "fill_alpha": 0.25}
        drawing.add("varea", colour, "area", source, **band)
        label = f"{name}, with a 95 % band"
        drawing.line(source, colour, dash, label=label, tips=tips)
        titles += [f"{name}: {height}", "from", "to"]
    drawing.mark((0, 1), chance, "an uninformative score", "dotted")
    rows: list[Row] = [
        (percent(x, 0), *itertools.chain(*(curve.at(x) for curve in by_set.values())))
        for x in at
    ]
    numbers = Table("Points of the curves, with 95 % bands", titles, rows)
    return drawing, numbers
