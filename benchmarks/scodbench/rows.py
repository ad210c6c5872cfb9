"""Result rows: JSON lines, appended a job at a time, whatever kills the writer."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from scodkit.errors import OptionError, ScodError

Row = dict[str, Any]

# where nothing else is said
ROWS_FILE, SWEEPS_FILE = Path("results/rows.jsonl"), Path("results/sweeps.jsonl")
FUSED_ROWS_FILE = Path("results/fused_methods.jsonl")
FUSED_SWEEP_FILE = Path("results/fused_sweep.jsonl")
PROJECTED_SWEEP_FILE = Path("results/projected_sweep.jsonl")


class RowsInUseError(ScodError, RuntimeError):
    """Another process is adding rows to the file."""


def read(path: Path) -> list[Row]:
    """Return the rows of a file, without those of a job that were not all written.

    Args:
        path: The file; none is as good as an empty one.

    Raises:
        OptionError: If a whole line is not a row.
    """
    return _whole(path, path.read_bytes())[0] if path.exists() else []


def append(path: Path, rows: Iterable[Row]) -> None:
    """Add the rows of a job, all of them or none; what was cut off before is cut away first.

    Args:
        path: The file; it is made if it is not there.
        rows: What to add. In the file each also says the how manieth it is (``part``) of how
            many (``of``).

    Raises:
        OptionError: If a whole line of the file is not a row.
    """
    group = list(rows)
    parts = [{**row, "part": part, "of": len(group)} for part, row in enumerate(group, start=1)]
    text = "".join(json.dumps(row) + "\n" for row in parts)
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(_beside(path, "append")), path.open("a+b") as file:
        file.seek(0)
        file.truncate(_whole(path, file.read())[1])
        file.write(text.encode())
        file.flush()
        os.fsync(file.fileno())


def _whole(path: Path, content: bytes) -> tuple[list[Row], int]:
    """Return the rows that count, and how many bytes they take.

    Raises:
        OptionError: If a whole line is not a row.
    """
    *lines, _ = content.split(b"\n")  # what has no end of line was cut off
    rows = [_parsed(path, number, line) for number, line in enumerate(lines, start=1)]
    part, of = (rows[-1].get(key, 1) if rows else 1 for key in ("part", "of"))
    if part < of:
        # of a file that somebody made shorter, other jobs' rows stay
        while rows and (rows[-1].get("part"), rows[-1].get("of")) == (part, of):
            rows.pop()
            part -= 1
    size = sum(len(line) + 1 for line in lines[: len(rows)])
    return [row for row in rows if row], size


def _parsed(path: Path, number: int, line: bytes) -> Row:
    try:
        row = json.loads(line) if line.strip() else {}
    except ValueError:
        row = None
    if not isinstance(row, dict):
        raise OptionError(
            f"expected a row of JSON in line {number} of {path}, got {line[:60]!r}; mend or "
            "delete that line"
        )
    return row


@contextlib.contextmanager
def claimed(path: Path) -> Iterator[None]:
    """Keep other runs away from a file of rows for as long as this lasts.

    Args:
        path: The file; which process claims it stands in a hidden file beside it.

    Raises:
        RowsInUseError: If another process has claimed it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    process = _beside(path, "process")
    process.touch()
    try:
        claim = FileLock(_beside(path, "claim")).acquire(blocking=False)
    except Timeout as error:
        raise RowsInUseError(
            f"expected to be the only one to add rows to {path}, but process "
            f"{process.read_text()} does so; wait until it ends, or type --rows and another "
            "file"
        ) from error
    with claim:
        process.write_text(str(os.getpid()))
        yield


def _beside(path: Path, purpose: str) -> Path:
    """Return a hidden file that goes with a file of rows."""
    return path.with_name(f".{path.name}.{purpose}.lock")


def latest(rows: Iterable[Row]) -> list[Row]:
    """Return the rows that no later ones took the place of.

    All rows of a domain, method (or sweep), seed and device give way together, when later ones
    were written; so none of other settings stays among them.

    Args:
        rows: In the order they were written.

    Examples:
        >>> old = {"method": "scod", "ood": "noise", "settings": "a", "auroc": 0.8}
        >>> new = {"method": "scod", "ood": "noise", "settings": "b", "auroc": 0.9}
        >>> [row["auroc"] for row in latest([old, new])]
        [0.9]
    """
    jobs: dict[tuple[object, ...], dict[tuple[object, ...], Row]] = {}
    for row in rows:
        about = (row.get(key) for key in ("domain", "seed", "device", "sweep"))
        # a row of a sweep may be about a method, too
        job = (*about, None if "sweep" in row else row.get("method"))
        own = jobs.setdefault(job, {})
        before = next(iter(own.values()), row)
        if row.get("part") == 1 or row.get("settings") != before.get("settings"):
            own.clear()
        # points of a sweep differ in more than the set, and their ids tell in what
        own[row.get("ood"), row.get("id") if "sweep" in row else None] = row
    return [row for own in jobs.values() for row in own.values()]


def select(rows: Iterable[Row], **wanted: Any) -> Iterator[Row]:
    """Yield the rows with these values.

    Args:
        rows: To choose from.
        wanted: Values by key; a set or a tuple stands for any of its members.

    Examples:
        >>> rows = [{"method": "scod", "seed": 0}, {"method": "naive", "seed": 0}]
        >>> list(select(rows, method={"naive"}, seed=0))
        [{'method': 'naive', 'seed': 0}]
    """
    for row in rows:
        if all(
            row.get(key) in value if isinstance(value, (set, tuple)) else row.get(key) == value
            for key, value in wanted.items()
        ):
            yield row
