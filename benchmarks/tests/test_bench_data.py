"""Data sets are found, checked and read the same in either layout; real ones where they are."""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from scipy.io import savemat

import bench_archives as archives
from bench_archives import HEADER, noise
from scodbench import data
from scodbench.data import load
from scodbench.data.datasets import dataset_named
from scodbench.data.errors import FormatError, MissingDataError
from scodbench.data.folder import data_folder
from scodkit.errors import OptionError, ScodError

LOADERS: dict[str, list[Callable[..., object]]] = {
    "wine": [data.wine],
    "mnist": [lambda f: data.mnist("train", f), lambda f: data.mnist("test", f)],
    "fashion_mnist": [lambda f: data.fashion_mnist("train", f)],
    "cifar10": [lambda f: data.cifar10("test", f), data.cifar10_subset],
    "svhn": [data.svhn],
    "tinyimagenet": [data.tinyimagenet],
    "taxinet": [data.taxinet_tiny, data.taxinet_morning, data.taxinet_validation],
    "densenet": [data.densenet_weights],
}


def test_the_folder_is_given_or_named_or_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SCODKIT_DATA", str(tmp_path / "named"))
    assert data_folder("given") == Path("given")
    assert data_folder("~/given") == tmp_path / "given"
    assert data_folder() == tmp_path / "named"
    monkeypatch.setenv("SCODKIT_DATA", "~/named")
    assert data_folder() == tmp_path / "named"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for unset in ("", None):
        monkeypatch.delenv("SCODKIT_DATA")
        if unset is not None:
            monkeypatch.setenv("SCODKIT_DATA", unset)
        assert data_folder() == tmp_path / "cache" / "scodkit"


@pytest.mark.parametrize("name", data.DATASETS)
def test_what_is_missing_is_named_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("SCODKIT_DATA", str(tmp_path))
    files = {file.name for layout in data.DATASETS[name].layouts for file in layout.files}
    for read in LOADERS[name]:
        with pytest.raises(MissingDataError) as caught:
            read(None)
        message = str(caught.value)
        assert message.startswith(f"expected the data set {name} in {tmp_path} (named by the")
        named = set(
            re.findall(r"[a-z0-9_]+/[\w.-]+\.(?:gz|csv|npz|mat|zip|safetensors)", message)
        )
        assert named
        assert named <= files
        if name in ("taxinet", "densenet"):
            assert "copy" in message
            assert "scodbench data get" not in message
        else:
            assert message.endswith(f"type: scodbench data get {name}")
    assert isinstance(caught.value, ScodError)
    assert isinstance(caught.value, FileNotFoundError)


def test_the_cache_is_said_to_be_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SCODKIT_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(
        MissingDataError, match="cache, as the variable SCODKIT_DATA is not set"
    ):
        data.wine()


def test_the_command_names_the_folder_that_was_given(tmp_path: Path) -> None:
    (tmp_path / "cifar10").mkdir()
    (tmp_path / "cifar10" / "cifar10_train_classes5to9_1000each.npz").write_bytes(b"")
    with pytest.raises(MissingDataError) as caught:
        data.cifar10("train", tmp_path)
    message = str(caught.value)
    assert message.endswith(f"type: scodbench data get cifar10 --data {tmp_path}")
    assert "cifar-10-python.tar.gz, or cifar10/cifar10_train_classes0to4" in message
    gone = message.split("not there: ")[1]
    assert "classes0to4" in gone
    assert "classes5to9" not in gone


def test_a_split_is_train_or_test(tmp_path: Path) -> None:
    for read in (data.mnist, data.fashion_mnist, data.cifar10):
        with pytest.raises(OptionError, match='"train" or "test", got \'val\''):
            read("val", tmp_path)


