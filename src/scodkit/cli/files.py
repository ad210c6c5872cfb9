"""Samples in files, read in batches: arrays of numpy, tables of numbers, folders of images."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from numpy.lib import format as npy
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import Dataset

from scodkit.cli.tables import Columns, read_table
from scodkit.errors import BatchError, NonFiniteError, OptionError, ScodError, optional
from scodkit.fit.memory import available_bytes
from scodkit.numerics.files import file_errors, regular_file

_NONE = Columns()  # nothing is said about columns
_ARRAYS = (".npy", ".npz", ".csv")
_IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm")
_NUMBERS = "fiub"  # numpy's kinds: floats, integers, booleans
# pixels of 16 bits, as pillow names them for each file format
_16_BITS = {("PNG", "I"), ("PNG", "I;16"), ("PPM", "I"), ("TIFF", "I;16"), ("TIFF", "I;16B")}


@dataclass(frozen=True)
class Form:
    """The form in which the model takes a sample.

    Args:
        dtype: Of its numbers.
        shape: Of a sample; None before a fit, where it is unknown.
        columns: Names of its numbers, if they have names.
        target: Name of the column of what the model predicts, in tables that have it.
        id: Name of the column of what samples are called, likewise.
    """

    dtype: torch.dtype
    shape: tuple[int, ...] | None = None
    columns: tuple[str, ...] | None = None
    target: str | None = None
    id: str | None = None

    @classmethod
    def of_fit(cls, notes: Mapping[str, Any], model: nn.Module) -> Form:
        """Return what a fit has noted; before a fit, the dtype of the model's weights alone."""
        noted = notes.get("inputs")
        if noted is None:
            dtypes = (p.dtype for p in model.parameters() if p.is_floating_point())
            return cls(next(dtypes, torch.float32))
        columns = noted.get("columns")
        dtype, shape = getattr(torch, noted["dtype"]), tuple(noted["shape"])
        columns = None if columns is None else tuple(columns)
        return cls(dtype, shape, columns, noted.get("target"), noted.get("id"))

    def note(self) -> dict[str, Any]:
        """Return it as plain data, for `of_fit`."""
        form = {name: value for name, value in asdict(self).items() if value is not None}
        return {**form, "dtype": str(self.dtype).removeprefix("torch.")}

    def tensor(self, values: NDArray[Any], has_dtype: bool) -> Tensor:
        """Return samples as the model takes them.

        Args:
            values: ``(b, *shape)``.
            has_dtype: Whether their dtype was chosen, so that integers are not taken for
                floats: pixels from 0 to 255 may be meant to be divided first.

        Raises:
            BatchError: If they have another dtype or another number of axes than at the fit.
        """
        if self.shape is not None and values.ndim != 1 + len(self.shape):
            raise BatchError(
                f"expected samples of shape {self.shape}, as at the fit, in an array with one "
                f"more axis in front, got an array of shape {values.shape}; save it with "
                "one more axis in front: a sample along the first"
            )
        tensor = torch.from_numpy(_native(values))
        same_kind = tensor.is_floating_point() == self.dtype.is_floating_point
        if same_kind or not has_dtype:
            cast = tensor.to(self.dtype)
            if not same_kind and not self.dtype.is_floating_point and (cast != tensor).any():
                raise BatchError(
                    "expected whole numbers, as at the fit, got a fraction or a missing "
                    "one; pass what the model was trained with"
                )
            return cast
        if self.shape is not None:
            fitted = str(self.dtype).removeprefix("torch.")
            raise BatchError(
                f"expected numbers in {fitted}, as at the fit, got {values.dtype.name}; "
                f"divide them as at the training, and save them in {fitted}"
            )
        return tensor


