"""The csv files of the Wine Quality data set."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from scodbench.data.errors import FormatError

_COLUMNS = 12


def read_wine(path: Path) -> Tensor:
    """Read the rows of a file.

    Args:
        path: ``winequality-red.csv`` or ``winequality-white.csv``: a header, then numbers
            between semicolons.

    Returns:
        ``(n, 12)`` float32: 11 physico-chemical features in their own units, then the quality
        (an integer, 0 to 10, high = good).

    Raises:
        FormatError: If it is something else.
    """
    try:
        with path.open(encoding="ascii") as file:
            header = file.readline().replace('"', "").strip().split(";")
            rows = np.loadtxt(file, delimiter=";", dtype=np.float32, ndmin=2)
    except ValueError as error:
        raise FormatError(_message(path, str(error))) from error
    if len(header) != _COLUMNS or header[-1] != "quality" or rows.shape[1] != _COLUMNS:
        raise FormatError(_message(path, f"columns {header} over rows of {rows.shape[1]}"))
    return torch.from_numpy(rows)


def _message(path: Path, got: str) -> str:
    return (
        f"expected {_COLUMNS} numbers a row between semicolons in {path}, under a header that "
        f"ends with quality, got: {got}; type: scodbench data check"
    )
