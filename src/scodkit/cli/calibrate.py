"""``scod calibrate``: held-out data, so that scores get p-values and alarms a rate."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from scodkit.cli import output as shown
from scodkit.cli.config import ConfigOption, resolved
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

if TYPE_CHECKING:
    from scodkit import Calibration

_RATES = (0.01, 0.05, 0.1)


def calibrate(  # noqa: PLR0913 (each a choice of its own)
    ctx: typer.Context,
    monitor: MonitorArgument,
    model: ModelArgument,
    data: Annotated[
        str,
        typer.Argument(
            metavar="DATA",
            help=f"Data like the training data, not used for it: {DATA_FORMS}.",
            show_default=False,
        ),
    ],
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
    """Score held-out data and keep the scores in the monitor; never the training data.

    \b
    scod calibrate monitor.scod model.py:net heldout.csv
    scod calibrate monitor.scod shop.nets:resnet shop.data:heldout -o calibrated.scod
    """  # noqa: D301 (\b keeps the lines of the examples)
    from scodkit.cli.inputs import batches_of
    from scodkit.cli.loading import running
    from scodkit.cli.saved import open_monitor

    path = output or monitor
    with shown.stoppable(f"{path} is as it was; type the same command again"):
        shown.check_output(path, ctx.params, force=force, itself=monitor)
        found, form = open_monitor(monitor, model, weights, device)
        progress = shown.shows_progress(as_json)
        batches = batches_of(data, batch_size, form, progress=progress)
        with running(found):
            found.calibrate(batches, progress=progress)
        found.notes["calibrate"] = resolved(ctx)
        found.save(path)
    assert found.calibration is not None
    facts = {"monitor": str(path), **calibration_facts(found.calibration)}
    if as_json:
        shown.show_json(facts)
        return
    limits = facts["thresholds"].items()
    shown.show_facts(
        {
            "monitor": str(path),
            "held-out samples": str(facts["held_out"]),
            "median score": shown.number(facts["median_score"]),
            "thresholds": ", ".join(
                f"{shown.number(limit)} at {float(rate):.0%} false alarms"
                for rate, limit in limits
            )
            or "too few samples for a rate of 10 %",
        }
    )
    shown.note(f"next: scod score {path} MODEL INPUTS")


def calibration_facts(calibration: Calibration) -> dict[str, Any]:
    """Return what held-out scores say, as plain data.

    Args:
        calibration: Of a monitor.

    Returns:
        How many there are, their median, and thresholds (nats) by false-alarm rate: of those
        rates that so many samples can promise, and only where there are no groups.
    """
    fewest = 1 / (calibration.num_data + 1)
    rates = [rate for rate in _RATES if rate >= fewest and calibration.groups is None]
    return {
        "held_out": calibration.num_data,
        "median_score": float(calibration.scores.median()),
        "thresholds": {str(rate): calibration.threshold(rate) for rate in rates},
    }
