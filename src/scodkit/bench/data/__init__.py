"""Data sets of the six domains: found, fetched, checked and read."""

from scodkit.bench.data.acquire import get
from scodkit.bench.data.checksums import Checksums
from scodkit.bench.data.datasets import DATASETS, Dataset, File, Layout
from scodkit.bench.data.download import fetch
from scodkit.bench.data.folder import data_folder
from scodkit.bench.data.load import (
    cifar10,
    cifar10_subset,
    densenet_weights,
    fashion_mnist,
    mnist,
    svhn,
    taxinet_morning,
    taxinet_tiny,
    taxinet_validation,
    tinyimagenet,
    wine,
)
from scodkit.bench.data.verify import (
    Condition,
    DatasetState,
    FileState,
    check,
    check_dataset,
)

__all__ = [
    "DATASETS",
    "Checksums",
    "Condition",
    "Dataset",
    "DatasetState",
    "File",
    "FileState",
    "Layout",
    "check",
    "check_dataset",
    "cifar10",
    "cifar10_subset",
    "data_folder",
    "densenet_weights",
    "fashion_mnist",
    "fetch",
    "get",
    "mnist",
    "svhn",
    "taxinet_morning",
    "taxinet_tiny",
    "taxinet_validation",
    "tinyimagenet",
    "wine",
]
