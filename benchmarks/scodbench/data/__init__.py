"""Data sets of the six domains: found, fetched, checked and read."""

from scodbench.data.acquire import get
from scodbench.data.checksums import Checksums
from scodbench.data.datasets import DATASETS, Dataset, File, Layout
from scodbench.data.download import fetch
from scodbench.data.folder import data_folder
from scodbench.data.load import (
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
from scodbench.data.verify import (
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
