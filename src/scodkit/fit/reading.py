"""Batches for a pass that may go on from an earlier one, without reading all again."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from torch.utils.data import (
    DataLoader,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from scodkit.errors import OptionError
from scodkit.fit.stream import num_batches, num_samples
from scodkit.model.network import Inputs, Network
from scodkit.numerics.hashing import digest_of
from scodkit.parts import data_hash, plain_sampler


class Reader:
    """The batches of a pass, each with a hash of all up to it.

    A ``DataLoader`` over a map-style data set is asked for the remaining positions alone, and
    the positions are hashed; anything else is read from its start, and its numbers are.

    Args:
        loader: What the batches come from.
        batches: All of them, already begun to be read.
    """

    def __init__(self, loader: Iterable[Any], batches: Iterable[Any]) -> None:
        self._loader, self._batches = loader, batches

    def calls(
        self, network: Network, done: int, *, hashed: bool
    ) -> Iterator[tuple[str, Inputs | None]]:
        """Yield the batches with their hashes.

        Args:
            network: Takes inputs out of batches.
            done: Batches at the start that are not needed, only their hashes.
            hashed: Whether hashes are needed at all.

        Yields:
            A hash, empty if not needed, and inputs, maybe None where they are not needed.
        """
        if hashed and (positions := _positions(self._loader)) is not None:
            yield from self._sought(network, done, positions)
            return
        digest = ""
        for number, batch in enumerate(self._batches):
            call = network.inputs_of(batch)
            if hashed:
                digest = batch_digest(call, digest)
            yield digest, None if number < done else call

    def _sought(
        self, network: Network, done: int, positions: list[list[Any]]
    ) -> Iterator[tuple[str, Inputs | None]]:
        digest = ""
        hashes = []
        for own in positions:
            digest = digest_of({}, salt=f"{digest} {json.dumps(own, default=str)}")
            hashes.append(digest)
        yield from ((before, None) for before in hashes[:done])
        batches = self._batches
        if done:
            loader: Any = self._loader
            batches = loader_like(loader, loader.dataset, batch_sampler=positions[done:])
        for digest, batch in zip(hashes[done:], batches, strict=True):
            yield digest, network.inputs_of(batch)


def data_identity(loader: object, first: Inputs) -> dict[str, Any]:
    """Return what is recognisable of the data: its length, its first batch, some items.

    Args:
        loader: The loader.
        first: The inputs in its first batch.

    Raises:
        OptionError: If the loader shuffles, so that a pass cannot be resumed.
    """
    inner = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    random = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
    unordered = not getattr(loader, "in_order", True)
    shuffled = isinstance(getattr(loader, "sampler", None), random) or isinstance(inner, random)
    if unordered or shuffled:
        raise OptionError(
            "expected data in a fixed order for a resumable fit, got a loader that shuffles; "
            "type DataLoader(..., shuffle=False), and in_order=True: the order does not matter "
            "to the sketch"
        )
    dataset: Any = getattr(loader, "dataset", None)
    sought = _is_sought(loader)
    return {
        "samples": num_samples(loader),
        "batches": num_batches(loader),
        "first_batch": batch_digest(first),
        "items": data_hash(len(dataset), dataset.__getitem__) if sought else None,
    }


def batch_digest(call: Inputs, before: str = "") -> str:
    """Return a hash of a batch's inputs, chained to the hash of the batches before it."""
    return digest_of({str(i): t for i, t in enumerate(call.tensors())}, salt=before)


def _positions(loader: Any) -> list[list[Any]] | None:
    """Return which items each batch has; None where they cannot be asked for by position."""
    return [list(own) for own in loader.batch_sampler] if _is_sought(loader) else None


def _is_sought(loader: Any) -> bool:
    """Return whether the items of each batch can be asked for by position."""
    # other samplers may give another order the next time they are asked
    in_turn = type(plain_sampler(loader)) is SequentialSampler
    return in_turn and getattr(loader, "in_order", True)


def loader_like(loader: Any, dataset: Any, **batches: Any) -> DataLoader[Any]:
    """Return a loader that reads as another does.

    Args:
        loader: The other one.
        dataset: What to read.
        **batches: How batches are made: ``batch_size`` or ``batch_sampler``.
    """
    workers = {
        name: getattr(loader, name)
        for name in ("timeout", "worker_init_fn", "multiprocessing_context", "prefetch_factor")
    }
    return DataLoader(
        dataset,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        **(workers if loader.num_workers else {}),
        **batches,
    )
