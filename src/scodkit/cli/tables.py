"""Tables of numbers in .csv files, and what their columns are for."""

from __future__ import annotations

import array
import csv
import re
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray
from tqdm.auto import tqdm

from scodkit.cli import messages
from scodkit.cli.output import note
from scodkit.errors import BatchError, OptionError

# numbers as tables write them: Python also reads 1_000, and digits of every script
NUMBER = re.compile(
    r"[+-]?(([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?|nan|inf(inity)?)",
    re.ASCII | re.IGNORECASE,
)


@dataclass(frozen=True)
class Columns:
    """What the columns of a table are for, by name.

    Args:
        take: The inputs, in this order; None for all that are nothing else.
        drop: Of no use.
        target: What the model predicts.
        id: What samples are called.
    """

    take: tuple[str, ...] | None = None
    drop: tuple[str, ...] = ()
    target: str | None = None
    id: str | None = None

    @classmethod
    def of(
        cls,
        *,
        columns: str | None = None,
        drop: str | None = None,
        target: str | None = None,
        id: str | None = None,
    ) -> Columns:
        """Return what was typed, names as ``a,b,c``.

        Examples:
            >>> Columns.of(drop='a,"b, c"', target="y")
            Columns(take=None, drop=('a', 'b, c'), target='y', id=None)
        """
        taken = None if columns is None else _names(columns)
        return cls(taken, () if drop is None else _names(drop), target, id)

    def named(self) -> list[tuple[str, str]]:
        """Return pairs of an option and a column that it names."""
        pairs = [("--columns", name) for name in self.take or ()]
        pairs += [("--drop", name) for name in self.drop]
        pairs += [("--target", self.target)] if self.target is not None else []
        return pairs + ([("--id", self.id)] if self.id is not None else [])


@dataclass(frozen=True, eq=False)
class Table:
    """What was read.

    Args:
        values: The inputs, ``(n, k)``.
        purposes: What the columns are for; the inputs are those it takes, None without names.
        targets: Cells of the target, one a sample; None if there is none.
        ids: Names of the samples, likewise.
    """

    values: NDArray[np.float64]
    purposes: Columns
    targets: list[str] | None
    ids: list[str] | None


