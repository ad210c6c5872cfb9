"""Samples in files: arrays of numpy, tables of numbers, folders of images."""

from __future__ import annotations

import array
import csv
import math
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from numpy.lib import format as npy
from numpy.typing import NDArray
from tqdm.auto import tqdm

from scodkit.errors import BatchError, OptionError, ScodError
from scodkit.fit.plan import available_bytes
from scodkit.numerics.optional import optional
from scodkit.parts import Part, data_hash, shard_rows

ARRAY_FILES = (".npy", ".npz", ".csv")
_IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm")
_NUMBERS = "fiub"  # numpy's kinds: floats, integers, truth values
# what tables mean by a number: Python also reads 1_000, and digits of every script
_NUMBER = re.compile(
    r"[+-]?(([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?|nan|inf(inity)?)",
    re.ASCII | re.IGNORECASE,
)
# pixels of 16 bits, as pillow calls them by the file's format
_DEEP = {("PNG", "I"), ("PNG", "I;16"), ("PPM", "I"), ("TIFF", "I;16"), ("TIFF", "I;16B")}


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
    check_regular(path)
    if path.is_dir():
        samples: Samples = ImageSamples(path, tuple(images_in(path)))
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


def check_regular(path: Path) -> None:
    """Refuse to read what may have no end, or never begin: pipes, devices, sockets.

    Args:
        path: Of something to read; that there is nothing is for others to say.

    Raises:
        OptionError: If it is neither a file nor a folder.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        raise OptionError(
            f"expected a file on disk, got a pipe or a device, {path}; write it to a file "
            "first, or for JSON lines on stdin type - (scod score MONITOR MODEL -)"
        )


def images_in(folder: Path) -> list[Path]:
    """Return the images in a folder and in those inside, sorted."""
    return sorted(path for path in folder.rglob("*") if path.suffix.lower() in _IMAGES)


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
        with path.open("rb") as file:
            if file.read(2) != b"PK":  # of an archive; its arrays are looked at one by one
                file.seek(0)
                _check_claim(file, path.stat().st_size)
        found: Any = np.load(path, mmap_mode="r", allow_pickle=False)
        if not isinstance(found, np.ndarray):
            found = _chosen(path, found)
    except ScodError:
        raise
    except Exception as error:  # numpy and zipfile have many words for a damaged file
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
    name = "x" if "x" in names else names[0]
    entry = archive.zip.getinfo(f"{name}.npy")
    with archive.zip.open(entry) as file:
        claimed = _check_claim(file, entry.file_size)
    free = available_bytes(torch.device("cpu"))
    if free is not None and claimed > free:
        raise BatchError(
            f"expected an array that fits into memory in {path}, but it claims {claimed:.3g} "
            f"bytes, and {free:.3g} are free; numpy.save it as .npy, which is read in pieces"
        )
    chosen: NDArray[Any] = archive[name]
    return chosen


def _check_claim(file: IO[bytes], size: int) -> int:
    """Return how many bytes an array says it has, before any are set apart for it.

    Raises:
        ValueError: If there are fewer.
    """
    short = npy.read_magic(file) == (1, 0)
    read = npy.read_array_header_1_0 if short else npy.read_array_header_2_0
    shape, _, dtype = read(file)
    claimed = math.prod(shape) * dtype.itemsize
    there = size - file.tell()
    if claimed > there:
        raise ValueError(f"it claims {claimed:.3g} bytes, of which {there:.3g} are there")
    return claimed


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
            if any(cell and not _is_float(cell) for cell in cells):
                names = _distinct(cells, f"the first line of {path}")
                continue
        if len(cells) != width:
            raise BatchError(
                f"expected {width} cells in line {lines.line_num} of {path}, as in those "
                f"before, got {len(cells)}"
            )
        for place, cell in enumerate(cells):
            if cell and not _NUMBER.fullmatch(cell):
                column = names[place] if names else place + 1
                raise BatchError(
                    f"expected a number in line {lines.line_num}, column {column} of {path}, "
                    f"got {cell!r}; leave the column out, or write numbers as -1.5e3"
                )
            numbers.append(float(cell or "nan"))
    return np.array(numbers).reshape(-1, width or 1), names


def _is_float(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _distinct(names: Sequence[str], where: str) -> list[str]:
    """Return names of columns, of which none is there twice.

    Raises:
        BatchError: If one is: which column is meant, nobody could say.
    """
    twice = [name for name, times in Counter(names).items() if times > 1]
    if twice:
        raise BatchError(
            f"expected different names of columns in {where}, got {', '.join(twice)} more "
            "than once; rename or remove one"
        )
    return list(names)


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
    wanted = _distinct(columns or names or (), "those to take")
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


def _image(path: Path) -> NDArray[Any]:
    Image = optional("PIL.Image", "cli")  # noqa: N806 (a module with a class's name)
    check_regular(path)
    try:
        with Image.open(path) as image:
            pixels = _pixels(path, image)
    except ScodError:
        raise
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise BatchError(f"expected an image at {path}, but it cannot be read: {error}") from (
            error
        )
    return pixels[None] if pixels.ndim == 2 else np.ascontiguousarray(pixels.transpose(2, 0, 1))


def _pixels(path: Path, image: Any) -> NDArray[Any]:
    """Return an image from 0 to 1, ``(H, W)`` or ``(H, W, 3)``, by what its numbers mean.

    Raises:
        BatchError: If that is not known, or what is seen depends on what is behind it.
    """
    if (image.format, image.mode) in _DEEP and "transparency" not in image.info:
        return np.asarray(image, dtype=np.float32) / 65535
    if image.mode not in ("1", "L", "LA", "P", "PA", "RGB", "RGBA"):
        raise BatchError(
            f"expected an image of grey or coloured pixels in 8 bits, or grey in 16, got one "
            f"that pillow calls {image.mode} at {path}; save it in 8 bits, of x from 0 to 1: "
            "Image.fromarray((255 * x).astype('uint8')).save(path)"
        )
    clear = image.mode in ("LA", "PA", "RGBA") or "transparency" in image.info
    if clear and image.convert("RGBA").getchannel("A").getextrema() != (255, 255):
        raise BatchError(
            f"expected an image that is opaque, got one with transparent pixels at {path}; put "
            "it on the background of the training and save it without: image.convert('RGB')"
        )
    grey = image.mode in ("1", "L", "LA")
    return np.asarray(image.convert("L" if grey else "RGB"), dtype=np.float32) / 255
