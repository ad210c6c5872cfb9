"""The idx format of MNIST and Fashion-MNIST, compressed or not."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from scodbench.data.errors import FormatError

_GZIP = b"\x1f\x8b"
_UNSIGNED_BYTES = 8


def read_idx(path: Path) -> Tensor:
    """Read an array of bytes.

    Args:
        path: An idx file, gzip or plain.

    Returns:
        uint8, in the shape the file gives: ``(n, 28, 28)`` for images, ``(n,)`` for labels.

    Raises:
        FormatError: If it is cut off or something else.

    Examples:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "labels"
        >>> _ = path.write_bytes(bytes([0, 0, 8, 1, 0, 0, 0, 3, 5, 0, 4]))
        >>> read_idx(path)
        tensor([5, 0, 4], dtype=torch.uint8)
    """
    with path.open("rb") as raw:
        compressed = raw.read(2) == _GZIP
        raw.seek(0)
        try:
            if not compressed:
                return _parse(raw)
            with gzip.GzipFile(fileobj=raw) as file:
                return _parse(file)
        except (ValueError, EOFError, gzip.BadGzipFile, zlib.error, struct.error) as error:
            raise FormatError(
                f"expected a whole idx file of bytes at {path}, got: {error}; type: "
                "scodbench data check"
            ) from error


def _parse(file: IO[bytes] | gzip.GzipFile) -> Tensor:
    zeros, kind, dimensions = struct.unpack(">HBB", file.read(4))
    if zeros != 0 or kind != _UNSIGNED_BYTES:
        raise ValueError(f"a header with {zeros} and type {kind}, not 0 and 8")
    shape = struct.unpack(f">{dimensions}I", file.read(4 * dimensions))
    # straight into the tensor: a second copy of all images is never made
    values = torch.empty(math.prod(shape), dtype=torch.uint8)
    view, filled = values.numpy().data, 0
    while filled < len(view):
        count = file.readinto(view[filled:])  # type: ignore[union-attr]
        if not count:
            raise ValueError(f"an end after {filled} of {len(view)} values")
        filled += count
    if file.read(1):
        raise ValueError(f"more than the {len(view)} values of shape {shape}")
    return values.reshape(shape)
