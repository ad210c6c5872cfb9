"""The published archive of CIFAR-10, ``cifar-10-python.tar.gz``.

Its batches are pickles of Python 2. A pickle may name any function to call; the reader here
knows only the three names of numpy an array is made with, and refuses every other.
"""

from __future__ import annotations

import io
import pickle
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from scodbench.data.errors import FormatError

Bytes = npt.NDArray[np.uint8]

_BATCHES = {"train": tuple(f"data_batch_{i}" for i in range(1, 6)), "test": ("test_batch",)}
_PIXELS = 3 * 32 * 32
_ALLOWED = {
    ("numpy", "dtype"): np.dtype,
    ("numpy", "ndarray"): np.ndarray,
    ("numpy.core.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0],
}


class _ArraysOnly(pickle.Unpickler):
    """Reads numbers, strings, containers and numpy's arrays; imports nothing."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"the forbidden name {module}.{name}")
        return _ALLOWED[module, name]


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
        contents = _ArraysOnly(io.BytesIO(batch), encoding="bytes").load()
    except Exception as error:  # a damaged pickle raises whatever its instructions lead to
        why = f"{name}: expected a whole pickle of arrays, got: {error}"
        raise FormatError(_message(path, why)) from error
    if not isinstance(contents, dict) or not {b"data", b"labels"} <= contents.keys():
        raise FormatError(_message(path, f"no data and labels in {name}"))
    pixels, labels = contents[b"data"], contents[b"labels"]
    whole = isinstance(pixels, np.ndarray) and pixels.dtype == np.uint8 and pixels.ndim == 2
    if not whole or pixels.shape[1] != _PIXELS:
        raise FormatError(_message(path, f"no array of (n, {_PIXELS}) bytes in {name}"))
    fine = isinstance(labels, list) and all(type(i) is int and 0 <= i < 10 for i in labels)
    if not fine or len(labels) != len(pixels):
        raise FormatError(_message(path, f"no label in 0-9 for each image in {name}"))
    return pixels, labels


def _message(path: Path, got: str) -> str:
    return (
        f"expected a whole cifar-10-python.tar.gz at {path}, got: {got}; type: scodbench "
        "data check"
    )
