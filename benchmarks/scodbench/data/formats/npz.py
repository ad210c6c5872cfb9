"""The project's own files: arrays by name in an ``.npz``, without pickles."""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from scodbench.data.errors import FormatError


def read_npz(path: Path, *names: str) -> list[Tensor]:
    """Read some arrays of a file; the others are not touched.

    Args:
        path: The file.
        names: Of the arrays.

    Returns:
        The arrays, in the order of their names, with the types they are stored in.

    Raises:
        FormatError: If it is cut off or something else.

    Examples:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "a.npz"
        >>> np.savez(path, labels=np.arange(3, dtype=np.uint8), other=np.ones(5))
        >>> read_npz(path, "labels")
        [tensor([0, 1, 2], dtype=torch.uint8)]
    """
    try:
        # opened here: numpy does not close a damaged file
        with path.open("rb") as file, np.load(file, allow_pickle=False) as held:
            return [torch.from_numpy(held[name]) for name in names]
    except (
        zipfile.BadZipFile,
        LookupError,
        ValueError,
        EOFError,
        TypeError,
        zlib.error,
    ) as error:
        raise FormatError(
            f"expected an .npz file with {', '.join(names)} at {path}, got: {error}; type: "
            "scodbench data check"
        ) from error
