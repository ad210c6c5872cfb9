"""``scod calibrate``: held-out data, so that scores get p-values and alarms a rate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from scodkit.cli import options
from scodkit.cli import output as shown

if TYPE_CHECKING:
    from scodkit import Calibration

_RATES = (0.01, 0.05, 0.1)


def calibrate(  # noqa: PLR0913 (each a choice of its own)
    ctx: typer.Context,
    monitor: options.MonitorArgument,
    model: options.ModelArgument,
    data: Annotated[
        str,
        typer.Argument(
            metavar="DATA",
            help=f"Data like the training data, not used for it: {options.DATA_FORMS}.",
            show_default=False,
        ),
    ],
    output: options.OtherOutputOption = None,
    weights: options.WeightsOption = None,
    batch_size: options.BatchSizeOption = 64,
    device: options.DeviceOption = "cpu",
    config: options.ConfigOption = None,
    force: options.ForceOption = False,
    as_json: options.JsonOption = False,
) -> None:
    """Score held-out data and keep the scores in the monitor; never the training data.

    \b
    scod calibrate monitor.scod model.py:net heldout.csv
    scod calibrate monitor.scod shop.nets:resnet shop.data:heldout -o calibrated.scod
    """  # noqa: D301 (\b keeps the lines of the examples)
    from scodkit.cli.loading import batches_of, open_monitor, running

    path = output or monitor
    with shown.stoppable(f"{path} is as it was; type the same command again"):
        shown.check_output(path, ctx.params, force=force, itself=monitor)
        opened, form = open_monitor(monitor, model, weights, device)
        progress = shown.shows_progress(as_json)
        batches = batches_of(data, batch_size, form, progress=progress)
        with running(opened):
            opened.calibrate(batches, progress=progress)
        opened.notes["calibrate"] = options.noted_options(ctx)
        opened.save(path)
    assert opened.calibration is not None
    facts = calibration_facts(opened.calibration)
    if as_json:
        shown.show_json({"monitor": str(path), **facts})
        return
    thresholds = [
        f"{shown.number(threshold)} at {float(rate):.0%} false alarms"
        for rate, threshold in facts["thresholds"].items()
    ]
    shown.show_facts(
        {
            "monitor": str(path),
            "held-out samples": str(facts["held_out"]),
            "median score": shown.number(facts["median_score"]),
            "thresholds": ", ".join(thresholds) or "too few samples for a rate of 10 %",
        }
    )
    shown.note(f"next: scod score {path} MODEL INPUTS")


def calibration_facts(calibration: Calibration) -> dict[str, Any]:
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
