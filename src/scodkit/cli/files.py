"""Samples in files: arrays of numpy, tables of numbers, folders of images."""

from __future__ import annotations

import array
import csv
import math
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray
from tqdm.auto import tqdm

from scodkit.errors import BatchError, OptionError
from scodkit.optional import optional
from scodkit.parts import Part, data_hash, shard_rows

ARRAY_FILES = (".npy", ".npz", ".csv")
_IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm")
_NUMBERS = "fiub"  # numpy's kinds: floats, integers, truth values


class Samples(ABC):
    """Samples that can be read some at a time.

    Attributes:
        has_dtype: Whether their dtype was chosen by whoever wrote them; text has none.
        columns: Names of the numbers of a sample, if they have names.
    """

    has_dtype: bool = False
    columns: tuple[str, ...] | None = None

    @abstractmethod
    def __len__(self) -> int:
        """Return how many there are."""

    @abstractmethod
    def read(self, rows: slice) -> NDArray[Any]:
        """Return some of them, ``(b, *shape)``."""

    def name(self, row: int) -> int | str:
        """Return what one is called in results: its place, unless it has a name."""
        return row

    @property
    def part(self) -> Part:
        """Which samples these are: by default all there are."""
        data = data_hash(len(self), lambda row: self.read(slice(row, row + 1)))
        return Part(data, 0, len(self))


class SamplesShard(Samples):
    """One of several parts of some samples.

    Args:
        whole: All of them.
        index: Which part, from 0.
        count: How many parts there are.
    """

    def __init__(self, whole: Samples, index: int, count: int) -> None:
        self._whole, self._rows = whole, shard_rows(len(whole), index, count)
        self.has_dtype, self.columns = whole.has_dtype, whole.columns

    @property
    def part(self) -> Part:
        """Which samples these are."""
        return Part(self._whole.part.data, self._rows.start, self._rows.stop)

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, rows: slice) -> NDArray[Any]:
        """See `Samples.read`.

        Returns:
            ``(b, *shape)``.
        """
        start, stop, _ = rows.indices(len(self))
        return self._whole.read(slice(self._rows.start + start, self._rows.start + stop))

    def name(self, row: int) -> int | str:
        """Return what one is called among all of them."""
        return self._whole.name(self._rows.start + row)


@dataclass(frozen=True)
class ArraySamples(Samples):
    """An array, a sample along its first axis.

    Args:
        values: ``(n, *shape)``.
        has_dtype: As in `Samples`.
        columns: As in `Samples`.
        left_out: Names of columns that are not among them.
    """

    values: NDArray[Any]
    has_dtype: bool = True
    columns: tuple[str, ...] | None = None
    left_out: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.values)

    def read(self, rows: slice) -> NDArray[Any]:
        """Return a copy of some rows, so that a mapped file is read piece by piece."""
        return np.array(self.values[rows])


@dataclass(frozen=True)
class ImageSamples(Samples):
    """Images, each ``(C, H, W)`` in float32 from 0 to 1: one channel if it is grey, or three.

    Args:
        folder: Where they are, folders inside included.
        paths: Of the images, sorted.
    """

    folder: Path
    paths: tuple[Path, ...]

    def __len__(self) -> int:
        return len(self.paths)

    def read(self, rows: slice) -> NDArray[Any]:
        """Return some images, ``(b, C, H, W)``.

        Raises:
            BatchError: If they are not of one size.
        """
        images = [_image(path) for path in self.paths[rows]]
        first = _image(self.paths[0]) if images else None
        for path, image in zip(self.paths[rows], images, strict=True):
            if first is not None and image.shape != first.shape:
                raise BatchError(
                    f"expected images of one size, {first.shape} as {self.paths[0].name}, got "
                    f"{image.shape} in {path}; resize them to what the model takes"
                )
        return np.stack(images)

    def name(self, row: int) -> str:
        """Return the image's path in the folder."""
        return str(self.paths[row].relative_to(self.folder))


def read_samples(
    path: Path, columns: Sequence[str] | None = None, *, progress: bool = False
) -> Samples:
    """Return the samples in a file or folder.

    Args:
        path: ``.npy``, ``.npz`` with one array or one named ``x``, ``.csv`` with a sample per
            line, or a folder of images.
        columns: Of a table with names: which to take, in this order; all by default.
        progress: Show a progress bar where it takes more than a second.

    Raises:
        OptionError: If there is no such file, or it is of another kind.
        BatchError: If there are no samples in it.
    """
    if not path.exists():
        raise OptionError(f"expected a file or folder at {path}, found none")
    if path.is_dir():
        samples: Samples = _folder(path)
    elif path.suffix.lower() == ".csv":
        samples = _table(path, columns, progress)
    elif path.suffix.lower() in ARRAY_FILES:
        samples = ArraySamples(_array(path))
    else:
        raise OptionError(
            f"expected a file that ends in {', '.join(ARRAY_FILES)}, or a folder of images, "
            f"got {path}; for other forms write a function that returns batches, and type "
            "file.py:function"
        )
    if len(samples) == 0:
        raise BatchError(f"expected samples in {path}, found none")
    return samples


