"""Charts of the fit, and of a stream with its alarm."""

from __future__ import annotations

import math

import numpy as np

from scodkit.report.drawing import Drawing, Ends, even, extremes
from scodkit.report.page import Chart, Table
from scodkit.report.rates import asked, percent
from scodkit.report.report import WatchedStream
from scodkit.summary import Summary

_MOST_DIRECTIONS = 1000
_MOST_SAMPLES = 3000
_MOST_ROWS = 20
_LINKED = "link:stream"  # charts with this tag move together
_BORDER = 70  # pixels to the left of both, so that their axes are in line


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
    drawing = Drawing("direction", f"eigenvalue, {unit}", x_range, y_range, (False, True))
    shown = even(len(values), _MOST_DIRECTIONS)
    source = {"x": (shown + 1).tolist(), "y": values[shown].tolist()}
    drawing.line(source, "blue", "solid", line_width=1.5)
    tips = {"direction": "@x", "eigenvalue": "@y{0.000e+0}"}
    drawing.dots(source, "eigenvalue", tips, size=6)
    says = (
        f"{len(values)} directions, from {values[0]:.3g} down to {values[-1]:.3g} {unit}; "
        f"effective rank {summary.effective_rank:.1f}."
    )
    rows = [(float(i + 1), float(values[i])) for i in even(len(values), _MOST_ROWS)]
    numbers = Table("Eigenvalues of directions", ("direction", "eigenvalue"), rows)
    return [Chart("spectrum", says, drawing.plot, drawing.keys, numbers)]


def captured(summary: Summary) -> list[Chart]:
    """Return the curvature captured by the first directions, and what data determines.

    Args:
        summary: Of the fit.
    """
    total = float(summary.values.sum())
    if total <= 0 or summary.captured <= 0:
        return []
    # the total is the share `captured` of the trace
    sums = summary.values.cumsum(0).numpy() * (summary.captured / total)
    columns = np.column_stack([np.arange(1.0, len(sums) + 1), sums, summary.determined.numpy()])
    drawing = Drawing("direction", "share", (0.0, len(sums) + 1.0), (0.0, 1.05))
    x, captured, determined = columns[even(len(sums), _MOST_DIRECTIONS)].T.tolist()
    source = {"x": x, "sum": captured, "determined": determined}
    tips = {"direction": "@x", "captured so far": "@sum{0.000}"}
    tips["determined by data"] = "@determined{0.000}"
    label = "curvature captured by directions up to this one"
    drawing.line(source, "blue", "solid", y="sum", label=label, tips=tips)
    label = "determined by data (1) or by the prior (0)"
    drawing.line(source, "green", "dashed", y="determined", label=label)
    says = (
        f"{len(sums)} directions capture {percent(summary.captured)} of the curvature of the "
        f"training data; the last of them is determined to "
        f"{percent(determined[-1])} by data, otherwise by the prior."
    )
    rows = columns[even(len(sums), _MOST_ROWS)].tolist()
    titles = ("direction", "captured so far", "determined by data")
    numbers = Table("Captured curvature", titles, rows)
    return [Chart("captured", says, drawing.plot, drawing.keys, numbers)]


def stream_charts(stream: WatchedStream | None, threshold: float | None) -> list[Chart]:
    """Return the scores in their order, if any is finite, and the evidence against them.

    Args:
        stream: Scores and alarm; None for no charts.
        threshold: Score above which single inputs raise an alarm; None for no line.
    """
    if stream is None:
        return []
    numbers = _stream_table(stream)
    drawings = [_scores(stream, threshold), _evidence(stream)]
    charts = []
    for name, drawn in zip(("stream", "evidence"), drawings, strict=True):
        if drawn is not None:
            drawing, says = drawn
            drawing.plot.tags, drawing.plot.min_border_left = [_LINKED], _BORDER
            charts.append(Chart(name, says, drawing.plot, drawing.keys, numbers))
    return charts


