"""The files of the data sets: which are there and right, and how they are fetched."""

from __future__ import annotations

import gzip
import hashlib
import zlib
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import pooch

from scodbench.data.datasets import DATASETS, Dataset, File, dataset_named
from scodbench.data.errors import ChecksumError, DownloadError, NotFetchableError
from scodbench.data.folder import data_folder
from scodkit import __version__

# no compression on the way: the bytes are to be those that were published
_HEADERS = {"User-Agent": f"scodkit/{__version__}", "Accept-Encoding": "identity"}


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
    wrong = mismatch(file, path)
    if wrong is None:
        return FileState(file, layout, path, Condition.THERE)
    return FileState(file, layout, path, Condition.WRONG, wrong)


def mismatch(file: File, path: Path) -> str | None:
    """Return what is wrong with a file, or None if its sha256 is one of those accepted.

    Args:
        file: What it is to be.
        path: An existing file.
    """
    found = pooch.file_hash(path)
    if found in file.sha256:
        return None
    message = f"expected sha256 {' or '.join(file.sha256)}, got {found}"
    if not file.content:
        return message
    try:
        inside = hashlib.sha256(gzip.decompress(path.read_bytes())).hexdigest()
    except (gzip.BadGzipFile, EOFError, zlib.error):
        inside = "no gzip file"
    if inside == file.content:
        return None
    return f"{message}; expected content {file.content}, got {inside}"


def get(
    name: str,
    folder: str | Path | None = None,
    *,
    progress: bool = True,
    timeout: float = 30.0,
    retries: int = 3,
) -> list[Path]:
    """Fetch the published files of a data set, except those that are there and right.

    A file gets its name only when it is complete and has the published sha256.

    Args:
        name: One of `DATASETS`.
        folder: Where to, as for `data_folder`; it is made.
        progress: Whether to show a bar for each file.
        timeout: Seconds without a byte after which a connection counts as cut.
        retries: How many more times a file is asked for after a failure.

    Returns:
        Where they are.

    Raises:
        NotFetchableError: If the data set has no public place.
        DownloadError: If a file cannot be fetched or written.
        ChecksumError: If another file came; it is removed.
    """
    dataset, root = dataset_named(name), data_folder(folder)
    if not dataset.fetched:
        raise NotFetchableError(
            f"expected a data set with a public place, got {name}; {dataset.instead}"
        )
    store = pooch.create(
        root,
        base_url="",
        registry={file.name: f"sha256:{file.sha256[0]}" for file in dataset.fetched},
        urls={file.name: file.url for file in dataset.fetched},
        retry_if_failed=retries,
    )
    http = pooch.HTTPDownloader(
        progressbar=progress, chunk_size=1 << 18, timeout=timeout, headers=_HEADERS
    )
    paths = [root / file.name for file in dataset.fetched]
    for file, path in zip(dataset.fetched, paths, strict=True):
        if path.is_file() and mismatch(file, path) is None:
            continue
        try:
            store.fetch(file.name, downloader=http)
            path.chmod(0o644)  # pooch leaves the mode of a temporary file, for its owner alone
        except OSError as error:  # those of the connection are such, too
            raise DownloadError(
                f"expected all of {file.url} in {path}, got: {error}; mend the connection or "
                f"make room, and {dataset.remedy(folder)}"
            ) from error
        except ValueError as error:
            raise ChecksumError(
                f"expected the published file at {file.url}, got: {error} "
                f"{dataset.remedy(folder).capitalize()}; if that fails, too, the file on the "
                "server has changed"
            ) from error
    return paths
