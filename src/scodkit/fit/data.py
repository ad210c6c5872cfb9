"""Training data as it comes: batches, where a pass goes on, and which samples it has seen.

Samples are known by eight bytes each. Data that comes again, in whatever batches and order, is
noticed by merges, updates, calibrations and fits that go on from a checkpoint.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from tqdm.auto import tqdm

from scodkit.errors import BatchError, EmptyLoaderError, OptionError
from scodkit.model.frames import NamedRows, labels_of
from scodkit.model.inputs import Inputs
from scodkit.model.kinds import as_array, is_array, is_rows
from scodkit.numerics.hashing import bytes_of, hashed
from scodkit.parts import plain_sampler

# samples beyond which no digests are kept: 400 MB of them
KEPT = 50_000_000

# samples in a batch of those that come as one array
_BATCH = 64

# bytes of samples that digests are made of at a time
_AT_ONCE = 2**22

# tensors of digests that wait on a GPU, which has to be waited for to move them
_WAITING = 1024

_NONE = torch.empty(0, dtype=torch.int64)
_ODD = 0x5851F42D4C957F2D

# batches done before that are read again where a fit goes on, evenly spaced
_READ_AGAIN = 8

# of `seen_again`: the share of samples from which on it is no accident; standard deviations
# that chance is allowed; repetitions that may have been missed in a small set; values that come
# as often in two sets by chance with a probability of a millionth
_SHARE, _SIGMAS, _MISSED, _NO_CHANCE = 0.01, 4.0, 3, 16

# --- Batches -------------------------------------------------------------------------------


def as_loader(samples: Any, labels: object = None) -> Iterable[Any]:
    """Return a loader of samples that come as one tensor, array, table or list of rows.

    Args:
        samples: Those, or a loader already, which is returned as it is.
        labels: Of the samples, ``(n, ...)``: the second part of each batch.

    Raises:
        BatchError: If there are not as many labels, or labels beside a loader.
    """
    whole = isinstance(samples, Tensor) or is_array(samples) or is_rows(samples)
    if labels is None:
        parts = [samples]
    elif whole:
        parts = [samples, labels]
    else:
        raise BatchError(
            f"expected labels beside an array or a tensor of samples, got a "
            f"{type(samples).__name__}; a loader yields its own: (inputs, labels)"
        )
    if not whole:
        return samples  # type: ignore[no-any-return]
    arrays = [part if isinstance(part, Tensor) else as_array(part) for part in parts]
    columns = labels_of(samples)
    lengths = [len(part) if part.ndim else 0 for part in arrays]
    if len(set(lengths)) > 1:
        raise BatchError(f"expected a label for each of {lengths[0]} samples, got {lengths[1]}")
    return DataLoader(_Arrays(arrays, columns), batch_size=_BATCH, collate_fn=_as_it_is)


def tell_of_labels(
    labels: object, why: str = "the curvature is that of the model's own predictions"
) -> None:
    """Say that labels are not used, where some are given as ``fit(x, y)``.

    Args:
        labels: Those; None if there are none.
        why: They are not used.
    """
    if labels is not None:
        warnings.warn(f"labels are not used: {why}; leave them out", UserWarning, stacklevel=3)


class _Arrays(Dataset[Any]):
    """Samples that are rows of one tensor or array; batches are read in one go.

    Args:
        parts: The samples, and their labels if there are any.
        columns: Names of the columns of the samples; None for none.
    """

    def __init__(self, parts: Sequence[Any], columns: list[str] | None) -> None:
        self._parts, self._columns = parts, columns

    def __len__(self) -> int:
        return len(self._parts[0])

    def __getitem__(self, place: int) -> Any:
        return self.__getitems__([place])

    def __getitems__(self, places: list[int]) -> Any:
        first, *labels = (part[places] for part in self._parts)
        if self._columns is not None:
            first = NamedRows.of(first, self._columns)
        return (first, *labels) if labels else first


def _as_it_is(batch: Any) -> Any:
    return batch


def open_stream(
    loader: Iterable[Any], order: Callable[[Any], Any] = lambda batch: batch
) -> tuple[Any, Iterable[Any]]:
    """Return the first batch, and an iterable that yields all of them, that one included.

    Args:
        loader: Any iterable of batches; a generator is fine, it is read once.
        order: Applied to each, as `Network.ordering` returns it.

    Raises:
        BatchError: If it is not an iterable of batches.
        EmptyLoaderError: If it is empty.
    """
    if isinstance(loader, Dataset):
        raise BatchError(
            f"expected an iterable of batches, got a {type(loader).__name__}; type "
            f"DataLoader(dataset, batch_size={_BATCH})"
        )
    stream = map(order, loader)
    try:
        first = next(stream)
    except StopIteration:
        raise EmptyLoaderError(
            "expected at least one batch, but the loader is empty; a generator can be read "
            "only once: make it anew"
        ) from None
    return first, itertools.chain([first], stream)


def batches_of(
    loader: Iterable[Any], description: str, progress: bool, *, leave: bool = True
) -> Iterator[Any]:
    """Yield the batches of a loader, behind a progress bar.

    Args:
        loader: As for `open_stream`.
        description: What is being done.
        progress: Whether to show the bar.
        leave: Whether it stays when all are done.
    """
    loader = as_loader(loader)
    _, batches = open_stream(loader)
    total, hidden = num_batches(loader), not progress
    yield from tqdm(batches, description, total, leave=leave, unit="batch", disable=hidden)


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


def check_order(loader: object) -> None:
    """Refuse a loader that shuffles: a pass over it could not be resumed.

    Raises:
        OptionError: If it does.
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


