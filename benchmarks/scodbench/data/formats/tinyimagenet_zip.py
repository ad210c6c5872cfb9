"""The published archive of Tiny ImageNet, ``tiny-imagenet-200.zip``: JPEG files of 64x64."""

from __future__ import annotations

import io
import zipfile
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from scodbench.data.errors import FormatError

_ROOT = "tiny-imagenet-200"


def read_tinyimagenet(path: Path, per_class: int) -> tuple[Tensor, Tensor]:
    """Read validation images, at half their size.

    Of each class those with the lowest file numbers are taken (the n of ``val_n.JPEG``), and
    all are returned in the order of that number. Grey images are expanded to RGB, and images
    reduced to 32x32 by Pillow's bicubic filter, which is antialiased.

    Args:
        path: ``tiny-imagenet-200.zip``.
        per_class: How many of each class.

    Returns:
        Images ``(n, 32, 32, 3)`` uint8, RGB, and labels ``(n,)`` int64: the place of the class
        in the archive's ``wnids.txt``.

    Raises:
        FormatError: If it is cut off or something else.
    """
    from PIL import Image

    try:
        with zipfile.ZipFile(path) as archive:
            chosen = _choose(archive, per_class)
            images = np.empty((len(chosen), 32, 32, 3), np.uint8)
            for place, (number, _) in enumerate(chosen):
                jpeg = archive.read(f"{_ROOT}/val/images/val_{number}.JPEG")
                with Image.open(io.BytesIO(jpeg), formats=("JPEG",)) as image:
                    small = image.convert("RGB").resize((32, 32), Image.Resampling.BICUBIC)
                images[place] = np.asarray(small)
    except (zipfile.BadZipFile, LookupError, ValueError, OSError) as error:
        raise FormatError(
            f"expected a whole tiny-imagenet-200.zip at {path}, got: {error}; type: "
            "scodbench data check"
        ) from error
    labels = torch.tensor([label for _, label in chosen], dtype=torch.int64)
    return torch.from_numpy(images), labels


def _choose(archive: zipfile.ZipFile, per_class: int) -> list[tuple[int, int]]:
    """Return the file numbers and labels of the first images of each class."""
    classes = archive.read(f"{_ROOT}/wnids.txt").decode("ascii").split()
    labels = {word: label for label, word in enumerate(classes)}
    lines = archive.read(f"{_ROOT}/val/val_annotations.txt").decode("ascii").splitlines()
    numbered = []
    for line in lines:
        file, word, *_ = line.split("\t")
        number = int(file.removeprefix("val_").removesuffix(".JPEG"))
        numbered.append((number, labels[word]))
    seen: Counter[int] = Counter()
    chosen = []
    for number, label in sorted(numbered):
        seen[label] += 1
        if seen[label] <= per_class:
            chosen.append((number, label))
    return chosen
