"""Where a taxiing aircraft is, from real frames that a user has; for those who have them.

As `scodbench.domains.taxinet`, but on frames of the NASA ULI release in the data folder:
clear mornings to learn, and afternoon, night and overcast sky as unknown. Its drives are parted
by the release itself.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from scodbench.data.taxinet_folder import (
    KNOWN,
    NOVEL,
    LabelledFrames,
    load_taxinet_folder,
)
from scodbench.domain import Splits
from scodbench.domains.kept_frames import COLUMNS, ROWS, KeptFrames
from scodbench.domains.splitting import some
from scodbench.domains.taxinet import SCALE, SELECTION, TAXINET, TEST, TRAIN
from scodkit.numerics.hashing import digest_of


@dataclass(frozen=True)
class FileSamples(KeptFrames):
    """Frames from image files.

    Args:
        frames: The files of the whole set.
    """

    frames: LabelledFrames

    @staticmethod
    def of(frames: LabelledFrames, most: int) -> FileSamples:
        """Return at most so many frames, chosen the same way every time."""
        which = some(len(frames.files), most)
        chosen = LabelledFrames(
            tuple(frames.files[i] for i in which.tolist()), frames.labels[which]
        )
        targets = chosen.labels / torch.tensor(SCALE)
        return FileSamples(targets, torch.arange(len(which)), chosen)

    def digest(self) -> str:
        """Return a hash of the targets, and of the files' names and sizes."""
        files = [self.frames.files[i] for i in self.which.tolist()]
        names = " ".join(f"{file.name} {file.stat().st_size}" for file in files)
        return digest_of({"targets": self.targets[self.which]}, salt=names)

    def make(self, numbers: Tensor, device: torch.device) -> Tensor:
        """Return frames by their numbers, read from their files."""
        frames = [self.frames.read(i, ROWS, COLUMNS) for i in numbers.tolist()]
        return torch.stack(frames).to(device)


def splits(folder: Path | None = None) -> Splits:
    """Return frames of clear mornings, and those of other conditions that are there."""
    found = load_taxinet_folder(folder)
    train, selection, test = (
        FileSamples.of(found[name], most)
        for name, most in zip(KNOWN, (TRAIN, SELECTION, TEST), strict=True)
    )
    novel = {
        name.removesuffix("_test"): FileSamples.of(found[name], TEST)
        for name in NOVEL
        if name in found
    }
    return Splits(train, selection, test, novel)


TAXINET_XPLANE = replace(
    TAXINET, name="taxinet_xplane", title="TaxiNet (X-Plane frames)", splits=splits
)
