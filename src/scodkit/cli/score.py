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
import math
import re
import shlex
import sys
from collections.abc import Iterable, Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Context, Exit, Option

from scodkit.cli import messages, options
from scodkit.cli import output as shown
from scodkit.errors import BatchError, OptionError, ScodError

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
_BAD_LINES, _ALARM = 2, 3  # exit codes
# the first line of a file of ours: a table's head, or an answer in JSON
_FIRST_LINE = re.compile(
    r"input,prediction(_0(,prediction_\d+)+)?(,target)?,score,p_value,alarm\n"
    r'|\{"input": .+, "prediction": .+, "score": .+, "p_value": .+, "alarm": \w+\}\n'
)
_FORMULA = ("=", "+", "-", "@", "\t", "\r")  # how cells begin that a spreadsheet may run


class OnBad(str, Enum):
    """What an input with a NaN does to scoring."""

    RAISE = "raise"
    ALARM = "alarm"


def score(  # noqa: PLR0913 (each a choice of its own)
    ctx: Context,
    monitor: options.MonitorArgument,
    model: options.ModelArgument,
    inputs: Annotated[
        str,
        Argument(
            metavar="INPUTS",
            help="A file of arrays (.npy, .npz, .csv), a folder of images, a callable as for "
            "fit; or - for JSON lines on stdin, answered one by one: [0.1, 2.5], or "
            '{"id": 7, "x": [0.1, null]}, where null is a missing number: an alarm.',
        ),
    ],
    false_alarm: Annotated[
        float | None,
        Option(help="Accepted share of alarms on known inputs; 0.05 by default."),
    ] = None,
    confidence: Annotated[
        float | None, Option(help="How surely that share is to hold; on average by default.")
    ] = None,
    fail_on_alarm: Annotated[
        bool, Option("--fail-on-alarm", help="Exit code 3 if there is an alarm.")
    ] = False,
    on_bad: Annotated[
        OnBad,
        Option(help="What an input with a NaN does in a file: on stdin it is always an alarm."),
    ] = OnBad.RAISE,
    output: Annotated[
        Path | None, Option("--output", "-o", help="A .csv or .jsonl file for all of it.")
    ] = None,
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
    """Predict and score inputs: in nats, larger = more atypical.

    Exit codes: 0 done, 2 bad input, 3 an alarm with --fail-on-alarm, 130 stopped.

    \b
    scod score monitor.scod model.py:net new.csv
    scod score monitor.scod model.py:net photos/ --false-alarm 0.01 -o scores.csv
    tail -f sensor.jsonl | scod score monitor.scod model.py:net -
    """  # noqa: D301, DOC501 (\b keeps the lines of the examples; shown as help)
    from scodkit.cli import loading
    from scodkit.cli.files import samples_of
    from scodkit.cli.tables import Columns

    with shown.stoppable("no file was changed; type the same command again"):
        if output is not None:
            shown.check_output(output, ctx.params, is_scores)
        opened, form = loading.open_monitor(monitor, model, weights, device)
        todo = messages.calibrate_command(monitor, ctx.params, opened.notes)
        rate_given = (false_alarm, confidence) != (None, None)
        rate = 0.05 if false_alarm is None else false_alarm
        threshold = loading.threshold_of(
            opened,
            rate,
            confidence,
            needed="for alarms at a rate" if rate_given else None,
            todo=todo[0],
        )
        if inputs == "-":
            if output is not None:
                raise OptionError(
                    f"expected a file of inputs for --output, got -, a stream, which is "
                    f"answered on stdout; type > {shlex.quote(str(output))} instead of --output"
                )
            raise Exit(_answer_stdin(opened, form, threshold, fail_on_alarm))
        finite = on_bad is OnBad.RAISE
        columns = Columns.of(drop=drop, target=target, id=id)
        batches = loading.batches_of(inputs, batch_size, form, finite=finite, columns=columns)
        samples = samples_of(batches)
        answers: list[Answer] = []
        for _, scored in loading.scored_batches(opened, batches):
            rows = range(len(answers), len(answers) + len(scored.score))
            names = rows if samples is None else map(samples.name, rows)
            part = _answers(opened, scored, threshold, names)
            if samples is not None and samples.targets is not None:
                part = [
                    _with_target(one, samples.targets[row])
                    for one, row in zip(part, rows, strict=True)
                ]
            answers += part
        if output is not None:
            _write(output, answers)
    alarms = None if threshold is None else sum(answer["alarm"] for answer in answers)
    _show(answers, alarms, rate, output, as_json)
    if alarms is None:
        shown.next_line(*todo)
    elif alarms and samples is not None and finite:  # no NaN can be explained
        shown.next_line(messages.follow_up("explain", monitor, ctx.params, inputs))
    if fail_on_alarm and alarms:
        raise Exit(_ALARM)


def _answers(
    monitor: Monitor, scored: Scored, threshold: float | None, names: Iterable[object]
) -> list[Answer]:
    """Return the answers to a batch of inputs with these names."""
    scores = scored.score.tolist()
    alarms = p_values = [None] * len(scores)
    if scored.p_value is not None and threshold is not None:
        p_values = scored.p_value.tolist()
        alarms = [score > threshold for score in scores]
    predictions = _predictions(monitor, scored.output)
    rows = zip(names, predictions, scores, p_values, alarms, strict=True)
    return [dict(zip(_FIELDS, row, strict=True)) for row in rows]


def _with_target(answer: Answer, target: str) -> Answer:
    """Return an answer with what the model should have predicted beside what it did."""
    name, prediction, *others = _FIELDS
    first = {name: answer[name], prediction: answer[prediction]}
    return {**first, "target": target, **{field: answer[field] for field in others}}


def _predictions(monitor: Monitor, output: Tensor) -> list[Any]:
    """Return classes ``(B,)`` of a classifier, else outputs ``(B, d)`` if they are few."""
    from scodkit import Categorical

    if isinstance(monitor.likelihood, Categorical) and output.ndim == 2:
        return list(output.argmax(1).tolist())
    if not len(output) or output[0].numel() > _NUMBERS:
        return [None] * len(output)
    return list(output.reshape(len(output), -1).tolist())


def _answer_stdin(
    monitor: Monitor, form: Form, threshold: float | None, fail_on_alarm: bool
) -> int:
    """Return the exit code, after each line was answered as it came; a bad one stops nothing.

    A line is JSON: a list of numbers, or an object with the list ``x`` and perhaps an ``id``.
    A null among the numbers is one that is missing, as a NaN.
    """
    from scodkit.cli.loading import one_line, running

    code = 0
    for count, line in enumerate(line for line in sys.stdin.buffer if line.strip()):
        name: object = count
        try:
            values = _parsed(line)
            if isinstance(values, dict):
                name = _checked_id(values.get("id", count))
                values = values.get("x")
            vector = _vector(values)
            if _has_gaps(vector, form):
                answer = _of_gaps(monitor, threshold, name)
            else:
                sample = form.tensor(vector[None], has_dtype=False)
                with running(monitor):
                    (answer,) = _answers(monitor, monitor(sample), threshold, [name])
            if fail_on_alarm and answer["alarm"]:
                code = code or _ALARM
        except Exception as error:  # whatever it is: one line must not end a stream
            reason = f"expected numbers to score, got others ({one_line(error)})"
            if isinstance(error, ScodError):
                reason = str(error)
            answer = {"input": name, "error": messages.one_line(reason)}
            code = _BAD_LINES
        shown.show_json(answer)
    return code


def _parsed(line: bytes) -> Any:
    """Return what is in a line.

    Raises:
        BatchError: If it is not JSON, or could be read in two ways.
    """
    try:
        return json.loads(line.decode(), object_pairs_hook=_object)
    except RecursionError:
        raise BatchError(
            "expected JSON, got lists in lists without end; write one list of numbers"
        ) from None
    except ValueError as error:  # bytes that are not UTF-8 and numbers too long among them
        raise BatchError(
            f"expected JSON, got a line that is not ({error}); write [0.1, 2.5]"
        ) from error


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
    if given is not None and not isinstance(given, (str, int, float)):
        raise BatchError(
            f"expected a text or a number for an id, got a {type(given).__name__}; write "
            "one of those, or leave the id out"
        )
    try:
        str(given).encode()
    except UnicodeEncodeError:
        raise BatchError(
            f"expected an id in characters, got half of one, {given!a}; write another id"
        ) from None
    return given


def _vector(values: object) -> NDArray[Any]:
    """Return a sample's numbers, a null as NaN.

    Raises:
        BatchError: If they are something else.
    """
    import numpy as np

    if not isinstance(values, list):
        raise BatchError(
            'expected a list of numbers, or an object with such a list "x", got '
            f"{json.dumps(values)[:40]}; write null for a number that is missing: [0.1, null]"
        )
    cells = np.asarray(values, dtype=object)
    for cell in cells.ravel():
        if not (cell is None or isinstance(cell, (int, float))):
            what = "lists of several lengths" if isinstance(cell, list) else repr(cell)
            raise BatchError(
                f"expected numbers alone, got {what}; write null for a missing one"
            )
    return cells.astype(np.float64)


def _has_gaps(vector: NDArray[Any], form: Form) -> bool:
    """Return whether whole numbers are missing, for which their dtype has no NaN."""
    whole = not form.dtype.is_floating_point and vector.shape == form.shape
    return whole and bool((vector != vector).any())


def _of_gaps(monitor: Monitor, threshold: float | None, name: object) -> Answer:
    """Return the answer to an input that no model can be run on: as atypical as can be."""
    import torch

    p_value = alarm = None
    if monitor.calibration is not None and threshold is not None:
        p_value = float(monitor.calibration.p_value(torch.tensor([math.inf])))
        alarm = True
    return dict(zip(_FIELDS, (name, None, math.inf, p_value, alarm), strict=True))


def _show(
    answers: Sequence[Answer],
    alarms: int | None,
    rate: float,
    output: Path | None,
    as_json: bool,
) -> None:
    if output is not None and as_json:
        shown.show_json({"scores": str(output), "inputs": len(answers), "alarms": alarms})
    elif as_json:
        for answer in answers:
            shown.show_json(answer)
    elif output is None:
        shown_rows = answers[:_ROWS] if sys.stdout.isatty() else answers
        marked = [bool(answer["alarm"]) for answer in shown_rows]
        headings = [field.replace("_", "-") for field in (answers[0] if answers else _FIELDS)]
        shown.show_table(headings, [_cells(answer) for answer in shown_rows], marked)
        if len(answers) > len(shown_rows):
            shown.note(f"and {len(answers) - len(shown_rows)} more; type -o scores.csv for all")
    where = "" if output is None else f", written to {output}"
    count = f"{len(answers)} inputs"
    if alarms is None:
        shown.note(f"{count} scored{where}, without p-values and alarms: not calibrated")
    else:
        shown.note(f"{alarms} alarms among {count} at a false-alarm rate of {rate:.3g}{where}")


def _cells(answer: Answer) -> list[str]:
    """Return an answer as a row of the table."""
    name, prediction, *target, score, p_value, alarm = answer.values()
    if isinstance(prediction, list):
        prediction = " ".join(map(shown.number, prediction))
    elif prediction is None:
        prediction = "..."
    raised = {None: "", True: "ALARM", False: "no"}[alarm]
    numbers = [shown.number(score), shown.number(p_value)]
    return [str(name), str(prediction), *target, *numbers, raised]


def _write(path: Path, answers: Sequence[Answer]) -> None:
    if path.suffix.lower() in (".jsonl", ".json", ".ndjson"):
        shown.write_text(path, "".join(f"{shown.json_line(answer)}\n" for answer in answers))
        return
    file = io.StringIO(newline="")
    table = csv.writer(file, lineterminator="\n")
    first = answers[0]["prediction"] if answers else None
    names = ["prediction"]
    if isinstance(first, list) and len(first) > 1:
        names = [f"prediction_{place}" for place in range(len(first))]
    has_target = bool(answers) and "target" in answers[0]
    table.writerow(["input", *names, *["target"] * has_target, "score", "p_value", "alarm"])
    for answer in answers:
        name, prediction, *target, score, p_value, alarm = answer.values()
        numbers = prediction if isinstance(prediction, list) else [prediction]
        texts = [_no_formula(text) for text in (name, *target)]
        raised = alarm if alarm is None else int(alarm)
        table.writerow([texts[0], *numbers, *texts[1:], score, p_value, raised])
    shown.write_text(path, file.getvalue())


def _no_formula(text: object) -> object:
    """Return a name or a target that no spreadsheet runs as a formula; numbers stay."""
    from scodkit.cli.tables import NUMBER

    if not isinstance(text, str) or NUMBER.fullmatch(text):
        return text
    return f"'{text}" if text.startswith(_FORMULA) else text


def is_scores(path: Path) -> bool:
    """Return whether a file is a table of scores, or lines of them, that may be replaced."""
    with path.open(encoding="utf-8", errors="replace") as file:
        return _FIRST_LINE.fullmatch(file.readline(_LONGEST)) is not None
