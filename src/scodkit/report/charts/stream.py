"""A stream over time: its scores, the wealth of the alarm, and the moment it rose."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from scodkit.report.charts.canvas import Chart, Key, add_hover, mark, new_plot, paint
from scodkit.report.table import Table, number, plain
from scodkit.report.watched_stream import WatchedStream

_MOST_POINTS = 3000
_MOST_ROWS = 20
_Places = npt.NDArray[np.intp]


def stream_scores(stream: WatchedStream) -> Chart | None:
    """Return the scores in their order, or None if none is finite.

    Args:
        stream: Scores and alarm.
    """
    scores = stream.scores.numpy()
    shown = _extremes(scores, _MOST_POINTS)
    shown = shown[np.isfinite(scores[shown])]
    if not len(shown):
        return None
    low, high = float(scores[shown].min()), float(scores[shown].max())
    is_log = low > 0
    if is_log:
        ends = (low / 1.5, high * 1.5)
    else:
        room = 0.05 * (high - low) or 1.0
        ends = (low - room, high + room)
    x_range = (0.0, len(scores) + 1.0)
    plot = new_plot("sample of the stream", "score, nats", x_range, ends, y_log=is_log)
    source = {"x": (shown + 1).tolist(), "y": scores[shown].tolist()}
    dots = plot.scatter(x="x", y="y", size=4, source=source)
    paint(dots, fill="blue", line="blue")
    add_hover(plot, [dots], [("sample", "@x"), ("score", "@y{0.0000}")])
    keys = [Key("score", "blue", "dot"), *_moments(plot, stream, ends)]
    says = f"{len(scores)} samples. {verdict(stream)}"
    if len(shown) < len(scores):
        says += f" Of the scores the {len(shown)} that stand out most are drawn."
    return Chart("stream", "Scores of the stream", says, plot, tuple(keys), _numbers(stream))


def stream_wealth(stream: WatchedStream) -> Chart:
    """Return the wealth of the alarm, in powers of ten, with the height it rises at.

    Args:
        stream: Scores and alarm.
    """
    wealth = stream.log_wealth.numpy() / math.log(10)
    limit = -math.log10(stream.false_alarm)
    # a drift that goes on makes the wealth grow without end: what happens at the limit counts
    ends = (float(min(wealth.min(), 0.0)) - 0.2, min(float(wealth.max()), 4 * limit) + 0.5)
    ends = (ends[0], max(ends[1], 1.25 * limit))
    shown = _extremes(wealth, _MOST_POINTS)
    x_range = (0.0, len(wealth) + 1.0)
    plot = new_plot("sample of the stream", "wealth, powers of ten", x_range, ends)
    source = {"x": (shown + 1).tolist(), "y": wealth[shown].round(5).tolist()}
    line = paint(plot.line(x="x", y="y", line_width=2.5, source=source), line="blue")
    add_hover(plot, [line], [("sample", "@x"), ("wealth", "10^@y{0.00}")])
    paint(plot.line(list(x_range), [limit, limit], line_width=2), line="red")
    keys = [
        Key("wealth: evidence that the stream has changed", "blue", "solid"),
        Key(
            f"alarm: at most {number(100 * stream.false_alarm).text} % false ones, ever",
            "red",
            "solid",
        ),
        *_moments(plot, stream, ends),
    ]
    says = f"The alarm rises when the wealth reaches {1 / stream.false_alarm:g}."
    title = "Evidence against the stream"
    return Chart("wealth", title, says, plot, tuple(keys), _numbers(stream))


def verdict(stream: WatchedStream) -> str:
    """Return in words when the stream changed and when the alarm rose."""
    if stream.alarmed_at is None:
        rose = "The alarm did not rise."
    else:
        rose = f"The alarm rose at sample {stream.alarmed_at}."
    if stream.changed_at is None:
        return rose
    if stream.alarmed_at is None:
        return f"The stream changed after sample {stream.changed_at}. {rose}"
    late = stream.alarmed_at - stream.changed_at
    when = f"{late} samples later" if late > 0 else "before that"
    return (
        f"The stream changed after sample {stream.changed_at}; the alarm rose at sample "
        f"{stream.alarmed_at}, {when}."
    )


def _moments(plot: Any, stream: WatchedStream, ends: tuple[float, float]) -> list[Key]:
    keys = []
    if stream.changed_at is not None:
        x = stream.changed_at + 0.5
        mark(plot, (x, x), ends, "dotted")
        keys.append(Key(f"stream changed after {stream.changed_at}", "ink", "dotted"))
    if stream.alarmed_at is not None:
        mark(plot, (stream.alarmed_at, stream.alarmed_at), ends)
        keys.append(Key(f"alarm rose at {stream.alarmed_at}", "ink", "dashed"))
    return keys


def _numbers(stream: WatchedStream) -> Table:
    """Return scores and wealth along the stream, and around what happened."""
    last = len(stream.scores)
    places = {round(place) for place in np.linspace(1, last, min(last, _MOST_ROWS))}
    places |= {place for place in (stream.changed_at, stream.alarmed_at) if place}
    rows: list[list[str | float]] = [
        [
            str(place),
            float(stream.scores[place - 1]),
            float(stream.log_wealth[place - 1]) / math.log(10),
        ]
        for place in sorted(places)
    ]
    titles = ("sample", "score, nats", "wealth, powers of ten")
    return plain("The stream at some of its samples", titles, rows)


def _extremes(values: npt.NDArray[np.float64], most: int) -> _Places:
    """Return places of the lowest and the highest value of each stretch, in order."""
    if len(values) <= most:
        return np.arange(len(values))
    found: set[int] = {0, len(values) - 1}
    for stretch in np.array_split(np.arange(len(values)), most // 2):
        own = values[stretch]
        found |= {int(stretch[own.argmin()]), int(stretch[own.argmax()])}
    return np.array(sorted(found), dtype=np.intp)