def check_numbers(values: NDArray[Any], where: str) -> None:
    """Refuse arrays that are not numbers with a sample along the first axis.

    Args:
        values: The array.
        where: Where it is from, for the message.

    Raises:
        BatchError: If they are not.
    """
    if values.dtype.kind not in _NUMBERS or values.ndim == 0:
        raise BatchError(
            f"expected real numbers of shape (samples, ...) in {where}, got {values.dtype} of "
            f"shape {values.shape}; type x.astype('float32')"
        )


def _array(path: Path) -> NDArray[Any]:
    try:
        found: Any = np.load(path, mmap_mode="r", allow_pickle=False)
        if not isinstance(found, np.ndarray):
            found = _chosen(path, found)
    except (ValueError, EOFError, zipfile.BadZipFile) as error:
        raise BatchError(
            f"expected an array of numbers in {path}, but it cannot be read ({error}); save it "
            "with numpy.save(path, x)"
        ) from error
    check_numbers(found, str(path))
    values: NDArray[Any] = found
    return values


def _chosen(path: Path, archive: Any) -> NDArray[Any]:
    names = list(archive.files)
    if len(names) != 1 and "x" not in names:
        raise BatchError(
            f"expected one array in {path}, or one named x, got {', '.join(names) or 'none'}; "
            "type numpy.savez(path, x=x)"
        )
    chosen: NDArray[Any] = archive["x" if "x" in names else names[0]]
    return chosen


def _table(path: Path, columns: Sequence[str] | None, progress: bool) -> ArraySamples:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            values, names = _read_table(path, file, progress)
    except (UnicodeDecodeError, csv.Error) as error:
        raise BatchError(f"expected text in {path}, but it is not: {error}") from error
    return _picked(path, values, names, columns)


def _read_table(
    path: Path, file: IO[str], progress: bool
) -> tuple[NDArray[Any], list[str] | None]:
    first = next((line for line in file if line.strip()), "")
    separator = max(",;\t", key=first.count)
    file.seek(0)
    lines = csv.reader(file, delimiter=separator)
    numbers, names, width = array.array("d"), None, None
    for line in tqdm(lines, "reading", unit=" lines", delay=1, disable=not progress):
        cells = [cell.strip() for cell in line]
        if cells in ([], [""]):
            continue
        if width is None:
            width = len(cells)
            if any(cell and _number(cell) is None for cell in cells):
                names = cells
                continue
        if len(cells) != width:
            raise BatchError(
                f"expected {width} cells in line {lines.line_num} of {path}, as in those "
                f"before, got {len(cells)}"
            )
        for place, cell in enumerate(cells):
            found = math.nan if not cell else _number(cell)
            if found is None:
                column = names[place] if names else place + 1
                raise BatchError(
                    f"expected a number in line {lines.line_num}, column {column} of {path}, "
                    f"got {cell!r}; leave the column out or turn it into numbers"
                )
            numbers.append(found)
    return np.array(numbers).reshape(-1, width or 1), names


def _number(cell: str) -> float | None:
    try:
        return float(cell)
    except ValueError:
        return None


def _picked(
    path: Path, values: NDArray[Any], names: list[str] | None, columns: Sequence[str] | None
) -> ArraySamples:
    """Return the columns that are asked for, by name.

    Raises:
        BatchError: If some are not there.
    """
    if names is None and (columns is None or len(columns) != values.shape[1]):
        if columns is not None and len(values):
            raise BatchError(
                f"expected the {len(columns)} columns {', '.join(columns)} in {path}, got "
                f"{values.shape[1]} without names; write the names in the first line"
            )
        return ArraySamples(values, has_dtype=False)
    wanted = list(columns or names or ())
    names = names or wanted
    missing = [name for name in wanted if name not in names]
    if missing:
        raise BatchError(
            f"expected the columns {', '.join(wanted)} in {path}, found no "
            f"{', '.join(missing)}; there are {', '.join(names)}"
        )
    picked = values[:, [names.index(name) for name in wanted]]
    others = tuple(name for name in names if name not in wanted)
    return ArraySamples(picked, has_dtype=False, columns=tuple(wanted), left_out=others)


def _folder(path: Path) -> ImageSamples:
    paths = sorted(p for p in path.rglob("*") if p.suffix.lower() in _IMAGES)
    return ImageSamples(path, tuple(paths))


def _image(path: Path) -> NDArray[Any]:
    Image = optional("PIL.Image", "cli")  # noqa: N806 (a module with a class's name)
    try:
        with Image.open(path) as image:
            grey = image.mode in ("1", "L")
            pixels = np.asarray(image.convert("L" if grey else "RGB"), dtype=np.float32) / 255
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise BatchError(f"expected an image at {path}, but it cannot be read: {error}") from (
            error
        )
    return pixels[None] if grey else np.ascontiguousarray(pixels.transpose(2, 0, 1))
