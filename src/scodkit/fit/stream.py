"""The data as it comes: the first batch, whether it can be trusted, how far it has come."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sized
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset
from tqdm.auto import tqdm

from scodkit.errors import BatchError, EmptyLoaderError, NondeterministicError
from scodkit.model.network import Inputs, Network


def open_stream(loader: Iterable[Any]) -> tuple[Any, Iterable[Any]]:
    """Return the first batch, and an iterable that yields all of them, that one included.

    Args:
        loader: Any iterable of batches; a generator is fine, it is read once.

    Raises:
        BatchError: If it is not an iterable of batches.
        EmptyLoaderError: If it is empty.
    """
    if isinstance(loader, (Tensor, np.ndarray)) or (
        isinstance(loader, Dataset) and not isinstance(loader, DataLoader)
    ):
        raise BatchError(
            f"expected an iterable of batches, got a {type(loader).__name__}; type "
            "DataLoader(dataset, batch_size=64), or [x] for a single batch"
        )
    stream = iter(loader)
    try:
        first = next(stream)
    except StopIteration:
        raise EmptyLoaderError(
            "expected at least one batch, but the loader is empty; a generator can be read "
            "only once: make it anew"
        ) from None
    return first, itertools.chain([first], stream)


def check_deterministic(network: Network, call: Inputs, loader: object) -> None:
    """Make sure the model and the data give the same answer twice.

    Args:
        network: The model, held in eval mode.
        call: The first batch.
        loader: What it came from; a map-style data set behind it is read twice.

    Raises:
        NondeterministicError: If either differs.
    """
    few = call.samples(slice(0, 8))
    with torch.no_grad():
        first, second = network(few), network(few)
    scale = float(first.abs().nan_to_num(0.0, 0.0, 0.0).max()) if first.numel() else 0.0
    if not torch.allclose(first, second, rtol=1e-3, atol=1e-3 * scale, equal_nan=True):
        raise NondeterministicError(
            "expected the same output twice for the same batch in eval mode, got two; is there "
            "dropout that ignores eval mode, or sampling inside forward? Remove it, or type "
            "fit(..., check_deterministic=False)"
        )
    dataset: Any = getattr(loader, "dataset", None)
    readable = hasattr(dataset, "__getitem__") and isinstance(dataset, Sized)
    readable = readable and not isinstance(dataset, IterableDataset)
    if readable and len(dataset) and not _same(dataset[0], dataset[0]):
        raise NondeterministicError(
            "expected the data set to give the same item twice, but item 0 differs between "
            "two reads; switch random augmentation off for fitting, or type "
            "fit(..., check_deterministic=False) to fit on augmented data"
        )


def _same(a: Any, b: Any) -> bool:
    """Return whether two items agree; those that cannot be compared are taken to."""
    if isinstance(a, (Tensor, np.ndarray)):
        return bool(np.array_equal(np.asarray(a), np.asarray(b), equal_nan=_is_real(a)))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(_same, a, b))
    return True


def _is_real(array: Tensor | np.ndarray[Any, Any]) -> bool:
    return np.asarray(array).dtype.kind in "fc"


def batches_of(
    batches: Iterable[Any],
    total: int | None,
    description: str,
    progress: bool,
    *,
    leave: bool = True,
) -> Iterator[Any]:
    """Yield batches, behind a progress bar if one is wanted.

    Args:
        batches: The batches.
        total: How many there will be, where that is known.
        description: What is being done.
        progress: Whether to show the bar.
        leave: Whether it stays when all are done.

    Yields:
        The batches, unchanged.
    """
    yield from tqdm(
        batches, description, total, leave=leave, unit="batch", disable=not progress
    )


def num_batches(loader: object) -> int | None:
    """Return how many batches a loader has, or None where it cannot say."""
    try:
        return len(loader)  # type: ignore[arg-type]
    except TypeError:
        return None


def num_samples(loader: object) -> int | None:
    """Return how many samples are behind a loader, or None where it cannot say."""
    dataset = getattr(loader, "dataset", None)
    return len(dataset) if isinstance(dataset, Sized) else None
