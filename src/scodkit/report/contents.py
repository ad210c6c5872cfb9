"""The sections of a report, each left out where there is nothing to show."""

from __future__ import annotations

import base64
import io
import json
import math
from collections.abc import Mapping, Sequence

import torch
from PIL import Image, ImageColor
from torch import Tensor

from scodkit import __version__
from scodkit.errors import ScodError
from scodkit.explain import Columns, Explanation, plots
from scodkit.explain.words import Names, in_words
from scodkit.metrics import curves
from scodkit.model.inputs import Inputs
from scodkit.monitor import Monitor
from scodkit.report import charts
from scodkit.report.page import Cell, Picture, Row, Section, Table, cell, percent, render
from scodkit.report.report import MethodLine, Report, ScoredSet
from scodkit.summary import Summary

_SAMPLES = 12  # of each set, in the table of samples
_EXPLAINED = 60  # samples of each set whose layers' shares are added up
_MOST_LAYERS = 20
_PER_ROW = 6  # pictures
_LARGEST = 160  # pixels along a side of a picture
_MOST_BARS = 96


def page_of(report: Report) -> str:
    """Return the page of a report as HTML.

    Args:
        report: What to show.
    """
    monitor, sets, summary = report.monitor, report.sets, report.monitor.summary()
    known = [one.scores for one in sets if one.known]
    curves_by_set = {
        one.name: curves(torch.cat(known), one.scores)
        for one in sets
        if known and not one.known
    }
    p_values = {one.name: one.p_values for one in sets if one.p_values is not None}
    calibration, threshold = monitor.calibration, None
    if calibration is not None and calibration.groups is None:
        p_values = {one.name: calibration.p_value(one.scores) for one in sets} | p_values
        threshold = calibration.threshold(report.false_alarm)
    rates = {
        name: float((values <= report.false_alarm).double().mean())
        for name, values in p_values.items()
    }
    facts = {f"AUROC, {name}": f"{pair.roc.area:.3f}" for name, pair in curves_by_set.items()}
    facts |= {f"alarms, {name}": percent(rate) for name, rate in rates.items()}
    if threshold is not None:
        facts["alarm above"] = f"{threshold:.3g} nats"
    facts["captured curvature"] = percent(summary.captured)
    if report.stream is not None and report.stream.alarmed_at is not None:
        facts["stream alarm at sample"] = str(report.stream.alarmed_at)
    pictures, no_slopes = gallery(monitor, sets)
    drawn = charts.histogram(sets, threshold, report.false_alarm)
    verdict = "" if report.stream is None else report.stream.verdict
    sections = (
        Section("scores", charts=drawn, tables=[_scores(sets, rates)]),
        Section("separation", charts=charts.separation(curves_by_set)),
        Section("methods", tables=[_methods(report.methods)]),
        Section("stream-of-samples", verdict, charts=charts.stream_charts(report.stream)),
        Section("gallery", gallery=pictures, note=no_slopes),
        Section("samples", tables=[_samples(report, p_values)]),
        Section("layers", tables=_layers(monitor, sets)),
        Section("fit", charts=charts.spectrum(summary) + charts.captured(summary)),
        Section("configuration", tables=[_settings(monitor)], folded=[_parameters(monitor)]),
    )
    shown = [section for section in sections if section]
    lead = _lead(report, summary, rates)
    return render(shown, title=report.title, lead=lead, facts=facts, notes=summary.notes)


def _lead(report: Report, summary: Summary, rates: Mapping[str, float]) -> str:
    lead = (
        f"{type(report.monitor.model).__name__} with {summary.num_parameters} weights looked "
        f"at, fitted on {summary.num_data} samples."
    )
    if rates:
        *first, last = [f"{percent(rate)} of {name}" for name, rate in rates.items()]
        raised = f"{', '.join(first)} and {last}" if first else last
        accepted = cell(100 * report.false_alarm).text
        lead += f" Where {accepted} % false alarms are accepted, {raised} raise one."
    return lead


def _scores(sets: Sequence[ScoredSet], rates: Mapping[str, float]) -> Table:
    """Return quantiles of the scores of each set, and its share of alarms."""
    levels = torch.tensor([0.05, 0.5, 0.95], dtype=torch.float64)
    rows = [
        (
            one.name,
            "known" if one.known else "unknown",
            cell(len(one), "d"),
            *torch.quantile(one.scores, levels, interpolation="lower").tolist(),
            cell(rates.get(one.name), ".1%"),
        )
        for one in sets
    ]
    titles = ("set", "kind", "inputs", "5 % below", "median", "95 % below", "alarms")
    return Table("Scores of the sets, in nats", titles, rows, sortable=True)


