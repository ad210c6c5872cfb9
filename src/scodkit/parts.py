"""Parts of a data set: none padded, none repeated, and none counted twice."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sized
from dataclasses import asdict, dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from scodkit.errors import OptionError
from scodkit.parameters import digest_of

# items of a data set that stand for all of it
_SAMPLED = 16

# numbers of a tensor that stand for all of it
_NUMBERS = 4096


@dataclass(frozen=True)
class Part:
    """Samples of a data set, one after the other.

    Args:
        data: A hash of the data set.
        start: The first of them.
        stop: One past the last.

    Examples:
        >>> Part("ab12", 0, 50).overlaps(Part("ab12", 40, 90))
        True
        >>> Part("ab12", 0, 50).overlaps(Part("ab12", 50, 100))
        False
    """

    data: str
    start: int
    stop: int

    def overlaps(self, other: Part) -> bool:
        """Return whether there is a sample in both."""
        return self.data == other.data and self.start < other.stop and other.start < self.stop

    def __str__(self) -> str:
        return f"samples {self.start} to {self.stop - 1} of the data {self.data[:8]}"

    def document(self) -> dict[str, Any]:
        """Return it as plain data, what it is made of."""
        return asdict(self)


def in_both(mine: Iterable[Part], theirs: Iterable[Part]) -> tuple[Part, Part] | None:
    """Return a part of each that have samples in common, or None."""
    pairs = itertools.product(mine, theirs)
    return next(((a, b) for a, b in pairs if a.overlaps(b)), None)


@runtime_checkable
class HasPart(Protocol):
    """A data set that knows which part of a larger one it is."""

    @property
    def part(self) -> Part:
        """The part."""


class Shard(Dataset[Any]):
    """One of several parts of a data set, as equal as they can be.

    For processes that fit together, or jobs whose fits are merged: unlike
    ``DistributedSampler`` it neither pads nor repeats, so that every sample counts once.

    Args:
        dataset: Map-style: with a length, read by position.
        index: Which part, from 0.
        count: How many parts there are.

    Attributes:
        part: Which samples these are.

    Examples:
        >>> [list(Shard(range(7), index, 3)) for index in range(3)]
        [[0, 1], [2, 3], [4, 5, 6]]
    """

    def __init__(self, dataset: Any, index: int, count: int) -> None:
        if not (isinstance(dataset, Sized) and hasattr(dataset, "__getitem__")):
            raise OptionError(
                f"expected a data set with a length, read by position, got a "
                f"{type(dataset).__name__}; pass every process its own stream instead"
            )
        self._dataset = dataset
        rows = shard_rows(len(dataset), index, count)
        self.part = Part(data_hash(len(dataset), dataset.__getitem__), rows.start, rows.stop)

    def __len__(self) -> int:
        return self.part.stop - self.part.start

    def __getitem__(self, place: int) -> Any:
        if not 0 <= place < len(self):
            raise IndexError(f"expected a place from 0 to {len(self) - 1}, got {place}")
        return self._dataset[self.part.start + place]


def part_behind(loader: object) -> Part | None:
    """Return which samples a loader goes through; None where it cannot say.

    Args:
        loader: Its data set knows, or it is a ``DataLoader`` that reads all of one.
    """
    dataset: Any = getattr(loader, "dataset", None)
    if isinstance(dataset, HasPart):
        return dataset.part
    if type(loader) is not DataLoader or isinstance(dataset, IterableDataset):
        return None
    sampler = loader.sampler
    shuffled = isinstance(sampler, RandomSampler) and not sampler.replacement
    if not (isinstance(sampler, SequentialSampler) or shuffled) or loader.drop_last:
        return None
    return Part(data_hash(len(dataset), dataset.__getitem__), 0, len(dataset))


def shard_rows(length: int, index: int, count: int) -> range:
    """Return which of ``length`` samples a part has.

    Args:
        length: Samples in all.
        index: Which part, from 0.
        count: How many parts there are.

    Raises:
        OptionError: If there is no such part.
    """
    if not (count >= 1 and 0 <= index < count):
        raise OptionError(
            f"expected a part from 0 to {count - 1} of {count}, got {index}; parts are "
            "counted from 0"
        )
    return range(length * index // count, length * (index + 1) // count)


def data_hash(length: int, item: Callable[[int], Any]) -> str:
    """Return a hash of a data set's length and of some of its items, spread evenly.

    Args:
        length: Items in all.
        item: Reads one by its position.
    """
    places = dict.fromkeys(i * (length - 1) // (_SAMPLED - 1) for i in range(_SAMPLED))
    tensors = {
        f"{place}.{number}": tensor
        for place in (places if length else ())
        for number, tensor in enumerate(_tensors_in(item(place)))
    }
    return digest_of(tensors, salt=str(length))[:32]


def sampled_hash(tensors: Mapping[str, Tensor], salt: str) -> str:
    """Return a hash of some of the numbers in tensors, spread evenly: they may be large.

    Args:
        tensors: By name.
        salt: Hashed before them.
    """
    few = {
        name: tensor.reshape(-1)[:: max(1, tensor.numel() // _NUMBERS)]
        for name, tensor in tensors.items()
    }
    return digest_of(few, salt)[:32]


def _tensors_in(item: Any) -> list[Tensor]:
    """Return the tensors of an item; of what is neither a tensor nor a number, nothing."""
    if isinstance(item, Tensor):
        return [item]
    if isinstance(item, (np.ndarray, np.generic, int, float)):
        return [torch.as_tensor(np.ascontiguousarray(item))]
    if isinstance(item, dict):
        return [t for key in sorted(item, key=str) for t in _tensors_in(item[key])]
    if isinstance(item, (tuple, list)):
        return [tensor for part in item for tensor in _tensors_in(part)]
    return []
