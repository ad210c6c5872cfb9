"""TaxiNet frames of a user's own: the folders of the NASA ULI release, with a csv of labels.

The release is at https://purl.stanford.edu/zz143mb4347; each of its archives, one a condition,
unpacks to ``<condition>/<condition>_train``, ``_validation`` and ``_test``.
"""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from scodbench.data.errors import FormatError, MissingDataError
from scodbench.data.folder import data_folder

KNOWN = ("morning_train", "morning_validation", "morning_test")
NOVEL = ("afternoon_test", "night_test", "overcast_test")
_FILE, _TARGETS = "image_filename", ("distance_to_centerline_meters", "heading_error_degrees")


@dataclass(frozen=True)
class LabelledFrames:
    """Frames that are read when they are asked for.

    Args:
        files: One image each.
        labels: ``(n, 2)`` float32: cross-track distance in metres, heading error in degrees.
    """

    files: tuple[Path, ...]
    labels: Tensor

    def read(self, number: int, rows: int, columns: int) -> Tensor:
        """Return a frame as ``(3, rows, columns)`` of bytes, RGB, scaled by Pillow's bicubic.

        Raises:
            FormatError: If the file is cut off or not an image.
        """
        from PIL import Image

        path = self.files[number]
        try:
            with Image.open(path) as image:
                scaled = image.convert("RGB").resize((columns, rows), Image.Resampling.BICUBIC)
        except (OSError, ValueError, SyntaxError) as error:  # the last of a broken PNG
            raise FormatError(
                f"expected a whole image at {path}, got: {error}; unpack its archive again"
            ) from error
        return torch.from_numpy(np.array(scaled)).permute(2, 0, 1)


def load_taxinet_folder(folder: str | Path | None = None) -> dict[str, LabelledFrames]:
    """Return the labelled frames of a TaxiNet folder.

    Args:
        folder: As for `data_folder`; frames are looked for in
            ``taxinet/<condition>/<condition>_<split>``, beside their ``labels.csv``.

    Returns:
        By the names of the splits: all of `KNOWN`, and those of `NOVEL` that are there.

    Raises:
        MissingDataError: If mornings are missing, or all of the other conditions.
        FormatError: If a csv file lacks a column, a number or an image.
    """
    root = data_folder(folder) / "taxinet"
    tables = {name: _table(root, name) for name in (*KNOWN, *NOVEL)}
    missing = [path for name, path in tables.items() if name in KNOWN and not path.is_file()]
    novel = [name for name in NOVEL if tables[name].is_file()]
    if not missing and not novel:
        missing = [tables[name] for name in NOVEL]
    if missing:
        absent = ", ".join(str(path.relative_to(root)) for path in missing)
        raise MissingDataError(
            f"expected TaxiNet frames in {root}, such as morning/morning_train/labels.csv with "
            "its PNG files beside it: the splits train, validation and test of morning, and "
            f"test of afternoon, night or overcast; not there: {absent}; unpack the archives "
            f"of https://purl.stanford.edu/zz143mb4347 in {root}"
        )
    return {name: read_labels(tables[name]) for name in (*KNOWN, *novel)}


def _table(root: Path, name: str) -> Path:
    return root / name.split("_")[0] / name / "labels.csv"


def read_labels(path: Path) -> LabelledFrames:
    """Return the frames of a folder by its ``labels.csv``.

    Args:
        path: The csv file, with the columns image_filename, distance_to_centerline_meters and
            heading_error_degrees among others; images are beside it.

    Raises:
        FormatError: If it lacks a column, a number or an image, or has no rows.
    """
    wanted = (_FILE, *_TARGETS)
    with path.open(newline="", encoding="utf-8") as file:
        table = csv.DictReader(file)
        lacking = [name for name in wanted if name not in (table.fieldnames or ())]
        if lacking:
            raise FormatError(
                f"expected the columns {', '.join(wanted)} in {path}, got "
                f"{', '.join(table.fieldnames or ()) or 'none'}; there is no {lacking[0]}"
            )
        rows = [(table.line_num, [row[name] or "" for name in wanted]) for row in table]
    if not rows:
        raise FormatError(f"expected a row for each frame in {path}, got none")
    labels = [[_number(text, path, line) for text in texts] for line, (_, *texts) in rows]
    files = tuple(path.parent / name for _, (name, *_) in rows)
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise FormatError(
            f"expected an image for each of {len(files)} rows of {path}, {len(missing)} are "
            f"not there: {missing[0]} is the first; unpack the archive again"
        )
    return LabelledFrames(files, torch.tensor(labels))


def _number(text: str, path: Path, line: int) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise FormatError(f"expected a number in line {line} of {path}, got {text!r}")
    return value