def _methods(methods: Sequence[MethodLine]) -> Table:
    columns = {
        "AUROC": ("auroc", ".3f"),
        "AUPR": ("aupr", ".3f"),
        "false alarms": ("false_alarms", ".1%"),
        "caught": ("caught", ".1%"),
        "cost": ("forward_passes", ".1f"),
        "fit, s": ("fit_seconds", ".2f"),
    }
    rows: list[Row] = [
        (line.name, *(cell(getattr(line, name), form) for name, form in columns.values()))
        for line in methods
    ]
    caption = "Methods; cost is the time of a scored prediction over that of a bare one"
    return Table(caption, ("method", *columns), rows, sortable=True)


def gallery(
    monitor: Monitor, sets: Sequence[ScoredSet]
) -> tuple[dict[str, list[Picture]], str]:
    """Return the most and the least atypical inputs of the sets that can be shown.

    Args:
        monitor: Fitted.
        sets: Scored inputs.

    Returns:
        Two rows for each set, by their titles; and why there are no slopes, empty if there
        are.
    """
    rows: dict[str, list[Picture]] = {}
    note = ""
    for one in sets:
        if one.inputs is None or not _can_be_shown(one.inputs[0].shape):
            continue
        order = one.scores.argsort(stable=True).tolist()
        few = min(_PER_ROW, len(order) // 2 or 1)
        indices = order[::-1][:few] + order[:few]
        inputs = one.batch(indices)
        explanation, missing = _explained(monitor, inputs)
        note = max(note, missing)
        pictures = [
            _picture(monitor, one, index, inputs[place], explanation, place)
            for place, index in enumerate(indices)
        ]
        rows[f"{one.name}: most atypical"] = pictures[:few]
        rows[f"{one.name}: least atypical"] = pictures[few:]
    return rows, note


def _samples(report: Report, p_values: Mapping[str, Tensor]) -> Table:
    rows: list[Row] = []
    for one in report.sets:
        indices = one.spread(_SAMPLES)
        columns = None
        if one.inputs is not None:
            columns = _columns(report.monitor, one.batch(indices))
        for place, index in enumerate(indices):
            label = prediction = p_value = alarm = None
            if one.labels is not None:
                label = one.labels[index]
            if one.outputs is not None:
                prediction = _prediction(report.monitor, one.outputs[index])
            if one.name in p_values:
                p_value = float(p_values[one.name][index])
                alarm = "alarm" if p_value <= report.false_alarm else "no"
            score, sample = float(one.scores[index]), cell(index, "d")
            farthest = None if columns is None else columns.farthest(place)
            row = (one.name, label, prediction, score, p_value, alarm, sample, farthest)
            rows.append(row)
    titles = (
        *("set", "is", "prediction", "score", "p-value", "alarm", "sample"),
        "farthest from the training mean",
    )
    caption = "Samples of each set, from the least to the most atypical, evenly by rank"
    return Table(caption, titles, rows, sortable=True)


def _layers(monitor: Monitor, sets: Sequence[ScoredSet]) -> list[Table]:
    """Return the shares of the layers in the scores of each set with inputs."""
    layers: tuple[str, ...] = ()
    shown, colours, shares = [], [], []
    for one, colour in zip(sets, charts.colours_of(sets), strict=True):
        if one.inputs is None:
            continue
        split = monitor.explain(one.batch(one.spread(_EXPLAINED))).layers
        sums = split.values[split.values.isfinite().all(1)].cpu().sum(0)
        if float(sums.sum()) > 0:
            layers = split.names
            shown.append(one)
            colours.append(colour)
            shares.append(sums / sums.sum())
    if not shown:
        return []
    values = torch.stack(shares, dim=1)  # (layers, sets)
    ranked = values.abs().amax(1).argsort(descending=True, stable=True).tolist()
    top, rest = sorted(ranked[:_MOST_LAYERS]), ranked[_MOST_LAYERS:]
    rows = [(layers[i], *map(_bar, values[i].tolist(), colours)) for i in top]
    if rest:
        others = values[rest].sum(0).tolist()
        rows.append((f"others ({len(rest)})", *map(_bar, others, colours)))
    titles = ("layer", *(one.name for one in shown))
    counts = ", ".join(f"{min(len(one), _EXPLAINED)} of {one.name}" for one in shown)
    caption = f"Shares of the layers in the scores, in order of the model ({counts})"
    return [Table(caption, titles, rows, sortable=True)]


def _bar(share: float, colour: str) -> Cell:
    """Return a share with a bar behind it."""
    return Cell(cell(share, ".1%").text, share, max(-1.0, min(1.0, share)), colour)


def _settings(monitor: Monitor) -> Table:
    """Return the configuration of a fitted monitor, with the fingerprints of its weights."""
    fitted, basis, calibration = monitor.fitted, monitor.basis, monitor.calibration
    calibrated_on = "none"
    if calibration is not None:
        calibrated_on = f"{calibration.num_data} held-out samples"
        if calibration.groups is not None:
            calibrated_on += f" in {len(set(calibration.groups.tolist()))} groups"
    settings = {
        "model": type(monitor.model).__name__,
        "likelihood": repr(monitor.likelihood),
        "sketch": repr(monitor.sketch),
        "rank": f"{monitor.rank} asked for, {basis.rank} kept",
        "prior scale": f"{monitor.prior_scale:g}",
        "task": "all of the prediction" if monitor.task is None else "a function",
        "output of a sample": str(tuple(fitted.shape)),
        "samples fitted": f"{basis.num_data}, {monitor.skipped} skipped",
        "captured curvature": f"{basis.captured:.4f} of {basis.trace:.4g}",
        "scores are upper bounds of exact ones": "yes" if basis.over_estimates else "not known",
        "calibration": calibrated_on,
        "fingerprint of the chosen weights": fitted.fingerprints.parameters,
        "fingerprint of the model": fitted.fingerprints.model,
        "scodkit": __version__,
        "torch": torch.__version__,
    }
    settings |= {f"note: {name}": json.dumps(value) for name, value in monitor.notes.items()}
    rows = list(settings.items())
    return Table("Configuration and fingerprints", ("what", "value"), rows)


def _parameters(monitor: Monitor) -> Table:
    """Return the chosen parameters by name, with their shapes and sizes."""
    rows = [
        (block.name, " x ".join(map(str, block.shape)) or "1", float(math.prod(block.shape)))
        for block in monitor.fitted.parameters.blocks
    ]
    return Table("Weights the scores are about", ("parameter", "shape", "numbers"), rows)


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
    monitor: Monitor,
    one: ScoredSet,
    index: int,
    sample: Tensor,
    explanation: Explanation,
    place: int,
) -> Picture:
    says = [] if one.labels is None else [one.labels[index]]
    columns, saliency = explanation.columns, explanation.saliency
    if columns is not None:
        says += columns.sentences(place) or filter(None, [columns.farthest(place)])
        if columns.spread is not None:
            sample = columns.distance[place]
    if one.outputs is not None:
        says.append("predicted " + _prediction(monitor, one.outputs[index]))
    says.append(f"score {cell(float(one.scores[index])).text}")
    is_image, drawn, scale = sample.ndim > 1, None, ""
    if saliency is not None and bool(saliency.gradient[place].isfinite().all()):
        slopes = saliency.shown(place)
        drawn = slope_map(slopes) if is_image else bars(slopes)
        if is_image:
            scale = f"{float(plots.image_planes(slopes).sum(0).abs().max()):.2g}"
        else:
            steepest = saliency.steepest(place, 1).items()
            says += [
                f"steepest slope: {at} {slope:+.3g} {saliency.unit}" for at, slope in steepest
            ]
    name = f"{one.name}, sample {index}"
    return Picture(name, says, image(sample) if is_image else bars(sample), drawn, scale)


def _columns(monitor: Monitor, inputs: Tensor) -> Columns | None:
    """Return the columns of inputs that are rows of a table; None of others."""
    names = Names.of(inputs, monitor.notes)
    return Columns.of(monitor.fitted.columns, Inputs((inputs,), {}), names)


def _prediction(monitor: Monitor, output: Tensor) -> str:
    """Return a prediction in words, whose percentages stay on one line."""
    words = in_words(monitor.likelihood, output, monitor.notes.get("classes"))
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
