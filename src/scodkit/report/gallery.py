"""Inputs to look at: pictures, columns of tables, and a list with predictions and scores."""

from __future__ import annotations

import base64
import io

import torch
from PIL import Image, ImageColor
from torch import Tensor

from scodkit.errors import ScodError
from scodkit.explain import Columns, Explanation, plots
from scodkit.explain.words import Names, in_words
from scodkit.model.inputs import Inputs
from scodkit.monitor import Monitor
from scodkit.report.findings import Findings
from scodkit.report.page import Cell, Picture, Row, Table, cell
from scodkit.report.report import ScoredSet

_SAMPLES = 12  # of each set, in the list at first
_LISTED = 200  # of each set, when they are asked for
_PER_ROW = 6  # pictures
_BETWEEN = 8  # pictures that are shown when they are asked for
_MISTAKES = 4  # of those
_LARGEST = 160  # pixels along a side of a picture
_MOST_BARS = 96
_COLUMNS = 5  # of a table's row that are shown
_LONG = 3.0  # spreads from the mean that fill the space for a bar, if there are no more


def gallery(found: Findings) -> tuple[dict[str, list[Picture]], str]:
    """Return the most and the least atypical inputs of the sets that can be shown.

    Args:
        found: What was counted.

    Returns:
        Rows for each set, by their titles; and why there are no slopes, empty if there are.
    """
    rows: dict[str, list[Picture]] = {}
    note = ""
    for one in found.report.sets:
        if one.inputs is None or not _can_be_shown(one.inputs[0].shape):
            continue
        order = one.scores.argsort(stable=True).tolist()
        few = min(_PER_ROW, len(order) // 2 or 1)
        ends = order[::-1][:few] + order[:few]
        between = _between(found, one, set(ends))
        indices = ends + between
        inputs = one.batch(indices)
        explanation, missing = _explained(found.report.monitor, inputs)
        note = max(note, missing)
        pictures = [
            _picture(found, one, index, inputs[place], explanation, place)
            for place, index in enumerate(indices)
        ]
        rows[f"{one.name}: most atypical"] = pictures[:few]
        if between:
            rows[f"{one.name}: in between"] = pictures[len(ends) :]
        rows[f"{one.name}: least atypical"] = pictures[few : len(ends)]
    return rows, note


def _between(found: Findings, one: ScoredSet, shown: set[int]) -> list[int]:
    """Return inputs between the ends: the most atypical mistakes, others evenly by rank."""
    order = one.scores.argsort(descending=True, stable=True).tolist()
    wrong = [i for i in order if i not in shown and found.is_mistake(one, i)][:_MISTAKES]
    rest = [i for i in order if i not in shown and i not in wrong]
    step = max(1, len(rest) // max(1, _BETWEEN - len(wrong)))
    chosen = {*wrong, *rest[step // 2 :: step][: _BETWEEN - len(wrong)]}
    return [i for i in order if i in chosen]


def listed(found: Findings) -> Table:
    """Return predictions and scores, of which those evenly by rank are shown at first.

    Args:
        found: What was counted.
    """
    rows: list[Row] = []
    attributes = []
    for one in found.report.sets:
        first, indices = set(one.spread(_SAMPLES)), one.spread(_LISTED)
        indices = sorted({*indices, *first}, key=lambda index: float(one.scores[index]))
        columns = None
        if one.inputs is not None:
            columns = columns_of(found.report.monitor, one.batch(indices))
        for place, index in enumerate(indices):
            label = None if one.labels is None else one.labels[index]
            prediction = p_value = alarm = None
            if one.outputs is not None:
                prediction = _prediction(found.report.monitor, one.outputs[index])
                prediction += " - a mistake" if found.is_mistake(one, index) else ""
            if one.name in found.p_values:
                p_value = float(found.p_values[one.name][index])
                alarm = "alarm" if found.flags[one.name][index] else "no"
            score, sample = float(one.scores[index]), cell(index, "d")
            farthest = None if columns is None else columns.farthest(place)
            row = (one.name, label, prediction, score, p_value, alarm, sample, farthest)
            rows.append(row)
            attributes.append(_attributes(found, one, index, index not in first))
    titles = (
        *("set", "is", "prediction", "score, nats", "p-value", "alarm", "sample"),
        "farthest from the training mean",
    )
    caption = "Inputs of each set, from the least to the most atypical; at first a few, by rank"
    return Table(caption, titles, rows, sortable=True, attributes=attributes)


def _attributes(found: Findings, one: ScoredSet, index: int, extra: bool) -> dict[str, str]:
    """Return what the filter of the page looks at."""
    flags, wrong = found.flags.get(one.name), found.is_mistake(one, index)
    kinds = found.kinds.get(one.name)
    return {
        "data-set": one.name,
        "data-score": cell(float(one.scores[index])).sorted_by or "",
        "data-alarm": "" if flags is None else str(int(flags[index])),
        "data-wrong": "" if wrong is None else str(int(wrong)),
        "data-kind": "" if kinds is None else kinds[index],
        "data-extra": str(int(extra)),
    }


def _can_be_shown(shape: torch.Size) -> bool:
    """Return whether samples are ``(H, W)``, ``(1, H, W)``, ``(3, H, W)``, or ``(n > 1,)``."""
    if len(shape) == 1:
        return shape[0] > 1
    return len(shape) == 2 or (len(shape) == 3 and shape[0] in (1, 3))


def _explained(monitor: Monitor, inputs: Tensor) -> tuple[Explanation, str]:
    """Return an explanation, with slopes if there are any, and why there are none."""
    missing = "the inputs are not floating-point numbers"
    if inputs.is_floating_point():
        try:
            return monitor.explain(inputs, saliency=True), ""
        except ScodError as error:
            missing = str(error)
    return monitor.explain(inputs), f"No slopes: {missing}."


def _picture(
    found: Findings,
    one: ScoredSet,
    index: int,
    sample: Tensor,
    explanation: Explanation,
    place: int,
) -> Picture:
    says = [] if one.labels is None else [one.labels[index]]
    columns, saliency = explanation.columns, explanation.saliency
    if columns is not None:
        says += columns.sentences(place)
    if one.outputs is not None:
        says.append("predicted " + _prediction(found.report.monitor, one.outputs[index]))
    says.append(f"score {cell(float(one.scores[index])).text} nats")
    is_image, drawn, scale = sample.ndim > 1, None, ""
    slopes: Tensor | None = None
    if saliency is not None and bool(saliency.gradient[place].isfinite().all()):
        slopes = saliency.shown(place)
        drawn = slope_map(slopes) if is_image else bars(slopes)
        if is_image:
            scale = f"{float(plots.image_planes(slopes).sum(0).abs().max()):.2g}"
    marks = [] if one.name not in found.flags or not found.flags[one.name][index] else ["alarm"]
    marks += ["mistake"] if found.is_mistake(one, index) else []
    in_spreads = columns is not None and columns.spread is not None
    name = f"{one.name}, sample {index}"
    return Picture(
        name=name,
        says=says,
        values=image(sample) if is_image else None if in_spreads else bars(sample),
        slopes=None if in_spreads else drawn,
        scale=scale,
        columns=_column_rows(name, columns, slopes, place) if in_spreads and columns else None,
        marks=marks,
        attributes=_attributes(found, one, index, extra=False),
    )


def _column_rows(name: str, columns: Columns, slopes: Tensor | None, place: int) -> Table:
    """Return the columns of an input farthest from the training data, the farthest first."""
    values, away = plots.row(columns.values, place), plots.row(columns.distance, place)
    order = away.nan_to_num(torch.inf).abs().argsort(descending=True, stable=True).tolist()
    most = max(_LONG, float(away.nan_to_num(0.0, 0.0, 0.0).abs().max()))
    rows: list[Row] = []
    for i in order[:_COLUMNS]:
        distance = float(away[i])
        length = 0.0 if distance != distance else max(-1.0, min(1.0, distance / most))
        colour = "red" if distance > 0 else "blue"
        bar = Cell(cell(distance, "+.3g").text, distance, length, colour)
        slope = None if slopes is None else cell(float(slopes.flatten()[i]), "+.2g")
        rows.append((columns.names[i], f"{float(values[i]):.5g}", bar, slope))
    titles = ("column", "value", "spreads", "slope")
    shown = f"{len(rows)} of {len(order)} columns" if len(rows) < len(order) else "columns"
    return Table(f"{name}: {shown}, the farthest first", titles, rows)


def columns_of(monitor: Monitor, inputs: Tensor) -> Columns | None:
    """Return the columns of inputs that are rows of a table; None of others."""
    names = Names.of(inputs, monitor.notes, form=monitor.fitted.form)
    return Columns.of(monitor.fitted.columns, Inputs((inputs,), {}), names)


def _prediction(monitor: Monitor, output: Tensor) -> str:
    """Return a prediction in words, whose percentages stay on one line."""
    words = in_words(monitor.likelihood, output, monitor.notes.get("classes"))
    words = words.replace("(100 %)", "(>\N{NO-BREAK SPACE}99.5 %)")  # surely not: it is rounded
    return words.replace(" %", "\N{NO-BREAK SPACE}%")


def image(sample: Tensor) -> str:
    """Return an image as a data URI, its own range of values from black to white.

    Args:
        sample: ``(H, W)`` or ``(C, H, W)``; NaN and infinities are black.
    """
    pixels = (plots.scaled_image(_finite(sample)) * 255).round().to(torch.uint8)
    return _data_uri(Image.fromarray(pixels.contiguous().numpy()))


def slope_map(gradient: Tensor) -> str:
    """Return slopes as a data URI: orange where more raises the score, blue where it lowers it.

    Args:
        gradient: ``(H, W)`` or ``(C, H, W)``; summed over channels. Zero is transparent.
    """
    slopes = plots.image_planes(_finite(gradient)).sum(0)
    strength = slopes.abs() / slopes.abs().max().clamp_min(1e-300)
    pixels = torch.empty(*slopes.shape, 4, dtype=torch.uint8)
    pixels[..., :3] = torch.tensor(ImageColor.getrgb(plots.LOWERS), dtype=torch.uint8)
    rises = torch.tensor(ImageColor.getrgb(plots.RAISES), dtype=torch.uint8)
    pixels[..., :3][slopes > 0] = rises  # in two steps: torch 2.6 takes no mask beside a slice
    pixels[..., 3] = (strength * 255).round().to(torch.uint8)
    return _data_uri(Image.fromarray(pixels.numpy()))


def bars(values: Tensor) -> list[float]:
    """Return a vector as heights in [-1, 1]; of a long one the largest of each stretch.

    Args:
        values: ``(n,)``; NaN and infinities have no height.

    Examples:
        >>> bars(torch.tensor([1.0, -2.0, float("nan")]))
        [0.5, -1.0, 0.0]
    """
    heights = _finite(values)
    if len(heights) > _MOST_BARS:
        stretches = heights.tensor_split(_MOST_BARS)
        heights = torch.stack([part[part.abs().argmax()] for part in stretches])
    heights = heights / heights.abs().max().clamp_min(1e-300)
    return [round(height, 4) for height in heights.tolist()]


def _finite(values: Tensor) -> Tensor:
    return values.detach().double().cpu().nan_to_num(0.0, 0.0, 0.0)


def _data_uri(picture: Image.Image) -> str:
    picture.thumbnail((_LARGEST, _LARGEST))
    png = io.BytesIO()
    picture.save(png, format="PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(png.getvalue()).decode()
