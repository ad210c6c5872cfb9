"""The digits 0 and 1; the digits 2-9, and clothes, are unknown."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from torch import nn

from scodbench.domain import Domain, SketchSize, Splits
from scodbench.domains.digits import classes, recipe
from scodbench.nets import digits_net
from scodbench.samples import Samples, TensorSamples
from scodkit.likelihoods import Bernoulli
from scodkit.model.parameters import LastLayers


def build() -> nn.Module:
    """Return the network, 14,337 weights."""
    return digits_net(nn.Linear(288, 1))


def splits(folder: Path | None = None) -> Splits:
    """Return the digits 0 and 1 as a number ``(n, 1)``; 2-9 and Fashion-MNIST as unknown."""
    found = classes(2, folder)
    train, selection, test = (
        _as_numbers(s) for s in (found.train, found.selection, found.test)
    )
    return Splits(train, selection, test, found.novel)


def _as_numbers(samples: Samples) -> Samples:
    assert isinstance(samples, TensorSamples)
    return replace(samples, targets=samples.targets.float()[:, None])


BINARY_MNIST = Domain(
    name="binary_mnist",
    title="Binary MNIST",
    likelihood=Bernoulli(),
    build=build,
    splits=splits,
    recipe=recipe(epochs=5),
    all_layers=SketchSize(304, 50),
    last_layers=LastLayers(count=2),
    last=SketchSize(304, 50),
    local_rank=50,
)