def read_table(path: Path, typed: Columns, fitted: Columns) -> Table:
    """Return the samples of a table, one a line.

    Args:
        path: A ``.csv`` file.
        typed: What the columns are for, as the command says.
        fitted: As it was at the fit; its target and id need not be in this table.

    Raises:
        BatchError: If it has other columns, or cells that are no numbers.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            return _read(path, file, typed, fitted)
    except (UnicodeDecodeError, csv.Error) as error:
        raise BatchError(
            f"expected text in {path}, but it is not: {error}; save it as .csv in UTF-8"
        ) from error


def _read(path: Path, file: IO[str], typed: Columns, fitted: Columns) -> Table:
    first = next((line for line in file if line.strip()), "")
    separator = max(",;\t", key=first.count)
    file.seek(0)
    lines = csv.reader(file, delimiter=separator)
    numbers, targets, ids = array.array("d"), list[str](), list[str]()
    names, purposes, width = None, typed, None
    places: list[int] = []
    for line in tqdm(lines, "reading", unit=" lines", delay=1, disable=None):
        cells = [cell.strip() for cell in line]
        if cells in ([], [""]):
            continue
        if width is None:
            width = len(cells)
            has_names = not _are_numbers(cells)
            names = _distinct(cells, f"the first line of {path}") if has_names else None
            purposes = _purposes(path, names, width, typed, fitted)
            order = names or purposes.take or ()
            taken = purposes.take
            places = list(range(width)) if taken is None else [order.index(n) for n in taken]
            if has_names:
                continue
        if len(cells) != width:
            raise BatchError(
                f"expected {width} cells in line {lines.line_num} of {path}, as in those "
                f"before, got {len(cells)}; mend the line"
            )
        for place in places:
            if cells[place] and not NUMBER.fullmatch(cells[place]):
                words = [p for p in places if cells[p] and not NUMBER.fullmatch(cells[p])]
                named = [names[p] for p in words] if names else []
                raise BatchError(
                    f"expected a number in line {lines.line_num}, column "
                    f"{names[place] if names else place + 1} of {path}, got {cells[place]!r}; "
                    + _instead_of_words(named if fitted.take is None else [])
                )
            numbers.append(float(cells[place] or "nan"))
        if names is not None:
            targets += [cells[names.index(purposes.target)]] if purposes.target else []
            ids += [cells[names.index(purposes.id)]] if purposes.id else []
    values = np.array(numbers).reshape(-1, len(places) or 1)
    return Table(
        values,
        purposes,
        targets if purposes.target else None,
        ids if purposes.id else None,
    )


def _are_numbers(cells: Sequence[str]) -> bool:
    try:
        _ = [float(cell) for cell in cells if cell]
    except ValueError:  # a word: this line has the names of the columns
        return False
    return True


def _instead_of_words(names: Sequence[str]) -> str:
    """Return what to do with cells that are words, in columns that need not be inputs."""
    advice = "write numbers as -1.5e3, and a missing one as nan"
    if not names:
        return advice
    return (
        f"type --drop {shlex.quote(joined(names))}, or --id and --target with what samples are "
        f"called and what the model predicts; or {advice}"
    )


def joined(names: Sequence[str]) -> str:
    """Return names as they are typed for `Columns.of`.

    Examples:
        >>> joined(["a", "b, c"])
        'a,"b, c"'
    """
    return ",".join(f'"{name}"' if "," in name else name for name in names)


def _purposes(
    path: Path, names: list[str] | None, width: int, typed: Columns, fitted: Columns
) -> Columns:
    """Return what each column of a table is for; the inputs are all named if any is.

    Raises:
        BatchError: If a column of the fit is missing, or one has two purposes.
        OptionError: If a column that was typed is missing.
    """
    if names is None:
        return _nameless(path, width, typed, fitted)
    for option, name in typed.named():
        if name not in names:
            raise OptionError(_no_column(path, option, name, names))
    fitted_target, fitted_id = (n if n in names else None for n in (fitted.target, fitted.id))
    aside = Columns(
        drop=typed.drop, target=typed.target or fitted_target, id=typed.id or fitted_id
    )
    others = [name for _, name in aside.named()]
    chosen = typed.take or fitted.take
    if chosen is None:
        chosen = tuple(name for name in names if name not in others)
    missing = [name for name in chosen if name not in names]
    if missing:
        raise BatchError(
            f"expected the columns {', '.join(chosen)} in {path}, got {', '.join(names)}, "
            f"without {', '.join(missing)}; {_as_at_the_fit(missing, names, chosen)}"
        )
    _distinct([*chosen, *others], "those to take, to drop, of the target and of the id")
    if not chosen:
        raise BatchError(
            f"expected columns of {path} to be left as inputs, got none; type fewer names "
            "after --drop"
        )
    unused = [name for name in names if name not in (*chosen, *others)]
    if unused:
        note(f"columns left out of {path}: {', '.join(unused)}")
    return Columns(chosen, aside.drop, aside.target, aside.id)


def _as_at_the_fit(missing: Sequence[str], names: Sequence[str], chosen: Sequence[str]) -> str:
    """Return what to do where columns are missing: perhaps others are misspelt."""
    unknown = [name for name in names if name not in chosen]
    near = {name: messages.nearest(name, unknown) for name in missing}
    meant = [f"{name} in place of {other}" for name, other in near.items() if other]
    if meant:
        return f"write {' and '.join(meant)} in its first line"
    return "name the columns as at the fit"


def _nameless(path: Path, width: int, typed: Columns, fitted: Columns) -> Columns:
    """Return what columns without names are for: all are inputs, in the order of the fit.

    Raises:
        BatchError: If there are more or fewer, or names are needed.
    """
    aside = [option for option, _ in typed.named() if option != "--columns"]
    if aside:
        raise BatchError(
            f"expected names of columns in the first line of {path} for {aside[0]}, got "
            "numbers; write the names in the first line"
        )
    chosen = typed.take or fitted.take
    if chosen is not None and len(chosen) != width:
        raise BatchError(
            f"expected the {len(chosen)} columns {', '.join(chosen)} in {path}, got "
            f"{width} without names; write the names in the first line"
        )
    return Columns(None if chosen is None else tuple(_distinct(chosen, "those to take")))


def _no_column(path: Path, option: str, name: str, names: Sequence[str]) -> str:
    near = messages.nearest(name, names)
    advice = f"type a name of those: {', '.join(names)}"
    if near is not None:
        advice = f"type: {messages.corrected(name, near)}"
    return (
        f"expected a column of {path} after {option}, got {name}, which is none of its "
        f"{len(names)}; {advice}"
    )


def _names(text: str) -> tuple[str, ...]:
    """Return names of columns as they are typed, with commas between."""
    (names,) = csv.reader([text], skipinitialspace=True)
    return tuple(name.strip() for name in names)


def _distinct(names: Sequence[str], where: str) -> list[str]:
    """Return names of columns, which must be unique.

    Raises:
        BatchError: If a name is repeated: which column is meant would be a guess.
    """
    repeated = [name for name, times in Counter(names).items() if times > 1]
    if repeated:
        raise BatchError(
            f"expected different names of columns in {where}, got {', '.join(repeated)} more "
            "than once; rename or remove one"
        )
    return list(names)
