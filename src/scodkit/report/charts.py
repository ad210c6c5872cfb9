"""Charts of a report, drawn by bokeh.

Colours are named here and chosen by the page's style sheet, light or dark: a tag such as
``fill:blue`` on a part of a plot tells the page's script what to paint. ``theme.json`` has the
rest of the style.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from bokeh.models import FixedTicker, HoverTool, LogTickFormatter, Range1d
from bokeh.plotting import figure

from scodkit.metrics import Array, Curve, Curves
from scodkit.report.page import Chart, Key, Row, Table, cell, percent
from scodkit.report.report import ScoredSet, WatchedStream
from scodkit.summary import Summary

_Indices = npt.NDArray[np.intp]
_Ends = tuple[float, float]
_Tips = Mapping[str, str]
_LINEAR = (False, False)

# colour-blind readers can tell these apart; known and unknown sets cycle through their own
_KNOWN_COLOURS = ("blue", "green", "ink")
_UNKNOWN_COLOURS = ("red", "purple", "ink")
_DASHES = ("solid", "dashed", "dotted")

# where bokeh marks only the upper half of a logarithmic axis
_FEW_DECADES = (5, 500)
_ONE_TWO_FIVE = [float(f"{digit}e{power}") for power in range(-12, 13) for digit in (1, 2, 5)]
_TIP = "background:var(--paper);color:var(--ink);margin:-5px;padding:6px 8px;font-size:13px"

_BINS = 36
_UNIT_SQUARE = ((-0.01, 1.01), (-0.01, 1.03))
_ROC_ROWS = (0.01, 0.05, 0.1, 0.2, 0.5)
_RECALL_ROWS = (0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 1.0)
_MOST_DIRECTIONS = 1000
_MOST_SAMPLES = 3000
_MOST_ROWS = 20


class _Drawing:
    """A plot as wide as the page allows, and the legend of what has been drawn.

    Args:
        x: Label of the horizontal axis, with its unit.
        y: Of the vertical one.
        x_range: Ends of the horizontal axis.
        y_range: Of the vertical one.
        log: Whether the horizontal and the vertical axis are logarithmic.
    """

    def __init__(
        self, x: str, y: str, x_range: _Ends, y_range: _Ends, log: tuple[bool, bool] = _LINEAR
    ) -> None:
        self.keys: list[Key] = []
        self.plot: Any = figure(
            tools="box_zoom,pan,wheel_zoom,reset",
            active_drag="box_zoom",
            active_scroll=None,
            x_axis_type="log" if log[0] else "linear",
            y_axis_type="log" if log[1] else "linear",
            x_range=Range1d(start=x_range[0], end=x_range[1]),
            y_range=Range1d(start=y_range[0], end=y_range[1]),
            x_axis_label=x,
            y_axis_label=y,
        )
        for axis, ends, is_log in zip(self.plot.axis, (x_range, y_range), log, strict=True):
            if is_log:
                axis.formatter = LogTickFormatter(min_exponent=4)
                if _FEW_DECADES[0] < ends[1] / ends[0] < _FEW_DECADES[1]:
                    axis.ticker = FixedTicker(ticks=_ONE_TWO_FIVE)

    def add(
        self,
        kind: str,
        colour: str,
        look: str,
        source: Mapping[str, Any],
        label: str = "",
        tips: _Tips | None = None,
        **glyph: Any,
    ) -> None:
        """Draw something, tag it with its colour, and show numbers under the pointer.

        Args:
            kind: Method of bokeh's plots that draws it.
            colour: Role of its colour.
            look: In the legend, as of `Key`.
            source: Columns of the data.
            label: In the legend; empty for no entry.
            tips: Columns of the data as bokeh writes them, ``@x{0.00}``, by label.
            glyph: Arguments of the method.
        """
        renderer = getattr(self.plot, kind)(source=source, **glyph)
        parts = {"line": ["line"], "varea": ["fill"]}.get(kind, ["fill", "line"])
        renderer.glyph.tags = [f"{part}:{colour}" for part in parts]
        # a glyph that is not selected must not fade into a colour of another theme
        renderer.nonselection_glyph = renderer.muted_glyph = None
        if label:
            self.keys.append((label, colour, look))
        if tips:
            # bokeh's own rows are too pale to be read, and white in the dark
            rows = [
                f"<div>{name} <strong>{value}</strong></div>" for name, value in tips.items()
            ]
            box = f'<div class="tip" style="{_TIP}">{"".join(rows)}</div>'
            self.plot.add_tools(HoverTool(renderers=[renderer], tooltips=box, visible=False))

    def line(self, source: Mapping[str, Any], colour: str, dash: str, **more: Any) -> None:
        """Draw a curve through the columns ``x`` and ``y`` of a source, as `add` does."""
        options = {"x": "x", "y": "y", "line_width": 2.5, "line_dash": dash, **more}
        self.add("line", colour, dash, source, **options)

    def dots(self, source: Mapping[str, Any], label: str, tips: _Tips, size: int) -> None:
        """Draw the points ``x`` and ``y`` of a source in blue."""
        self.add("scatter", "blue", "dot", source, label, tips, x="x", y="y", size=size)

    def mark(self, x: _Ends, y: _Ends, label: str, dash: str = "dashed") -> None:
        """Draw a straight line that means a limit or a moment."""
        self.line({"x": list(x), "y": list(y)}, "ink", dash, label=label, line_width=2)


def colours_of(sets: Sequence[ScoredSet]) -> list[str]:
    """Return the role of a colour for each set: known and unknown sets have their own."""
    known, unknown = itertools.cycle(_KNOWN_COLOURS), itertools.cycle(_UNKNOWN_COLOURS)
    return [next(known if one.known else unknown) for one in sets]


def histogram(
    sets: Sequence[ScoredSet], threshold: float | None, false_alarm: float
) -> list[Chart]:
    """Return histograms of all sets, each in percent of its set; none without finite scores.

    Args:
        sets: Scored inputs; infinite scores count as a part of their set that is not drawn.
        threshold: Score of the alarm; None for no line.
        false_alarm: The rate it is for.
    """
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
    left, right = edges[:-1].tolist(), edges[1:].tolist()
    shares = [np.histogram(one.scores, edges)[0] * (100 / len(one)) for one in sets]
    top = 1.12 * max(float(share.max()) for share in shares)
    ends = ((low, high), (0.0, top))
    drawing = _Drawing("score, nats", "% of the set", *ends, (is_log, False))
    tips = {"set": "@set", "scores": "@left{0.0000} to @right{0.0000}"}
    tips["share"] = "@share{0.0} %"
    bars: dict[str, Any] = {"left": "left", "right": "right", "top": "share", "bottom": 0}
    bars |= {"fill_alpha": 0.45, "line_width": 1.5}
    for one, share, colour in zip(sets, shares, colours_of(sets), strict=True):
        source = {"left": left, "right": right, "share": share.tolist()}
        source["set"] = [one.name] * _BINS
        drawing.add("quad", colour, "area", source, one.name, tips, **bars)
    medians = [f"{one.name}: median {float(one.scores.median()):.3g} nats" for one in sets]
    says = "; ".join(medians) + "."
    if threshold is not None:
        accepted = f"{cell(100 * false_alarm).text} % false alarms accepted"
        drawing.mark((threshold, threshold), (0.0, top), f"alarm, {accepted}")
        says += f" The alarm rises above {threshold:.3g} nats."
    infinite = int(scores.isinf().sum())
    if infinite:
        says += f" {infinite} infinite scores lie beyond the right end."
    titles = ["from", "to", *(f"{one.name}, %" for one in sets)]
    rows = list(zip(left, right, *(share.tolist() for share in shares), strict=True))
    numbers = Table("Shares of the sets between scores", titles, rows)
    return [Chart("histogram", says, drawing.plot, drawing.keys, numbers)]


def separation(by_set: Mapping[str, Curves]) -> list[Chart]:
    """Return the ROC curves and the precision-recall curves.

    Args:
        by_set: Curves by name of the unknown set; without any there are no charts.
    """
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
    roc_chart = Chart("roc", caught + ".", *_curves(rocs, axes, (0, 1), _ROC_ROWS))
    precisions = {name: curves.precision_recall for name, curves in by_set.items()}
    areas = "; ".join(f"{name}: area {_area(curve)}" for name, curve in precisions.items())
    areas += ". Known and unknown inputs count the same, however many there are of each."
    axes = {"unknown inputs caught": "caught", "alarms that are right": "right"}
    drawn = _curves(precisions, axes, (0.5, 0.5), _RECALL_ROWS)
    return [roc_chart, Chart("precision-recall", areas, *drawn)]


def _area(curve: Curve) -> str:
    return f"{curve.area:.3f} ({curve.area_low:.3f} to {curve.area_high:.3f})"


def _curves(
    by_set: Mapping[str, Curve], axes: Mapping[str, str], chance: _Ends, at: Sequence[float]
) -> tuple[Any, list[Key], Table]:
    """Return a plot of curves, its legend, and points of the curves.

    Args:
        by_set: Curves by name of the unknown set.
        axes: Labels of the horizontal and the vertical axis, each with a word for short.
        chance: Where a score that tells nothing begins and ends.
        at: Places of the points.
    """
    (x_label, y_label), (across, height) = axes.keys(), axes.values()
    drawing = _Drawing(f"{x_label}, share", f"{y_label}, share", *_UNIT_SQUARE)
    tips = {"set": "@set", across: "@x{0.000}", "curve": "@y{0.000}"}
    tips["band of 95 %"] = "@low{0.000} to @high{0.000}"
    titles = [x_label.capitalize()]
    for i, (name, curve) in enumerate(by_set.items()):
        cycle, place = divmod(i, len(_UNKNOWN_COLOURS))
        colour, dash = _UNKNOWN_COLOURS[place], _DASHES[cycle % len(_DASHES)]
        columns = {"low": curve.low, "y": curve.y, "high": curve.high, "x": curve.x}
        source = {key: values.round(5).tolist() for key, values in columns.items()}
        source["set"] = [name] * len(curve.x)
        band: dict[str, Any] = {"x": "x", "y1": "low", "y2": "high", "fill_alpha": 0.25}
        drawing.add("varea", colour, "area", source, **band)
        label = f"{name}, with a band of 95 %"
        drawing.line(source, colour, dash, label=label, tips=tips)
        titles += [f"{name}: {height}", "from", "to"]
    drawing.mark((0, 1), chance, "a score that tells nothing", "dotted")
    rows: list[Row] = [
        (percent(x, 0), *itertools.chain(*(curve.at(x) for curve in by_set.values())))
        for x in at
    ]
    numbers = Table("Points of the curves, with bands of 95 %", titles, rows)
    return drawing.plot, drawing.keys, numbers


def spectrum(summary: Summary) -> list[Chart]:
    """Return the eigenvalues, or nothing if none is positive.

    Args:
        summary: Of the fit.
    """
    values = summary.values[summary.values > 0].numpy()
    if not len(values):
        return []
    y_range = (float(values.min()) / 2, float(values.max()) * 2)
    unit = "nats per squared weight"
    x_range = (0.0, len(values) + 1.0)
    drawing = _Drawing("direction", f"eigenvalue, {unit}", x_range, y_range, (False, True))
    shown = _even(len(values), _MOST_DIRECTIONS)
    source = {"x": (shown + 1).tolist(), "y": values[shown].tolist()}
    drawing.line(source, "blue", "solid", line_width=1.5)
    tips = {"direction": "@x", "eigenvalue": "@y{0.000e+0}"}
    drawing.dots(source, "eigenvalue", tips, size=6)
    says = (
        f"{len(values)} directions, from {values[0]:.3g} down to {values[-1]:.3g} {unit}; "
        f"spread over {summary.effective_rank:.1f} of them in effect."
    )
    rows = [(float(i + 1), float(values[i])) for i in _even(len(values), _MOST_ROWS)]
    numbers = Table("Eigenvalues of directions", ("direction", "eigenvalue"), rows)
    return [Chart("spectrum", says, drawing.plot, drawing.keys, numbers)]


def captured(summary: Summary) -> list[Chart]:
    """Return the curvature captured by the first directions, and how far data decides.

    Args:
        summary: Of the fit.
    """
    total = float(summary.values.sum())
    if total <= 0 or summary.captured <= 0:
        return []
    # the total is the share `captured` of the trace
    sums = summary.values.cumsum(0).numpy() * (summary.captured / total)
    columns = np.column_stack([np.arange(1.0, len(sums) + 1), sums, summary.determined.numpy()])
    drawing = _Drawing("direction", "share", (0.0, len(sums) + 1.0), (0.0, 1.05))
    x, captured, determined = columns[_even(len(sums), _MOST_DIRECTIONS)].T.tolist()
    source = {"x": x, "sum": captured, "determined": determined}
    tips = {"direction": "@x", "captured so far": "@sum{0.000}"}
    tips["decided by data"] = "@determined{0.000}"
    label = "curvature captured by directions up to this one"
    drawing.line(source, "blue", "solid", y="sum", label=label, tips=tips)
    label = "decided by data, not the prior"
    drawing.line(source, "green", "dashed", y="determined", label=label)
    says = (
        f"{len(sums)} directions capture {percent(summary.captured)} of the curvature of the "
        f"training data; along the last of them data, not the prior, decides "
        f"{percent(determined[-1])}."
    )
    rows = columns[_even(len(sums), _MOST_ROWS)].tolist()
    titles = ("direction", "captured so far", "decided by data")
    numbers = Table("Captured curvature", titles, rows)
    return [Chart("captured", says, drawing.plot, drawing.keys, numbers)]


def stream_charts(stream: WatchedStream | None) -> list[Chart]:
    """Return the scores in their order, if any is finite, and the wealth of the alarm.

    Args:
        stream: Scores and alarm; None for no charts.
    """
    if stream is None:
        return []
    scores, wealth = stream.scores.numpy(), stream.log_wealth.numpy() / math.log(10)
    x_range = (0.0, len(scores) + 1.0)
    numbers = _stream_table(stream)
    charts = []
    shown = _extremes(scores, _MOST_SAMPLES)
    shown = shown[np.isfinite(scores[shown])]
    if len(shown):
        low, high = float(scores[shown].min()), float(scores[shown].max())
        is_log = low > 0
        room = 0.05 * (high - low) or 1.0
        ends = (low / 1.5, high * 1.5) if is_log else (low - room, high + room)
        ranges = (x_range, ends)
        drawing = _Drawing("sample of the stream", "score, nats", *ranges, (False, is_log))
        source = {"x": (shown + 1).tolist(), "y": scores[shown].tolist()}
        drawing.dots(source, "score", {"sample": "@x", "score": "@y{0.0000}"}, size=4)
        _mark_moments(drawing, stream, ends)
        says = f"{len(scores)} samples. {stream.verdict}"
        if len(shown) < len(scores):
            says += f" Of the scores the {len(shown)} that stand out most are drawn."
        charts.append(Chart("stream", says, drawing.plot, drawing.keys, numbers))
    limit = -math.log10(stream.false_alarm)
    # a drift that goes on makes the wealth grow without end: what happens at the limit counts
    top = max(min(float(wealth.max()), 4 * limit) + 0.5, 1.25 * limit)
    ends = (float(min(wealth.min(), 0.0)) - 0.2, top)
    drawing = _Drawing("sample of the stream", "wealth, powers of ten", x_range, ends)
    shown = _extremes(wealth, _MOST_SAMPLES)
    source = {"x": (shown + 1).tolist(), "y": wealth[shown].round(5).tolist()}
    tips = {"sample": "@x", "wealth": "10^@y{0.00}"}
    label = "wealth: evidence that the stream has changed"
    drawing.line(source, "blue", "solid", label=label, tips=tips)
    label = f"alarm: at most {cell(100 * stream.false_alarm).text} % false ones, ever"
    limits = {"x": list(x_range), "y": [limit, limit]}
    drawing.line(limits, "red", "solid", label=label, line_width=2)
    _mark_moments(drawing, stream, ends)
    says = f"The alarm rises when the wealth reaches {1 / stream.false_alarm:g}."
    return [*charts, Chart("wealth", says, drawing.plot, drawing.keys, numbers)]


def _mark_moments(drawing: _Drawing, stream: WatchedStream, ends: _Ends) -> None:
    """Mark when the stream changed and when the alarm rose."""
    if stream.changed_at is not None:
        x = stream.changed_at + 0.5
        drawing.mark((x, x), ends, f"stream changed after {stream.changed_at}", "dotted")
    if stream.alarmed_at is not None:
        x = stream.alarmed_at
        drawing.mark((x, x), ends, f"alarm rose at {x}")


def _stream_table(stream: WatchedStream) -> Table:
    """Return scores and wealth along the stream, and around what happened."""
    last = len(stream.scores)
    samples = {round(place) for place in np.linspace(1, last, min(last, _MOST_ROWS))}
    samples |= {moment for moment in (stream.changed_at, stream.alarmed_at) if moment}
    wealth = stream.log_wealth / math.log(10)
    rows = [
        (str(t), float(stream.scores[t - 1]), float(wealth[t - 1])) for t in sorted(samples)
    ]
    titles = ("sample", "score, nats", "wealth, powers of ten")
    return Table("The stream at some of its samples", titles, rows)


def _even(length: int, most: int) -> _Indices:
    """Return at most ``most`` evenly spaced indices, the first and the last among them."""
    return np.unique(np.linspace(0, length - 1, min(length, most)).round().astype(np.intp))


def _extremes(values: Array, most: int) -> _Indices:
    """Return at most about ``most`` indices: the lowest and highest value of each stretch."""
    if len(values) <= most:
        return np.arange(len(values))
    extremes = {0, len(values) - 1}
    for stretch in np.array_split(np.arange(len(values)), most // 2):
        part = values[stretch]
        extremes |= {int(stretch[part.argmin()]), int(stretch[part.argmax()])}
    return np.array(sorted(extremes), dtype=np.intp)
