"""How a monitor was made, and what it belongs to: the same as its saved file says."""

from __future__ import annotations

import json

import torch

from scodkit.monitor import Monitor
from scodkit.report.table import Cell, Table, plain
from scodkit.version import __version__


def settings_table(monitor: Monitor) -> Table:
    """Return the configuration of a fitted monitor, with the fingerprints of its weights.

    Args:
        monitor: Fitted.
    """
    fitted, basis, calibration = monitor.fitted, monitor.basis, monitor.calibration
    held_out = "none"
    if calibration is not None:
        held_out = f"{calibration.num_data} held-out samples"
        if calibration.groups is not None:
            held_out += f" in {len(set(calibration.groups.tolist()))} groups"
    rows = {
        "model": type(monitor.model).__name__,
        "likelihood": repr(monitor.likelihood),
        "sketch": repr(monitor.sketch),
        "rank": f"{monitor.rank} asked for, {basis.rank} kept",
        "prior scale": f"{monitor.prior_scale:g}",
        "task": "all of the prediction" if monitor.task is None else "a function",
        "output of a sample": str(tuple(fitted.shape)),
        "samples fitted": f"{basis.num_data}, {monitor.skipped} skipped",
        "captured curvature": f"{basis.captured:.4f} of {basis.trace:.4g}",
        "scores err on the safe side": "yes" if basis.certified else "not known",
        "calibration": held_out,
        "fingerprint of the chosen weights": fitted.fingerprints.parameters,
        "fingerprint of the model": fitted.fingerprints.model,
        "scodkit": __version__,
        "torch": torch.__version__,
    }
    rows |= {f"note: {name}": json.dumps(value) for name, value in monitor.notes.items()}
    cells = tuple((Cell(name), Cell(value)) for name, value in rows.items())
    return Table("Configuration and fingerprints", ("what", "value"), cells, sortable=False)


def parameter_table(monitor: Monitor) -> Table:
    """Return the chosen weights by name.

    Args:
        monitor: Fitted.
    """
    blocks = monitor.fitted.parameters.blocks
    rows: list[list[str | float]] = []
    for block in blocks:
        shape = " x ".join(map(str, block.shape)) or "1"
        rows.append([block.name, shape, float(block.columns.stop - block.columns.start)])
    return plain("Weights the scores are about", ("parameter", "shape", "numbers"), rows)
