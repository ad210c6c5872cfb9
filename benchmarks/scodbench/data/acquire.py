"""Fetching a whole data set."""

from __future__ import annotations

from pathlib import Path

from scodbench.data.datasets import dataset_named
from scodbench.data.download import fetch
from scodbench.data.errors import NotFetchableError
from scodbench.data.folder import data_folder


def get(name: str, folder: str | Path | None = None, *, progress: bool = True) -> list[Path]:
    """Fetch the published files of a data set, except those that are there and right.

    Args:
        name: One of `DATASETS`.
        folder: Where to, as for `data_folder`; it is made.
        progress: Whether to show a bar for each file.

    Returns:
        Where they are.

    Raises:
        NotFetchableError: If the data set has no public place.

    Examples:
        >>> get("taxinet")
        Traceback (most recent call last):
        ...
        scodbench.data.errors.NotFetchableError: expected a data set with a public place, \
got taxinet; it is part of the project's data and has no public place: copy taxinet/ into the \
folder, or name a folder that has it, with the variable SCODKIT_DATA
    """
    dataset, root = dataset_named(name), data_folder(folder)
    if not dataset.fetched:
        raise NotFetchableError(
            f"expected a data set with a public place, got {name}; {dataset.instead}"
        )
    return [
        fetch(file.url, root / file.name, file.checksums, progress=progress)
        for file in dataset.fetched
    ]
