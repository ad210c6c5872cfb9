"""How results are shown: tables on a terminal, plain text in a pipe, JSON for machines.

Results go to stdout, everything else to stderr.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path
from typing import Any

import click
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from scodkit.replacing import replacing

STOPPED = 130  # exit code, as of a program that Ctrl-C ended
ALARM = 3  # exit code of `scod score --fail-on-alarm`


def note(text: str) -> None:
    """Say something that is not a result."""
    context = click.get_current_context(silent=True)
    name = "scod" if context is None else context.find_root().info_name
    typer.echo(f"{name}: {text}", err=True)


def shows_progress(as_json: bool) -> bool:
    """Return whether progress bars are wanted: somebody must be there to see them."""
    return sys.stderr.isatty() and not as_json


def show_json(document: Mapping[str, Any]) -> None:
    """Print a document on one line of its own."""
    typer.echo(json_line(document))


def json_line(document: Mapping[str, Any]) -> str:
    """Return a document as one line of JSON, which has no infinities: they become null.

    Examples:
        >>> json_line({"score": float("inf"), "alarm": True})
        '{"score": null, "alarm": true}'
    """
    return json.dumps(_finite(document), allow_nan=False, ensure_ascii=False)


def show_facts(facts: Mapping[str, str]) -> None:
    """Print names and values, a line each.

    Args:
        facts: By name, in the order to be shown.
    """
    show_table((), list(facts.items()))


def show_table(
    headings: Sequence[str], rows: Sequence[Sequence[str]], marked: Sequence[bool] = ()
) -> None:
    """Print a table: in colour on a terminal, as plain columns elsewhere.

    Args:
        headings: Of the columns; none for rows of a name and a value.
        rows: Cells of each row.
        marked: Which rows are to catch the eye on a terminal; none by default.
    """
    if not sys.stdout.isatty():  # as text: for 10,000 rows rich takes 4 s
        lines = [headings, *rows] if headings else rows
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        for line in lines:
            cells = (f"{cell:{width}}" for cell, width in zip(line, widths, strict=True))
            typer.echo("  ".join(cells).rstrip())
        return
    table = Table(show_header=bool(headings), box=None, padding=(0, 2, 0, 0))
    for heading in headings or ("", ""):
        name = not table.columns
        table.add_column(heading, style="bold cyan" if name else "", overflow="fold")
    for row, mark in zip_longest(rows, marked):
        table.add_row(*map(escape, row), style="bold red" if mark else None)
    Console().print(table)


def check_output(path: Path) -> None:
    """Make sure a file can be written, before work is done for it.

    Args:
        path: Where it is to be.
    """
    from scodkit.artifact import check_place

    check_place(path)
    with tempfile.TemporaryFile(dir=path.parent):
        pass


def write_text(path: Path, text: str) -> None:
    """Write a file so that at every moment the old one or the new one is there, whole.

    Args:
        path: Where to.
        text: What to write.
    """
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file so that at every moment the old one or the new one is there, whole.

    Args:
        path: Where to.
        content: What to write.
    """
    with replacing(path) as temporary:
        temporary.write_bytes(content)


@contextmanager
def stoppable(afterwards: str) -> Iterator[None]:
    """Let Ctrl-C end the command with a word on how things stand.

    Args:
        afterwards: What is left, and how to go on.

    Yields:
        Nothing.

    Raises:
        Exit: With the exit code of Ctrl-C.
    """
    try:
        yield
    except KeyboardInterrupt:
        note(f"stopped; {afterwards}")
        raise typer.Exit(STOPPED) from None


def number(value: float | None) -> str:
    """Return a number for people, empty for none.

    Examples:
        >>> number(0.123456), number(None), number(12345.678), number(float("inf"))
        ('0.1235', '', '1.235e+04', 'inf')
    """
    return "" if value is None else f"{value:.4g}"


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(part) for part in value]
    return value
