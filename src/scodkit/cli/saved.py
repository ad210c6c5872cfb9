"""Saved monitors, opened beside the model they belong to."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from scodkit import Monitor
from scodkit.cli.files import check_regular
from scodkit.cli.inputs import Form
from scodkit.cli.loading import load_model
from scodkit.errors import MismatchError


def open_monitor(
    path: Path, model: str, weights: Path | None, device: str
) -> tuple[Monitor, Form]:
    """Return a saved monitor, and what the inputs of its model look like.

    Args:
        path: Where it is.
        model: The model it was fitted on, as the user names it.
        weights: A file of the model's weights; None if it comes with them.
        device: Where the model is to run.
    """
    network = load_model(model, weights, device)
    monitor = load_monitor(path, network, weights)
    return monitor, Form.of_fit(monitor.notes, network)


def load_monitor(path: Path, model: nn.Module, weights: Path | None) -> Monitor:
    """Return a saved monitor of a model.

    Args:
        path: Where it is.
        model: The model it was fitted on.
        weights: Where the model's weights are from; None if it came with them.

    Raises:
        MismatchError: If it belongs to another model.
    """
    check_regular(path)
    try:
        return Monitor.load(path, model)
    except MismatchError as error:
        if weights is not None:
            raise
        raise MismatchError(f"{error} (was --weights left out?)") from error
