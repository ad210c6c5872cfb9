"""``scod score``: how atypical inputs are, and which are out of the model's depth.

An answer to an input is plain data: ``input`` (its row, file name or id), ``prediction`` (the
class of a classifier, else the output's numbers, None if there are more than 100), ``score``
(nats, larger = more atypical, infinite for an input with a NaN), ``p_value`` and ``alarm``
(None without a calibration).
"""

from __future__ import annotations

import csv
import io
import json
import re
import sys
from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from scodkit.cli import options
from scodkit.cli import output as shown
from scodkit.errors import BatchError, NotFittedError, ScodError

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from scodkit import Monitor, Scored
    from scodkit.cli.files import Form

Answer = dict[str, Any]

_FIELDS = ("input", "prediction", "score", "p_value", "alarm")
_ROWS = 40  # rows on a terminal
_NUMBERS = 100  # numbers of an output that are shown; maps and long vectors are not
_LONGEST = 1_000_000  # letters of a first line of ours: it holds 100 numbers and a name
_FALSE_ALARM = 0.05
_BAD_LINES, _ALARM = 2, 3  # exit codes
_HEAD = re.compile(r"input,prediction(_0(,prediction_\d+)+)?,score,p_value,alarm\n")
_FORMULA = ("=", "+", "-", "@", "\t", "\r")  # how cells begin that a spreadsheet may run


class OnBad(str, Enum):
    """What an input with a NaN does to scoring."""

    RAISE = "raise"
    ALARM = "alarm"


def score(  # noqa: PLR0913 (each a choice of its own)
    ctx: typer.Context,
    monitor: options.MonitorArgument,
    model: options.ModelArgument,
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
        OnBad,
        typer.Option(
            help="What an input with a NaN does in a file: on stdin it is always an alarm."
        ),
    ] = OnBad.RAISE,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="A .csv or .jsonl file for all of it."),
    ] = None,
    weights: options.WeightsOption = None,
    batch_size: options.BatchSizeOption = 64,
    device: options.DeviceOption = "cpu",
    config: options.ConfigOption = None,
    force: options.ForceOption = False,
    as_json: options.JsonOption = False,
) -> None:
    """Predict and score inputs: in nats, larger = more atypical.

    Exit codes: 0 done, 2 bad input, 3 an alarm with --fail-on-alarm, 130 stopped.

    \b
    scod score monitor.scod model.py:net new.csv
    scod score monitor.scod model.py:net photos/ --false-alarm 0.01 -o scores.csv
    tail -f sensor.jsonl | scod score monitor.scod model.py:net -
    """  # noqa: D301, DOC501 (\b keeps the lines of the examples; shown as help)
    from scodkit.cli.files import Batches
    from scodkit.cli.loading import batches_of, open_monitor, scored_batches

    with shown.stoppable("no file was changed; type the same command again"):
        if output is not None:
            shown.check_output(output, ctx.params, is_scores, force=force)
        opened, form = open_monitor(monitor, model, weights, device)
        rate = _alarm_rate(opened, false_alarm, confidence)
        answer = partial(_answers, opened, rate=rate, confidence=confidence)
        if inputs == "-":
            if output is not None:
                raise typer.BadParameter(
                    "a stream is answered on stdout; type > scores.jsonl instead"
                )
            raise typer.Exit(_answer_stdin(opened, answer, form, fail_on_alarm))
        finite, progress = on_bad is OnBad.RAISE, shown.shows_progress(as_json)
        batches = batches_of(inputs, batch_size, form, finite=finite, progress=progress)
        answers: list[Answer] = []
        for _, scored in scored_batches(opened, batches, progress):
            answers += answer(scored)
        for row, one in enumerate(answers):
            one["input"] = batches.dataset.name(row) if isinstance(batches, Batches) else row
        if output is not None:
            _write(output, answers)
    alarms = sum(bool(one["alarm"]) for one in answers)
    _show(answers, alarms, rate, output, as_json)
    if fail_on_alarm and alarms:
        raise typer.Exit(_ALARM)


