"""Readers give back what was put in, refuse what is damaged, and execute nothing."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.io import savemat

import bench_archives as archives
from bench_archives import HEADER, noise
from scodbench.data.errors import FormatError
from scodbench.data.formats.cifar_archive import read_cifar_archive
from scodbench.data.formats.idx import read_idx
from scodbench.data.formats.npz import read_npz
from scodbench.data.formats.svhn_mat import read_svhn
from scodbench.data.formats.tinyimagenet_zip import read_tinyimagenet
from scodbench.data.formats.wine_csv import read_wine


@pytest.mark.parametrize("shape", [(7, 28, 28), (5,), (0, 28, 28)])
@pytest.mark.parametrize("pack", [gzip.compress, bytes])
def test_idx(tmp_path: Path, shape: tuple[int, ...], pack: Callable[[bytes], bytes]) -> None:
    array = noise(*shape)
    path = tmp_path / "a"
    path.write_bytes(pack(archives.idx_bytes(array)))
    read = read_idx(path)
    assert read.dtype == torch.uint8
    assert read.shape == shape
    assert np.array_equal(read.numpy(), array)


def test_a_damaged_idx_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a"
    plain = archives.idx_bytes(noise(3, 4, 4))
    packed = gzip.compress(plain)
    changed = packed[:-6] + bytes([packed[-6] ^ 1]) + packed[-5:]  # in the check sum
    for damaged in (
        *(plain[:n] for n in (0, 3, 9, len(plain) - 1)),
        *(packed[:n] for n in (2, 12, len(packed) - 9, len(packed) - 1)),
        plain + b"\0",
        gzip.compress(plain + b"\0"),
        changed,
        plain[:2] + b"\x09" + plain[3:],  # signed bytes
        b"\1" + plain[1:],
        b"<html>not found</html>",
    ):
        path.write_bytes(damaged)
        with pytest.raises(FormatError, match="scodbench data check"):
            read_idx(path)


def test_wine(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(
        HEADER + "7.4;0.7;0;1.9;0.076;11;34;0.9978;3.51;0.56;9.4;5\n"
        "7.8;0.88;0;2.6;0.098;25;67;0.9968;3.2;0.68;9.8;6\n"
    )
    expected = [
        [7.4, 0.7, 0, 1.9, 0.076, 11, 34, 0.9978, 3.51, 0.56, 9.4, 5],
        [7.8, 0.88, 0, 2.6, 0.098, 25, 67, 0.9968, 3.2, 0.68, 9.8, 6],
    ]
    assert torch.equal(read_wine(path), torch.tensor(expected))
    good = path.read_text()
    for damaged in (
        good.replace(";", ","),
        good.removeprefix(HEADER),
        good.replace("11;34", "eleven;34"),
        good[:-20],
        good.replace("quality", "colour"),
        "<html>ü</html>",
    ):
        path.write_text(damaged)
        with pytest.raises(FormatError, match=r"12 numbers.*scodbench data check"):
            read_wine(path)


class Malicious:
    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, ("executed",)


def test_nothing_in_a_pickle_is_executed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    pickle.loads(pickle.dumps(Malicious()))
    assert Path("executed").is_dir()  # so it would
    Path("executed").rmdir()
    python2 = b"\x80\x02cposix\nmkdir\nU\x08executed\x85R."
    unheard_of = b"\x80\x02cno_such_module\nf\n)R}b."
    numpys = b"\x80\x02cnumpy\nload\nU\x01a\x85R."
    batches = [python2, unheard_of, numpys]
    batches += [pickle.dumps(Malicious(), protocol) for protocol in range(6)]
    for batch in batches:
        archives.write_tar(tmp_path / "a.tar.gz", {"x/test_batch": batch})
        with pytest.raises(FormatError, match=r"forbidden name .*scodbench data check"):
            read_cifar_archive(tmp_path / "a.tar.gz", "test")
    assert "no_such_module" not in sys.modules
    assert not Path("executed").exists()


def test_a_damaged_pickle_is_refused(tmp_path: Path) -> None:
    batch = archives.cifar_batch(noise(2, 3072), [1, 2])
    cut = [batch[:length] for length in (0, 1, 5, 30, 200, len(batch) - 1)]
    strange = [b"\x80\x02.", b"\x80\x02e.", b"\x80\x02h\x07.", b"(u.", b"Nb."]
    for damaged in (*cut, *strange):
        archives.write_tar(tmp_path / "a.tar.gz", {"x/test_batch": damaged})
        with pytest.raises(FormatError, match="test_batch: expected a whole pickle"):
            read_cifar_archive(tmp_path / "a.tar.gz", "test")


def cifar(tmp_path: Path, each: int = 6) -> tuple[Path, np.ndarray, np.ndarray]:
    images = noise(6 * each, 32, 32, 3)
    labels = np.random.default_rng(1).integers(0, 10, 6 * each)
    path = tmp_path / "cifar-10-python.tar.gz"
    archives.write_cifar(path, images, labels, test=each)
    return path, images, labels


def test_the_cifar_archive(tmp_path: Path) -> None:
    path, images, labels = cifar(tmp_path)
    for split, part in (("train", slice(0, 30)), ("test", slice(30, 36))):
        read, classes = read_cifar_archive(path, split)
        assert read.dtype == torch.uint8
        assert classes.dtype == torch.int64
        assert read.is_contiguous()
        assert np.array_equal(read.numpy(), images[part])
        assert np.array_equal(classes.numpy(), labels[part])


def test_a_cifar_archive_with_arrays_by_columns(tmp_path: Path) -> None:
    rows = np.asfortranarray(noise(4, 3072))
    batch = archives.cifar_batch(rows, [1, 2, 3, 4])
    archives.write_tar(tmp_path / "a.tar.gz", {"c/test_batch": batch})
    read, _ = read_cifar_archive(tmp_path / "a.tar.gz", "test")
    assert np.array_equal(read.permute(0, 3, 1, 2).reshape(4, 3072).numpy(), rows)


def test_a_damaged_cifar_archive_is_refused(tmp_path: Path) -> None:
    path, _, _ = cifar(tmp_path)
    whole = path.read_bytes()
    for length in (0, 10, len(whole) // 2, len(whole) // 3):
        path.write_bytes(whole[:length])
        with pytest.raises(FormatError, match="scodbench data check"):
            read_cifar_archive(path, "train")
    good = archives.cifar_batch(noise(2, 3072), [1, 2])
    for batch, complaint in (
        (archives.cifar_batch(noise(2, 3072), [1, 2, 3]), "label in 0-9"),
        (archives.cifar_batch(noise(2, 3072), [1, 10]), "label in 0-9"),
        (archives.cifar_batch(noise(2, 3071), [1, 2]), r"array of \(n, 3072\)"),
        (good.replace(b"U\x02u1", b"U\x02i1"), r"array of \(n, 3072\)"),
        (good.replace(b"_reconstruct", b"_remembering"), "forbidden name numpy.core"),
        (b"\x80\x02}.", "no data and labels"),
    ):
        archives.write_tar(path, {"c/test_batch": batch})
        with pytest.raises(FormatError, match=complaint):
            read_cifar_archive(path, "test")
    archives.write_tar(path, {f"c/data_batch_{i}": good for i in (1, 2, 4, 5)})
    with pytest.raises(FormatError, match="without data_batch_3"):
        read_cifar_archive(path, "train")
    longer = archives.cifar_batch(noise(3, 3072), [1, 2, 3])
    archives.write_tar(path, {"c/data_batch_1": good, "c/data_batch_2": longer})
    with pytest.raises(FormatError, match="data_batch_2 of another size"):
        read_cifar_archive(path, "train")


@pytest.mark.parametrize("compressed", [True, False])
def test_svhn(tmp_path: Path, compressed: bool) -> None:
    images = noise(12, 32, 32, 3)
    labels = np.array([5, 2, 1, 10, 6, 1, 9, 1, 1, 8, 3, 10], np.uint8)
    path = tmp_path / "test_32x32.mat"
    held = {"X": images.transpose(1, 2, 3, 0), "y": labels[:, None]}
    savemat(path, held, do_compression=compressed)
    read, digits = read_svhn(path, 11)
    assert np.array_equal(read.numpy(), images[:11])
    assert digits.tolist() == [5, 2, 1, 0, 6, 1, 9, 1, 1, 8, 3]
    assert digits.dtype == torch.int64
    assert read.is_contiguous()
    whole = path.read_bytes()
    for length in (0, 100, len(whole) // 2):
        path.write_bytes(whole[:length])
        with pytest.raises(FormatError, match="scodbench data check"):
            read_svhn(path, 5)
    savemat(path, {"X": held["X"][:28], "y": held["y"]})
    with pytest.raises(FormatError, match=r"images \(28, 32, 3, 5\)"):
        read_svhn(path, 5)


def halved(image: np.ndarray) -> np.ndarray:
    """The definition: cubic convolution with a = -1/2, stretched by 2, rows and columns."""

    def weight(t: float) -> float:
        t = abs(t)
        if t < 1:
            return 1.5 * t**3 - 2.5 * t**2 + 1
        return -0.5 * t**3 + 2.5 * t**2 - 4 * t + 2 if t < 2 else 0.0

    table = np.array(
        [[weight((j + 0.5) / 2 - (i + 0.5)) for j in range(64)] for i in range(32)]
    )
    table /= table.sum(1, keepdims=True)
    return np.einsum("ij,jkc,lk->ilc", table, image.astype(float), table).clip(0, 255)


def test_tinyimagenet(tmp_path: Path) -> None:
    path = tmp_path / "tiny-imagenet-200.zip"
    labels = [2, 2, 0, 1, 2, 1, 0, 2, 0, 1, 1, 0, 2]
    images = [archives.jpeg(noise(64, 64, 3, seed=n)) for n in range(13)]
    images[3] = archives.jpeg(noise(64, 64, seed=3))  # grey
    archives.write_tinyimagenet(path, ["n03", "n01", "n02"], labels, images)
    read, classes = read_tinyimagenet(path, per_class=2)
    chosen = [0, 1, 2, 3, 5, 6]
    assert classes.tolist() == [labels[n] for n in chosen]
    assert classes.dtype == torch.int64
    assert read.shape == (6, 32, 32, 3)
    for place, number in enumerate(chosen):
        decoded = np.asarray(Image.open(io.BytesIO(images[number])).convert("RGB"))
        difference = np.abs(read[place].numpy() - halved(decoded))
        assert difference.max() <= 1.01  # rounded twice
        assert difference.mean() < 0.4
    assert torch.equal(read[3, ..., 0], read[3, ..., 2])


def test_a_damaged_tinyimagenet_archive_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.zip"
    good = archives.jpeg(noise(64, 64, 3))
    portable = io.BytesIO()
    Image.fromarray(noise(64, 64, 3)).save(portable, "PNG")
    archives.write_tinyimagenet(path, ["a"], [0], [good])
    whole = path.read_bytes()
    for length in (0, 50, len(whole) - 5):
        path.write_bytes(whole[:length])
        with pytest.raises(FormatError, match="scodbench data check"):
            read_tinyimagenet(path, 1)
    for images in ([good[:100]], [b"no image"], [portable.getvalue()], []):
        archives.write_tinyimagenet(path, ["a"], [0], images)
        with pytest.raises(FormatError, match="scodbench data check"):
            read_tinyimagenet(path, 1)


def test_npz(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    images = noise(3, 40, 40)
    np.savez_compressed(path, images=images, labels=np.arange(3), other=np.ones(2))
    labels, read = read_npz(path, "labels", "images")
    assert np.array_equal(read.numpy(), images)
    assert labels.tolist() == [0, 1, 2]
    with pytest.raises(FormatError, match="with images, index"):
        read_npz(path, "images", "index")
    whole = path.read_bytes()
    for damaged in (b"", whole[: len(whole) // 2], whole[:999] + b"\0\0\0" + whole[1002:]):
        path.write_bytes(damaged)
        with pytest.raises(FormatError, match="scodbench data check"):
            read_npz(path, "images")


def test_an_npz_file_with_a_pickle_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    np.savez("a.npz", images=np.array([Malicious()], dtype=object))
    with pytest.raises(FormatError):
        read_npz(Path("a.npz"), "images")
    assert not Path("executed").exists()
