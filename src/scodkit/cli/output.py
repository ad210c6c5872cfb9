"""How results are shown: tables on a terminal, plain text in a pipe, JSON for machines.

Results go to stdout, everything else to stderr. Files are written whole or not at all, and
never over an input or over something that is not an earlier result.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from scodkit.cli import messages
from scodkit.errors import OptionError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STOPPED = 130  # exit code, as of a program that Ctrl-C ended
_PICTURES = (".png", ".svg", ".pdf")
_MARK = "drawn by scod"  # in every picture, which may be replaced by another
_OUTPUTS = ("output", "plot", "checkpoint")  # options that name files to write, not to read


def visible(text: str) -> str:
    """Return text that cannot control a terminal: unprintable characters become escapes.

    Args:
        text: From anywhere: names of files and columns may be hostile.

    Examples:
        >>> visible("a b.png"), len(visible(chr(27) + "[2J"))
        ('a b.png', 7)
    """
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode()
        for letter in text
    )


def note(text: str) -> None:
    """Print a remark, which is not a result, on stderr."""
    typer.echo(f"{messages.program}: {visible(text)}", err=True)


def say(text: str, kind: str = "", more: str | None = None) -> None:
    """Print an error or a warning on stderr, a line each: expected, found, try, more.

    Args:
        text: "expected ..., got ...; what to type", for Python or for a shell.
        kind: What it is, in front; nothing for an error.
        more: Where to read on, if anywhere.
    """
    expected, found, advice = messages.in_parts(text)
    note(f"{kind}{expected}")
    for label, part in (("found", found), ("try", advice), ("more", more)):
        if not part:
            continue
        typer.echo(f"{'':{len(messages.program) + 2}}{label:8} {visible(part)}", err=True)


def next_line(command: str, why: str = "") -> None:
    """Print a command that may come next, on a line of its own, to be pasted."""
    note(f"next{why and ', '}{why}:")
    typer.echo(f"  {visible(command)}", err=True)


def next_score(monitor: Path, given: Mapping[str, Any], data: str) -> None:
    """Print the command that scores data, as a next one."""
    command = messages.follow_up("score", monitor, given, data)
    next_line(command, "here or with inputs of your own")


def shows_progress() -> bool:
    """Return whether to show progress bars: only on a terminal."""
    return sys.stderr.isatty()


def show_json(document: Mapping[str, Any]) -> None:
    """Print a document on one line of its own."""
    typer.echo(json_line(document))


def json_line(document: Mapping[str, Any]) -> str:
    """Return a document as one line of JSON, in ASCII, which every reader and locale takes.

    JSON has no infinities: they become null.

    Examples:
        >>> json_line({"score": float("inf"), "alarm": True})
        '{"score": null, "alarm": true}'
    """
    return json.dumps(_finite(document), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(part) for part in value]
    return value


def show_facts(facts: Mapping[str, str]) -> None:
    """Print names and values, a line each.

    Args:
        facts: Values by name, in the order to be shown.
    """
    show_table((), list(facts.items()))


def show_table(
    headings: Sequence[str], rows: Sequence[Sequence[str]], marked: Sequence[bool] = ()
) -> None:
    """Print a table: in colour on a terminal, as plain columns elsewhere.

    Args:
        headings: Of the columns; none for rows of a name and a value.
        rows: Cells of each row.
        marked: Which rows to highlight on a terminal; none by default.
    """
    rows = [[visible(cell) for cell in row] for row in rows]
    if not sys.stdout.isatty():  # as text: for 10,000 rows rich takes 4 s
        lines = [headings, *rows] if headings else rows
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        for line in lines:
            cells = (f"{cell:{width}}" for cell, width in zip(line, widths, strict=True))
            typer.echo("  ".join(cells).rstrip())
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(show_header=bool(headings), box=None, padding=(0, 2, 0, 0))
    for place, heading in enumerate(headings or ("", "")):
        table.add_column(heading, style="" if place else "bold cyan", overflow="fold")
    for row, mark in zip_longest(rows, marked):
        table.add_row(*map(escape, row), style="bold red" if mark else None)
    Console().print(table)


def number(value: float | None) -> str:
    """Return a number for people, empty for none.

    Examples:
        >>> number(0.123456), number(None), number(12345.678), number(float("inf"))
        ('0.1235', '', '1.235e+04', 'inf')
    """
    return "" if value is None else f"{value:.4g}"


def check_output(
    path: Path,
    given: Mapping[str, object],
    is_ours: Callable[[Path], bool] | None = None,
    itself: Path | None = None,
) -> None:
    """Raise if a file cannot be written, or must not be replaced, before any work is done.

    Args:
        path: Where it is to be.
        given: All that the command was given, by name of the argument or option; with
            ``force`` it replaces whatever is there, unless it reads it.
        is_ours: Whether an existing file is of the kind to be written, and may be replaced;
            by default whether it is a saved monitor.
        itself: The input that the command may replace with its result.

    Raises:
        OptionError: If it is an input of the command, or something else of the user's.
    """
    from scodkit.numerics import artifact

    artifact.check_place(path)
    if not path.exists() or (itself and itself.exists() and path.samefile(itself)):
        return
    for name in _possible_files(given):
        if _reads(name, path):
            raise OptionError(
                f"expected another file to write to than one that is read, got {path}, "
                f"which is read as {name}; type another name"
            )
    is_ours = is_ours or (lambda file: artifact.header_of(file).get("kind") == "monitor")
    if not given.get("force") and path.stat().st_size and not is_ours(path):
        raise OptionError(
            f"expected a new file to write to, or an earlier result of this kind, got "
            f"{path}, which is something else; type another name, or --force to replace it"
        )


def _possible_files(given: Mapping[str, object]) -> Iterator[str]:
    """Yield the paths that a command's arguments may name: files, folders, source files."""
    for option, value in given.items():
        for word in value if isinstance(value, (list, tuple)) else (value,):
            if option not in _OUTPUTS and isinstance(word, (str, Path)):
                for name in (str(word), str(word).partition("=")[2]):
                    code = name.rpartition(":")[0]
                    module = code and code.replace(".", "/") + ".py"
                    yield from filter(None, (name, code, module))


