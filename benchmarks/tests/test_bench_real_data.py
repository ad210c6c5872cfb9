"""The real data sets, where the variable SCODKIT_DATA names a folder that has them."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import bench_archives as archives
from scodbench import data
from scodbench.data.files import mismatch

FOLDER = os.environ.get("SCODKIT_DATA", "")


def needs(name: str) -> pytest.MarkDecorator:
    files = [f for layout in data.DATASETS[name].layouts for f in layout.files]
    there = bool(FOLDER) and any((Path(FOLDER) / file.name).is_file() for file in files)
    return pytest.mark.skipif(not there, reason=f"SCODKIT_DATA names no folder with {name}")


def described(images: Tensor, labels: Tensor) -> tuple[tuple[int, ...], list[int]]:
    assert images.dtype == torch.uint8
    assert labels.dtype == torch.int64
    assert images.is_contiguous()
    assert len(images) == len(labels)
    return tuple(images.shape), labels.bincount().tolist()


@needs("taxinet")
def test_checksums_are_those_of_the_readme() -> None:
    readme = Path(FOLDER) / "README.md"
    if not readme.is_file():
        pytest.skip("there is no README with the data")
    text = readme.read_text()
    rows = re.findall(r"^\| `(\S+)` \| (\d+) \| `([0-9a-f]{64})` \|$", text, re.MULTILINE)
    assert len(rows) == 20
    files = {
        file.name: file
        for dataset in data.DATASETS.values()
        for layout in dataset.layouts
        for file in layout.files
    }
    for name, size, checksum in rows:
        assert checksum in files[name].sha256
        # the size of idx files is that of the published ones, compressed by another program
        assert files[name].size == int(size) or name.endswith(".gz")
    assert len(files) == len(rows) + 3  # archives of CIFAR-10, SVHN and Tiny ImageNet


@pytest.mark.parametrize("name", [pytest.param(n, marks=needs(n)) for n in data.DATASETS])
def test_every_data_set_is_whole(name: str) -> None:
    state = data.check_dataset(name)
    assert state.complete, state
    assert all(f.condition is not data.Condition.WRONG for f in state.files)


@needs("mnist")
def test_contents_of_idx_files_are_those_expected_too() -> None:
    for name in ("mnist", "fashion_mnist"):
        for file in data.DATASETS[name].fetched:
            by_content = replace(file, sha256=("0" * 64,))
            assert mismatch(by_content, Path(FOLDER) / file.name) is None


@needs("wine")
def test_wine() -> None:
    wine = data.wine()
    assert wine["red"].shape == (1599, 12)
    assert wine["white"].shape == (4898, 12)
    assert wine["red"].dtype == torch.float32
    first = [7.4, 0.7, 0, 1.9, 0.076, 11, 34, 0.9978, 3.51, 0.56, 9.4, 5]
    assert torch.equal(wine["red"][0], torch.tensor(first))
    assert wine["red"][:, 11].long().bincount().tolist() == [0, 0, 0, 10, 53, 681, 638, 199, 18]
    assert wine["white"][:, 11].mean() == pytest.approx(5.8779, abs=1e-4)


@needs("mnist")
def test_mnist() -> None:
    images, labels = data.mnist("train")
    shape, counts = described(images, labels)
    assert shape == (60000, 28, 28)
    assert counts == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert labels[:5].tolist() == [5, 0, 4, 1, 9]
    assert images.float().mean() / 255 == pytest.approx(0.1307, abs=1e-4)
    assert images.float().std() / 255 == pytest.approx(0.3081, abs=1e-4)
    shape, counts = described(*data.mnist("test"))
    assert shape == (10000, 28, 28)
    assert counts == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]


@needs("fashion_mnist")
def test_fashion_mnist() -> None:
    images, labels = data.fashion_mnist("train")
    assert described(images, labels) == ((60000, 28, 28), [6000] * 10)
    assert labels[:5].tolist() == [9, 0, 0, 3, 0]
    assert images.float().mean() / 255 == pytest.approx(0.2860, abs=1e-4)
    assert described(*data.fashion_mnist("test")) == ((10000, 28, 28), [1000] * 10)


@needs("cifar10")
def test_cifar10() -> None:
    images, labels = data.cifar10("test")
    assert described(images, labels) == ((10000, 32, 32, 3), [1000] * 10)
    assert labels[:4].tolist() == [3, 8, 8, 0]
    assert described(*data.cifar10_subset())[1] == [2000] * 5 + [1000] * 5


@needs("cifar10")
def test_the_published_archive_gives_the_prepared_subset(tmp_path: Path) -> None:
    """An archive with the prepared images in their places gives them back in their order.

    Between them are images of classes of which enough have come, as the README says.
    """
    files = [Path(FOLDER) / f.name for f in data.DATASETS["cifar10"].layouts[1].files[1:]]
    if not all(file.is_file() for file in files):
        pytest.skip("the prepared layout of CIFAR-10 is not there")
    held = [np.load(file) for file in files]
    index = np.concatenate([h["index"] for h in held])
    known = np.concatenate([h["labels"] for h in held])
    length = -(-(index.max() + 1) // 5) * 5
    images = np.zeros((length, 32, 32, 3), np.uint8)
    images[index] = np.concatenate([h["images"] for h in held])
    last = np.array([index[known == label].max() for label in range(10)])
    labels = np.full(length, -1)
    labels[index] = known
    for place in (labels < 0).nonzero()[0]:
        full = (last < place).nonzero()[0]
        assert len(full), f"image {place} is of a class of which not enough have come"
        labels[place] = full[place % len(full)]
    archives.write_cifar(tmp_path / "cifar10" / "cifar-10-python.tar.gz", images, labels, 0)
    read, classes = data.cifar10_subset(tmp_path)
    order = index.argsort()
    assert np.array_equal(classes.numpy(), known[order])
    assert np.array_equal(read.numpy(), images[index[order]])


@needs("svhn")
def test_svhn() -> None:
    images, labels = data.svhn()
    counts = [339, 988, 775, 561, 496, 450, 381, 376, 316, 318]
    assert described(images, labels) == ((5000, 32, 32, 3), counts)
    assert labels[:5].tolist() == [5, 2, 1, 0, 6]


@needs("tinyimagenet")
def test_tinyimagenet() -> None:
    images, labels = data.tinyimagenet()
    assert described(images, labels) == ((5000, 32, 32, 3), [25] * 200)
    assert labels[:5].tolist() == [163, 1, 132, 179, 179]  # val_0 to val_4


@needs("taxinet")
def test_taxinet() -> None:
    tiny = data.taxinet_tiny()
    assert {name: tuple(value.shape) for name, value in tiny.items()} == {
        "images": (3504, 8, 16),
        "labels": (3504, 2),
    }
    assert tiny["images"].dtype == torch.float32
    assert (tiny["images"].mean((1, 2)) - 0.5).abs().max() < 0.02
    morning = data.taxinet_morning()
    assert morning["images"].shape == (158, 72, 128, 3)
    assert morning["images"].dtype == torch.uint8
    assert morning["labels"].shape == (158, 2)
    assert morning["downtrack_m"].shape == (158,)
    assert morning["drive"].bincount().tolist() == [126, 32]
    validation = data.taxinet_validation()
    assert validation["images"].shape == (96, 72, 128, 3)
    assert validation["images"].dtype == torch.uint8
    assert validation["frame"].dtype == torch.int64
    assert (validation["frame"].diff() == 1).all()


@needs("densenet")
def test_densenet_weights() -> None:
    weights = data.densenet_weights()
    statistics = ("running_mean", "running_var", "num_batches_tracked")
    learned = [v for name, v in weights.items() if not name.endswith(statistics)]
    assert sum(value.numel() for value in learned) == 6_956_426
    assert all(value.dtype == torch.float32 for value in learned)
    assert weights["features.conv0.weight"].shape == (64, 3, 3, 3)
    assert weights["classifier.weight"].shape == (10, 1024)
