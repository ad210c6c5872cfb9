"""The digits 0-4; the digits 5-9, and clothes, are unknown."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from scodbench.domain import Domain, SketchSize, Splits
from scodbench.domains.digits import classes, recipe
from scodbench.nets import digits_net
from scodkit.likelihoods import Categorical
from scodkit.model.parameters import LastLayers


def build() -> nn.Module:
    """Return the network, 15,493 weights."""
    return digits_net(nn.Linear(288, 5))


def splits(folder: Path | None = None) -> Splits:
    """Return the digits 0-4, parted; 5-9 and Fashion-MNIST as unknown."""
    return classes(5, folder)


MNIST = Domain(
    name="mnist",
    title="MNIST",
    likelihood=Categorical(),
    build=build,
    splits=splits,
    recipe=recipe(epochs=8),
    all_layers=SketchSize(604, 100),
    last_layers=LastLayers(count=2),
    last=SketchSize(604, 100),
    local_rank=100,
)
