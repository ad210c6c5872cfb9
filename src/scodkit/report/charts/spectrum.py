"""What the fit has kept: its spectrum, and the share of the curvature that is captured."""

from __future__ import annotations

import numpy as np

from scodkit.report.charts.canvas import Chart, Key, add_hover, new_plot, paint
from scodkit.report.table import percent, plain
from scodkit.summary import Summary

_MOST_POINTS = 1000
_MOST_ROWS = 20


def spectrum(summary: Summary) -> Chart | None:
    """Return the eigenvalues, or None if none is positive.

    Args:
        summary: Of the fit.
    """
    values = summary.values.numpy()
    values = values[values > 0]
    if not len(values):
        return None
    shown = _even(len(values), _MOST_POINTS)
    x_range = (0.0, len(values) + 1.0)
    y_range = (float(values.min()) / 2, float(values.max()) * 2)
    unit = "nats per squared weight"
    plot = new_plot("direction", f"eigenvalue, {unit}", x_range, y_range, y_log=True)
    source = {"x": (shown + 1).tolist(), "y": values[shown].tolist()}
    paint(plot.line(x="x", y="y", line_width=1.5, source=source), line="blue")
    dots = paint(plot.scatter(x="x", y="y", size=6, source=source), fill="blue", line="blue")
    add_hover(plot, [dots], [("direction", "@x"), ("eigenvalue", "@y{0.000e+0}")])
    says = (
        f"{len(values)} directions, from {values[0]:.3g} down to {values[-1]:.3g} {unit}; "
        f"spread over {summary.effective_rank:.1f} of them in effect."
    )
    rows = [[float(i + 1), float(values[i])] for i in _even(len(values), _MOST_ROWS)]
    numbers = plain("Eigenvalues of directions", ("direction", "eigenvalue"), rows)
    keys = (Key("eigenvalue", "blue", "dot"),)
    return Chart("spectrum", "Spectrum", says, plot, keys, numbers)


def captured(summary: Summary) -> Chart | None:
    """Return the curvature captured by the first directions, and how far data decides.

    Args:
        summary: Of the fit.
    """
    kept = float(summary.values.sum())
    if kept <= 0 or summary.captured <= 0:
        return None
    # the trace is what the kept part is that share of
    sums = summary.values.cumsum(0).numpy() * (summary.captured / kept)
    determined = summary.determined.numpy()
    shown = _even(len(sums), _MOST_POINTS)
    plot = new_plot("direction", "share", (0.0, len(sums) + 1.0), (0.0, 1.05))
    source = {
        "x": (shown + 1).tolist(),
        "sum": sums[shown].tolist(),
        "determined": determined[shown].tolist(),
    }
    line = paint(plot.line(x="x", y="sum", line_width=2.5, source=source), line="blue")
    other = plot.line(x="x", y="determined", line_width=2.5, line_dash="dashed", source=source)
    paint(other, line="green")
    tips = [("direction", "@x"), ("captured so far", "@sum{0.000}")]
    add_hover(plot, [line], [*tips, ("decided by data", "@determined{0.000}")])
    says = (
        f"{len(sums)} directions capture {percent(summary.captured)} of the curvature of the "
        f"training data; along the last of them data, not the prior, decides "
        f"{percent(float(determined[-1]))}."
    )
    titles = ("direction", "captured so far", "decided by data")
    rows = [
        [float(i + 1), float(sums[i]), float(determined[i])]
        for i in _even(len(sums), _MOST_ROWS)
    ]
    keys = (
        Key("curvature captured by directions up to this one", "blue", "solid"),
        Key("decided by data, not the prior", "green", "dashed"),
    )
    numbers = plain("Captured curvature", titles, rows)
    return Chart("captured", "Captured curvature", says, plot, keys, numbers)


def _even(length: int, most: int) -> np.ndarray[tuple[int, ...], np.dtype[np.intp]]:
    """Return places from first to last, evenly, at most so many."""
    return np.unique(np.linspace(0, length - 1, min(length, most)).round().astype(np.intp))