def _scores(stream: WatchedStream, threshold: float | None) -> tuple[Drawing, str] | None:
    """Return the scores in their order, drawn and in words; None without a finite one."""
    scores = stream.scores.numpy()
    shown = extremes(scores, _MOST_SAMPLES)
    shown = shown[np.isfinite(scores[shown])]
    if not len(shown):
        return None
    low, high = float(scores[shown].min()), float(scores[shown].max())
    is_log = low > 0
    room = 0.05 * (high - low) or 1.0
    ends = (low / 1.5, high * 1.5) if is_log else (low - room, high + room)
    x_range = (0.0, len(scores) + 1.0)
    drawing = Drawing("sample of the stream", "score, nats", x_range, ends, (False, is_log))
    source = {"x": (shown + 1).tolist(), "y": scores[shown].tolist()}
    drawing.dots(source, "score", {"sample": "@x", "score": "@y{0.0000}"}, size=4)
    if threshold is not None:
        line = {"x": list(x_range), "y": [threshold, threshold]}
        drawing.line(line, "red", "dashed", label="alarm of a single input", line_width=2)
    _mark_moments(drawing, stream, ends)
    says = f"{len(scores)} samples. {stream.verdict}"
    if len(shown) < len(scores):
        says += f" Only the {len(shown)} scores that stand out most are drawn."
    return drawing, says


def _evidence(stream: WatchedStream) -> tuple[Drawing, str]:
    """Return the evidence that the stream has changed, drawn and in words."""
    odds = stream.log_wealth.numpy() / math.log(10)
    x_range = (0.0, len(odds) + 1.0)
    limit = -math.log10(stream.false_alarm)
    # a drift that goes on makes the odds grow without end: what happens at the limit counts
    top = max(min(float(odds.max()), 4 * limit) + 0.5, 1.25 * limit)
    ends = (float(min(odds.min(), 0.0)) - 0.2, top)
    drawing = Drawing("sample of the stream", "evidence, odds as log10", x_range, ends)
    shown = extremes(odds, _MOST_SAMPLES)
    source = {"x": (shown + 1).tolist(), "y": odds[shown].round(5).tolist()}
    tips = {"sample": "@x", "odds": "10^@y{0.00}"}
    label = "evidence that the stream has changed (odds, log10)"
    drawing.line(source, "blue", "solid", label=label, tips=tips)
    most = asked(stream.false_alarm)
    limits = {"x": list(x_range), "y": [limit, limit]}
    label = f"alarm, with a probability of at most {most} if nothing changes"
    drawing.line(limits, "red", "dashed", label=label, line_width=2)
    _mark_moments(drawing, stream, ends)
    says = (
        f"The alarm rises when the odds that the stream has changed reach "
        f"{1 / stream.false_alarm:g} to 1. For a stream that does not change, the probability "
        f"that it ever raises a false alarm is at most {most}. At the end the odds are "
        f"10^{odds[-1]:.1f} to 1."
    )
    return drawing, says


def _mark_moments(drawing: Drawing, stream: WatchedStream, ends: Ends) -> None:
    """Mark when the stream changed and when the alarm rose."""
    if stream.changed_at is not None:
        x = stream.changed_at + 0.5
        drawing.mark((x, x), ends, f"stream changed after {stream.changed_at}", "dotted")
    if stream.alarmed_at is not None:
        x = stream.alarmed_at
        drawing.mark((x, x), ends, f"alarm rose at {x}")


def _stream_table(stream: WatchedStream) -> Table:
    """Return scores and evidence along the stream, and around what happened."""
    last = len(stream.scores)
    samples = {round(place) for place in np.linspace(1, last, min(last, _MOST_ROWS))}
    samples |= {moment for moment in (stream.changed_at, stream.alarmed_at) if moment}
    wealth = stream.log_wealth / math.log(10)
    rows = [
        (str(t), float(stream.scores[t - 1]), float(wealth[t - 1])) for t in sorted(samples)
    ]
    titles = ("sample", "score, nats", "evidence, odds as log10")
    return Table("The stream at some of its samples", titles, rows)