def test_the_registry_is_whole() -> None:
    assert list(data.DATASETS) == list(LOADERS)
    for dataset in data.DATASETS.values():
        assert dataset.licence
        assert bool(dataset.fetched) != bool(dataset.instead)
        for layout in dataset.layouts:
            for file in layout.files:
                assert (layout.name == "published") == bool(file.url)
                assert file.size > 0
                assert file.checksum_from
                sums = [*file.sha256, file.content or "0" * 64]
                assert all(re.fullmatch("[0-9a-f]{64}", checksum) for checksum in sums)
    assert dataset_named("mnist") is data.DATASETS["mnist"]


def test_check_tells_there_from_missing_from_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sha256 = hashlib.sha256(b"abc").hexdigest()
    published = (
        data.File("t/a", 1, ("0" * 64,), url="http://x"),
        data.File("t/b.gz", 1, ("2" * 64,), sha256, "http://x"),
    )
    prepared = data.File("t/c", 1, ("1" * 64,))
    layouts = (data.Layout("published", published), data.Layout("prepared", (prepared,)))
    monkeypatch.setitem(data.DATASETS, "toy", data.Dataset("toy", "", "", layouts))
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "a").write_bytes(b"abc")
    (tmp_path / "t" / "b.gz").write_bytes(gzip.compress(b"abc"))
    state = data.check(tmp_path)[-1]
    assert [f.condition.value for f in state.files] == ["wrong checksum", "there", "missing"]
    assert [f.layout for f in state.files] == ["published", "published", "prepared"]
    assert re.fullmatch(
        r"expected sha256 0{64}, got ba7816bf[0-9a-f]{56}", state.files[0].wrong
    )
    assert not state.complete
    (tmp_path / "t" / "b.gz").write_bytes(gzip.compress(b"abd"))
    assert "; expected content" in data.check_dataset("toy", tmp_path).files[1].wrong
    (tmp_path / "t" / "b.gz").write_bytes(gzip.compress(b"abc")[:-3])
    assert "got no gzip file" in data.check_dataset("toy", tmp_path).files[1].wrong
    (tmp_path / "t" / "c").write_bytes(b"abc")
    right = dataclasses.replace(prepared, sha256=("3" * 64, sha256))
    layouts = (layouts[0], data.Layout("prepared", (right,)))
    monkeypatch.setitem(data.DATASETS, "toy", data.Dataset("toy", "", "", layouts))
    assert data.check_dataset("toy", tmp_path).complete


def test_mnist_from_small_files(tmp_path: Path) -> None:
    for name, read in (("mnist", data.mnist), ("fashion_mnist", data.fashion_mnist)):
        for start, split, seed in (("train", "train", 0), ("t10k", "test", 1)):
            images, labels = noise(5, 28, 28, seed=seed), noise(5, seed=seed) % 10
            archives.write_idx(tmp_path / name / f"{start}-images-idx3-ubyte.gz", images)
            archives.write_idx(tmp_path / name / f"{start}-labels-idx1-ubyte.gz", labels)
            got, classes = read(split, tmp_path)
            assert np.array_equal(got.numpy(), images)
            assert classes.dtype == torch.int64
            assert classes.tolist() == labels.tolist()


def test_wine_from_small_files(tmp_path: Path) -> None:
    (tmp_path / "wine").mkdir()
    for colour, value in (("red", 1), ("white", 2)):
        rows = HEADER + ";".join([str(value)] * 12) + "\n"
        (tmp_path / "wine" / f"winequality-{colour}.csv").write_text(rows)
    read = data.wine(tmp_path)
    assert torch.equal(read["red"], torch.ones(1, 12))
    assert torch.equal(read["white"], 2 * torch.ones(1, 12))


def write_prepared_cifar(folder: Path, images: np.ndarray, labels: np.ndarray) -> None:
    """The first 4 of each class 0-4 and the first 2 of each class 5-9, as in the README."""
    folder.mkdir(parents=True)
    first = [i for i in range(len(labels)) if (labels[:i] == labels[i]).sum() < 4]
    low = np.array([i for i in first if labels[i] < 5])
    high = np.array([i for i in first if labels[i] > 4 and (labels[:i] == labels[i]).sum() < 2])
    for name, index in (("0to4_2000", low), ("5to9_1000", high)):
        np.savez(
            folder / f"cifar10_train_classes{name}each.npz",
            images=images[index],
            labels=labels[index].astype(np.uint8),
            index=index.astype(np.int32),
        )


