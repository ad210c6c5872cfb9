"""Parts of a data set, for fits that share it: no sample is repeated or counted twice."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from scodkit.errors import OptionError
from scodkit.numerics.hashing import digest_of

# items of a data set that are hashed, and numbers of a tensor
_SAMPLED = 16
_NUMBERS = 4096


@dataclass(frozen=True)
class Part:
    """Consecutive samples of a data set.

    Args:
        data: A hash of the data set.
        start: The first sample.
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
        """Return it as plain data."""
        return asdict(self)


def in_both(mine: Iterable[Part], theirs: Iterable[Part]) -> tuple[Part, Part] | None:
    """Return two parts, one of each side, that have samples in common, or None."""
    pairs = itertools.product(mine, theirs)
    return next(((a, b) for a, b in pairs if a.overlaps(b)), None)


class Shard(Dataset[Any]):
    """One of several parts of a data set, of equal size up to one sample.

    For processes that fit together, or jobs whose fits are merged: unlike
    ``DistributedSampler`` it neither pads nor repeats, so that every sample counts once.

    Args:
        dataset: Map-style: with a length, read by position.
        index: Which part, from 0.
        count: How many parts there are.

    Attributes:
        part: Which samples these are; None if items of the data set cannot be hashed: a merge
            then tells fits apart by their sketches.

    Examples:
        >>> [list(Shard(range(7), index, 3)) for index in range(3)]
        [[0, 1], [2, 3], [4, 5, 6]]
    """

    def __init__(self, dataset: Any, index: int, count: int) -> None:
        by_position = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
        if not by_position or isinstance(dataset, IterableDataset):
            raise OptionError(
                f"expected a data set with a length, read by position, got a "
                f"{type(dataset).__name__}; pass every process its own stream instead"
            )
        self._dataset, self._rows = dataset, shard_rows(len(dataset), index, count)
        outer = getattr(dataset, "part", None)
        self.part: Part | None = None
        if isinstance(outer, Part):  # a shard of a shard
            self.part = self._part(outer.data, outer.start)
        elif not len(dataset) or _can_be_hashed(dataset):
            self.part = self._part(data_hash(len(dataset), dataset.__getitem__), 0)

    def _part(self, data: str, first: int) -> Part:
        return Part(data, first + self._rows.start, first + self._rows.stop)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, place: int) -> Any:
        if not 0 <= place < len(self):
            raise IndexError(f"expected a place from 0 to {len(self) - 1}, got {place}")
        return self._dataset[self._rows.start + place]


def part_behind(loader: object) -> Part | None:
    """Return which samples a loader reads; None if that is unknown.

    Args:
        loader: Has a `Shard` as its ``dataset``, or is a ``DataLoader`` that reads every item.
    """
    if isinstance(loader, DataLoader) and not reads_all_once(loader):
        return None
    dataset: Any = getattr(loader, "dataset", None)
    part = getattr(dataset, "part", None)
    if isinstance(part, Part):
        return part
    if not isinstance(loader, DataLoader) or not _can_be_hashed(dataset):
        return None
    return Part(data_hash(len(dataset), dataset.__getitem__), 0, len(dataset))


def reads_all_once(loader: DataLoader[Any]) -> bool:
    """Return whether a loader reads every item of a map-style data set, each once."""
    sampler = plain_sampler(loader)
    if loader.drop_last:
        return False
    if type(sampler) is RandomSampler:
        return not sampler.replacement and sampler.num_samples == len(sampler.data_source)
    return type(sampler) is SequentialSampler


def plain_sampler(loader: Any) -> Any:
    """Return the sampler of a ``DataLoader`` with a plain ``BatchSampler``.

    Args:
        loader: Anything.

    Returns:
        None for anything but a ``DataLoader`` over a map-style data set, and for one with
        another batch sampler.
    """
    plain = type(loader) is DataLoader and type(loader.batch_sampler) is BatchSampler
    if not plain or isinstance(loader.dataset, IterableDataset):
        return None
    return loader.batch_sampler.sampler


def shard_rows(length: int, index: int, count: int) -> range:
    """Return which samples of a data set a part has.

    Args:
        length: Of the data set.
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
    """Return a hash of a data set's length and of a few items, evenly spaced.

    Args:
        length: Of the data set.
        item: Reads an item by its position.
    """
    places = dict.fromkeys(i * (length - 1) // (_SAMPLED - 1) for i in range(_SAMPLED))
    digest = hashlib.sha256(str(length).encode())
    for place in places if length else ():
        for piece in _bytes_in(item(place)):
            digest.update(piece or b"")
    return digest.hexdigest()[:32]


def sampled_hash(tensors: Mapping[str, Tensor], salt: str) -> str:
    """Return a hash of some numbers of each tensor, evenly spaced: tensors may be large.

    Args:
        tensors: By name.
        salt: Hashed before them.
    """
    few = {
        name: tensor.reshape(-1)[:: max(1, tensor.numel() // _NUMBERS)]
        for name, tensor in tensors.items()
    }
    return digest_of(few, salt)[:32]


def _can_be_hashed(dataset: Any) -> bool:
    """Return whether the items of a data set are of types that can be hashed."""
    pieces = list(_bytes_in(dataset[0])) if len(dataset) else []
    return bool(pieces) and None not in pieces


def _bytes_in(item: Any) -> Iterator[bytes | None]:
    """Yield the bytes that an item consists of; None for values of an unknown type."""
    if isinstance(item, Tensor):
        yield digest_of({"": item}).encode()
    elif isinstance(item, (str, bytes, int, float)):
        yield repr(item).encode()
    elif isinstance(item, Mapping):
        for key in sorted(item, key=str):
            yield str(key).encode()
            yield from _bytes_in(item[key])
    elif isinstance(item, (tuple, list)):
        for part in item:
            yield from _bytes_in(part)
    elif hasattr(item, "__array__") or hasattr(item, "__array_interface__"):  # pictures, too
        array = np.asarray(item)
        form = f"{array.dtype.str} {array.shape}".encode()
        yield None if array.dtype == object else form + array.tobytes()
    elif item is not None:
        yield None
