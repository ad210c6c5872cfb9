"""Where a taxiing aircraft is, from its wing camera; other light and weather are unknown.

The paper's frames are not public. These are rendered (see `scodkit.bench.runway`), with its
conditions: a clear morning to learn, and afternoon, evening and clouds as unknown.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from scodkit.bench.domain import Domain, SketchSize, Splits
from scodkit.bench.nets import ResNet18
from scodkit.bench.runway import (
    AFTERNOON,
    CLOUDY,
    EVENING,
    MORNING,
    Condition,
    render,
    sample_poses,
)
from scodkit.bench.samples import Samples
from scodkit.bench.training import Recipe
from scodkit.likelihoods import Gaussian
from scodkit.parameters import LastLayers, digest_of

_TRAIN, _SELECTION, _TEST = 20_000, 1000, 2000
# a target of one is so many metres to the left, or so many degrees
SCALE = (10.0, 30.0)


@dataclass
class _Store:
    """Rendered frames as bytes, filled as they are asked for."""

    frames: Tensor | None = None
    there: Tensor | None = None


@dataclass(frozen=True)
class RenderedSamples(Samples):
    """Frames that are rendered when they are first read, and then kept as bytes.

    Args:
        poses: ``(n, 3)`` of the whole set.
        condition: Light and weather.
        first_seed: Of the first frame; frame ``i`` has ``first_seed + i``.
        which: ``(m,)`` numbers of the frames that count.
    """

    poses: Tensor
    condition: Condition
    first_seed: int
    which: Tensor
    store: _Store = field(default_factory=_Store, repr=False, compare=False)

    @staticmethod
    def of(count: int, condition: Condition, seed: int) -> RenderedSamples:
        """Return a set of frames with poses drawn from a seed."""
        poses = sample_poses(count, seed)
        return RenderedSamples(poses, condition, seed * 10_000_000, torch.arange(count))

    def __len__(self) -> int:
        return len(self.which)

    def take(self, which: Tensor | slice) -> RenderedSamples:
        """Return some of them, which share what is rendered."""
        return replace(self, which=self.which[which])

    def digest(self) -> str:
        """Return a hash of what the frames are rendered from."""
        poses = {"poses": self.poses[self.which], "which": self.which}
        return digest_of(poses, salt=f"{self.condition} {self.first_seed}")

    def read(self, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
        """Return frames ``(m, 3, 260, 300)`` in [-1, 1], and scaled targets ``(m, 2)``."""
        device = torch.device(device)
        self._render(device)
        assert self.store.frames is not None
        frames = self.store.frames[self.which.to(device)]
        targets = self.poses[self.which, :2] / torch.tensor(SCALE)
        return frames.float().div_(127.5).sub_(1), targets.to(device)

    def _render(self, device: torch.device) -> None:
        store, count = self.store, len(self.poses)
        if store.frames is None or store.frames.device.type != device.type:
            shape = (count, 3, 260, 300)
            store.frames = torch.empty(shape, dtype=torch.uint8, device=device)
            store.there = torch.zeros(count, dtype=torch.bool)
        assert store.there is not None
        missing = torch.unique(self.which[~store.there[self.which]])
        for some in missing.split(256):
            frames = render(
                self.poses[some], self.condition, self.first_seed + some, device=device
            )
            store.frames[some.to(device)] = frames.mul_(255).round_().to(torch.uint8)
        store.there[missing] = True


def build() -> nn.Module:
    """Return ResNet-18 with two outputs: cross-track and heading, scaled."""
    return ResNet18(2)


def splits(folder: Path | None = None) -> Splits:
    """Return frames of clear mornings, parted; other light and weather as unknown.

    Nothing is read from the folder: frames are rendered as they are asked for.
    """
    return Splits(
        RenderedSamples.of(_TRAIN, MORNING, seed=1),
        RenderedSamples.of(_SELECTION, MORNING, seed=2),
        RenderedSamples.of(_TEST, MORNING, seed=3),
        {
            "afternoon": RenderedSamples.of(_TEST, AFTERNOON, seed=4),
            "evening": RenderedSamples.of(_TEST, EVENING, seed=5),
            "cloudy": RenderedSamples.of(_TEST, CLOUDY, seed=6),
        },
    )


TAXINET = Domain(
    name="taxinet",
    title="TaxiNet (rendered)",
    likelihood=Gaussian(),
    build=build,
    splits=splits,
    # the paper starts from weights trained on photographs, which need less
    recipe=Recipe(torch.optim.Adam, rate=1e-3, batch=64, epochs=10, anneal=True),
    all_layers=SketchSize(46, 7),
    last_layers=LastLayers(fraction=0.15),
    last=SketchSize(124, 20),
    local_rank=14,
)
