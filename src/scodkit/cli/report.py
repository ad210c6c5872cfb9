"""``scod report``: one page of a monitor and what it says of known and unknown inputs."""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Context, Option

from scodkit.cli import messages, options
from scodkit.cli import output as shown
from scodkit.errors import BatchError

if TYPE_CHECKING:
    from torch import Tensor

    from scodkit import Monitor
    from scodkit.report import ScoredSet

_HEAD_BYTES = 4096  # of a page: its generator is named among the first
_MOST_BYTES = 2**30  # bytes of inputs that are kept of data that can be read only once


def report(  # noqa: PLR0913 (each a choice of its own)
    ctx: Context,
    monitor: options.MonitorArgument,
    model: options.ModelArgument,
    known: Annotated[
        list[str] | None,
        Option(
            help="Inputs like the training data, as DATA or NAME=DATA: "
            f"{options.DATA_FORMS}. May be repeated."
        ),
    ] = None,
    unknown: Annotated[
        list[str] | None, Option(help="Inputs unlike the training data, likewise.")
    ] = None,
    stream: Annotated[
        str | None, Option(help="Inputs in their order, watched for a drift.")
    ] = None,
    output: Annotated[Path, Option("--output", "-o", help="File for the page.")] = Path(
        "report.html"
    ),
    compare: Annotated[
        Path | None,
        Option(
            metavar="FILE.json", help="Numbers of another report, to be shown beside these."
        ),
    ] = None,
    classes: Annotated[
        str | None, Option(help="Names of the classes, in the order of the model: cat,dog.")
    ] = None,
    title: Annotated[str, Option(help="Heading of the page.")] = "What the network knows",
    false_alarm: Annotated[
        float, Option(help="Accepted share of alarms on known inputs.")
    ] = 0.05,
    weights: options.WeightsOption = None,
    batch_size: options.BatchSizeOption = 64,
    device: options.DeviceOption = "cpu",
    config: options.ConfigOption = None,
    force: options.ForceOption = False,
    as_json: options.JsonOption = False,
) -> None:
    """Show a monitor at work: one HTML file that needs no network.

    Its numbers go into a .json beside it. Labels of known inputs, in a column that the fit
    calls the target or in batches (inputs, labels), give shares of mistakes.

    \b
    scod report monitor.scod model.py:net --known test.csv --unknown others.csv
    scod report monitor.scod model.py:net --known day=day/ \\
      --unknown night=night/ -o cars.html --compare before.json
    """  # noqa: D301 (\b keeps the lines of the examples)
    from scodkit.alarms.drift import DriftAlarm
    from scodkit.cli.loading import batches_of, open_monitor, threshold_of
    from scodkit.report import Report, WatchedStream, check_installed, read_numbers

    with shown.stoppable(f"{output} is as it was; type the same command again"):
        check_page(output, ctx.params)
        check_installed()
        earlier = None if compare is None else read_numbers(compare)
        opened, form = open_monitor(monitor, model, weights, device)
        if classes is not None:
            opened.notes["classes"] = classes.split(",")
        needed = None if stream is None else "to watch a stream with"
        todo = messages.calibrate_command(monitor, ctx.params, opened.notes)
        if threshold_of(opened, false_alarm, needed=needed, todo=todo[0]) is None:
            shown.note("no alarms: the monitor is not calibrated")
            shown.next_line(*todo)
        sets, data = [], _data_of(opened)
        for specs, is_known in ((known, True), (unknown, False)):
            for spec in specs or ():
                name, where = named_data(spec)
                data[name] = where
                batches = batches_of(where, batch_size, form)
                sets.append(_scored_set(opened, name, batches, is_known))
        watched = None
        if stream is not None and opened.calibration is not None:
            data["stream"] = stream
            batches = batches_of(stream, batch_size, form)
            scores = _scored_set(opened, "stream", batches, True).scores
            watched = WatchedStream.of(DriftAlarm(opened.calibration), scores)
        page = Report(
            opened,
            sets,
            stream=watched,
            title=title,
            false_alarm=false_alarm,
            command=shlex.join(["scod", *sys.argv[1:]]),
            data=data,
            earlier=earlier,
        )
        with contextlib.redirect_stdout(sys.stderr):  # the user's model may print
            page.save(output)
    if as_json:
        counts = {one.name: len(one) for one in sets}
        numbers = str(output.with_suffix(".json"))
        shown.show_json({"report": str(output), "numbers": numbers, "sets": counts})
        return
    shown.show_facts({"report": str(output.resolve())})
    if not sets:
        shown.note(
            "no inputs were given: type --known DATA and --unknown DATA for their scores"
        )


