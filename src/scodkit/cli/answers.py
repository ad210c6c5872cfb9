"""Inputs asked about, and what a monitor answers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from scodkit import Categorical, Monitor, Scored
from scodkit.cli.inputs import Batches, Form
from scodkit.cli.loading import running, said
from scodkit.cli.output import visible
from scodkit.errors import BatchError, NotFittedError, ScodError
from scodkit.fit.stream import batches_of as with_progress
from scodkit.fit.stream import num_batches
from scodkit.report import ScoredSet

# numbers of an output that are shown; maps and long vectors are not
_MOST = 100
_RATE = 0.05


@dataclass(frozen=True)
class Answer:
    """What is said about one input.

    Args:
        name: Of the input: its row, file name or id.
        prediction: The class of a classifier, else the output's numbers; None if there are
            more than 100.
        score: In nats, larger = more atypical; infinite for an input with a NaN.
        p_value: None where there is no calibration.
        alarm: Likewise.
    """

    name: int | str
    prediction: int | list[float] | None
    score: float
    p_value: float | None
    alarm: bool | None

    def document(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {"input": self.name, **{k: v for k, v in vars(self).items() if k != "name"}}


@dataclass
class Alarm:
    """When an alarm is raised, and how many were.

    Args:
        rate: Accepted share of alarms on known inputs; None if there is no calibration.
        confidence: How surely that share is to hold; None for on average.
        count: Alarms so far.
    """

    rate: float | None
    confidence: float | None = None
    count: int = 0

    @classmethod
    def of(cls, monitor: Monitor, rate: float | None, confidence: float | None) -> Alarm:
        """Return the alarm of a monitor, refused before any input is read.

        Args:
            monitor: Fitted, perhaps calibrated.
            rate: Accepted share of false alarms, if one was asked for.
            confidence: How surely, if that was asked for.

        Raises:
            NotFittedError: If it was, and there is no calibration.
        """
        if monitor.calibration is None:
            if rate is None and confidence is None:
                return cls(None)
            raise NotFittedError(
                "expected a calibrated monitor for alarms at a rate, got one that is not; "
                "type: scod calibrate MONITOR MODEL HELD_OUT_DATA"
            )
        rate = _RATE if rate is None else rate
        monitor.calibration.threshold(rate, confidence=confidence)
        return cls(rate, confidence)

    def raised(self, monitor: Monitor, scores: Tensor) -> list[bool | None]:
        """Return which scores ``(B,)`` raise it, and count them."""
        if self.rate is None or monitor.calibration is None:
            return [None] * len(scores)
        flags = monitor.calibration.flag(scores, self.rate, confidence=self.confidence)
        self.count += int(flags.sum())
        found: list[bool | None] = flags.tolist()
        return found


def answers_to(
    monitor: Monitor, batches: Batches | Iterable[Any], alarm: Alarm, progress: bool
) -> list[Answer]:
    """Return what a monitor says about all samples of some batches.

    Args:
        monitor: The monitor.
        batches: As `scodkit.cli.inputs.batches_of` returns them.
        alarm: When to raise it.
        progress: Show a progress bar.
    """
    found: list[Answer] = []
    with running(monitor):
        for batch in with_progress(batches, num_batches(batches), "scoring", progress):
            scored = monitor(batch)
            rows = range(len(found), len(found) + len(scored.score))
            names: Sequence[int | str] = rows
            if isinstance(batches, Batches):
                names = [batches.dataset.name(row) for row in rows]
            found += _answers(monitor, scored, names, alarm)
    return found


def answers_to_lines(
    monitor: Monitor, form: Form, lines: Iterable[bytes], alarm: Alarm
) -> Iterator[dict[str, Any]]:
    """Yield what a monitor says about each line, as it comes; a bad one stops nothing.

    Args:
        monitor: The monitor.
        form: What a sample looks like.
        lines: JSON: a list of numbers, or an object with the list ``x`` and perhaps an ``id``.
            A null among the numbers is one that is missing, as a NaN.
        alarm: When to raise it.

    Yields:
        Documents: an answer, or the input's name and an ``error``.
    """
    for count, line in enumerate(line for line in lines if line.strip()):
        name: Any = count
        try:
            asked = _parsed(line)
            values = asked
            if isinstance(asked, dict):
                name, values = _name(asked.get("id", name)), asked.get("x")
            sample = form.tensor(_vector(values)[None], has_dtype=False)
            with running(monitor):
                scored = monitor(sample)
            found = _answers(monitor, scored, [name], alarm)[0].document()
        except ScodError as error:
            found = {"input": name, "error": " ".join(str(error).split())}
        except Exception as error:  # whatever it is: one line must not end a stream
            found = {"input": name, "error": f"expected numbers to score, got {said(error)}"}
        yield found


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
    found = dict(pairs)
    if len(found) < len(pairs):  # which of the two is meant?
        raise ValueError("a key is there twice")
    return found


def _name(given: object) -> str | int | float | None:
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


def _vector(values: object) -> NDArray[np.float64]:
    """Return a sample's numbers, a null as NaN.

    Raises:
        BatchError: If they are something else.
    """
    if not isinstance(values, list):
        raise BatchError('expected a list of numbers, or an object with such a list "x"')
    cells = np.asarray(values, dtype=object)
    for cell in cells.ravel():
        if not (cell is None or isinstance(cell, (int, float))):
            what = "lists of several lengths" if isinstance(cell, list) else repr(cell)
            raise BatchError(f"expected numbers alone, got {what}; type null for a missing one")
    return cells.astype(np.float64)


def _answers(
    monitor: Monitor, scored: Scored, names: Sequence[int | str], alarm: Alarm
) -> list[Answer]:
    raised = alarm.raised(monitor, scored.score)
    p_values = [None] * len(names) if scored.p_value is None else scored.p_value.tolist()
    return [
        Answer(*parts)
        for parts in zip(
            names,
            _predictions(monitor, scored.output),
            scored.score.tolist(),
            p_values,
            raised,
            strict=True,
        )
    ]


def _predictions(monitor: Monitor, output: Tensor) -> list[Any]:
    """Return classes ``(B,)`` of a classifier, else outputs ``(B, d)`` if they are few."""
    if isinstance(monitor.likelihood, Categorical) and output.ndim == 2:
        return list(output.argmax(1).tolist())
    if output[0].numel() > _MOST if len(output) else False:
        return [None] * len(output)
    return list(output.flatten(1).tolist())


# bytes of inputs that are kept of data that can be read only once
_MOST_KEPT = 2**30


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
        told = with_progress(
            batches, num_batches(batches), f"scoring {visible(name)}", progress
        )
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
