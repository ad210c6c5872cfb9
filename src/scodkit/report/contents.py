"""The sections of a report, each left out where there is nothing to show."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from scodkit.errors import OptionError
from scodkit.explain.words import layer_names
from scodkit.monitor import Monitor
from scodkit.report import charts, monitor_charts
from scodkit.report.checks import (
    FAILED,
    FAILED_LEVEL,
    LOOK,
    LOOK_LEVEL,
    NOT_CHECKED,
    PASSED,
    Check,
    checks_of,
)
from scodkit.report.drawing import colours_of
from scodkit.report.findings import Findings
from scodkit.report.gallery import gallery, listed
from scodkit.report.numbers import by_kind, compared, document, thresholds, versions
from scodkit.report.page import Cell, Row, Section, Table, cell, render
from scodkit.report.rates import Rate, asked, percent
from scodkit.report.report import MethodLine, Report, ScoredSet

_EXPLAINED = 60  # samples of each set whose layers' shares are added up
_MOST_LAYERS = 20
_LONGEST = 300  # letters of a note


def made(report: Report) -> tuple[str, dict[str, Any]]:
    """Return the page of a report as HTML, and its numbers.

    Args:
        report: What to show.
    """
    found = Findings.of(report)
    checks, monitor = checks_of(found), report.monitor
    promise, promised = charts.promise(found)
    errors, kept = charts.errors(found)
    numbers = document(found, checks, promised, kept)
    pictures, no_slopes = gallery(found)
    slider = thresholds(found)
    verdict = "" if report.stream is None else report.stream.verdict
    stream = monitor_charts.stream_charts(report.stream, found.threshold)
    fit = monitor_charts.spectrum(found.summary) + monitor_charts.captured(found.summary)
    drawn = charts.histogram(found)
    sections = (
        Section("scores", charts=drawn, slider=slider, tables=[_scores(found)]),
        Section("promise-kept", charts=promise),
        Section("separation", charts=charts.separation(found)),
        Section("classes", tables=[_classes(found)]),
        Section("mistakes", charts=errors),
        Section(
            "inputs",
            note=no_slopes,
            gallery=pictures,
            filters=_filters(found),
            tables=[listed(found)],
        ),
        Section("methods", tables=[_methods(report.methods)]),
        Section("stream-of-samples", verdict, charts=stream, stacked=True),
        Section("layers", tables=_layers(monitor, report.sets)),
        Section("fit", charts=fit),
        Section("compared", tables=_compared(numbers, report)),
        Section(
            "configuration", tables=[_settings(found, numbers)], folded=[_parameters(monitor)]
        ),
    )
    page = render(
        [section for section in sections if section],
        slider,
        title=report.title,
        lead=_lead(found),
        made=_made_by(numbers),
        checks=checks,
        verdicts=_verdicts(checks),
        levels=_levels(checks),
        facts=_facts(found),
        notes=found.summary.notes,
    )
    return page, numbers


def _verdicts(checks: Sequence[Check]) -> str:
    """Return how many checks have each verdict."""
    counts = Counter(check.verdict for check in checks)
    if len(counts) == 1 and PASSED in counts:
        return f"all {len(checks)} passed"
    words = {FAILED: "failed", LOOK: "to look at", NOT_CHECKED: "not checked", PASSED: "passed"}
    return ", ".join(f"{counts[own]} {word}" for own, word in words.items() if counts[own])


def _lead(found: Findings) -> str:
    """Return a sentence of what was looked at, and one of when an alarm is raised."""
    report, calibration = found.report, found.report.monitor.calibration
    sets = [
        f"{len(one)} inputs of {one.name} ({'known' if one.known else 'unknown'})"
        for one in report.sets
    ]
    *first, last = sets or ["no inputs"]
    scored = f"{', '.join(first)} and {last}" if first else last
    lead = (
        f"The monitor of a {type(report.monitor.model).__name__} network, fitted on "
        f"{found.summary.num_data} inputs, scored {scored}."
    )
    if found.threshold is not None and calibration is not None:
        lead += (
            f" Scores above {found.threshold:.3g} nats raise an alarm; this threshold comes "
            f"from {calibration.num_data} held-out inputs, for {asked(report.false_alarm)} "
            "false alarms."
        )
    return lead


def _made_by(numbers: Mapping[str, Any]) -> str:
    """Return when, with what and from what the report was made."""
    when = numbers["made"].replace("T", " ").replace("+00:00", " UTC")
    own = numbers["versions"]
    return f"{when}, scodkit {own['scodkit']}, torch {own['torch']}, Python {own['python']}"


def _levels(checks: Sequence[Check]) -> str:
    """Return what chance does to the checks."""
    tests = sum(check.chance is not None for check in checks)
    levels = "Ranges on this page are 95 % intervals."
    if tests:
        levels += (
            f" If all is well, chance alone fails a check on at most "
            f"{percent(FAILED_LEVEL, 0)} of pages, and marks one to look at on at most "
            f"{percent(LOOK_LEVEL, 0)}."
        )
    return levels


def _facts(found: Findings) -> dict[str, tuple[str, str]]:
    """Return the numbers to see first, each with its interval or its unit."""
    facts, known = {}, [one.name for one in found.known]
    for name, rate in found.alarms.items():
        what = "false alarms" if name in known else "caught"
        facts[f"{what}, {name}"] = (percent(rate.share), rate.detail)
    for name, rate in found.mistakes.items():
        facts[f"mistakes, {name}"] = (percent(rate.share), rate.detail)
    for name, pair in found.curves.items():
        roc = pair.roc
        ends = f"{roc.area_low:.3f} to {roc.area_high:.3f}"
        facts[f"AUROC, {name}"] = (f"{roc.area:.3f}", ends)
    if found.threshold is not None:
        facts["alarm above"] = (f"{found.threshold:.3g} nats", "score of an input")
    facts["captured curvature"] = (
        percent(found.summary.captured),
        f"{len(found.summary.values)} directions",
    )
    stream = found.report.stream
    if stream is not None and stream.alarmed_at is not None:
        facts["stream alarm at sample"] = (str(stream.alarmed_at), f"of {len(stream.scores)}")
    return facts


def _scores(found: Findings) -> Table:
    """Return quantiles of the scores of each set, and its share of alarms."""
    levels = torch.tensor([0.05, 0.5, 0.95], dtype=torch.float64)
    rows = [
        (
            one.name,
            "known" if one.known else "unknown",
            cell(len(one), "d"),
            *torch.quantile(one.scores, levels, interpolation="lower").tolist(),
            _rate(found.alarms.get(one.name)),
            _rate(found.mistakes.get(one.name)),
        )
        for one in found.report.sets
    ]
    titles = (
        *("set", "kind", "inputs", "5 % below", "median", "95 % below"),
        *("alarms", "mistakes"),
    )
    return Table("Scores of the sets, in nats", titles, rows, sortable=True)


def _rate(rate: Rate | None) -> Cell | None:
    return None if rate is None else Cell(rate.words, rate.share)


def _classes(found: Findings) -> Table:
    """Return alarms and mistakes by class."""
    rows: list[Row] = []
    for one in found.report.sets:
        table = by_kind(found, one.name)
        if len(table) < 2:
            continue
        for kind, (raised, wrong) in table.items():
            count = sum(own == kind for own in found.kinds[one.name])
            rows.append((kind, one.name, cell(count, "d"), _rate(raised), _rate(wrong)))
    titles = ("class", "set", "inputs", "alarms", "mistakes")
    return Table("Alarms and mistakes by class", titles, rows, sortable=True)


def _filters(found: Findings) -> dict[str, Sequence[str]]:
    """Return what inputs can be chosen by."""
    show = ["a few of each set", "all"]
    show += ["alarms", "no alarm"] if found.flags else []
    show += ["mistakes"] if found.mistakes else []
    kinds = dict.fromkeys(kind for own in found.kinds.values() for kind in sorted(set(own)))
    return {"show": show, "set": [one.name for one in found.report.sets], "class": list(kinds)}


def _methods(methods: Sequence[MethodLine]) -> Table:
    rows: list[Row] = []
    for line in methods:
        auroc = cell(line.auroc, ".3f")
        if line.auroc is not None and line.auroc_ends is not None:
            low, high = line.auroc_ends
            auroc = Cell(f"{auroc.text} ({low:.3f} to {high:.3f})", line.auroc)
        shares: list[Cell] = []
        for place, share in enumerate((line.false_alarms, line.caught)):
            if share is None or line.inputs is None:
                shares.append(cell(share, ".1%"))
            else:
                total = line.inputs[place]
                shares.append(_rate(Rate(round(share * total), total)) or cell(None))
        passes, seconds = cell(line.forward_passes, ".2g"), cell(line.fit_seconds, ".2f")
        rows.append((line.name, auroc, cell(line.aupr, ".3f"), *shares, passes, seconds))
    titles = (
        *("method", "AUROC", "AUPR", "false alarms", "caught"),
        *("time, in forward passes", "fit, seconds"),
    )
    caption = (
        "Methods, with 95 % intervals. Where two intervals overlap, the methods may be "
        "equally good; times change from run to run"
    )
    return Table(caption, titles, rows, sortable=True)


def _layers(monitor: Monitor, sets: Sequence[ScoredSet]) -> list[Table]:
    """Return the shares of the layers in the scores of each set with inputs."""
    layers: tuple[str, ...] = ()
    shown, colours, shares = [], [], []
    for one, colour in zip(sets, colours_of(sets), strict=True):
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


def _compared(numbers: Mapping[str, Any], report: Report) -> list[Table]:
    """Return the table of two reports, if there is another one.

    Raises:
        OptionError: If the other one is of a form that is not known.
    """
    if report.earlier is None:
        return []
    try:
        return [compared(numbers, report.earlier)]
    except (KeyError, TypeError, AttributeError) as error:
        raise OptionError(
            f"expected the numbers of a report of this version, got others ({error!r}); make "
            "the other report again"
        ) from error


def _settings(found: Findings, numbers: Mapping[str, Any]) -> Table:
    """Return what made this page, with the fingerprints of the weights."""
    report, monitor = found.report, found.report.monitor
    fitted, basis, calibration = monitor.fitted, monitor.basis, monitor.calibration
    calibrated_on = "none"
    if calibration is not None:
        calibrated_on = f"{calibration.num_data} held-out inputs"
        if calibration.groups is not None:
            calibrated_on += f" in {len(set(calibration.groups.tolist()))} groups"
    settings = {"made": numbers["made"]}
    settings |= {"command": report.command} if report.command else {}
    settings |= {f"data, {name}": where for name, where in report.data.items()}
    settings |= {
        "inputs fitted": f"{basis.num_data}, {monitor.skipped} skipped",
        "calibration": calibrated_on,
        **{f"inputs, {one.name}": str(len(one)) for one in report.sets},
        "model": type(monitor.model).__name__,
        "likelihood": repr(monitor.likelihood),
        "sketch": repr(monitor.sketch),
        "rank": f"{monitor.rank} asked for, {basis.rank} kept",
        "prior scale": f"{monitor.prior_scale:g}",
        "task": "all of the prediction" if monitor.task is None else "a function",
        "output of a sample": str(tuple(fitted.shape)),
        "captured curvature": f"{basis.captured:.4f} of {basis.trace:.4g}",
        "scores are upper bounds of exact ones": "yes" if basis.over_estimates else "not known",
        "fingerprint of the chosen weights": fitted.fingerprints.parameters,
        "fingerprint of the model": fitted.fingerprints.model,
        **versions(),
    }
    settings |= {f"note, {name}": _in_words(value) for name, value in monitor.notes.items()}
    rows = list(settings.items())
    return Table("What made this page", ("what", "value"), rows)


def _in_words(note: object) -> str:
    """Return a note of a monitor as words."""
    if isinstance(note, Mapping):
        return "; ".join(f"{key} {_in_words(value)}" for key, value in note.items())
    if isinstance(note, (list, tuple)):
        return ", ".join(map(_in_words, note))[:_LONGEST]
    return note if isinstance(note, str) else json.dumps(note)[:_LONGEST]


def _parameters(monitor: Monitor) -> Table:
    """Return the chosen parameters by layer and name, with their shapes and sizes."""
    rows = []
    for block in monitor.fitted.parameters.blocks:
        path = block.name.rpartition(".")[0]
        (layer,) = layer_names(monitor.model, [path]) if path else ("the model itself",)
        shape = " x ".join(map(str, block.shape)) or "1"
        rows.append((block.name, layer, shape, cell(math.prod(block.shape), "d")))
    titles = ("parameter", "layer", "shape", "numbers")
    return Table("Weights the scores are about", titles, rows)
