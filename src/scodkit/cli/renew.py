"""``scod renew``: the recipe of a saved monitor, fitted anew on weights that have changed."""

from __future__ import annotations

from typing import Annotated

from typer import Context, Option

from scodkit.cli import options
from scodkit.cli import output as shown
from scodkit.cli.inspect import show_fit


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
    """Fit and calibrate anew, as before, after more training.

    \b
    scod renew monitor.scod model.py:net train.csv --heldout heldout.csv
    """  # noqa: D301 (\b keeps the lines of the examples)
    import torch

    from scodkit.cli.files import Form
    from scodkit.cli.loading import (
        batches_of,
        load_model,
        name_columns,
        running,
        unfitted_monitor,
    )

    path = output or monitor
    with shown.stoppable(f"{path} is as it was; type the same command again"):
        shown.check_output(path, ctx.params, itself=monitor)
        network = load_model(model, weights, device)
        renewed = unfitted_monitor(monitor, network)
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
        name_columns(renewed)
        for earlier in ("calibrate", "merge", "parts"):
            renewed.notes.pop(earlier, None)
        renewed.notes["renew"] = options.noted_options(ctx)
        renewed.save(path)
    show_fit(path, renewed, as_json, ctx.params)