def _alarm_rate(
    monitor: Monitor, false_alarm: float | None, confidence: float | None
) -> float | None:
    """Return the accepted share of false alarms, refused before any input is read.

    Args:
        monitor: Fitted, perhaps calibrated.
        false_alarm: The share that was asked for, if one was.
        confidence: How surely it must hold, if that was asked for.

    Returns:
        The share; None without a calibration.

    Raises:
        NotFittedError: If one was asked for, and there is no calibration.
    """
    if monitor.calibration is not None:
        rate = _FALSE_ALARM if false_alarm is None else false_alarm
        monitor.calibration.threshold(rate, confidence=confidence)
        return rate
    if false_alarm is None and confidence is None:
        return None
    raise NotFittedError(
        "expected a calibrated monitor for alarms at a rate, got one that is not; "
        "type: scod calibrate MONITOR MODEL HELD_OUT_DATA"
    )


def _answers(
    monitor: Monitor, scored: Scored, *, rate: float | None, confidence: float | None
) -> list[Answer]:
    """Return the answers to a batch, whose inputs are named by their positions in it."""
    count = len(scored.score)
    alarms = p_values = [None] * count
    if monitor.calibration is not None and rate is not None:
        alarms = monitor.calibration.flag(scored.score, rate, confidence=confidence).tolist()
    if scored.p_value is not None:
        p_values = scored.p_value.tolist()
    predictions = _predictions(monitor, scored.output)
    columns = (range(count), predictions, scored.score.tolist(), p_values, alarms)
    return [dict(zip(_FIELDS, one, strict=True)) for one in zip(*columns, strict=True)]


def _predictions(monitor: Monitor, output: Tensor) -> list[Any]:
    """Return classes ``(B,)`` of a classifier, else outputs ``(B, d)`` if they are few."""
    from scodkit import Categorical

    if isinstance(monitor.likelihood, Categorical) and output.ndim == 2:
        return list(output.argmax(1).tolist())
    if not len(output) or output[0].numel() > _NUMBERS:
        return [None] * len(output)
    return list(output.reshape(len(output), -1).tolist())


def _answer_stdin(
    monitor: Monitor,
    answer: Callable[[Scored], list[Answer]],
    form: Form,
    fail_on_alarm: bool,
) -> int:
    """Return the exit code, after each line was answered as it came; a bad one stops nothing.

    A line is JSON: a list of numbers, or an object with the list ``x`` and perhaps an ``id``.
    A null among the numbers is one that is missing, as a NaN.
    """
    from scodkit.cli.loading import one_line, running

    code = 0
    for count, line in enumerate(line for line in sys.stdin.buffer if line.strip()):
        name: Any = count
        try:
            values = _parsed(line)
            if isinstance(values, dict):
                name, values = _checked_id(values.get("id", name)), values.get("x")
            sample = form.tensor(_vector(values)[None], has_dtype=False)
            with running(monitor):
                scored = monitor(sample)
            document = {**answer(scored)[0], "input": name}
        except ScodError as error:
            document = {"input": name, "error": " ".join(str(error).split())}
        except Exception as error:  # whatever it is: one line must not end a stream
            reason = f"expected numbers to score, got {one_line(error)}"
            document = {"input": name, "error": reason}
        if "error" in document:
            code = _BAD_LINES
        elif fail_on_alarm and document["alarm"]:
            code = code or _ALARM
        shown.show_json(document)
    return code


def _parsed(line: bytes) -> Any:
    """Return what is in a line.

    Raises:
        BatchError: If it is not JSON, or could be read in two ways.
    """
    try:
        return json.loads(line.decode(), object_pairs_hook=_object)
    except RecursionError:
        raise BatchError("expected JSON, got lists in lists without end") from None
    except ValueError as error:  # bytes that are not UTF-8 and numbers too long among them
        raise BatchError(f"expected JSON: {error}") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) < len(pairs):  # which of the two is meant?
        raise ValueError("a key is there twice")
    return document


