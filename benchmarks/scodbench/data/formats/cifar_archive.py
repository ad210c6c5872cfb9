"""The published archive of CIFAR-10, ``cifar-10-python.tar.gz``.

Its batches are pickles; they are read by `read_inert`, which executes nothing.
"""

from __future__ import annotations

import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from scodbench.data.errors import FormatError
from scodbench.data.formats.inert_pickle import Call, Name, read_inert

Bytes = npt.NDArray[np.uint8]

_BATCHES = {"train": tuple(f"data_batch_{i}" for i in range(1, 6)), "test": ("test_batch",)}
_PIXELS = 3 * 32 * 32


def read_cifar_archive(path: Path, split: str) -> tuple[Tensor, Tensor]:
    """Read a split of CIFAR-10, in original order.

    Args:
        path: ``cifar-10-python.tar.gz``.
        split: ``"train"`` or ``"test"``.

    Returns:
        Images ``(n, 32, 32, 3)`` uint8, RGB, and labels ``(n,)`` int64; 50000 and 10000 of
        them.

    Raises:
        FormatError: If it is cut off or something else.
    """
    names = _BATCHES[split]
    images: Bytes | None = None
    labels = np.empty(0, np.int64)
    found = set()
    # in the order of the archive, which is not that of the batches: one pass over the gzip
    for name, batch in _batches(path, names):
        pixels, classes = _parse(path, name, batch)
        size = len(pixels)
        if images is None:
            images = np.empty((len(names) * size, 32, 32, 3), np.uint8)
            labels = np.empty(len(names) * size, np.int64)
        if len(images) != len(names) * size:
            raise FormatError(_message(path, f"{name} of another size, {size}"))
        start = names.index(name) * size
        images[start : start + size] = pixels.reshape(size, 3, 32, 32).transpose(0, 2, 3, 1)
        labels[start : start + size] = classes
        found.add(name)
    if images is None or len(found) < len(names):
        missing = ", ".join(sorted(set(names) - found))
        raise FormatError(_message(path, f"an archive without {missing}"))
    return torch.from_numpy(images), torch.from_numpy(labels)


def _batches(path: Path, names: tuple[str, ...]) -> Iterator[tuple[str, bytes]]:
    """Yield the wanted members of the archive and their names.

    Raises:
        FormatError: If it cannot be read.
    """
    left = set(names)
    try:
        with tarfile.open(path, "r|gz") as archive:
            for member in archive:
                name = PurePosixPath(member.name).name
                file = archive.extractfile(member) if name in left else None
                if file is not None:
                    yield name, file.read()
                    left.remove(name)
                if not left:
                    return
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        raise FormatError(_message(path, str(error))) from error


def _parse(path: Path, name: str, batch: bytes) -> tuple[Bytes, list[int]]:
    """Return the pixels ``(n, 3072)`` and labels of a batch.

    Raises:
        FormatError: If it holds something else.
    """
    try:
        contents = read_inert(batch)
    except FormatError as error:
        raise FormatError(_message(path, f"{name}: {error}")) from error
    if not isinstance(contents, dict) or not {b"data", b"labels"} <= contents.keys():
        raise FormatError(_message(path, f"no data and labels in {name}"))
    pixels, labels = _array(contents[b"data"]), contents[b"labels"]
    if pixels is None or pixels.shape[1] != _PIXELS:
        raise FormatError(_message(path, f"no array of (n, {_PIXELS}) bytes in {name}"))
    fine = isinstance(labels, list) and all(type(i) is int and 0 <= i < 10 for i in labels)
    if not fine or len(labels) != len(pixels):
        raise FormatError(_message(path, f"no label in 0-9 for each image in {name}"))
    return pixels, labels


def _array(record: object) -> Bytes | None:
    """Return the array of bytes a record stands for, or None if it does not stand for one.

    The record of an array is a call of numpy's ``_reconstruct`` and a state: a version, the
    shape, the type (itself a call), whether columns come first, and the bytes.
    """
    match record:
        case Call(
            function=Name(name="_reconstruct"),
            state=(
                int(),
                (int(rows), int(columns)),
                Call(function=Name(module="numpy", name="dtype"), arguments=(b"u1", *_)),
                int(columns_first),
                bytes(raw),
            ),
        ) if len(raw) == rows * columns:
            values = np.frombuffer(raw, np.uint8)
            return values.reshape(rows, columns, order="F" if columns_first else "C")
        case _:
            return None


def _message(path: Path, got: str) -> str:
    return (
        f"expected a whole cifar-10-python.tar.gz at {path}, got: {got}; type: scodbench "
        "data check"
    )
