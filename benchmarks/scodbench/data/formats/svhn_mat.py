"""The MATLAB files of SVHN's cropped digits, such as ``test_32x32.mat``."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from scodbench.data.errors import FormatError


def read_svhn(path: Path, count: int) -> tuple[Tensor, Tensor]:
    """Read the first images of a file.

    Args:
        path: The file.
        count: How many; all if there are fewer.

    Returns:
        Images ``(n, 32, 32, 3)`` uint8, RGB, and labels ``(n,)`` int64, the digits; the file
        has 10 for the digit 0.

    Raises:
        FormatError: If it is cut off or something else.
    """
    from scipy.io import loadmat

    try:
        with path.open("rb") as file:
            held = loadmat(file, variable_names=("X", "y"))
        images, labels = held["X"][..., :count], held["y"][:count, 0]
    # a damaged file makes scipy raise nearly anything
    except Exception as error:
        raise FormatError(_message(path, f"{type(error).__name__}: {error}")) from error
    if images.shape != (32, 32, 3, len(labels)) or images.dtype != np.uint8:
        raise FormatError(_message(path, f"images {images.shape} of {images.dtype}"))
    digits = torch.from_numpy(labels.astype(np.int64)) % 10
    return torch.from_numpy(np.ascontiguousarray(images.transpose(3, 0, 1, 2))), digits


def _message(path: Path, got: str) -> str:
    return (
        f"expected a MATLAB 5 file at {path} with images X (32, 32, 3, n) of bytes and labels "
        f"y (n, 1), got: {got}; type: scodbench data check"
    )
