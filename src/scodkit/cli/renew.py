"""``scod renew``: the recipe of a saved monitor, fitted anew on weights that have changed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Context, Option

from scodkit.cli import options
from scodkit.cli import output as shown
from scodkit.cli.inspect import show_fit
from scodkit.errors import OptionError

if TYPE_CHECKING:
    from torch import nn

    from scodkit import Monitor


def renew(  # noqa: PLR0913 (each a choice of its own)
    ctx: Context,
    monitor: options.MonitorArgument,
    model: options.ModelArgument,
    data: options.TrainingDataArgument,
    heldout: Annotated[
        str | None, Option(metavar="DATA", help="Held-out data, to calibrate with.")
    ] = None,
    output: options.OtherOutputOption = None,
    weights: options.WeightsOption = None,
    batch_size: options.BatchSizeOption = 64,
    device: options.DeviceOption = "cpu",
    config: options.ConfigOption = None,
    force: options.ForceOption = False,
    as_json: options.JsonOption = False,
) -> None:
    """Fit and calibrate a monitor anew, as it was before, after the model was trained on.

    \b
    scod renew monitor.scod model.py:net train.csv --heldout heldout.csv
    """  # noqa: D301 (\b keeps the lines of the examples)
    import torch

    from scodkit.cli.files import Form
    from scodkit.cli.loading import batches_of, load_model, running

    path = output or monitor
    with shown.stoppable(f"{path} is as it was; type the same command again"):
        shown.check_output(path, ctx.params, itself=monitor)
        network = load_model(model, weights, device)
        renewed = _unfitted(monitor, network)
        noted = renewed.notes.get("fit", {})  # how the fit was made, as far as a file tells
        on_bad = noted.get("on_bad", "raise")
        form = Form.of_fit(renewed.notes, network)
        batches = batches_of(data, batch_size, form, finite=on_bad == "raise")
        heldout_batches = None
        if heldout is not None:
            heldout_batches = batches_of(heldout, batch_size, form)
        with running(renewed):
            renewed.renew(
                batches,
                heldout_batches,
                progress=shown.shows_progress(),
                on_bad=on_bad,
                check_deterministic=noted.get("check_deterministic", True),
                precision=torch.bfloat16 if noted.get("precision") == "bfloat16" else None,
                products=noted.get("products"),
            )
        for earlier in ("calibrate", "merge", "parts"):
            renewed.notes.pop(earlier, None)
        renewed.notes["renew"] = options.noted_options(ctx)
        renewed.save(path)
    show_fit(path, renewed, as_json)


def _unfitted(path: Path, model: nn.Module) -> Monitor:
    """Return a monitor with the options of a saved one, for a model whose weights may differ.

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
