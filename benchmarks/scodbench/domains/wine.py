"""Wine quality from red wines; white wines, and noise, are unknown."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from scodbench.data import load
from scodbench.data.errors import FormatError
from scodbench.domain import Domain, SketchSize, Splits
from scodbench.domains.splitting import parted_by_group
from scodbench.nets import wine_net
from scodbench.samples import TensorSamples
from scodbench.training import Recipe
from scodkit.likelihoods import Gaussian
from scodkit.model.parameters import LastLayers

_RED = 1599  # as published
_TRAIN, _SELECTION = 1000, 200


def splits(folder: Path | None = None) -> Splits:
    """Return about 1000 red wines to learn, 200 to choose with, 400 to test, raw features.

    The table has wines with the very same features several times; they stay together. Unknown
    are all white wines, and as many points drawn evenly from the box of their ranges.

    Raises:
        FormatError: If there are too few.
    """
    tables = load.wine(folder)
    red = tables["red"]
    if len(red) < _RED:
        raise FormatError(
            f"expected {_RED} red wines, got {len(red)}: the file is cut off; type: "
            "scodbench data check"
        )
    _, same = torch.unique(red[:, :11], dim=0, return_inverse=True)
    parts = [red[which] for which in parted_by_group(same, [_TRAIN, _SELECTION])]
    train, selection, test = (TensorSamples(part[:, :11], part[:, 11:]) for part in parts)
    white = tables["white"]
    low, high = white[:, :11].amin(0), white[:, :11].amax(0)
    even = torch.rand(len(white), 11, generator=torch.Generator().manual_seed(0))
    noise = low + (high - low) * even
    novel = {
        "white_wine": TensorSamples(white[:, :11], white[:, 11:]),
        "noise": TensorSamples(noise, torch.zeros(len(noise), 1)),
    }
    return Splits(train, selection, test, novel)


def xavier(module: nn.Module) -> None:
    """Draw the weights of a linear layer with the gain that suits tanh, 5/3."""
    if isinstance(module, nn.Linear):
        nn.init.xavier_normal_(module.weight, gain=5 / 3)


WINE = Domain(
    name="wine",
    title="Wine",
    likelihood=Gaussian(),
    build=wine_net,
    splits=splits,
    recipe=Recipe(torch.optim.Adam, rate=0.02, batch=5, epochs=20, start=xavier),
    all_layers=SketchSize(604, 100),
    last_layers=LastLayers(count=2),
    last=SketchSize(604, 100),
    local_rank=20,
)
