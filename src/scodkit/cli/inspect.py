"""``scod inspect``: everything a saved monitor says about itself, without its model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import scodkit
from scodkit.cli import messages
from scodkit.cli import output as shown
from scodkit.cli.options import JsonOption, MonitorArgument

_RATES = (0.01, 0.05, 0.1)  # of false alarms, whose thresholds are shown
# what is shown of a header as it is
_HEADER = (
    *("format", "scodkit_version", "torch_version", "likelihood", "sketch", "rank"),
    *("prior_scale", "parameters", "output_shape", "fingerprints"),
)


def inspect(monitor: MonitorArgument, as_json: JsonOption = False) -> None:
    """Show all that a monitor says of itself, without its model.

    That is versions, likelihood, sketch, curvature, calibration and options. The file is
    checked against its digest.

    \b
    scod inspect monitor.scod
    scod inspect monitor.scod --json | jq .captured_curvature
    """  # noqa: D301 (\b keeps the lines of the examples)
    from scodkit import monitor_file
    from scodkit.summary import summarise

    with shown.stoppable("nothing was changed"):
        header, tensors = monitor_file.read_file(monitor)
    # the residual is not shown, and may be infinite, which JSON cannot say
    numbers = {**header["basis"], "residual_norm": math.inf}
    calibration = None
    if "calibration" in tensors:
        groups = tensors.get("calibration_groups")
        calibration = scodkit.Calibration(tensors["calibration"], groups)
    summary = summarise(
        scodkit.Eigenbasis(tensors["values"], tensors["vectors"], **numbers),
        header["prior_scale"],
        weights={name: math.prod(shape) for name, shape in header["parameters"].items()},
        skipped=header["skipped"],
        scores=None if calibration is None else calibration.scores,
        parts=None,
    )
    functions = [name for name, given in header["functions"].items() if given]
    notes, num_bytes = header.get("notes", {}), monitor.stat().st_size
    if as_json:
        shown.show_json(
            {
                "monitor": str(monitor),
                "bytes": num_bytes,
                **{name: header[name] for name in _HEADER},
                **_summary_document(summary),
                "functions": functions,
                "eigenvalues": summary.values.tolist(),
                "has_sketch": "state" in header,
                "calibration": calibration and calibration_document(calibration),
                "notes": notes,
            }
        )
        return
    no_sketch = "" if "state" in header else ", not in the file: no updates or merges"
    facts = {
        "monitor": f"{monitor}, {num_bytes / 1e6:.3g} MB",
        "written by": f"scodkit {header['scodkit_version']}, torch {header['torch_version']}, "
        f"format {header['format']}",
        "likelihood": _object(header["likelihood"]),
        "sketch": _object(header["sketch"]) + no_sketch,
        "rank": str(header["rank"]),
        "prior scale": shown.number(header["prior_scale"]),
        "functions": ", ".join(functions) or "none",
        **_summary_facts(summary),
        "parameters": ", ".join(header["parameters"]),
        "output shape": str(tuple(header["output_shape"])),
        "calibration": "none; scod calibrate makes one",
        **({} if calibration is None else calibration_facts(calibration)),
        "fingerprint of weights": header["fingerprints"]["parameters"],
        "fingerprint of model": header["fingerprints"]["model"],
    }
    for verb, options in notes.items():
        for name, value in options.items() if isinstance(options, dict) else ():
            facts[f"{verb}: {name.replace('_', '-')}"] = str(value)
    shown.show_facts(facts)
    if calibration is None and notes.get("fit"):
        shown.next_line(*messages.calibrate_command(monitor, notes["fit"], notes))


def show_fit(
    path: Path,
    monitor: scodkit.Monitor,
    as_json: bool,
    given: Mapping[str, Any],
) -> None:
    """Show the summary of a fit, and what to type next.

    Args:
        path: Where the monitor was saved.
        monitor: The monitor.
        as_json: Show one JSON document.
        given: What the command was given, by name of the argument or option.
    """
    summary = monitor.summary()
    if as_json:
        rank = len(summary.values)
        shown.show_json({"monitor": str(path), "rank": rank, **_summary_document(summary)})
        return
    shown.show_facts({"monitor": str(path), **_summary_facts(summary)})
    if monitor.calibration is not None:
        shown.next_score(path, given, str(given["heldout"]))
    elif given.get("shard") is not None:
        shown.next_line(*messages.merge_command(path, given))
    else:
        shown.next_line(*messages.calibrate_command(path, given, monitor.notes))


def calibration_document(calibration: scodkit.Calibration) -> dict[str, Any]:
    """Return the number of held-out samples, their median score and thresholds.

    Args:
        calibration: Of a monitor.

    Returns:
        Plain data; the thresholds (nats) are by false-alarm rate, for those rates that so many
        samples can promise, and only where there are no groups.
    """
    fewest = 1 / (calibration.num_data + 1)
    rates = [rate for rate in _RATES if rate >= fewest and calibration.groups is None]
    return {
        "held_out": calibration.num_data,
        "median_score": float(calibration.scores.median()),
        "thresholds": {str(rate): calibration.threshold(rate) for rate in rates},
    }


def calibration_facts(calibration: scodkit.Calibration) -> dict[str, str]:
    """Return the same as `calibration_document` in words."""
    document = calibration_document(calibration)
    thresholds = [
        f"{shown.number(threshold)} at {float(rate):.0%} false alarms"
        for rate, threshold in document["thresholds"].items()
    ]
    median = shown.number(document["median_score"])
    return {
        "calibration": f"{document['held_out']} held-out samples, median score {median}",
        "thresholds": ", ".join(thresholds) or "none: by group, or too few samples",
    }


def _summary_document(summary: scodkit.Summary) -> dict[str, Any]:
    return {
        "samples": summary.num_data,
        "skipped": summary.skipped,
        "weights": summary.num_parameters,
        "captured_curvature": summary.captured,
        "effective_rank": summary.effective_rank,
        "certified": summary.certified,
        "remarks": list(summary.notes),
    }


def _summary_facts(summary: scodkit.Summary) -> dict[str, str]:
    return {
        "fitted on": f"{summary.num_data} samples, {summary.skipped} skipped",
        "weights": summary.chosen,
        "captured curvature": f"{summary.captured:.1%} with rank {len(summary.values)}, "
        f"effective rank {summary.effective_rank:.1f}",
        "certified": "yes" if summary.certified else "no",
        "looks wrong": "; ".join(summary.notes) or "nothing",
    }


def _object(description: Mapping[str, Any]) -> str:
    """Return an object of a header as it would be typed."""
    options = (
        f"{name}={_object(value) if isinstance(value, Mapping) else value}"
        for name, value in description.items()
        if name != "type" and value is not None
    )
    return f"{description['type']}({', '.join(options)})"
