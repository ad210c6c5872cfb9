"""Parts of a data set, for fits that share it: no sample is repeated or left out."""

from __future__ import annotations

from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from scodkit.errors import OptionError


class Shard(Dataset[Any]):
    """One of several parts of a data set, of equal size up to one sample.

    For processes that fit together, or jobs whose fits are merged: unlike
    ``DistributedSampler`` it neither pads nor repeats, so that every sample counts once.

    Args:
        dataset: Map-style: with a length, read by position.
        index: Which part, from 0.
        count: How many parts there are.

    Examples:
        >>> [list(Shard(range(7), index, 3)) for index in range(3)]
        [[0, 1], [2, 3], [4, 5, 6]]
    """

    def __init__(self, dataset: Any, index: int, count: int) -> None:
        if not read_by_position(dataset):
            raise OptionError(
                f"expected a data set with a length, read by position, got a "
                f"{type(dataset).__name__}; pass every process its own stream instead"
            )
        self._dataset, self._rows = dataset, shard_rows(len(dataset), index, count)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, place: int) -> Any:
        if not 0 <= place < len(self):
            raise IndexError(f"expected a place from 0 to {len(self) - 1}, got {place}")
        return self._dataset[self._rows.start + place]


def read_by_position(dataset: object) -> bool:
    """Return whether a data set is map-style: with a length, read by position."""
    methods = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    return methods and not isinstance(dataset, IterableDataset)


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