@dataclass(frozen=True, eq=False)
class Samples(Dataset[Tensor]):
    """Samples of a file or an array as the model takes them, read by position.

    Args:
        source: Returns the samples at some positions, ``(b, *shape)``.
        total: How many there are.
        names: What they are called in results; their positions by default.
        has_dtype: Whether their dtype was chosen by whoever wrote them; text has none.
        columns: Names of the numbers of a sample, if they have names.
        purposes: What the columns of the table are for that they are from.
        targets: What the model is to predict, as the table says it; None if it does not.
        form: The form to bring them to, before tensors can be read.
        finite: Refuse samples with a NaN or an infinity.
    """

    source: Callable[[Sequence[int]], NDArray[Any]]
    total: int
    names: Sequence[str] | None = None
    has_dtype: bool = False
    columns: tuple[str, ...] | None = None
    purposes: Columns = _NONE
    targets: Sequence[str] | None = None
    form: Form | None = None
    finite: bool = True

    @classmethod
    def of_array(cls, values: NDArray[Any], where: str, **options: Any) -> Samples:
        """Return those along the first axis of an array.

        Args:
            values: ``(n, *shape)``; copied as it is read, so that a mapped file is read
                piece by piece.
            where: Where it is from, for the message.
            options: As of the class.

        Raises:
            BatchError: If it does not hold numbers, with a sample along its first axis.
        """
        if values.dtype.kind not in _NUMBERS or values.ndim == 0:
            raise BatchError(
                f"expected real numbers of shape (samples, ...) in {where}, got {values.dtype} "
                f"of shape {values.shape}; save them as numbers, with a sample along the "
                "first axis"
            )
        options = {"has_dtype": True, **options}
        return cls(lambda rows: np.asarray(values[list(rows)]), len(values), **options)

    def __len__(self) -> int:
        return self.total

    def __getitem__(self, row: int) -> Tensor:
        return self.batch([row])[0]

    def __getitems__(self, rows: Sequence[int]) -> list[Tensor]:
        return list(self.batch(rows))  # read at once by a ``DataLoader``

    def batch(self, rows: Sequence[int]) -> Tensor:
        """Return some samples as a batch, ``(b, *shape)``.

        Args:
            rows: Their positions.

        Raises:
            NonFiniteError: If there is a NaN or an infinity, and there must not be.
        """
        assert self.form is not None
        batch = self.form.tensor(self.source(rows), self.has_dtype)
        if self.finite and not bool(batch.isfinite().all()):
            bad = ~batch.isfinite().reshape(len(batch), -1).all(1)
            counted = " (samples are counted from 0)" if self.names is None else ""
            raise NonFiniteError(
                f"expected finite numbers, got a NaN, an infinity or an empty cell in sample "
                f"{self.name(rows[int(bad.nonzero()[0])])}{counted}; mend or remove it (scod "
                "fit takes --on-bad skip, scod score --on-bad alarm)"
            )
        return batch

    def name(self, row: int) -> int | str:
        """Return what a sample is called in results."""
        return row if self.names is None else self.names[row]

    def first_form(self) -> Form:
        """Return the form of the first sample."""
        first = self[0]
        of = self.purposes
        return Form(first.dtype, tuple(first.shape), self.columns, of.target, of.id)


def samples_of(batches: object) -> Samples | None:
    """Return the samples of a loader that reads them from a file; None for others."""
    dataset = getattr(batches, "dataset", None)
    return dataset if isinstance(dataset, Samples) else None


def read_samples(path: Path, typed: Columns = _NONE, form: Form | None = None) -> Samples:
    """Return the samples in a file or folder.

    Args:
        path: ``.npy``, ``.npz`` with one array or one named ``x``, ``.csv`` with a sample per
            line, or a folder of images.
        typed: What the columns of a table are for, as the command says.
        form: The form of the fit, whose columns are taken if the command names none.

    Raises:
        OptionError: If there is no such file, or it is of another kind.
        BatchError: If there are no samples in it.
    """
    if not path.is_dir():
        regular_file(path, "file or folder")
    with file_errors(path, "read"):
        if path.is_dir():
            images = images_in(path)
            shape = _image(images[0]).shape if images else ()
            names = [str(image.relative_to(path)) for image in images]
            samples = Samples(partial(_images, images, shape), len(images), names=names)
        elif path.suffix.lower() == ".csv":
            samples = _table(path, typed, form)
        elif path.suffix.lower() in _ARRAYS:
            samples = Samples.of_array(_array(path), str(path))
        else:
            raise OptionError(
                f"expected a file that ends in {', '.join(_ARRAYS)}, or a folder of images, "
                f"got {path}; for other forms write a function that returns batches, and type "
                "file.py:function"
            )
    if len(samples) == 0:
        raise BatchError(
            f"expected samples in {path}, found none; look whether it is the right one"
        )
    return samples


def images_in(folder: Path) -> list[Path]:
    """Return the images in a folder and in those inside, sorted."""
    return sorted(path for path in folder.rglob("*") if path.suffix.lower() in _IMAGES)


def _array(path: Path) -> NDArray[Any]:
    try:
        if zipfile.is_zipfile(path):
            return _from_archive(path)
        with path.open("rb") as file:
            _check_claim(file, path.stat().st_size)
        values: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    except ScodError:
        raise
    except Exception as error:  # numpy and zipfile have many words for a damaged file
        raise BatchError(
            f"expected an array of numbers in {path}, but it cannot be read ({error}); save it "
            "anew, as numpy.save does, without objects"
        ) from error
    return values