def _checked_id(given: object) -> str | int | float | None:
    """Return an id that can be given back.

    Raises:
        BatchError: If it is no text or number, or text that has no encoding.
    """
    if isinstance(given, str) and not given.isascii():
        try:
            given.encode()
        except UnicodeEncodeError:
            raise BatchError(f"expected an id in characters, got half of one, {given!a}") from (
                None
            )
    if given is None or isinstance(given, (str, int, float)):
        return given
    raise BatchError(f"expected a text or a number for an id, got a {type(given).__name__}")


def _vector(values: object) -> NDArray[Any]:
    """Return a sample's numbers, a null as NaN.

    Raises:
        BatchError: If they are something else.
    """
    import numpy as np

    if not isinstance(values, list):
        raise BatchError('expected a list of numbers, or an object with such a list "x"')
    cells = np.asarray(values, dtype=object)
    for cell in cells.ravel():
        if not (cell is None or isinstance(cell, (int, float))):
            what = "lists of several lengths" if isinstance(cell, list) else repr(cell)
            raise BatchError(f"expected numbers alone, got {what}; type null for a missing one")
    return cells.astype(np.float64)


def _show(
    answers: Sequence[Answer],
    alarms: int,
    rate: float | None,
    output: Path | None,
    as_json: bool,
) -> None:
    if output is not None and as_json:
        counts = {"inputs": len(answers), "alarms": None if rate is None else alarms}
        shown.show_json({"scores": str(output), **counts})
    elif as_json:
        for answer in answers:
            shown.show_json(answer)
    elif output is None:
        shown_rows = answers[:_ROWS] if sys.stdout.isatty() else answers
        marked = [bool(answer["alarm"]) for answer in shown_rows]
        headings = ("input", "prediction", "score", "p-value", "alarm")
        shown.show_table(headings, [_cells(answer) for answer in shown_rows], marked)
        if len(answers) > len(shown_rows):
            shown.note(f"and {len(answers) - len(shown_rows)} more; type -o scores.csv for all")
    where = "" if output is None else f", written to {output}"
    if rate is None:
        shown.note(
            f"{len(answers)} inputs scored{where}; for p-values and alarms type: "
            "scod calibrate MONITOR MODEL HELD_OUT_DATA"
        )
    else:
        shown.note(
            f"{alarms} alarms among {len(answers)} inputs at a false-alarm rate of "
            f"{rate:.3g}{where}"
        )


def _cells(answer: Answer) -> list[str]:
    """Return an answer as a row of the table."""
    name, prediction, score, p_value, alarm = answer.values()
    if isinstance(prediction, list):
        prediction = " ".join(map(shown.number, prediction))
    elif prediction is None:
        prediction = "..."
    raised = "" if alarm is None else "ALARM" if alarm else "no"
    return [str(name), str(prediction), shown.number(score), shown.number(p_value), raised]


def _write(path: Path, answers: Sequence[Answer]) -> None:
    if path.suffix.lower() in (".jsonl", ".json", ".ndjson"):
        lines = map(shown.json_line, answers)
        shown.write_text(path, "".join(f"{line}\n" for line in lines))
        return
    file = io.StringIO(newline="")
    table = csv.writer(file, lineterminator="\n")
    first = answers[0]["prediction"] if answers else None
    names = ["prediction"]
    if isinstance(first, list) and len(first) > 1:
        names = [f"prediction_{place}" for place in range(len(first))]
    table.writerow(["input", *names, "score", "p_value", "alarm"])
    for answer in answers:
        name, prediction, score, p_value, alarm = answer.values()
        numbers = prediction if isinstance(prediction, list) else [prediction]
        if isinstance(name, str) and name.startswith(_FORMULA):
            name = f"'{name}"
        table.writerow([name, *numbers, score, p_value, alarm if alarm is None else int(alarm)])
    shown.write_text(path, file.getvalue())


def is_scores(path: Path) -> bool:
    """Return whether a file is a table of scores, or lines of them, that may be replaced."""
    with path.open(encoding="utf-8", errors="replace") as file:
        first = file.readline(_LONGEST)
    if _HEAD.fullmatch(first):
        return True
    try:
        answer = json.loads(first)
    except (ValueError, RecursionError):
        return False
    return isinstance(answer, dict) and answer.keys() == {*_FIELDS}
