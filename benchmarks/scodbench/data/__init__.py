"""Data sets of the six domains: found, fetched, checked and read."""

from scodbench.data.datasets import DATASETS, Dataset, File, Layout
from scodbench.data.files import (
    Condition,
    DatasetState,
    FileState,
    check,
    check_dataset,
    get,
)
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

__all__ = [
    "DATASETS",
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
    "get",
    "mnist",
    "svhn",
    "taxinet_morning",
    "taxinet_tiny",
    "taxinet_validation",
    "tinyimagenet",
    "wine",
]
