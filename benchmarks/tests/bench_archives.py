"""Small files in exactly the formats of the published data sets."""

from __future__ import annotations

import gzip
import io
import struct
import tarfile
import zipfile
from pathlib import Path

import numpy as np
from PIL import Image

HEADER = (
    '"fixed acidity";"volatile acidity";"citric acid";"residual sugar";"chlorides";'
    '"free sulfur dioxide";"total sulfur dioxide";"density";"pH";"sulphates";"alcohol";'
    '"quality"\n'
)


def noise(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def idx_bytes(array: np.ndarray) -> bytes:
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


def write_idx(path: Path, array: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(idx_bytes(array), 1))


def python2_string(text: bytes) -> bytes:
    if len(text) < 256:
        return b"U" + bytes([len(text)]) + text
    return b"T" + struct.pack("<i", len(text)) + text


def python2_number(number: int) -> bytes:
    if 0 <= number < 256:
        return b"K" + bytes([number])
    if 0 <= number < 65536:
        return b"M" + struct.pack("<H", number)
    return b"J" + struct.pack("<i", number)


def python2_array(array: np.ndarray) -> bytes:
    """Bytes as Python 2's cPickle and its numpy wrote them, in protocol 2."""
    rows, columns = array.shape
    fortran = array.flags.f_contiguous and not array.flags.c_contiguous
    return b"".join(
        [
            b"cnumpy.core.multiarray\n_reconstruct\nq\x07cnumpy\nndarray\nq\x08K\x00\x85q\x09",
            python2_string(b"b"),
            b"\x87q\x0aRq\x0b(K\x01",
            python2_number(rows) + python2_number(columns),
            b"\x86q\x0ccnumpy\ndtype\nq\x0dU\x02u1q\x0eK\x00K\x01\x87q\x0fRq\x10",
            b"(K\x03U\x01|q\x11NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tq\x12b",
            b"\x88" if fortran else b"\x89",
            python2_string(array.tobytes(order="F" if fortran else "C")),
            b"tq\x13b",
        ]
    )


def python2_list(items: list[bytes]) -> bytes:
    # cPickle appends a thousand at a time
    groups = [items[i : i + 1000] for i in range(0, len(items), 1000)]
    return b"]q\x05" + b"".join(b"(" + b"".join(group) + b"e" for group in groups)


def cifar_batch(pixels: np.ndarray, labels: list[int]) -> bytes:
    """A batch, of which all strings are Python 2's."""
    files = [python2_string(b"image_%d.png" % i) + b"r\x00\x02\x00\x00" for i in range(3)]
    return b"".join(
        [
            b"\x80\x02}q\x01(",
            python2_string(b"batch_label") + b"q\x02",
            python2_string(b"training batch 1 of 5") + b"q\x03",
            python2_string(b"labels") + b"q\x04",
            python2_list([python2_number(label) for label in labels]),
            python2_string(b"data") + b"q\x06" + python2_array(pixels),
            python2_string(b"filenames") + b"q\x14" + python2_list(files),
            b"u.",
        ]
    )


def write_tar(path: Path, members: dict[str, bytes]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz", compresslevel=0) as archive:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def write_cifar(path: Path, images: np.ndarray, labels: np.ndarray, test: int) -> None:
    """An archive of images (n, 32, 32, 3): five batches, then the last ones to test."""
    rows = images.transpose(0, 3, 1, 2).reshape(len(images), 3072)
    pieces = [*np.array_split(np.arange(len(images) - test), 5)]
    pieces.append(np.arange(len(images) - test, len(images)))
    names = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
    members = {
        f"cifar-10-batches-py/{name}": cifar_batch(rows[piece], labels[piece].tolist())
        for name, piece in zip(names, pieces, strict=True)
    }
    members["cifar-10-batches-py/readme.html"] = b"<html>"
    members["cifar-10-batches-py/batches.meta"] = b"\x80\x02}q\x01."
    # the published archive has them in no order
    shuffled = [3, 6, 5, 2, 7, 1, 4, 0]
    write_tar(path, {list(members)[i]: members[list(members)[i]] for i in shuffled})


def jpeg(image: np.ndarray) -> bytes:
    held = io.BytesIO()
    Image.fromarray(image).save(held, "JPEG", quality=95)
    return held.getvalue()


def write_tinyimagenet(
    path: Path, classes: list[str], labels: list[int], images: list[bytes]
) -> None:
    """An archive of validation images, in which image n is of class ``labels[n]``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [f"val_{n}.JPEG\t{classes[label]}\t0\t32\t44\t62" for n, label in enumerate(labels)]
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tiny-imagenet-200/wnids.txt", "\n".join(classes) + "\n")
        # numbers as texts: val_10 comes before val_2
        text = "\n".join(sorted(lines)) + "\n"
        archive.writestr("tiny-imagenet-200/val/val_annotations.txt", text)
        for number, image in enumerate(images):
            archive.writestr(f"tiny-imagenet-200/val/images/val_{number}.JPEG", image)
