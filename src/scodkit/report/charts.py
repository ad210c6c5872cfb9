"""Charts of a report, drawn by bokeh.

Colours are named here and chosen by the page's style sheet, light or dark: a tag such as
``fill:blue`` on a part of a plot tells the page's script what to paint.
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

from scodkit.report.page import Chart, Key, Row, Table, cell, percent
from scodkit.report.report import ScoredSet, WatchedStream
from scodkit.report.separation import Array, Curve, Curves
from scodkit.summary import Summary

_Indices = npt.NDArray[np.intp]
_Ends = tuple[float, float]

# colour-blind readers can tell these apart; known and unknown sets cycle through their own
_KNOWN_COLOURS = ("blue", "green", "ink")
_UNKNOWN_COLOURS = ("red", "purple", "ink")
_DASHES = ("solid", "dashed", "dotted")

_HEIGHT = 300
_TOOLS = "box_zoom,pan,wheel_zoom,reset"
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


def histogram(
    sets: Sequence[ScoredSet], threshold: float | None, false_alarm: float
) -> Chart | None:
    """Return histograms of all sets, each in percent of its set; None without finite scores.

    Args:
        sets: Scored inputs; infinite scores count as a part of their set that is not drawn.
        threshold: Score of the alarm; None for no line.
        false_alarm: The rate it is for.
    """
    scores = torch.cat([one.scores for one in sets])
    finite = scores[scores.isfinite()].tolist() + ([] if threshold is None else [threshold])
    if not finite:
        return None
    low, high = min(finite), max(finite)
    is_log = 0 < low < high
    high = high if high > low else low + 1.0
    edges = (np.geomspace if is_log else np.linspace)(low, high, _BINS + 1)
    shares = [np.histogram(one.scores, edges)[0] * (100 / len(one)) for one in sets]
    top = 1.12 * max(float(share.max()) for share in shares)
    plot = _new_plot("score, nats", "% of the set", (low, high), (0.0, top), x_log=is_log)
    medians = [f"{one.name}: median {float(one.scores.median()):.3g} nats" for one in sets]
    says = "; ".join(medians) + "."
    keys: list[Key] = []
    for one, share, colour in zip(sets, shares, colours_of(sets), strict=True):
        source = {
            "left": edges[:-1].tolist(),
            "right": edges[1:].tolist(),
            "share": share.tolist(),
            "set": [one.name] * len(share),
        }
        columns = {"left": "left", "right": "right", "top": "share", "bottom": 0}
        bars = plot.quad(**columns, fill_alpha=0.45, line_width=1.5, source=source)
        tips = {"set": "@set", "scores": "@left{0.0000} to @right{0.0000}"}
        _paint(plot, bars, tips | {"share": "@share{0.0} %"}, fill=colour, line=colour)
        keys.append((one.name, colour, "area"))
    if threshold is not None:
        _mark(plot, (threshold, threshold), (0.0, top))
        accepted = f"{cell(100 * false_alarm).text} % false alarms accepted"
        keys.append((f"alarm, {accepted}", "ink", "dashed"))
        says += f" The alarm rises above {threshold:.3g} nats."
    infinite = int(scores.isinf().sum())
    if infinite:
        says += f" {infinite} infinite scores lie beyond the right end."
    rows = np.column_stack([edges[:-1], edges[1:], *shares]).tolist()
    titles = ["from", "to", *(f"{one.name}, %" for one in sets)]
    numbers = Table("Shares of the sets between scores", titles, rows)
    title = "Scores of known and unknown inputs"
    return Chart("histogram", title, says, plot, keys, numbers)


def roc_chart(by_set: Mapping[str, Curves]) -> Chart:
    """Return the ROC curves.

    Args:
        by_set: Curves by name of the unknown set.
    """
    rocs = {name: curves.roc for name, curves in by_set.items()}
    says = "; ".join(
        f"{name}: area {_area(roc)}, and {percent(roc.at(0.05)[0])} caught at 5 % false alarms"
        for name, roc in rocs.items()
    )
    axes = {
        "known inputs that raise an alarm": "false alarms",
        "unknown inputs caught": "caught",
    }
    plot, keys, numbers = _curves(rocs, axes, (0, 1), _ROC_ROWS)
    return Chart("roc", "ROC curve", says + ".", plot, keys, numbers)


def precision_recall_chart(by_set: Mapping[str, Curves]) -> Chart:
    """Return the precision-recall curves, for as many known as unknown inputs.

    Args:
        by_set: Curves by name of the unknown set.
    """
    precisions = {name: curves.precision_recall for name, curves in by_set.items()}
    says = "; ".join(f"{name}: area {_area(curve)}" for name, curve in precisions.items())
    says += ". Known and unknown inputs count the same, however many there are of each."
    axes = {"unknown inputs caught": "caught", "alarms that are right": "right"}
    plot, keys, numbers = _curves(precisions, axes, (0.5, 0.5), _RECALL_ROWS)
    return Chart("precision-recall", "Precision and recall", says, plot, keys, numbers)


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
    plot = _new_plot(f"{x_label}, share", f"{y_label}, share", *_UNIT_SQUARE)
    keys: list[Key] = []
    titles = [x_label.capitalize()]
    for i, (name, curve) in enumerate(by_set.items()):
        cycle, place = divmod(i, len(_UNKNOWN_COLOURS))
        colour, dash = _UNKNOWN_COLOURS[place], _DASHES[cycle % len(_DASHES)]
        columns = {"low": curve.low, "y": curve.y, "high": curve.high, "x": curve.x}
        source = {key: values.round(5).tolist() for key, values in columns.items()}
        source["set"] = [name] * len(curve.x)
        band = plot.varea(x="x", y1="low", y2="high", fill_alpha=0.25, source=source)
        _paint(plot, band, fill=colour)
        line = plot.line(x="x", y="y", line_width=2.5, line_dash=dash, source=source)
        tips = {"set": "@set", across: "@x{0.000}", "curve": "@y{0.000}"}
        tips["band of 95 %"] = "@low{0.000} to @high{0.000}"
        _paint(plot, line, tips, line=colour)
        keys.append((f"{name}, with a band of 95 %", colour, dash))
        titles += [f"{name}: {height}", "from", "to"]
    _mark(plot, (0, 1), chance, "dotted")
    keys.append(("a score that tells nothing", "ink", "dotted"))
    rows: list[Row] = [
        (percent(x, 0), *itertools.chain(*(curve.at(x) for curve in by_set.values())))
        for x in at
    ]
    return plot, keys, Table("Points of the curves, with bands of 95 %", titles, rows)


def spectrum(summary: Summary) -> Chart | None:
    """Return the eigenvalues, or None if none is positive.

    Args:
        summary: Of the fit.
    """
    values = summary.values[summary.values > 0].numpy()
    if not len(values):
        return None
    y_range = (float(values.min()) / 2, float(values.max()) * 2)
    unit = "nats per squared weight"
    x_range = (0.0, len(values) + 1.0)
    plot = _new_plot("direction", f"eigenvalue, {unit}", x_range, y_range, y_log=True)
    shown = _even(len(values), _MOST_DIRECTIONS)
    source = {"x": (shown + 1).tolist(), "y": values[shown].tolist()}
    _paint(plot, plot.line(x="x", y="y", line_width=1.5, source=source), line="blue")
    tips = {"direction": "@x", "eigenvalue": "@y{0.000e+0}"}
    _paint_dots(plot, source, tips, size=6)
    says = (
        f"{len(values)} directions, from {values[0]:.3g} down to {values[-1]:.3g} {unit}; "
        f"spread over {summary.effective_rank:.1f} of them in effect."
    )
    rows = [(float(i + 1), float(values[i])) for i in _even(len(values), _MOST_ROWS)]
    numbers = Table("Eigenvalues of directions", ("direction", "eigenvalue"), rows)
    return Chart("spectrum", "Spectrum", says, plot, [("eigenvalue", "blue", "dot")], numbers)


def captured(summary: Summary) -> Chart | None:
    """Return the curvature captured by the first directions, and how far data decides.

    Args:
        summary: Of the fit.
    """
    total = float(summary.values.sum())
    if total <= 0 or summary.captured <= 0:
        return None
    # the total is the share `captured` of the trace
    sums = summary.values.cumsum(0).numpy() * (summary.captured / total)
    determined = summary.determined.numpy()
    shown = _even(len(sums), _MOST_DIRECTIONS)
    plot = _new_plot("direction", "share", (0.0, len(sums) + 1.0), (0.0, 1.05))
    source = {
        "x": (shown + 1).tolist(),
        "sum": sums[shown].tolist(),
        "determined": determined[shown].tolist(),
    }
    line = plot.line(x="x", y="sum", line_width=2.5, source=source)
    other = plot.line(x="x", y="determined", line_width=2.5, line_dash="dashed", source=source)
    _paint(plot, other, line="green")
    tips = {"direction": "@x", "captured so far": "@sum{0.000}"}
    _paint(plot, line, tips | {"decided by data": "@determined{0.000}"}, line="blue")
    says = (
        f"{len(sums)} directions capture {percent(summary.captured)} of the curvature of the "
        f"training data; along the last of them data, not the prior, decides "
        f"{percent(float(determined[-1]))}."
    )
    listed = _even(len(sums), _MOST_ROWS)
    rows = np.column_stack([listed + 1.0, sums[listed], determined[listed]]).tolist()
    titles = ("direction", "captured so far", "decided by data")
    keys: list[Key] = [
        ("curvature captured by directions up to this one", "blue", "solid"),
        ("decided by data, not the prior", "green", "dashed"),
    ]
    numbers = Table("Captured curvature", titles, rows)
    return Chart("captured", "Captured curvature", says, plot, keys, numbers)


def stream_scores(stream: WatchedStream) -> Chart | None:
    """Return the scores in their order, or None if none is finite.

    Args:
        stream: Scores and alarm.
    """
    scores = stream.scores.numpy()
    shown = _extremes(scores, _MOST_SAMPLES)
    shown = shown[np.isfinite(scores[shown])]
    if not len(shown):
        return None
    low, high = float(scores[shown].min()), float(scores[shown].max())
    is_log = low > 0
    room = 0.05 * (high - low) or 1.0
    ends = (low / 1.5, high * 1.5) if is_log else (low - room, high + room)
    x_range = (0.0, len(scores) + 1.0)
    plot = _new_plot("sample of the stream", "score, nats", x_range, ends, y_log=is_log)
    source = {"x": (shown + 1).tolist(), "y": scores[shown].tolist()}
    _paint_dots(plot, source, {"sample": "@x", "score": "@y{0.0000}"}, size=4)
    keys = [("score", "blue", "dot"), *_mark_moments(plot, stream, ends)]
    says = f"{len(scores)} samples. {stream.verdict}"
    if len(shown) < len(scores):
        says += f" Of the scores the {len(shown)} that stand out most are drawn."
    return Chart("stream", "Scores of the stream", says, plot, keys, _stream_table(stream))


def stream_wealth(stream: WatchedStream) -> Chart:
    """Return the wealth of the alarm, in powers of ten, with the height it rises at.

    Args:
        stream: Scores and alarm.
    """
    wealth = stream.log_wealth.numpy() / math.log(10)
    limit = -math.log10(stream.false_alarm)
    # a drift that goes on makes the wealth grow without end: what happens at the limit counts
    top = max(min(float(wealth.max()), 4 * limit) + 0.5, 1.25 * limit)
    ends = (float(min(wealth.min(), 0.0)) - 0.2, top)
    shown = _extremes(wealth, _MOST_SAMPLES)
    x_range = (0.0, len(wealth) + 1.0)
    plot = _new_plot("sample of the stream", "wealth, powers of ten", x_range, ends)
    source = {"x": (shown + 1).tolist(), "y": wealth[shown].round(5).tolist()}
    line = plot.line(x="x", y="y", line_width=2.5, source=source)
    _paint(plot, line, {"sample": "@x", "wealth": "10^@y{0.00}"}, line="blue")
    _paint(plot, plot.line(list(x_range), [limit, limit], line_width=2), line="red")
    accepted = f"at most {cell(100 * stream.false_alarm).text} % false ones, ever"
    keys = [
        ("wealth: evidence that the stream has changed", "blue", "solid"),
        (f"alarm: {accepted}", "red", "solid"),
        *_mark_moments(plot, stream, ends),
    ]
    says = f"The alarm rises when the wealth reaches {1 / stream.false_alarm:g}."
    title = "Evidence against the stream"
    return Chart("wealth", title, says, plot, keys, _stream_table(stream))


def _mark_moments(plot: Any, stream: WatchedStream, ends: _Ends) -> list[Key]:
    """Return the legend of when the stream changed and the alarm rose, and draw both."""
    keys: list[Key] = []
    if stream.changed_at is not None:
        x = stream.changed_at + 0.5
        _mark(plot, (x, x), ends, "dotted")
        keys.append((f"stream changed after {stream.changed_at}", "ink", "dotted"))
    if stream.alarmed_at is not None:
        _mark(plot, (stream.alarmed_at, stream.alarmed_at), ends)
        keys.append((f"alarm rose at {stream.alarmed_at}", "ink", "dashed"))
    return keys


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
    """Return indices from first to last, evenly, at most so many."""
    return np.unique(np.linspace(0, length - 1, min(length, most)).round().astype(np.intp))


def _extremes(values: Array, most: int) -> _Indices:
    """Return indices of the lowest and the highest value of each stretch, in order."""
    if len(values) <= most:
        return np.arange(len(values))
    extremes = {0, len(values) - 1}
    for stretch in np.array_split(np.arange(len(values)), most // 2):
        part = values[stretch]
        extremes |= {int(stretch[part.argmin()]), int(stretch[part.argmax()])}
    return np.array(sorted(extremes), dtype=np.intp)


def _new_plot(
    x: str, y: str, x_range: _Ends, y_range: _Ends, *, x_log: bool = False, y_log: bool = False
) -> Any:
    """Return an empty plot, as wide as the page allows.

    Args:
        x: Label of the horizontal axis, with its unit.
        y: Of the vertical one.
        x_range: Ends of the horizontal axis.
        y_range: Of the vertical one.
        x_log: Whether the horizontal axis is logarithmic.
        y_log: Whether the vertical one is.
    """
    plot: Any = figure(
        height=_HEIGHT,
        sizing_mode="stretch_width",
        tools=_TOOLS,
        active_drag="box_zoom",
        active_scroll=None,
        x_axis_type="log" if x_log else "linear",
        y_axis_type="log" if y_log else "linear",
        x_range=Range1d(start=x_range[0], end=x_range[1]),
        y_range=Range1d(start=y_range[0], end=y_range[1]),
        x_axis_label=x,
        y_axis_label=y,
        background_fill_color=None,
        border_fill_color=None,
        outline_line_color=None,
        toolbar_location="above",
        min_border_right=14,
    )
    plot.toolbar.logo = None
    axes = ((plot.xaxis[0], x_log, x_range), (plot.yaxis[0], y_log, y_range))
    for axis, is_log, ends in axes:
        axis.axis_label_text_font_style = "normal"
        axis.axis_label_text_font_size = axis.major_label_text_font_size = "12px"
        axis.minor_tick_line_color = None
        axis.ticker.desired_num_ticks = 5
        if is_log:
            axis.formatter = LogTickFormatter(min_exponent=4)
            if _FEW_DECADES[0] < ends[1] / ends[0] < _FEW_DECADES[1]:
                axis.ticker = FixedTicker(ticks=_ONE_TWO_FIVE)
    return plot


def _paint(
    plot: Any, renderer: Any, tips: Mapping[str, str] | None = None, **roles: str
) -> None:
    """Tag a part of a plot with the roles of its colours, and show numbers under the pointer.

    Args:
        plot: The plot.
        renderer: Its part, as a method of the plot returned it.
        tips: Columns of the data as bokeh writes them, ``@x{0.00}``, by label.
        roles: Colours of its ``line`` and ``fill``.
    """
    renderer.glyph.tags = [f"{part}:{colour}" for part, colour in roles.items()]
    # a glyph that is not selected must not fade into a colour of another theme
    renderer.nonselection_glyph = renderer.muted_glyph = None
    if tips:
        # bokeh's own rows are too pale to be read, and white in the dark
        rows = [f"<div>{label} <strong>{value}</strong></div>" for label, value in tips.items()]
        box = f'<div class="tip" style="{_TIP}">{"".join(rows)}</div>'
        plot.add_tools(HoverTool(renderers=[renderer], tooltips=box, visible=False))


def _paint_dots(plot: Any, source: dict[str, Any], tips: Mapping[str, str], size: int) -> None:
    dots = plot.scatter(x="x", y="y", size=size, source=source)
    _paint(plot, dots, tips, fill="blue", line="blue")


def _mark(plot: Any, x: Sequence[float], y: Sequence[float], dash: str = "dashed") -> None:
    """Draw a line that means a limit or a moment."""
    line = plot.line(list(x), list(y), line_width=2, line_dash=dash)
    _paint(plot, line, line="ink")


def colours_of(sets: Sequence[ScoredSet]) -> list[str]:
    """Return the role of a colour for each set: known and unknown sets have their own."""
    known, unknown = itertools.cycle(_KNOWN_COLOURS), itertools.cycle(_UNKNOWN_COLOURS)
    return [next(known if one.known else unknown) for one in sets]
