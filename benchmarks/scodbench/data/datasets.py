"""The data sets, as ``registry.toml`` beside this module tells of them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scodkit.errors import OptionError


@dataclass(frozen=True)
class File:
    """A file of a data set.

    Args:
        name: Relative to the data folder, with forward slashes.
        size: Bytes.
        sha256: What the file's may be; the first one is that of the file at the URL.
        content: What the sha256 of a gzip file's content may be: the same data compressed by
            another program is another file. Empty if that does not count.
        url: Its public place; empty if it has none.
        checksum_from: Who published the checksum.
    """

    name: str
    size: int
    sha256: tuple[str, ...]
    content: str = ""
    url: str = ""
    checksum_from: str = "the README of the project's data"


@dataclass(frozen=True)
class Layout:
    """One way a data set can be stored.

    Args:
        name: ``published`` for the authors' own files, ``prepared`` for the project's.
        files: All that belong to it.
    """

    name: str
    files: tuple[File, ...]


@dataclass(frozen=True)
class Dataset:
    """A data set.

    Args:
        name: As on the command line.
        title: What it is, in words.
        licence: As far as it is known.
        layouts: The ways it can be stored; any one of them is enough.
        instead: What to do where it cannot be fetched; empty if it can.
    """

    name: str
    title: str
    licence: str
    layouts: tuple[Layout, ...]
    instead: str = ""

    @property
    def fetched(self) -> tuple[File, ...]:
        """The files with a public place; none if there is no such place."""
        return tuple(file for layout in self.layouts for file in layout.files if file.url)

    def remedy(self, folder: str | Path | None = None) -> str:
        """Return what to do where the data set is missing.

        Args:
            folder: Where it is to be, if that was said.
        """
        there = "" if folder is None else f" --data {folder}"
        return self.instead or f"type: scodbench data get {self.name}{there}"


def _dataset(name: str, told: dict[str, Any]) -> Dataset:
    """Return a data set as the registry tells of it."""
    layouts = []
    for layout in ("published", "prepared"):
        files = [File(**{**f, "sha256": tuple(f["sha256"])}) for f in told.pop(layout, ())]
        if files:
            layouts.append(Layout(layout, tuple(files)))
    return Dataset(name, layouts=tuple(layouts), **told)


_toml: Any = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
_registry = _toml.loads(Path(__file__).with_name("registry.toml").read_text(encoding="utf-8"))

DATASETS: Mapping[str, Dataset] = {
    name: _dataset(name, told) for name, told in _registry.items()
}


def dataset_named(name: str) -> Dataset:
    """Return a data set.

    Args:
        name: One of `DATASETS`.

    Raises:
        OptionError: If there is none of that name.

    Examples:
        >>> dataset_named("mnist").remedy()
        'type: scodbench data get mnist'
    """
    if name not in DATASETS:
        raise OptionError(f"expected a data set of {', '.join(DATASETS)}; got {name}")
    return DATASETS[name]
