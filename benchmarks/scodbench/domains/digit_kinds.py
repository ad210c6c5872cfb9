"""Handwritten digits with outputs of other kinds: labels, a variance, a sequence, a map."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from scodbench.data import load
from scodbench.domain import Domain, SketchSize, Splits
from scodbench.domains.digits import TEST_ON, recipe, standardised
from scodbench.domains.mnist import MNIST
from scodbench.domains.rotated_mnist import ROTATED_MNIST
from scodbench.nets import digits_net
from scodbench.samples import TensorSamples
from scodkit.likelihoods import Bernoulli, Categorical, HeteroscedasticGaussian

_KNOWN = 5
_LENGTH = 3  # digits in a row
# lit segments of a seven-segment display, for the digits 0-9
_SEGMENTS = (0x3F, 0x06, 0x5B, 0x4F, 0x66, 0x6D, 0x7D, 0x07, 0x7F, 0x6F)


def segments(labels: Tensor) -> Tensor:
    """Return which of seven segments are lit for digits ``(n,)``: ``(n, 7)`` of 0 and 1.

    Examples:
        >>> segments(torch.tensor([1]))
        tensor([[0., 1., 1., 0., 0., 0., 0.]])
    """
    return (torch.tensor(_SEGMENTS)[labels][:, None] >> torch.arange(7) & 1).float()


def _with_targets(splits: Splits, of: Callable[[TensorSamples], Tensor]) -> Splits:
    def changed(samples: object) -> TensorSamples:
        assert isinstance(samples, TensorSamples)
        return replace(samples, targets=of(samples))

    return Splits(
        changed(splits.train),
        changed(splits.selection),
        changed(splits.test),
        {name: changed(own) for name, own in splits.novel.items()},
    )


def label_splits(folder: Path | None = None) -> Splits:
    """Return the digits 0-4 with the lit segments of a display as labels."""
    return _with_targets(MNIST.splits(folder), lambda samples: segments(samples.targets))


def ink(samples: TensorSamples) -> Tensor:
    """Return the class of each of 14 x 14 places: 0 for paper, 1 + digit for ink."""
    dark = functional.max_pool2d(samples.inputs.float()[:, None], 2)[:, 0] > 127
    return torch.where(dark, 1 + samples.targets.clamp_max(_KNOWN - 1)[:, None, None], 0)


def map_splits(folder: Path | None = None) -> Splits:
    """Return the digits 0-4 with the class of each place as targets."""
    return _with_targets(MNIST.splits(folder), ink)


def rows_of(images: Tensor, labels: Tensor, count: int, seed: int) -> TensorSamples:
    """Return rows of three images side by side, drawn from a set.

    Args:
        images: ``(n, 28, 28)`` of bytes.
        labels: ``(n,)``.
        count: How many rows.
        seed: Of the draw.
    """
    generator = torch.Generator().manual_seed(seed)
    which = torch.randint(len(images), (count, _LENGTH), generator=generator)
    joined = images[which].permute(0, 2, 1, 3).flatten(2)
    return TensorSamples(joined, labels[which], standardised)


def row_splits(folder: Path | None = None) -> Splits:
    """Return rows of three digits 0-4; unknown are rows with one other, and rows of clothes."""
    images, labels = load.mnist("train", folder)
    known, test = labels < _KNOWN, load.mnist("test", folder)
    cut = len(labels) // 10
    learnt = (images[cut:][known[cut:]], labels[cut:][known[cut:]])
    chosen = (images[:cut][known[:cut]], labels[:cut][known[:cut]])
    seen, others = (
        (test[0][those], test[1][those]) for those in (test[1] < _KNOWN, test[1] >= _KNOWN)
    )
    one_other = rows_of(*seen, TEST_ON, seed=3)
    strange = rows_of(*others, TEST_ON, seed=4)
    one_other.inputs[:, :, 28:56] = strange.inputs[:, :, 28:56]
    return Splits(
        rows_of(*learnt, 20_000, seed=0),
        rows_of(*chosen, 2000, seed=1),
        rows_of(*seen, TEST_ON, seed=2),
        {
            "one_other": one_other,
            "clothes": rows_of(*load.fashion_mnist("test", folder), TEST_ON, 5),
        },
    )


class RowNet(nn.Module):
    """Reads a row of digits ``(B, 1, 28, 84)``: logits ``(B, 3, 5)``, by a recurrent layer."""

    def __init__(self) -> None:
        super().__init__()
        self.eye = digits_net(nn.Linear(288, 32), nn.ReLU())
        self.memory = nn.GRU(32, 32, batch_first=True)
        self.head = nn.Linear(32, _KNOWN)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of each digit."""
        each = x.view(len(x), 1, 28, _LENGTH, 28).permute(0, 3, 1, 2, 4).flatten(0, 1)
        seen = self.eye(each).view(len(x), _LENGTH, -1)
        logits: Tensor = self.head(self.memory(seen)[0])
        return logits


def map_net() -> nn.Module:
    """Return a network for maps: ``(B, 1, 28, 28)`` to logits ``(B, 6, 14, 14)``."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 32, 5, padding=4, dilation=2),
        nn.ReLU(),
        nn.Conv2d(32, 1 + _KNOWN, 1),
    )


KINDS: Mapping[str, Domain] = {
    domain.name: domain
    for domain in (
        replace(
            MNIST,
            name="digit_labels",
            title="Digits, seven labels",
            likelihood=Bernoulli(),
            build=lambda: digits_net(nn.Linear(288, 7)),
            splits=label_splits,
        ),
        replace(
            ROTATED_MNIST,
            name="digit_variance",
            title="Rotated digits, with variance",
            likelihood=HeteroscedasticGaussian(),
            build=lambda: digits_net(nn.Linear(288, 10), nn.ReLU(), nn.Linear(10, 2)),
        ),
        replace(
            MNIST,
            name="digit_row",
            title="Rows of digits",
            likelihood=Categorical(class_dim=-1),
            build=RowNet,
            splits=row_splits,
            fit_on=2000,
        ),
        replace(
            MNIST,
            name="digit_map",
            title="Maps of digits",
            likelihood=Categorical(class_dim=1),
            build=map_net,
            splits=map_splits,
            recipe=recipe(epochs=4),
            last=SketchSize(124, 20),
            fit_on=256,
        ),
    )
}
