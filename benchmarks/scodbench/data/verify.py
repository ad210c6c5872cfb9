"""What of every data set is there, and whether it is right."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from scodbench.data.datasets import DATASETS, Dataset, File, dataset_named
from scodbench.data.folder import data_folder


class Condition(str, Enum):
    """How a file was found."""

    THERE = "there"
    """With the right checksum."""

    MISSING = "missing"
    """Not at all."""

    WRONG = "wrong checksum"
    """Cut off or altered, or another file."""


@dataclass(frozen=True)
class FileState:
    """A file of a data set, as it was found.

    Args:
        file: What was looked for.
        layout: The name of the layout it belongs to.
        path: Where.
        condition: What was found.
        wrong: The checksums expected and found, where they differ; empty otherwise.
    """

    file: File
    layout: str
    path: Path
    condition: Condition
    wrong: str = ""


@dataclass(frozen=True)
class DatasetState:
    """A data set, as it was found.

    Args:
        dataset: What was looked for.
        files: All its files, of all layouts.
    """

    dataset: Dataset
    files: tuple[FileState, ...]

    @property
    def complete(self) -> bool:
        """Whether one layout is there with all its files, none of them wrong."""
        return any(
            all(f.condition is Condition.THERE for f in self.files if f.layout == layout.name)
            for layout in self.dataset.layouts
        )


def check(folder: str | Path | None = None) -> list[DatasetState]:
    """Look for every file of every data set, and read those that are there.

    Args:
        folder: As for `data_folder`.

    Returns:
        The data sets in the order of `DATASETS`.

    Examples:
        >>> [state.dataset.name for state in check("nowhere") if state.complete]
        []
    """
    return [check_dataset(name, folder) for name in DATASETS]


def check_dataset(name: str, folder: str | Path | None = None) -> DatasetState:
    """Look for every file of one data set, and read those that are there.

    Args:
        name: One of `DATASETS`.
        folder: As for `data_folder`.

    Returns:
        Its files, of all layouts.
    """
    dataset, root = dataset_named(name), data_folder(folder)
    return DatasetState(
        dataset,
        tuple(
            _look(file, layout.name, root / file.name)
            for layout in dataset.layouts
            for file in layout.files
        ),
    )


def _look(file: File, layout: str, path: Path) -> FileState:
    if not path.is_file():
        return FileState(file, layout, path, Condition.MISSING)
    wrong = file.checksums.mismatch(path)
    if wrong is None:
        return FileState(file, layout, path, Condition.THERE)
    return FileState(file, layout, path, Condition.WRONG, wrong)
