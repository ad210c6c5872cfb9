"""The data sets as tensors, the same whichever layout they are stored in.

Where both are there, the published files come before the prepared ones. Nothing is kept in
memory between calls.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from scodbench.data.datasets import dataset_named
from scodbench.data.errors import FormatError
from scodbench.data.folder import locate
from scodbench.data.formats.cifar_archive import read_cifar_archive
from scodbench.data.formats.idx import read_idx
from scodbench.data.formats.npz import read_npz
from scodbench.data.formats.svhn_mat import read_svhn
from scodbench.data.formats.tinyimagenet_zip import read_tinyimagenet
from scodbench.data.formats.wine_csv import read_wine
from scodkit.errors import OptionError

Folder = str | Path | None

_CIFAR_ARCHIVE = "cifar10/cifar-10-python.tar.gz"
_CIFAR_TRAIN = (
    "cifar10/cifar10_train_classes0to4_2000each.npz",
    "cifar10/cifar10_train_classes5to9_1000each.npz",
)
# how many of the first training images of each class are in the subset
_CIFAR_SUBSET = (2000,) * 5 + (1000,) * 5
_SVHN_IMAGES = 5000
_TINYIMAGENET_PER_CLASS = 25


def wine(folder: Folder = None) -> dict[str, Tensor]:
    """Return the Wine Quality data set.

    Args:
        folder: As for `data_folder`, here and below.

    Returns:
        ``red`` ``(1599, 12)`` and ``white`` ``(4898, 12)`` float32: 11 features in their own
        units, then the quality (an integer, high = good).
    """
    red, white = _find(
        "wine", folder, ("wine/winequality-red.csv", "wine/winequality-white.csv")
    )
    return {"red": read_wine(red), "white": read_wine(white)}


def mnist(split: str, folder: Folder = None) -> tuple[Tensor, Tensor]:
    """Return the digits of MNIST.

    Args:
        split: ``"train"``, 60000 of them, or ``"test"``, 10000.
        folder: As for `data_folder`.

    Returns:
        Images ``(n, 28, 28)`` uint8, 255 = ink, and labels ``(n,)`` int64.
    """
    return _idx_pair("mnist", split, folder)


def fashion_mnist(split: str, folder: Folder = None) -> tuple[Tensor, Tensor]:
    """Return the clothes of Fashion-MNIST.

    Args:
        split: ``"train"``, 60000 of them, or ``"test"``, 10000.
        folder: As for `data_folder`.

    Returns:
        Images ``(n, 28, 28)`` uint8, 0 = background, and labels ``(n,)`` int64.
    """
    return _idx_pair("fashion_mnist", split, folder)


def cifar10(split: str, folder: Folder = None) -> tuple[Tensor, Tensor]:
    """Return the images of CIFAR-10, in original order.

    The published archive has all 50000 training images. The prepared files have 15000 of them,
    those of `cifar10_subset`.

    Args:
        split: ``"train"`` or ``"test"``, 10000 images in either layout.
        folder: As for `data_folder`.

    Returns:
        Images ``(n, 32, 32, 3)`` uint8, RGB, and labels ``(n,)`` int64.
    """
    _check_split(split)
    prepared = _CIFAR_TRAIN if split == "train" else ("cifar10/cifar10_test.npz",)
    paths = _find("cifar10", folder, (_CIFAR_ARCHIVE,), prepared)
    if paths[0].suffix != ".npz":
        return read_cifar_archive(paths[0], split)
    if split == "test":
        return _labelled(paths[0])
    few, many = (read_npz(path, "images", "labels", "index") for path in paths)
    images, labels, index = (torch.cat(pair) for pair in zip(few, many, strict=True))
    order = index.argsort()
    return images[order], labels[order].long()


def cifar10_subset(folder: Folder = None) -> tuple[Tensor, Tensor]:
    """Return the same 15000 training images of CIFAR-10 from either layout.

    They are the first 2000 of each of the classes 0-4 and the first 1000 of each of the classes
    5-9, in original order.

    Args:
        folder: As for `data_folder`.

    Returns:
        Images ``(15000, 32, 32, 3)`` uint8, RGB, and labels ``(15000,)`` int64.
    """
    images, labels = cifar10("train", folder)
    chosen = first_of_each(labels, _CIFAR_SUBSET)
    return images[chosen], labels[chosen]


def svhn(folder: Folder = None) -> tuple[Tensor, Tensor]:
    """Return the first 5000 test images of SVHN.

    In the prepared file, pixels after image 948 were recovered from enlarged copies: one in 200
    differs from the published value, by 1 of 255.

    Args:
        folder: As for `data_folder`.

    Returns:
        Images ``(5000, 32, 32, 3)`` uint8, RGB, and labels ``(5000,)`` int64, the digits.
    """
    (path,) = _find("svhn", folder, ("svhn/test_32x32.mat",), ("svhn/svhn_test_5000.npz",))
    return _labelled(path) if path.suffix == ".npz" else read_svhn(path, _SVHN_IMAGES)


def tinyimagenet(folder: Folder = None) -> tuple[Tensor, Tensor]:
    """Return 5000 validation images of Tiny ImageNet, reduced to 32x32.

    They are the first 25 of each of the 200 classes by file number, in the order of that
    number.

    Args:
        folder: As for `data_folder`.

    Returns:
        Images ``(5000, 32, 32, 3)`` uint8, RGB, and labels ``(5000,)`` int64, by the data set's
        list of classes.
    """
    (path,) = _find(
        "tinyimagenet",
        folder,
        ("tinyimagenet/tiny-imagenet-200.zip",),
        ("tinyimagenet/tinyimagenet_val_32x32_5000.npz",),
    )
    if path.suffix == ".npz":
        return _labelled(path)
    return read_tinyimagenet(path, _TINYIMAGENET_PER_CLASS)


def taxinet_tiny(folder: Folder = None) -> dict[str, Tensor]:
    """Return the down-sampled frames of TaxiNet.

    Args:
        folder: As for `data_folder`.

    Returns:
        ``images`` ``(3504, 8, 16)`` float32, grey in [0, 1], each with a mean of 0.5; and
        ``labels`` ``(3504, 2)`` float32: cross-track error in metres, heading error in degrees.
    """
    return _taxinet("tinytaxinet_8x16_3504.npz", folder)


def taxinet_morning(folder: Folder = None) -> dict[str, Tensor]:
    """Return frames of two drives of TaxiNet, in the morning under a clear sky.

    Args:
        folder: As for `data_folder`.

    Returns:
        ``images`` ``(158, 72, 128, 3)`` uint8, RGB; ``labels`` ``(158, 2)`` as of
        `taxinet_tiny`; ``downtrack_m`` ``(158,)`` float32, metres along the runway; ``drive``
        ``(158,)`` int64, 0 or 1.
    """
    return _taxinet("taxinet_xplane_morning_72x128.npz", folder, "downtrack_m", "drive")


def taxinet_validation(folder: Folder = None) -> dict[str, Tensor]:
    """Return consecutive frames of a third drive of TaxiNet, from another source.

    Args:
        folder: As for `data_folder`.

    Returns:
        ``images`` ``(96, 72, 128, 3)`` uint8, RGB; ``labels`` ``(96, 2)`` as of `taxinet_tiny`;
        ``frame`` ``(96,)`` int64, the number of the frame.
    """
    return _taxinet("taxinet_validation_72x128.npz", folder, "frame")


def densenet_weights(folder: Folder = None) -> dict[str, Tensor]:
    """Return the weights of the DenseNet-121 trained on CIFAR-10.

    Args:
        folder: As for `data_folder`.

    Returns:
        Parameters and buffers by name, as ``load_state_dict`` wants them: float32 (stored as
        float16), except the int64 counters of batch normalisation.

    Raises:
        FormatError: If the file is cut off or something else.
    """
    (path,) = _find("densenet", folder, ("cifar10/densenet121_cifar10_fp16.safetensors",))
    try:
        stored = load_file(path)
    except SafetensorError as error:
        raise FormatError(
            f"expected a whole safetensors file at {path}, got: {error}; type: "
            "scodbench data check"
        ) from error
    return {
        name: tensor.float() if tensor.is_floating_point() else tensor
        for name, tensor in stored.items()
    }


def first_of_each(labels: Tensor, counts: tuple[int, ...]) -> Tensor:
    """Return where the first samples of each class are.

    Args:
        labels: ``(n,)`` classes.
        counts: How many to take of class 0, 1 and so on; all where there are fewer.

    Returns:
        Positions, ascending.

    Examples:
        >>> first_of_each(torch.tensor([1, 0, 1, 0, 0, 2, 1]), (2, 1))
        tensor([0, 1, 3])
    """
    places = [(labels == label).nonzero()[:count, 0] for label, count in enumerate(counts)]
    return torch.cat(places).sort().values


def _find(name: str, folder: Folder, *layouts: tuple[str, ...]) -> list[Path]:
    return locate(name, layouts, dataset_named(name).remedy(folder), folder)


def _check_split(split: str) -> None:
    if split not in ("train", "test"):
        raise OptionError(f'expected the split "train" or "test", got {split!r}')


def _idx_pair(name: str, split: str, folder: Folder) -> tuple[Tensor, Tensor]:
    _check_split(split)
    start = f"{name}/{'train' if split == 'train' else 't10k'}"
    images, labels = _find(
        name, folder, (f"{start}-images-idx3-ubyte.gz", f"{start}-labels-idx1-ubyte.gz")
    )
    return read_idx(images), read_idx(labels).long()


def _labelled(path: Path) -> tuple[Tensor, Tensor]:
    images, labels = read_npz(path, "images", "labels")
    return images, labels.long()


def _taxinet(file: str, folder: Folder, *others: str) -> dict[str, Tensor]:
    names = ("images", "labels", *others)
    (path,) = _find("taxinet", folder, (f"taxinet/{file}",))
    held = dict(zip(names, read_npz(path, *names), strict=True))
    return {
        # counters to int64, images as they are
        name: value if value.is_floating_point() or name == "images" else value.long()
        for name, value in held.items()
    }
