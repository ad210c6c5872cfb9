"""``scod renew``: the recipe of a saved monitor, fitted anew on weights that have changed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from scodkit.cli import output as shown
from scodkit.cli.config import ConfigOption, resolved
from scodkit.cli.fit import show_fit
from scodkit.cli.options import (
    DATA_FORMS,
    BatchSizeOption,
    DeviceOption,
    ForceOption,
    JsonOption,
    ModelArgument,
    MonitorArgument,
    WeightsOption,
)
from scodkit.errors import OptionError

if TYPE_CHECKING:
    from torch import nn

    from scodkit import Monitor


def renew(  # noqa: PLR0913 (each a choice of its own)
    ctx: typer.Context,
    monitor: MonitorArgument,
    model: ModelArgument,
    data: Annotated[
        str,
        typer.Argument(
            metavar="DATA", help=f"Training data: {DATA_FORMS}.", show_default=False
        ),
    ],
    heldout: Annotated[
        str | None,
        typer.Option(
            metavar="DATA", help="Held-out data, to calibrate with.", show_default=False
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Another file for the result.", show_default=False),
    ] = None,
    weights: WeightsOption = None,
    batch_size: BatchSizeOption = 64,
    device: DeviceOption = "cpu",
    config: ConfigOption = None,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Fit and calibrate a monitor anew, as it was before, after the model was trained on.

    \b
    scod renew monitor.scod model.py:net train.csv --heldout heldout.csv
    """  # noqa: D301 (\b keeps the lines of the examples)
    from scodkit.cli.inputs import Form, batches_of
    from scodkit.cli.loading import load_model, running

    path = output or monitor
    with shown.stoppable(f"{path} is as it was; type the same command again"):
        shown.check_output(path, ctx.params, force=force, itself=monitor)
        network = load_model(model, weights, device)
        found = _recipe_in(monitor, network)
        form, progress = Form.of_fit(found.notes, network), shown.shows_progress(as_json)
        options = _fit_options(found.notes.get("fit", {}))
        finite = options["on_bad"] == "raise"
        batches = batches_of(data, batch_size, form, finite=finite, progress=progress)
        held = None
        if heldout is not None:
            held = batches_of(heldout, batch_size, form, progress=progress)
        with running(found):
            found.renew(batches, held, progress=progress, **options)
        for earlier in ("calibrate", "merge", "parts"):
            found.notes.pop(earlier, None)
        found.notes["renew"] = resolved(ctx)
        found.save(path)
    show_fit(path, found, as_json)


def _recipe_in(path: Path, model: nn.Module) -> Monitor:
    """Return the monitor of a file, for a model that need not have the weights of the file.

    Raises:
        OptionError: If it was made with functions, which are in no file.
    """
    from scodkit import Calibration, Likelihood, Monitor
    from scodkit import monitor_file as storage
    from scodkit.sketch import Sketch, documents

    header, tensors = storage.read(path)
    functions = [name for name, given in header["functions"].items() if given]
    if functions:
        raise OptionError(
            f"expected a monitor that was made without functions, got {path}, which had "
            f"{', '.join(functions)}; renew it in Python: monitor.renew(train, heldout)"
        )
    monitor = Monitor(
        model,
        documents.build(header["likelihood"], Likelihood),
        header["rank"],
        sketch=documents.build(header["sketch"], Sketch),
        parameters=list(header["parameters"]),
        prior_scale=header["prior_scale"],
    )
    monitor.notes = dict(header.get("notes", {}))
    if "calibration" in tensors:
        monitor.calibration = Calibration(tensors["calibration"])
    return monitor


def _fit_options(noted: dict[str, Any]) -> dict[str, Any]:
    """Return how the fit was made, as far as a file tells."""
    from scodkit.cli.choices import PRECISIONS

    precisions = {name.value: dtype for name, dtype in PRECISIONS.items()}
    return {
        "on_bad": noted.get("on_bad", "raise"),
        "check_deterministic": noted.get("check_deterministic", True),
        "precision": precisions.get(str(noted.get("precision"))),
        "products": noted.get("products"),
    }
