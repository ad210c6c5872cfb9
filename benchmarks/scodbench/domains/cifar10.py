"""CIFAR-10: its first five classes, as in the paper, or all ten; other images are unknown."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from scodbench.data import load
from scodbench.domain import Domain, SketchSize, Splits
from scodbench.domains.splitting import order, some
from scodbench.nets import DenseNet121, FirstOutputs
from scodbench.samples import TensorSamples
from scodkit.likelihoods import Categorical
from scodkit.model.parameters import LastLayers

_MEAN = (0.4914, 0.4822, 0.4465)
_SPREAD = (0.2471, 0.2435, 0.2616)
_KNOWN = 5
_SELECTION = 1000
_TEST_ON = 2500


def build() -> nn.Module:
    """Return the ten-class network, of which the first five outputs count."""
    return FirstOutputs(DenseNet121(10), _KNOWN)


def weights(folder: Path | None = None) -> Mapping[str, Tensor]:
    """Return trained weights by name."""
    return {f"model.{name}": w for name, w in load.densenet_weights(folder).items()}


def standardised(images: Tensor) -> Tensor:
    """Return images ``(n, 32, 32, 3)`` of bytes as ``(n, 3, 32, 32)``, standardised."""
    mean, spread = (
        torch.tensor(v, device=images.device)[:, None, None] for v in (_MEAN, _SPREAD)
    )
    return (images.permute(0, 3, 1, 2).float() / 255 - mean) / spread


def splits(folder: Path | None = None) -> Splits:
    """Return images of the first five classes, parted; three sets of unknown ones.

    The network saw all of the training split, so what is chosen with or tested on comes from
    the test split.
    """
    images, labels = load.cifar10_subset(folder)
    learnt = (labels < _KNOWN).nonzero()[:, 0]
    test_images, test_labels = load.cifar10("test", folder)
    known = (test_labels < _KNOWN).nonzero()[:, 0]
    known = known[order(len(known))]
    others = (test_labels >= _KNOWN).nonzero()[:, 0]

    def of(images: Tensor, labels: Tensor, which: Tensor) -> TensorSamples:
        return TensorSamples(images[which], labels[which], standardised)

    tiny, house = load.tinyimagenet(folder), load.svhn(folder)
    return Splits(
        of(images, labels, learnt[order(len(learnt))]),
        of(test_images, test_labels, known[:_SELECTION]),
        of(test_images, test_labels, known[_SELECTION : _SELECTION + _TEST_ON]),
        {
            "tinyimagenet": of(*tiny, some(len(tiny[0]), _TEST_ON)),
            "svhn": of(*house, some(len(house[0]), _TEST_ON)),
            "classes_5_9": of(test_images, test_labels, others[some(len(others), _TEST_ON)]),
        },
    )


CIFAR10 = Domain(
    name="cifar10",
    title="CIFAR-10",
    likelihood=Categorical(),
    build=build,
    splits=splits,
    weights=weights,
    all_layers=SketchSize(76, 12),
    last_layers=LastLayers(fraction=0.15),
    last=SketchSize(184, 30),
    local_rank=20,
    ensemble=False,
)


def all_splits(folder: Path | None = None) -> Splits:
    """Return images of all ten classes, parted; two sets of unknown ones."""
    images, labels = load.cifar10_subset(folder)
    test_images, test_labels = load.cifar10("test", folder)
    known = order(len(test_labels))
    tiny, house = load.tinyimagenet(folder), load.svhn(folder)

    def of(images: Tensor, labels: Tensor, which: Tensor) -> TensorSamples:
        return TensorSamples(images[which], labels[which], standardised)

    return Splits(
        of(images, labels, order(len(labels))),
        of(test_images, test_labels, known[:_SELECTION]),
        of(test_images, test_labels, known[_SELECTION : _SELECTION + _TEST_ON]),
        {
            "tinyimagenet": of(*tiny, some(len(tiny[0]), _TEST_ON)),
            "svhn": of(*house, some(len(house[0]), _TEST_ON)),
        },
    )


# the network as it was trained: none of the unknown images are of classes it has seen
CIFAR10_ALL = replace(
    CIFAR10,
    name="cifar10_all",
    title="CIFAR-10, ten classes",
    build=lambda: DenseNet121(10),
    splits=all_splits,
    weights=load.densenet_weights,
)
