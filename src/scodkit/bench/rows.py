"""Result rows: one JSON object a line, appended whole, whatever kills the writer."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from scodkit.errors import OptionError

Row = dict[str, Any]


def read(path: Path) -> list[Row]:
    """Return the rows of a file; a last line that was cut off is left out.

    Args:
        path: The file; none is as good as an empty one.

    Raises:
        OptionError: If a whole line is not a row.
    """
    if not path.exists():
        return []
    *lines, _ = path.read_bytes().split(b"\n")  # what has no end of line was cut off
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line) if line.strip() else None
        except ValueError:
            raise OptionError(
                f"expected a row of JSON in line {number} of {path}, got {line[:60]!r}; mend "
                "or delete that line"
            ) from None
        if row is not None:
            rows.append(row)
    return rows


def rewrite(path: Path, rows: Iterable[Row]) -> None:
    """Replace a file by these rows, so that at every moment one or the other is there, whole.

    Args:
        path: The file.
        rows: What is to be in it.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        temporary.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def append(path: Path, rows: Iterable[Row]) -> None:
    """Add rows to a file, each in one piece; a line cut off before is cut away first.

    Args:
        path: The file; it is made if it is not there.
        rows: What to add.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(row) + "\n" for row in rows)
    with path.open("a+b") as file:
        _cut_tail(file.fileno())
        file.seek(0, os.SEEK_END)
        file.write(text.encode())
        file.flush()
        os.fsync(file.fileno())


def _cut_tail(handle: int) -> None:
    """Shorten a file to its last end of line."""
    size = os.fstat(handle).st_size
    keep = size
    while keep and os.pread(handle, 1, keep - 1) != b"\n":
        keep -= 1
    if keep < size:
        os.ftruncate(handle, keep)


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