def test_cifar_is_the_same_in_both_layouts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "_CIFAR_SUBSET", (4,) * 5 + (2,) * 5)
    images, labels = noise(120, 32, 32, 3), np.random.default_rng(2).integers(0, 10, 120)
    published, prepared = tmp_path / "published", tmp_path / "prepared"
    archives.write_cifar(published / "cifar10" / "cifar-10-python.tar.gz", images, labels, 20)
    write_prepared_cifar(prepared / "cifar10", images[:100], labels[:100])
    test = {"images": images[100:], "labels": labels[100:].astype(np.uint8)}
    np.savez(prepared / "cifar10" / "cifar10_test.npz", **test)

    def same(a: tuple[torch.Tensor, ...], b: tuple[torch.Tensor, ...]) -> bool:
        return all(torch.equal(x, y) and x.dtype == y.dtype for x, y in zip(a, b, strict=True))

    full = data.cifar10("train", published)
    assert np.array_equal(full[0].numpy(), images[:100])
    assert full[1].tolist() == labels[:100].tolist()
    subset = data.cifar10_subset(published)
    assert len(subset[0]) == 30
    assert same(subset, data.cifar10_subset(prepared))
    assert same(subset, data.cifar10("train", prepared))
    assert same(data.cifar10("test", published), data.cifar10("test", prepared))
    # where both are there the published one, which is whole, is read
    (prepared / "cifar10" / "cifar-10-python.tar.gz").hardlink_to(
        published / "cifar10" / "cifar-10-python.tar.gz"
    )
    assert same(data.cifar10("train", prepared), full)


def test_svhn_is_the_same_in_both_layouts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "_SVHN_IMAGES", 4)
    images, labels = noise(6, 32, 32, 3), np.array([5, 10, 1, 10, 6, 1], np.uint8)
    for layout in ("published", "prepared"):
        (tmp_path / layout / "svhn").mkdir(parents=True)
    held = {"X": images.transpose(1, 2, 3, 0), "y": labels[:, None]}
    savemat(tmp_path / "published" / "svhn" / "test_32x32.mat", held)
    few = {"images": images[:4], "labels": labels[:4] % 10, "exact": np.ones(4, bool)}
    np.savez(tmp_path / "prepared" / "svhn" / "svhn_test_5000.npz", **few)
    for a, b in zip(
        data.svhn(tmp_path / "published"), data.svhn(tmp_path / "prepared"), strict=True
    ):
        assert torch.equal(a, b)
        assert a.dtype == b.dtype


def test_densenet_weights_come_as_float32(tmp_path: Path) -> None:
    path = tmp_path / "cifar10" / "densenet121_cifar10_fp16.safetensors"
    path.parent.mkdir()
    weights = {"a": torch.tensor([0.1, 2.0]).half(), "n": torch.tensor(3)}
    save_file(weights, path)
    read = data.densenet_weights(tmp_path)
    assert read["a"].dtype == torch.float32
    assert torch.equal(read["a"], weights["a"].float())
    assert read["n"].dtype == torch.int64
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(FormatError, match="scodbench data check"):
        data.densenet_weights(tmp_path)


def test_tinyimagenet_from_a_small_archive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "_TINYIMAGENET_PER_CLASS", 1)
    images = [archives.jpeg(np.full((64, 64, 3), shade, np.uint8)) for shade in (10, 90, 200)]
    path = tmp_path / "tinyimagenet" / "tiny-imagenet-200.zip"
    archives.write_tinyimagenet(path, ["n02", "n01"], [1, 1, 0], images)
    read, labels = data.tinyimagenet(tmp_path)
    assert labels.tolist() == [1, 0]
    assert read[:, 5, 5, 0].tolist() == [10, 200]