def check_page(output: Path, given: Mapping[str, Any]) -> None:
    """Raise if a page or the numbers beside it cannot be written, as `check_output` does.

    Args:
        output: Where the page is to be.
        given: All that the command was given.
    """
    from scodkit.report.report import is_numbers, numbers_beside

    shown.check_output(output, given, is_page)
    shown.check_output(numbers_beside(output), given, is_numbers)


def _data_of(monitor: Monitor) -> dict[str, str]:
    """Return where the data of the fit and of the calibration is from."""
    of = {"training": "fit", "held out": "calibrate"}
    noted = {name: monitor.notes.get(verb, {}).get("data") for name, verb in of.items()}
    return {name: str(where) for name, where in noted.items() if where is not None}


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


def _scored_set(monitor: Monitor, name: str, batches: Iterable[Any], known: bool) -> ScoredSet:
    """Return a set with its scores and outputs, and with its inputs if they are tensors.

    Raises:
        BatchError: If the set is empty.
    """
    import torch

    from scodkit.cli.files import samples_of
    from scodkit.cli.loading import scored_batches
    from scodkit.model.kinds import first_part
    from scodkit.report import ScoredSet

    samples = samples_of(batches)  # read again for the few that the page shows
    scored, tensors, labels, num_bytes = [], [], [], 0
    title = f"scoring {shown.visible(name)}"
    for batch, part in scored_batches(monitor, batches, title):
        scored.append(part)
        if samples is None and num_bytes <= _MOST_BYTES:
            first = first_part(batch)
            tensors.append(first if isinstance(first, torch.Tensor) else torch.empty(0))
            num_bytes += tensors[-1].nbytes
            labels.append(batch[1] if first is not batch and len(batch) > 1 else None)
    if not scored:
        raise BatchError(f"expected inputs in {name!r}, got none; leave the set out")
    scores = torch.cat([part.score.cpu() for part in scored])
    inputs: Any = samples
    same_shape = len({part.shape[1:] for part in tensors}) == 1
    if same_shape and sum(map(len, tensors)) == len(scores):
        inputs = torch.cat(tensors)
    outputs = torch.cat([part.output.detach().cpu() for part in scored])
    return ScoredSet(
        name,
        scores,
        known,
        inputs=inputs,
        outputs=outputs,
        targets=_targets(monitor, labels if samples is None else samples.targets, outputs),
        labels=None if samples is None else samples.names,
    )


def _targets(
    monitor: Monitor, found: Sequence[object] | None, outputs: Tensor
) -> Tensor | None:
    """Return the right classes or outputs of a set; None where they cannot be told.

    Args:
        monitor: With names of classes among its notes, or without.
        found: Cells of a table, or labels batch by batch.
        outputs: What the model returned.
    """
    import torch

    from scodkit.report.findings import tells_one_class

    if not found:
        return None
    if all(isinstance(label, torch.Tensor) for label in found):
        parts = [label.detach().cpu() for label in found if isinstance(label, torch.Tensor)]
        targets = torch.cat(parts) if all(part.ndim for part in parts) else torch.empty(0)
        whole = not targets.is_floating_point() and targets.shape == outputs.shape[:1]
        alike = targets.shape == outputs.shape if targets.is_floating_point() else whole
        return targets if (whole if tells_one_class(monitor) else alike) else None
    if not all(isinstance(cell, str) for cell in found):
        return None
    try:
        if tells_one_class(monitor):
            names = monitor.notes.get("classes") or [str(i) for i in range(outputs.shape[1])]
            return torch.tensor([list(names).index(cell) for cell in found])
        numbers = torch.tensor([float(str(cell)) for cell in found], dtype=torch.float64)
    except ValueError:
        shown.note(
            "the target is left out of the report: its cells are neither numbers nor names of "
            "classes; name those in the order of the model, --classes cat,dog"
        )
        return None
    return numbers[:, None] if outputs.shape[1:] == (1,) else None