def _from_archive(path: Path) -> NDArray[Any]:
    archive: Any = np.load(path, allow_pickle=False)
    names = list(archive.files)
    if len(names) != 1 and "x" not in names:
        raise BatchError(
            f"expected one array in {path}, or one named x, got {', '.join(names) or 'none'}; "
            "save the inputs alone, or under the name x"
        )
    name = "x" if "x" in names else names[0]
    entry = archive.zip.getinfo(f"{name}.npy")
    with archive.zip.open(entry) as file:
        claimed = _check_claim(file, entry.file_size)
    free = available_bytes(torch.device("cpu"))
    if free is not None and claimed > free:
        raise BatchError(
            f"expected an array that fits into memory in {path}, but it claims {claimed:.3g} "
            f"bytes, and {free:.3g} are free; save it as .npy, which is read in pieces"
        )
    chosen: NDArray[Any] = archive[name]
    return chosen


def _check_claim(file: IO[bytes], size: int) -> int:
    """Return the size in bytes that an array's header claims, before any are allocated.

    Raises:
        ValueError: If the file has fewer.
    """
    short = npy.read_magic(file) == (1, 0)
    read = npy.read_array_header_1_0 if short else npy.read_array_header_2_0
    shape, _, dtype = read(file)
    claimed = math.prod(shape) * dtype.itemsize
    present = size - file.tell()
    if claimed > present:
        raise ValueError(f"it claims {claimed:.3g} bytes, of which {present:.3g} are there")
    return claimed


def _table(path: Path, typed: Columns, form: Form | None) -> Samples:
    fitted = Columns() if form is None else Columns(form.columns, (), form.target, form.id)
    table = read_table(path, typed, fitted)
    samples = Samples.of_array(
        table.values, str(path), has_dtype=False, columns=table.purposes.take, names=table.ids
    )
    return replace(samples, targets=table.targets, purposes=table.purposes)


def _images(paths: Sequence[Path], shape: tuple[int, ...], rows: Sequence[int]) -> NDArray[Any]:
    """Return some images, ``(b, C, H, W)``.

    Raises:
        BatchError: If they are not all of this shape.
    """
    images = [_image(paths[row]) for row in rows]
    for row, image in zip(rows, images, strict=True):
        if image.shape != shape:
            raise BatchError(
                f"expected images of one size, {shape} as {paths[0].name}, got "
                f"{image.shape} in {paths[row]}; resize them to what the model takes"
            )
    return np.stack(images)


def _image(path: Path) -> NDArray[Any]:
    """Return an image, ``(C, H, W)`` in float32 from 0 to 1: one channel if grey, or three.

    Raises:
        BatchError: If it cannot be read.
        ScodError: If its pixel format is unsupported, or a pixel is transparent.
    """
    Image = optional("PIL.Image", "cli")  # noqa: N806 (a module with a class's name)
    regular_file(path, "readable image")
    try:
        with Image.open(path) as image:
            pixels = _pixels(path, image)
    except ScodError:
        raise
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise BatchError(
            f"expected an image at {path}, but it cannot be read: {error}; save it anew, or "
            "remove it"
        ) from error
    return np.moveaxis(np.atleast_3d(pixels), -1, 0)


def _pixels(path: Path, image: Any) -> NDArray[Any]:
    """Return pixels scaled to [0, 1] in float32, ``(H, W)`` or ``(H, W, 3)``.

    Raises:
        BatchError: If the pixel format is unsupported, or a pixel is transparent.
    """
    if (image.format, image.mode) in _16_BITS and "transparency" not in image.info:
        return np.asarray(image, dtype=np.float32) / 65535
    if image.mode not in ("1", "L", "LA", "P", "PA", "RGB", "RGBA"):
        raise BatchError(
            f"expected an image of grey or coloured pixels in 8 bits, or grey in 16, got one "
            f"that pillow calls {image.mode} at {path}; save it in 8 bits, from 0 to 255"
        )
    has_alpha = image.mode in ("LA", "PA", "RGBA") or "transparency" in image.info
    if has_alpha and image.convert("RGBA").getchannel("A").getextrema() != (255, 255):
        raise BatchError(
            f"expected an image that is opaque, got one with transparent pixels at {path}; put "
            "it on the background of the training, and save it in RGB without them"
        )
    grey = image.mode in ("1", "L", "LA")
    return np.asarray(image.convert("L" if grey else "RGB"), dtype=np.float32) / 255


def _native(values: NDArray[Any]) -> NDArray[Any]:
    """Return an array in native byte order, cast to a dtype that torch has.

    Raises:
        BatchError: If integers exceed int64.
    """
    dtype = values.dtype.newbyteorder("=")
    if dtype.kind == "u" and dtype.itemsize > 1:
        dtype = np.dtype(np.int64)
        if values.size and values.max() > np.iinfo(np.int64).max:
            raise BatchError(
                f"expected integers that int64 can hold, got {values.max()}; save "
                "them as floats, if the model takes such"
            )
    elif dtype.kind == "f" and dtype.itemsize > 8:
        dtype = np.dtype(np.float64)
    return np.ascontiguousarray(values, dtype=dtype)
