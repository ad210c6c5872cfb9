"""The data sets: which files, from where, under what licence, and how to know them again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from scodbench.data.checksums import Checksums
from scodkit.errors import OptionError


@dataclass(frozen=True)
class File:
    """A file of a data set.

    Args:
        name: Relative to the data folder, with forward slashes.
        size: Bytes.
        checksums: What it must be.
        url: Its public place; empty if it has none.
        checksum_from: Who published the checksum.
    """

    name: str
    size: int
    checksums: Checksums
    url: str = ""
    checksum_from: str = "the README of the project's data"


@dataclass(frozen=True)
class Layout:
    """One way a data set can be stored.

    Args:
        name: ``published`` for the authors' own files, ``prepared`` for the project's.
        files: All that belong to it.
    """

    name: str
    files: tuple[File, ...]


@dataclass(frozen=True)
class Dataset:
    """A data set.

    Args:
        name: As on the command line.
        title: What it is, in words.
        licence: As far as it is known.
        layouts: The ways it can be stored; any one of them is enough.
        instead: What to do where it cannot be fetched; empty if it can.
    """

    name: str
    title: str
    licence: str
    layouts: tuple[Layout, ...]
    instead: str = ""

    @property
    def fetched(self) -> tuple[File, ...]:
        """The files with a public place; none if there is no such place."""
        return tuple(file for layout in self.layouts for file in layout.files if file.url)

    @property
    def remedy(self) -> str:
        """What to do where the data set is missing."""
        return self.instead or f"type: scodbench data get {self.name}"


_TFDS = "tensorflow/datasets on GitHub, tensorflow_datasets/"
_UCI = "https://archive.ics.uci.edu/ml/machine-learning-databases/wine-quality/"
_MNIST = "https://ossci-datasets.s3.amazonaws.com/mnist/"
_FASHION = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
_WITH_THE_PROJECT = (
    "it is part of the project's data and has no public place: copy {} into the folder, or "
    "name a folder that has it, with the variable SCODKIT_DATA"
)


def _wine(name: str, size: int, sha256: str) -> File:
    return File(
        f"wine/{name}",
        size,
        Checksums((sha256,)),
        _UCI + name,
        _TFDS + "structured/wine_quality/checksums.tsv",
    )


def _idx(place: str, name: str, size: int, published: str, prepared: str, content: str) -> File:
    folder = "mnist" if place == _MNIST else "fashion_mnist"
    return File(
        f"{folder}/{name}-ubyte.gz",
        size,
        Checksums((published, prepared), content),
        f"{place}{name}-ubyte.gz",
        f"{_TFDS}url_checksums/{folder}.txt",
    )


def _prepared(name: str, size: int, sha256: str) -> File:
    return File(name, size, Checksums((sha256,)))


_WINE = Dataset(
    "wine",
    "Wine Quality (Cortez et al., 2009): 1599 red, 4898 white",
    "CC BY 4.0",
    (
        Layout(
            "published",
            (
                _wine(
                    "winequality-red.csv",
                    84199,
                    "4a402cf041b025d4566d954c3b9ba8635a3a8a01e039005d97d6a710278cf05e",
                ),
                _wine(
                    "winequality-white.csv",
                    264426,
                    "76c3f809815c17c07212622f776311faeb31e87610d52c26d87d6e361b169836",
                ),
            ),
        ),
    ),
)
_MNIST_FILES = (
    _idx(
        _MNIST,
        "train-images-idx3",
        9912422,
        "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
        "db8f937d487057fb14a9f0fbe97f0bc8d311ab41b750d41e1ff37c43b9e55e19",
        "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    ),
    _idx(
        _MNIST,
        "train-labels-idx1",
        28881,
        "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
        "51fc562b6747b666fbf6e84ce29d43c3cb5f9c388c664d43b33f02095313405a",
        "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    ),
    _idx(
        _MNIST,
        "t10k-images-idx3",
        1648877,
        "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
        "cfeddb84311ecf044fc6a5b0f6ee8a24d265d4e83e388400186eb114082f4209",
        "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    ),
    _idx(
        _MNIST,
        "t10k-labels-idx1",
        4542,
        "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
        "e41c74e484045d39b462a7790a4af51301bd9b0b24f0154798d713ec68c45920",
        "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    ),
)
_FASHION_FILES = (
    _idx(
        _FASHION,
        "train-images-idx3",
        26421880,
        "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
        "b0564c3eedabfbf835052cff8503ea422014ce006caf5b757f851416ee8300c7",
        "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    ),
    _idx(
        _FASHION,
        "train-labels-idx1",
        29515,
        "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
        "0ae29f65d86684f32d1b9c85147786c547b9c6aebcaf235f0400a0cce308b056",
        "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    ),
    _idx(
        _FASHION,
        "t10k-images-idx3",
        4422102,
        "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
        "cc1d090a38ace84dfa1aa66e3ada7c336ef481a96936906477e6dd344da56eaa",
        "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    ),
    _idx(
        _FASHION,
        "t10k-labels-idx1",
        5148,
        "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
        "8d3605d196f4be44669e46906da9733c8131fef761fdbfec72c424d5222f1a05",
        "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
    ),
)
_CIFAR_PUBLISHED = File(
    "cifar10/cifar-10-python.tar.gz",
    170498071,
    Checksums(("6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce",)),
    "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
    "keras-team/keras on GitHub, keras/src/datasets/cifar10.py",
)
_CIFAR_PREPARED = (
    _prepared(
        "cifar10/cifar10_test.npz",
        28249958,
        "bef27f3a8bed606fe141cdaa6b5b0fe0c285ad18fd484fd27b51f91ddfad1830",
    ),
    _prepared(
        "cifar10/cifar10_train_classes0to4_2000each.npz",
        27853600,
        "6a60a8de74aa3034950a8a90af0eaf8ea24793f0e6207983ca8603f05d210619",
    ),
    _prepared(
        "cifar10/cifar10_train_classes5to9_1000each.npz",
        14351554,
        "f58312ad502b8a6eecec2a76f08e3cdaee0ea8d5990c4f7a061bec71801c482c",
    ),
)
_SVHN_PUBLISHED = File(
    "svhn/test_32x32.mat",
    64275384,
    Checksums(("cdce80dfb2a2c4c6160906d0bd7c68ec5a99d7ca4831afa54f09182025b6a75b",)),
    "http://ufldl.stanford.edu/housenumbers/test_32x32.mat",
    _TFDS + "url_checksums/svhn_cropped.txt",
)
_SVHN_PREPARED = _prepared(
    "svhn/svhn_test_5000.npz",
    12892073,
    "a304ec769768f9fbbad09463341c9b653c73ec665387f4799836d60f0236088d",
)
_TINYIMAGENET_PUBLISHED = File(
    "tinyimagenet/tiny-imagenet-200.zip",
    248100043,
    Checksums(("6198c8ae015e2b3e007c7841da39ec069199b9aa3bfa943a462022fe5e43c821",)),
    "https://cs231n.stanford.edu/tiny-imagenet-200.zip",
    "berenslab/t-simcne on GitHub, cnexp/dataset/tiny_imagenet.py",
)
_TINYIMAGENET_PREPARED = (
    _prepared(
        "tinyimagenet/tinyimagenet_val_32x32_5000.npz",
        14374801,
        "7235cd00c4eede267eaf6db446f748a7db1c4bae5484ff36c89462bb7727306b",
    ),
    _prepared(
        "tinyimagenet/classes.csv",
        7437,
        "69078c6fbf4226c62bf4841ff7b54fc63afaf72483a9d468b5bf5684b35cd25a",
    ),
)
_TAXINET_PREPARED = (
    _prepared(
        "taxinet/tinytaxinet_8x16_3504.npz",
        1480082,
        "22d3b1860062e0cff4d8ae960846bb99c806ed677779ee7c2fdd48b52c4e2d06",
    ),
    _prepared(
        "taxinet/taxinet_xplane_morning_72x128.npz",
        2493721,
        "0bba40d94688a0e6a6e5b38cc4f520a982e3e6c07b2ddcb8bea4f63971f690d9",
    ),
    _prepared(
        "taxinet/taxinet_validation_72x128.npz",
        1780290,
        "aa2b5a8c4cae62e993ca030eabde4f5f5d64f5ae2090ac80d8d4682cbe4441f4",
    ),
)
_DENSENET_PREPARED = _prepared(
    "cifar10/densenet121_cifar10_fp16.safetensors",
    14163852,
    "7b5f009b3a70a911c33f74e01b103aa3f671d1092adcb54c1d2051b6ef35e544",
)

_ALL = (
    _WINE,
    Dataset(
        "mnist",
        "MNIST (LeCun, Cortes, Burges): 60000 training and 10000 test digits",
        "CC BY-SA 3.0, as usually stated",
        (Layout("published", _MNIST_FILES),),
    ),
    Dataset(
        "fashion_mnist",
        "Fashion-MNIST (Xiao, Rasul, Vollgraf, 2017): 60000 training and 10000 test images",
        "MIT",
        (Layout("published", _FASHION_FILES),),
    ),
    Dataset(
        "cifar10",
        "CIFAR-10 (Krizhevsky, 2009): 50000 training and 10000 test images",
        "none stated by the authors",
        (Layout("published", (_CIFAR_PUBLISHED,)), Layout("prepared", _CIFAR_PREPARED)),
    ),
    Dataset(
        "svhn",
        "SVHN cropped digits (Netzer et al., 2011): the first 5000 of the test split",
        "non-commercial use, by the authors' note",
        (Layout("published", (_SVHN_PUBLISHED,)), Layout("prepared", (_SVHN_PREPARED,))),
    ),
    Dataset(
        "tinyimagenet",
        "Tiny ImageNet-200: 25 validation images of each class, at 32x32",
        "ImageNet terms: non-commercial research",
        (
            Layout("published", (_TINYIMAGENET_PUBLISHED,)),
            Layout("prepared", _TINYIMAGENET_PREPARED),
        ),
    ),
    Dataset(
        "taxinet",
        "TaxiNet: X-Plane wing-camera frames, 3504 tiny and 254 larger ones",
        "larger morning frames Apache-2.0 (NASA ULI, Stanford ASL), others none stated",
        (Layout("prepared", _TAXINET_PREPARED),),
        _WITH_THE_PROJECT.format("taxinet/"),
    ),
    Dataset(
        "densenet",
        "DenseNet-121 weights for CIFAR-10, 93.26 % on the test split",
        "as CIFAR-10: none stated",
        (Layout("prepared", (_DENSENET_PREPARED,)),),
        _WITH_THE_PROJECT.format(_DENSENET_PREPARED.name),
    ),
)

DATASETS: Mapping[str, Dataset] = {dataset.name: dataset for dataset in _ALL}


def dataset_named(name: str) -> Dataset:
    """Return a data set.

    Args:
        name: One of `DATASETS`.

    Raises:
        OptionError: If there is none of that name.

    Examples:
        >>> dataset_named("mnist").remedy
        'type: scodbench data get mnist'
    """
    if name not in DATASETS:
        raise OptionError(f"expected a data set of {', '.join(DATASETS)}; got {name}")
    return DATASETS[name]
