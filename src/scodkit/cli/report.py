"""``scod report``: one page of a monitor and what it says of known and unknown inputs."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, overload

import torch
import typer
from torch import Tensor

from scodkit import Monitor, Scored
from scodkit.alarms import DriftAlarm
from scodkit.cli import output as shown
from scodkit.cli.config import ConfigOption
from scodkit.cli.inputs import Batches, batches_of
from scodkit.cli.loading import running
from scodkit.cli.options import (
    DATA_FORMS,
    BatchSizeOption,
    DeviceOption,
    JsonOption,
    ModelArgument,
    MonitorArgument,
    WeightsOption,
)
from scodkit.cli.saved import open_monitor
from scodkit.errors import BatchError, NotFittedError
from scodkit.report import Report, ScoredSet, WatchedStream, check_installed
from scodkit.stream import batches_of as with_progress
from scodkit.stream import num_batches

# bytes of inputs that are kept of data that can be read only once
_MOST_KEPT = 2**30


def report(  # noqa: PLR0913 (each a choice of its own)
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
    as_json: JsonOption = False,
) -> None:
    """Show a monitor at work: one HTML file that needs no network.

    \b
    scod report monitor.scod model.py:net --known test.csv --unknown others.csv
    scod report monitor.scod model.py:net --known day=day/ --unknown night=night/ -o cars.html
    """  # noqa: D301 (\b keeps the lines of the examples)
    with shown.stoppable(f"{output} is as it was; type the same command again"):
        shown.check_output(output)
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


def scored_set(
    monitor: Monitor, name: str, batches: Batches | Iterable[Any], known: bool, progress: bool
) -> ScoredSet:
    """Return a set with its scores, and with inputs where they are tensors.

    Args:
        monitor: Fitted.
        name: Of the set.
        batches: Of its inputs.
        known: Whether they are like the training data.
        progress: Show a progress bar.

    Raises:
        BatchError: If there are none.
    """
    scored: list[Scored] = []
    kept: list[Tensor] = []
    held = 0
    with running(monitor):
        told = with_progress(batches, num_batches(batches), f"scoring {name}", progress)
        for batch in told:
            scored.append(monitor(batch))
            if not isinstance(batches, Batches) and held <= _MOST_KEPT:
                kept.append(_first_tensor(batch))
                held += kept[-1].numel() * kept[-1].element_size()
    scores = torch.cat([torch.empty(0), *(part.score.cpu() for part in scored)])
    if not len(scores):
        raise BatchError(f"expected inputs in {name!r}, found none; leave the set out")
    p_values = [part.p_value for part in scored if part.p_value is not None]
    return ScoredSet(
        name,
        scores,
        known,
        _Read(batches) if isinstance(batches, Batches) else _joined(kept, len(scores)),
        torch.cat([part.output.detach().cpu() for part in scored]),
        torch.cat(p_values) if p_values else None,
        _labels(batches),
    )


class _Read(Sequence[Tensor]):
    """Inputs that are read again when they are asked for: a page shows few of them."""

    def __init__(self, batches: Batches) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return len(self._batches.dataset)

    @overload
    def __getitem__(self, place: int) -> Tensor: ...

    @overload
    def __getitem__(self, place: slice) -> Sequence[Tensor]: ...

    def __getitem__(self, place: int | slice) -> Tensor | Sequence[Tensor]:
        if isinstance(place, slice):
            return list(self._batches.read(place))
        return self._batches.read(slice(place, place + 1))[0]


def _first_tensor(batch: object) -> Tensor:
    """Return the inputs of a batch, empty where they are not one tensor."""
    first = batch[0] if isinstance(batch, (tuple, list)) and batch else batch
    return first if isinstance(first, Tensor) else torch.empty(0)


def _joined(kept: Sequence[Tensor], count: int) -> Tensor | None:
    """Return all inputs, or None if not all were kept, or they differ in shape."""
    same = len({part.shape[1:] for part in kept}) == 1
    return torch.cat(list(kept)) if same and sum(map(len, kept)) == count else None


def _labels(batches: Batches | Iterable[Any]) -> list[str] | None:
    """Return the names of inputs that have names of their own, such as files."""
    if not isinstance(batches, Batches):
        return None
    names = [batches.dataset.name(row) for row in range(len(batches.dataset))]
    return [str(name) for name in names] if isinstance(names[0], str) else None


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