def batches_from(loader: Any, batches: Iterable[Any], done: int) -> Iterator[tuple[int, Any]]:
    """Yield batches with their numbers, for a pass that goes on from a checkpoint.

    Args:
        loader: What they come from. A ``DataLoader`` that reads a map-style data set in order
            is asked for a few of the batches that were done, and all after them.
        batches: All of them, already begun to be read.
        done: How many the pass has done before.
    """
    # other samplers may give another order the next time they are asked
    in_turn = type(plain_sampler(loader)) is SequentialSampler
    if not (done and in_turn and getattr(loader, "in_order", True)):
        yield from enumerate(batches)
        return
    positions = [list(batch) for batch in loader.batch_sampler]
    again = {i * (done - 1) // (_READ_AGAIN - 1) for i in range(_READ_AGAIN)}
    numbers = [n for n in range(len(positions)) if n in again or n >= done]
    sampler = [positions[number] for number in numbers]
    yield from zip(
        numbers, loader_like(loader, loader.dataset, batch_sampler=sampler), strict=True
    )


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


# --- Samples that were seen ----------------------------------------------------------------


def digests_of(call: Inputs) -> Tensor:
    """Return a hash of each sample's inputs, ``(B,)`` in int64, where the inputs are.

    The same on every device and in every batch. Zeros at the end of a sample do not count, so
    that one padded to another length is still the same.

    Args:
        call: A batch.
    """
    digests = torch.zeros((), dtype=torch.int64)
    for stream, tensor in enumerate(call.tensors()):
        digests = digests + _summed(tensor.detach(), stream)
    return digests


def _summed(tensor: Tensor, stream: int) -> Tensor:
    """Return the words of each sample, mixed, times odd numbers that differ by place."""
    rows = tensor.reshape(len(tensor), math.prod(tensor.shape[1:]))
    if not rows.numel():
        return rows.new_zeros(len(rows), dtype=torch.int64)
    at_once = max(1, _AT_ONCE // (rows.shape[1] * rows.element_size()))
    if at_once < len(rows):
        return torch.cat([_summed(part, stream) for part in torch.split(rows, at_once)])
    raw = bytes_of(rows)
    words = torch.constant_pad_nd(raw, (0, 8 + -raw.shape[1] % 8)).view(torch.int64)
    # or numbers that differ in their first bits alone, as 1.0 and 2.0 do, would differ in as
    # few bits of a product; zero stays zero
    for _ in range(2):
        words.mul_(_ODD)
        words.bitwise_xor_(words >> 32)
    return words.mul_(_factors(words.shape[1], stream, words.device)).sum(1)


@functools.lru_cache(maxsize=8)
def _factors(count: int, stream: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        place = torch.arange(count, device=device)
        return hashed(0, 2 * stream, place) << 32 | hashed(0, 2 * stream + 1, place) | 1


def batch_digest(call: Inputs) -> int:
    """Return a hash of the samples of a batch in their order, as a signed 64-bit number."""
    digests = digests_of(call).cpu().numpy()
    return int.from_bytes(hashlib.sha256(digests.data).digest()[:8], "big", signed=True)


class Seen:
    """The samples that a pass has come by; none are kept beyond `KEPT` of them.

    Args:
        before: Digests to go on from; None if they are not known, and never will be.
    """

    def __init__(self, before: Tensor | None = _NONE) -> None:
        self._parts = None if before is None else [before]  # on the CPU
        self._waiting: list[Tensor] = []

    def add(self, digests: Tensor) -> None:
        """Keep the digests of some more samples, from `digests_of`."""
        self._waiting.append(digests)
        if len(self._waiting) > _WAITING:
            self._settle()

    def all(self) -> Tensor | None:
        """Return the digests, sorted, on the CPU; None if they are not all known."""
        self._settle()
        return None if self._parts is None else joined(self._parts)

    def _settle(self) -> None:
        if self._parts is not None and self._waiting:
            self._parts.append(torch.cat(self._waiting).cpu())
            if sum(map(len, self._parts)) > KEPT:
                self._parts = None
        self._waiting = []


def joined(parts: Sequence[Tensor | None]) -> Tensor | None:
    """Return the digests of several passes, sorted; None where some are not known."""
    known = [part for part in parts if part is not None]
    if len(known) < len(parts) or sum(map(len, known)) > KEPT:
        return None
    return torch.cat(known).sort().values


@dataclass(frozen=True)
class Again:
    """Samples that came again.

    Args:
        count: How many.
        total: Of how many that came.
        certain: Whether they are more than chance explains, even by what may have been
            missed of it.
    """

    count: int
    total: int
    certain: bool

    def __str__(self) -> str:
        return f"{self.count} of {self.total}"


def seen_again(before: Tensor | None, new: Tensor | None) -> Again | None:
    """Return which samples of a set were in another; None for none, or as many as by chance.

    Where inputs take few values, samples are alike by chance. How likely that is tells each
    set by itself: another sample of its kind is in it as often as its own are in it more than
    once (Good 1953). Values are counted, not samples, so that one blank image counts once. A
    set whose values all come as often as in the other is that one, or a part of it.

    Args:
        before: Digests of the samples that were there first; None if they are not known.
        new: Of those that came, likewise.

    Examples:
        >>> seen_again(torch.arange(32), torch.arange(16, 64))
        Again(count=16, total=48, certain=True)
    """
    if before is None or new is None:
        return None
    old, times = torch.unique(before, return_counts=True)
    values, counts = torch.unique(new, return_counts=True)
    common = torch.isin(values, old, assume_unique=True)
    shared = int(common.sum())
    if shared == len(values) > 0:  # all there, and as often: the same samples, or some of them
        as_often = torch.equal(counts, times[torch.isin(old, values, assume_unique=True)])
        if as_often and (shared == len(old) or shared >= _NO_CHANCE):
            return Again(len(new), len(new), certain=shared >= _NO_CHANCE)
    # of the values that came those in the old set, and the other way round
    sides = ((len(values), times), (len(old), counts))
    beyond = [shared > _by_chance(*side, missed=0) for side in sides]
    surely = [shared > _by_chance(*side, missed=_MISSED) for side in sides]
    certain = any(surely) and shared > max(_MISSED, _SHARE * min(len(values), len(old)))
    if not (certain or all(beyond)):
        return None
    return Again(int(counts[common].sum()), len(new), certain)


def _by_chance(count: int, times: Tensor, missed: int) -> float:
    """Return how many of ``count`` values a set may have, whose own come so many times."""
    samples = int(times.sum()) + missed
    share = (int(times[times > 1].sum()) + missed) / max(1, samples)
    # the spread of the count, and of the share itself, of which samples come in pairs
    spread = share * (1 - share) * (count + 2 * count**2 / max(1, samples))
    return count * share + _SIGMAS * math.sqrt(spread)