def _reads(name: str, path: Path) -> bool:
    """Return whether an argument names this file, or a folder of images that holds it."""
    from scodkit.cli.files import images_in

    if os.path.isdir(name):
        return any(path.samefile(image) for image in images_in(Path(name)) if image.exists())
    return os.path.exists(name) and path.samefile(name)


def write_text(path: Path, text: str) -> None:
    """Write a file atomically.

    Args:
        path: Where to.
        text: What to write.
    """
    from scodkit.numerics.files import replacing

    with replacing(path) as temporary:
        # a file's name may hold lone surrogates, which no encoding has
        temporary.write_bytes(text.encode(errors="backslashreplace"))


def check_picture(path: Path, given: Mapping[str, object]) -> None:
    """Raise if a picture cannot be drawn in a file, as `check_output` does.

    Args:
        path: Where it is to be.
        given: All that the command was given.

    Raises:
        OptionError: If the file's name does not end as that of a picture.
    """
    if path.suffix.lower() not in _PICTURES:
        raise OptionError(
            f"expected a file that ends in {', '.join(_PICTURES)} to draw in, got {path}"
        )
    check_output(path, given, lambda file: _MARK.encode() in file.read_bytes())


def write_picture(path: Path, figure: Figure) -> None:
    """Write a figure atomically.

    Args:
        path: Where to.
        figure: What to write.
    """
    from scodkit.numerics.files import replacing

    with replacing(path) as temporary:
        kind = path.suffix[1:].lower()
        figure.savefig(temporary, format=kind, metadata={"Creator": _MARK})


@contextmanager
def stoppable(afterwards: str) -> Iterator[None]:
    """Let Ctrl-C end the command with a remark on what is left and how to go on.

    Args:
        afterwards: The remark.

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
