"""Where a taxiing aircraft is, from its wing camera; other light and weather are unknown.

The paper's frames are not public. These are rendered (see `scodbench.runway`), with its
conditions: a clear morning to learn, and afternoon, evening and clouds as unknown.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from scodbench.domain import Domain, SketchSize, Splits
from scodbench.domains.kept_frames import KeptFrames
from scodbench.nets import ResNet18
from scodbench.runway import (
    AFTERNOON,
    CLOUDY,
    EVENING,
    MORNING,
    Condition,
    all_day,
    render,
    sample_poses,
)
from scodbench.training import Recipe
from scodkit.likelihoods import Gaussian
from scodkit.model.parameters import LastLayers
from scodkit.numerics.hashing import digest_of

TRAIN, SELECTION, TEST = 20_000, 1000, 2000  # frames, at most
# a target of one is so many metres to the left, or so many degrees
SCALE = (10.0, 30.0)


@dataclass(frozen=True)
class RenderedSamples(KeptFrames):
    """Rendered frames.

    Args:
        poses: ``(n, 3)`` of the whole set.
        condition: Light and weather.
        first_seed: Of the first frame; frame ``i`` has ``first_seed + i``.
    """

    poses: Tensor
    condition: Condition
    first_seed: int

    @staticmethod
    def of(count: int, condition: Condition, seed: int) -> RenderedSamples:
        """Return a set of frames with poses drawn from a seed."""
        poses = sample_poses(count, seed)
        targets = poses[:, :2] / torch.tensor(SCALE)
        return RenderedSamples(
            targets, torch.arange(count), poses, condition, seed * 10_000_000
        )

    def digest(self) -> str:
        """Return a hash of what the frames are rendered from."""
        poses = {"poses": self.poses[self.which], "which": self.which}
        return digest_of(poses, salt=f"{self.condition} {self.first_seed}")

    def make(self, numbers: Tensor, device: torch.device) -> Tensor:
        """Return frames by their numbers, rendered."""
        seeds = self.first_seed + numbers
        frames = render(self.poses[numbers], self.condition, seeds, device=device)
        return frames.mul_(255).round_().to(torch.uint8)


def build() -> nn.Module:
    """Return ResNet-18 with two outputs: cross-track and heading, scaled."""
    return ResNet18(2)


def splits(folder: Path | None = None) -> Splits:
    """Return frames of clear mornings, parted; other light and weather as unknown.

    The mixed set is a clear day from morning to afternoon, so that some of its frames are like
    those of the training. Nothing is read from the folder: frames are rendered as they are
    asked for.
    """
    return Splits(
        RenderedSamples.of(TRAIN, MORNING, seed=1),
        RenderedSamples.of(SELECTION, MORNING, seed=2),
        RenderedSamples.of(TEST, MORNING, seed=3),
        {
            "afternoon": RenderedSamples.of(TEST, AFTERNOON, seed=4),
            "evening": RenderedSamples.of(TEST, EVENING, seed=5),
            "cloudy": RenderedSamples.of(TEST, CLOUDY, seed=6),
        },
        mixed=RenderedSamples.of(TEST, all_day(), seed=7),
    )


# the paper starts from weights trained on photographs, which need less, and takes five frames
# a step at a rate of 0.001; so few would leave a GPU idle
RECIPE = Recipe(
    torch.optim.Adam, rate=1.4e-3, batch=128, epochs=10, anneal=True, mixed_precision=True
)

TAXINET = Domain(
    name="taxinet",
    title="TaxiNet (rendered)",
    likelihood=Gaussian(),
    build=build,
    splits=splits,
    recipe=RECIPE,
    all_layers=SketchSize(46, 7),
    last_layers=LastLayers(fraction=0.15),
    last=SketchSize(124, 20),
    local_rank=14,
)
