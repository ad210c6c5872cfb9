"""``scod inspect``: everything a saved monitor says about itself, without its model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from scodkit.cli import output as shown
from scodkit.cli.calibrate import calibration_facts
from scodkit.cli.options import JsonOption, MonitorArgument


def inspect(monitor: MonitorArgument, as_json: JsonOption = False) -> None:
    """Show a monitor's versions, likelihood, sketch, curvature, calibration and options.

    The file is checked against its digest; the model is not needed.

    \b
    scod inspect monitor.scod
    scod inspect monitor.scod --json | jq .captured_curvature
    """  # noqa: D301 (\b keeps the lines of the examples)
    from scodkit import Calibration, Eigenbasis
    from scodkit import monitor_file as storage
    from scodkit.summary import summarise

    with shown.stoppable("nothing was changed"):
        header, tensors = storage.read_file(monitor)
    # the residual is not shown, and may be infinite, which JSON cannot say
    numbers = {**header["basis"], "residual_norm": math.inf}
    basis = Eigenbasis(tensors["values"], tensors["vectors"], **numbers)
    calibration = None
    if "calibration" in tensors:
        calibration = Calibration(tensors["calibration"], tensors.get("calibration_groups"))
    summary = summarise(
        basis,
        header["prior_scale"],
        weights={name: math.prod(shape) for name, shape in header["parameters"].items()},
        skipped=header["skipped"],
        scores=None if calibration is None else calibration.scores,
        parts=None,
    )
    document = {
        "monitor": str(monitor),
        "bytes": monitor.stat().st_size,
        **{name: header[name] for name in ("format", "scodkit_version", "torch_version")},
        **{name: header[name] for name in ("likelihood", "sketch", "rank", "prior_scale")},
        "functions": [name for name, given in header["functions"].items() if given],
        "samples": summary.num_data,
        "skipped": summary.skipped,
        "weights": summary.num_parameters,
        "parameters": header["parameters"],
        "output_shape": header["output_shape"],
        "captured_curvature": summary.captured,
        "effective_rank": summary.effective_rank,
        "eigenvalues": summary.values.tolist(),
        "certified": summary.certified,
        "has_sketch": "state" in header,
        "calibration": None if calibration is None else calibration_facts(calibration),
        "fingerprints": header["fingerprints"],
        "remarks": list(summary.notes),
        "notes": header.get("notes", {}),
    }
    if as_json:
        shown.show_json(document)
    else:
        shown.show_facts(_facts(document))


def _facts(document: Mapping[str, Any]) -> dict[str, str]:
    """Return what is in a monitor in words."""
    calibration = document["calibration"]
    facts = {
        "monitor": f"{document['monitor']}, {document['bytes'] / 1e6:.3g} MB",
        "written by": f"scodkit {document['scodkit_version']}, torch "
        f"{document['torch_version']}, format {document['format']}",
        "likelihood": _object(document["likelihood"]),
        "sketch": _object(document["sketch"])
        + ("" if document["has_sketch"] else ", not in the file: no updates or merges"),
        "rank": str(document["rank"]),
        "prior scale": shown.number(document["prior_scale"]),
        "functions": ", ".join(document["functions"]) or "none",
        "fitted on": f"{document['samples']} samples, {document['skipped']} skipped",
        "weights": f"{document['weights']} in {len(document['parameters'])} parameters: "
        + ", ".join(document["parameters"]),
        "output shape": str(tuple(document["output_shape"])),
        "captured curvature": f"{document['captured_curvature']:.1%}, effective rank "
        f"{document['effective_rank']:.1f}",
        "certified": "yes" if document["certified"] else "no",
        "calibration": "none; type: scod calibrate",
        "fingerprint of weights": document["fingerprints"]["parameters"],
        "fingerprint of model": document["fingerprints"]["model"],
        "looks wrong": "; ".join(document["remarks"]) or "nothing",
    }
    if calibration is not None:
        thresholds = (
            f"; threshold {shown.number(threshold)} at {float(rate):.0%}"
            for rate, threshold in calibration["thresholds"].items()
        )
        held_out = f"{calibration['held_out']} held-out samples"
        facts["calibration"] = held_out + "".join(thresholds)
    for verb, options in document["notes"].items():
        for name, value in options.items() if isinstance(options, dict) else ():
            facts[f"{verb}: {name.replace('_', '-')}"] = str(value)
    return facts


def _object(description: Mapping[str, Any]) -> str:
    """Return an object of a header as it would be typed."""
    options = (
        f"{name}={_object(value) if isinstance(value, Mapping) else value}"
        for name, value in description.items()
        if name != "type" and value is not None
    )
    return f"{description['type']}({', '.join(options)})"
