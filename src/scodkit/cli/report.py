"""``scod report``: one page of a monitor and what it says of known and unknown inputs."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from scodkit.cli import output as shown
from scodkit.cli.config import ConfigOption
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
from scodkit.errors import NotFittedError

if TYPE_CHECKING:
    from scodkit import Monitor

_HEAD_BYTES = 4096  # of a page: what it is made by is among the first


def report(  # noqa: PLR0913 (each a choice of its own)
    ctx: typer.Context,
    monitor: MonitorArgument,
    model: ModelArgument,
    known: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Inputs like the training data, as DATA or NAME=DATA: {DATA_FORMS}. May be "
            "repeated.",
            show_default=False,
        ),
    ] = None,
    unknown: Annotated[
        list[str] | None,
        typer.Option(help="Inputs unlike the training data, likewise.", show_default=False),
    ] = None,
    stream: Annotated[
        str | None,
        typer.Option(help="Inputs in their order, watched for a drift.", show_default=False),
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="File for the page.")] = Path(
        "report.html"
    ),
    title: Annotated[str, typer.Option(help="Heading of the page.")] = "What the network knows",
    false_alarm: Annotated[
        float, typer.Option(help="Accepted share of alarms on known inputs.")
    ] = 0.05,
    weights: WeightsOption = None,
    batch_size: BatchSizeOption = 64,
    device: DeviceOption = "cpu",
    config: ConfigOption = None,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Show a monitor at work: one HTML file that needs no network.

    \b
    scod report monitor.scod model.py:net --known test.csv --unknown others.csv
    scod report monitor.scod model.py:net --known day=day/ --unknown night=night/ -o cars.html
    """  # noqa: D301 (\b keeps the lines of the examples)
    from scodkit.alarms import DriftAlarm
    from scodkit.cli.answers import scored_set
    from scodkit.cli.inputs import batches_of
    from scodkit.cli.saved import open_monitor
    from scodkit.report import Report, WatchedStream, check_installed

    with shown.stoppable(f"{output} is as it was; type the same command again"):
        shown.check_output(output, ctx.params, is_page, force=force)
        check_installed()
        found, form = open_monitor(monitor, model, weights, device)
        _check_calibration(found, false_alarm, stream)
        progress = shown.shows_progress(as_json)
        specs = [(spec, True) for spec in known or []] + [(s, False) for s in unknown or []]
        sets = []
        for spec, is_known in specs:
            name, data = named_data(spec)
            batches = batches_of(data, batch_size, form)
            sets.append(scored_set(found, name, batches, is_known, progress))
        watched = None
        if stream is not None and found.calibration is not None:
            batches = batches_of(stream, batch_size, form)
            scores = scored_set(found, "stream", batches, True, progress).scores
            watched = WatchedStream.of(DriftAlarm(found.calibration), scores)
        page = Report(found, sets, stream=watched, title=title, false_alarm=false_alarm)
        with contextlib.redirect_stdout(sys.stderr):  # the user's model may print
            page.save(output)
    if as_json:
        counts = {one.name: len(one) for one in sets}
        shown.show_json({"report": str(output), "sets": counts})
        return
    shown.show_facts({"report": str(output.resolve())})
    if not specs:
        shown.note(
            "no inputs were given: type --known DATA and --unknown DATA for their scores"
        )


def is_page(path: Path) -> bool:
    """Return whether a file is a page of ours, which may be replaced."""
    with path.open("rb") as file:
        return b'<meta name="generator" content="scodkit ' in file.read(_HEAD_BYTES)


def named_data(spec: str) -> tuple[str, str]:
    """Return the name of a set and where its data is.

    Args:
        spec: ``NAME=DATA``, or ``DATA`` alone, named after its file, folder or callable.

    Examples:
        >>> named_data("night=photos/night"), named_data("runs/test.csv")
        (('night', 'photos/night'), ('test', 'runs/test.csv'))
        >>> named_data("shop.data:heldout")
        ('heldout', 'shop.data:heldout')
    """
    name, equals, data = spec.partition("=")
    if equals and name and data and not Path(spec).exists():
        return name, data
    if Path(spec).exists() or ":" not in spec:
        return Path(spec).stem or spec, spec
    return spec.rpartition(":")[2], spec


def _check_calibration(monitor: Monitor, false_alarm: float, stream: str | None) -> None:
    """Refuse what the calibration cannot give, before any input is read.

    Raises:
        NotFittedError: If a stream is to be watched without one.
    """
    if monitor.calibration is not None:
        if monitor.calibration.groups is None:
            monitor.calibration.threshold(false_alarm)
        return
    if stream is not None:
        raise NotFittedError(
            "expected a calibrated monitor to watch a stream with, got one that is not; type: "
            "scod calibrate MONITOR MODEL HELD_OUT_DATA"
        )
    shown.note("no alarms, as the monitor is not calibrated: scod calibrate MONITOR MODEL DATA")
