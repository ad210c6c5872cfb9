"""``scod score``: how atypical inputs are, and which are out of the model's depth."""

from __future__ import annotations

import csv
import io
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from scodkit.cli import output as shown
from scodkit.cli.config import ConfigOption
from scodkit.cli.options import (
    BatchSizeOption,
    DeviceOption,
    ForceOption,
    JsonOption,
    ModelArgument,
    MonitorArgument,
    ScoreBad,
    WeightsOption,
)

if TYPE_CHECKING:
    from scodkit import Monitor
    from scodkit.cli.answers import Alarm, Answer
    from scodkit.cli.inputs import Form

_SHOWN = 40  # rows on a terminal
_LONGEST = 1_000_000  # letters of a first line of ours: it holds 100 numbers and a name
_BAD_LINES = 2  # exit code
_HEAD = re.compile(r"input,prediction(_0(,prediction_\d+)+)?,score,p_value,alarm\n")
_FORMULA = ("=", "+", "-", "@", "\t", "\r")  # how cells begin that a spreadsheet may run


def score(  # noqa: PLR0913 (each a choice of its own)
    ctx: typer.Context,
    monitor: MonitorArgument,
    model: ModelArgument,
    inputs: Annotated[
        str,
        typer.Argument(
            metavar="INPUTS",
            help="A file of arrays (.npy, .npz, .csv), a folder of images, a callable as for "
            "fit; or - for JSON lines on stdin, answered one by one: [0.1, 2.5], or "
            '{"id": 7, "x": [0.1, 2.5]}.',
            show_default=False,
        ),
    ],
    false_alarm: Annotated[
        float | None,
        typer.Option(
            help="Accepted share of alarms on known inputs; 0.05 by default.",
            show_default=False,
        ),
    ] = None,
    confidence: Annotated[
        float | None,
        typer.Option(help="How surely that share is to hold; on average by default."),
    ] = None,
    fail_on_alarm: Annotated[
        bool, typer.Option("--fail-on-alarm", help="Exit code 3 if there is an alarm.")
    ] = False,
    on_bad: Annotated[
        ScoreBad,
        typer.Option(
            help="What an input with a NaN does in a file: on stdin it is always an alarm."
        ),
    ] = ScoreBad.RAISE,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="A .csv or .jsonl file for all of it."),
    ] = None,
    weights: WeightsOption = None,
    batch_size: BatchSizeOption = 64,
    device: DeviceOption = "cpu",
    config: ConfigOption = None,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Predict and score inputs: in nats, larger = more atypical.

    Exit codes: 0 done, 2 bad input, 3 an alarm with --fail-on-alarm, 130 stopped.

    \b
    scod score monitor.scod model.py:net new.csv
    scod score monitor.scod model.py:net photos/ --false-alarm 0.01 -o scores.csv
    tail -f sensor.jsonl | scod score monitor.scod model.py:net -
    """  # noqa: D301, DOC501 (\b keeps the lines of the examples; shown as help)
    from scodkit.cli.answers import Alarm, answers_to
    from scodkit.cli.inputs import batches_of
    from scodkit.cli.saved import open_monitor

    with shown.stoppable("no file was changed; type the same command again"):
        if output is not None:
            shown.check_output(output, ctx.params, is_scores, force=force)
        found, form = open_monitor(monitor, model, weights, device)
        alarm = Alarm.of(found, false_alarm, confidence)
        if inputs == "-":
            code = _answer_stdin(found, form, alarm, output)
            raise typer.Exit(code or (shown.ALARM if fail_on_alarm and alarm.count else 0))
        finite, progress = on_bad is ScoreBad.RAISE, shown.shows_progress(as_json)
        batches = batches_of(inputs, batch_size, form, finite=finite, progress=progress)
        answers = answers_to(found, batches, alarm, progress)
        if output is not None:
            _write(output, answers)
    _show(answers, alarm, output, as_json)
    if fail_on_alarm and alarm.count:
        raise typer.Exit(shown.ALARM)


def _answer_stdin(monitor: Monitor, form: Form, alarm: Alarm, output: Path | None) -> int:
    """Return the exit code, after all lines were answered as they came.

    Raises:
        BadParameter: If a file is asked for: a stream has no end to write it at.
    """
    from scodkit.cli.answers import answers_to_lines

    if output is not None:
        raise typer.BadParameter("a stream is answered on stdout; type > scores.jsonl instead")
    code = 0
    for answer in answers_to_lines(monitor, form, sys.stdin.buffer, alarm):
        code = _BAD_LINES if "error" in answer else code
        shown.show_json(answer)
    return code


def _show(answers: Sequence[Answer], alarm: Alarm, output: Path | None, as_json: bool) -> None:
    if output is not None and as_json:
        counts = {"inputs": len(answers), "alarms": alarm.count if alarm.rate else None}
        shown.show_json({"scores": str(output), **counts})
    elif as_json:
        for answer in answers:
            shown.show_json(answer.document())
    elif output is None:
        most = _SHOWN if sys.stdout.isatty() else len(answers)
        rows = [_cells(answer) for answer in answers[:most]]
        marked = [bool(answer.alarm) for answer in answers[:most]]
        shown.show_table(("input", "prediction", "score", "p-value", "alarm"), rows, marked)
        if len(answers) > most:
            shown.note(f"and {len(answers) - most} more; type -o scores.csv for all")
    shown.note(_summary(answers, alarm, output))


def _summary(answers: Sequence[Answer], alarm: Alarm, output: Path | None) -> str:
    where = "" if output is None else f", written to {output}"
    if alarm.rate is None:
        return (
            f"{len(answers)} inputs scored{where}; for p-values and alarms type: "
            "scod calibrate MONITOR MODEL HELD_OUT_DATA"
        )
    return (
        f"{alarm.count} alarms among {len(answers)} inputs at a false-alarm rate of "
        f"{alarm.rate:.3g}{where}"
    )


def _cells(answer: Answer) -> list[str]:
    parts = answer.prediction
    if parts is None:
        prediction = "..."
    elif isinstance(parts, int):
        prediction = str(parts)
    else:
        prediction = " ".join(map(shown.number, parts))
    raised = "" if answer.alarm is None else "ALARM" if answer.alarm else "no"
    return [
        str(answer.name),
        prediction,
        shown.number(answer.score),
        shown.number(answer.p_value),
        raised,
    ]


def _write(path: Path, answers: Sequence[Answer]) -> None:
    if path.suffix.lower() in (".jsonl", ".json", ".ndjson"):
        lines = (shown.json_line(answer.document()) for answer in answers)
        shown.write_text(path, "".join(f"{line}\n" for line in lines))
        return
    file = io.StringIO(newline="")
    table = csv.writer(file, lineterminator="\n")
    several = answers[0].prediction if answers else None
    names = ["prediction"]
    if isinstance(several, list) and len(several) > 1:
        names = [f"prediction_{place}" for place in range(len(several))]
    table.writerow(["input", *names, "score", "p_value", "alarm"])
    for answer in answers:
        parts: list[Any] = (
            answer.prediction if isinstance(answer.prediction, list) else [answer.prediction]
        )
        raised = None if answer.alarm is None else int(answer.alarm)
        name = answer.name
        if isinstance(name, str) and name.startswith(_FORMULA):
            name = f"'{name}"
        table.writerow([name, *parts, answer.score, answer.p_value, raised])
    shown.write_text(path, file.getvalue())


def is_scores(path: Path) -> bool:
    """Return whether a file is a table of scores, or lines of them, that may be replaced."""
    with path.open(encoding="utf-8", errors="replace") as file:
        first = file.readline(_LONGEST)
    if _HEAD.fullmatch(first):
        return True
    try:
        found = json.loads(first)
    except (ValueError, RecursionError):
        return False
    names = {"input", "prediction", "score", "p_value", "alarm"}
    return isinstance(found, dict) and found.keys() == names
