"""What people call the things that rows name."""

from __future__ import annotations

import re

# where it is more than the name with spaces
_NAMES = {
    "pooled": "all together",
    "tinyimagenet": "TinyImageNet",
    "svhn": "SVHN",
    "fashion": "Fashion-MNIST",
    "digits": "other digits",
    "other_stretch": "another stretch",
    "Nystrom": "Nyström",
    "TwoSided": "two-sided (the paper's)",
    "FrequentDirections": "Frequent Directions",
}


def words(name: str) -> str:
    """Return a name of rows as it is read.

    Examples:
        >>> words("white_wine"), words("classes_5_9"), words("svhn")
        ('white wine', 'classes 5-9', 'SVHN')
    """
    return _NAMES.get(name, re.sub(r"(\d)_(\d)", r"\1-\2", name).replace("_", " "))


def networks(least: int, most: int) -> str:
    """Return how many networks figures are of.

    Examples:
        >>> networks(1, 1), networks(3, 5)
        ('1 network', '3 to 5 networks')
    """
    if most == 1:
        return "1 network"
    return f"{most} networks" if least == most else f"{least} to {most} networks"
