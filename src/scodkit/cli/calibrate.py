"""``scod calibrate``: held-out scores for a monitor, which give p-values and alarms a rate."""

from __future__ import annotations

from typing import Annotated

from typer import Argument, Context

from scodkit.cli import inspect, options
from scodkit.cli import output as shown


def calibrate(  # noqa: PLR0913 (each a choice of its own)
    ctx: Context,
    monitor: options.MonitorArgument,
    model: options.ModelArgument,
    data: Annotated[
        str,
        Argument(
            metavar="DATA",
            help=f"Data like the training data, not used for it: {options.DATA_FORMS}.",
        ),
    ],
    output: options.OtherOutputOption = None,
    drop: options.DropOption = None,
    target: options.TargetOption = None,
    id: options.IdOption = None,
    weights: options.WeightsOption = None,
    batch_size: options.BatchSizeOption = 64,
    device: options.DeviceOption = "cpu",
    config: options.ConfigOption = None,
    force: options.ForceOption = False,
    as_json: options.JsonOption = False,
) -> None:
    """Score held-out data, so that p-values and alarms have a rate.

    The scores are kept in the monitor. Never calibrate with the training data.

    \b
    scod calibrate monitor.scod model.py:net heldout.csv
    scod calibrate monitor.scod shop.nets:resnet shop.data:heldout \\
      -o calibrated.scod
    """  # noqa: D301 (\b keeps the lines of the examples)
    from scodkit.cli.loading import batches_of, open_monitor, running
    from scodkit.cli.tables import Columns

    path = output or monitor
    with shown.stoppable(f"{path} is as it was; type the same command again"):
        shown.check_output(path, ctx.params, itself=monitor)
        opened, form = open_monitor(monitor, model, weights, device)
        columns = Columns.of(drop=drop, target=target, id=id)
        batches = batches_of(data, batch_size, form, columns=columns)
        with running(opened):
            opened.calibrate(batches, progress=shown.shows_progress())
        opened.notes["calibrate"] = options.noted_options(ctx)
        opened.save(path)
    assert opened.calibration is not None
    if as_json:
        document = inspect.calibration_document(opened.calibration)
        shown.show_json({"monitor": str(path), **document})
        return
    shown.show_facts({"monitor": str(path), **inspect.calibration_facts(opened.calibration)})
    shown.next_score(path, ctx.params, data)
