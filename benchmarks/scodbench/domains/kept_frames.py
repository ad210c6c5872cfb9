"""Camera frames that are costly to make: made when they are first read, then kept as bytes."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from torch import Tensor

from scodbench.samples import Samples

ROWS, COLUMNS = 260, 300
_AT_ONCE = 256  # frames made at a time


@dataclass(frozen=True)
class _Kept:
    """Frames on a device, and which of them are there already."""

    frames: Tensor
    there: Tensor


_Own = TypeVar("_Own", bound="KeptFrames")


@dataclass(frozen=True)
class KeptFrames(Samples):
    """Frames of a set, with targets, of which some count.

    Args:
        targets: ``(n, 2)`` of the whole set: cross-track and heading, scaled.
        which: ``(m,)`` numbers of the frames that count.
    """

    targets: Tensor
    which: Tensor
    # shared by all that is taken of a set; by device, as the CPU and a GPU may both read it
    kept: dict[torch.device, _Kept] = field(
        default_factory=dict, repr=False, compare=False, kw_only=True
    )

    @abstractmethod
    def make(self, numbers: Tensor, device: torch.device) -> Tensor:
        """Return frames by their numbers ``(m,)``, as ``(m, 3, 260, 300)`` of bytes."""

    def __len__(self) -> int:
        return len(self.which)

    def take(self: _Own, which: Tensor | slice) -> _Own:
        """Return some of them, which share what is made."""
        return replace(self, which=self.which[which])

    def read(self, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
        """Return frames ``(m, 3, 260, 300)`` in [-1, 1], and scaled targets ``(m, 2)``."""
        # "cuda" is the name of "cuda:0", or of another that was made the current one
        device = torch.empty(0, device=device).device
        kept = self._made(device)
        frames = kept.frames[self.which.to(device)]
        return frames.float().div_(127.5).sub_(1), self.targets[self.which].to(device)

    def _made(self, device: torch.device) -> _Kept:
        if device not in self.kept:
            shape = (len(self.targets), 3, ROWS, COLUMNS)
            frames = torch.empty(shape, dtype=torch.uint8, device=device)
            self.kept[device] = _Kept(frames, torch.zeros(len(self.targets), dtype=torch.bool))
        kept = self.kept[device]
        missing = torch.unique(self.which[~kept.there[self.which]])
        for some in missing.split(_AT_ONCE):
            kept.frames[some.to(device)] = self.make(some, device)
            kept.there[some] = True
        return kept
