"""Which samples a fit has seen, by eight bytes of each: to notice those that come again."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from scodkit.model.network import Inputs
from scodkit.numerics.hashing import hashed

# samples beyond which none are kept: 400 MB of them
KEPT = 50_000_000

# bytes of samples that digests are made of at a time
_AT_ONCE = 2**22

# tensors of digests that wait on a GPU, which has to be waited for to move them
_WAITING = 1024

_ODD = 0x5851F42D4C957F2D

# of `seen_again`: the share of samples from which on it is no accident; standard deviations
# that chance is allowed; repetitions that may have been missed in a small set
_SHARE, _SIGMAS, _MISSED = 0.01, 4.0, 3


def digests_of(call: Inputs) -> Tensor:
    """Return a hash of each sample's inputs, ``(B,)`` in int64, where the inputs are.

    The same on every device and in every batch. Zeros at the end of a sample do not count, so
    that one padded to another length is still the same.

    Args:
        call: A batch.
    """
    each = [_summed(tensor.detach(), stream) for stream, tensor in enumerate(call.tensors())]
    return each[0] if len(each) == 1 else torch.stack(each).sum(0)


def _summed(tensor: Tensor, stream: int) -> Tensor:
    """Return the words of each sample, mixed, times odd numbers that differ by place."""
    rows = tensor.reshape(len(tensor), math.prod(tensor.shape[1:]))
    if not rows.numel():
        return rows.new_zeros(len(rows), dtype=torch.int64)
    some = max(1, _AT_ONCE // (rows.shape[1] * rows.element_size()))
    if some < len(rows):
        return torch.cat([_summed(own, stream) for own in torch.split(rows, some)])
    raw = rows.contiguous().view(torch.uint8)
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


class Seen:
    """The samples that a pass has come by; none are kept beyond `KEPT` of them.

    Args:
        before: Digests to go on from; None if they are not known, and never will be.
    """

    def __init__(self, before: Tensor | None) -> None:
        self._kept = [] if before is None else [before]
        self._waiting: list[Tensor] = []
        self._known, self._count = before is not None, sum(map(len, self._kept))

    def add(self, digests: Tensor) -> None:
        """Keep the digests of some more samples, from `digests_of`."""
        self._count += len(digests)
        self._known = self._known and self._count <= KEPT
        self._waiting.append(digests)
        if len(self._waiting) > _WAITING:
            self._settle()

    def all(self) -> Tensor | None:
        """Return the digests, sorted, on the CPU; None if they are not all known."""
        self._settle()
        return torch.cat(self._kept).sort().values if self._known else None

    def _settle(self) -> None:
        if self._waiting:
            self._kept.append(torch.cat(self._waiting).cpu())
        self._waiting = []
        if not self._known:
            self._kept = []


def nothing() -> Seen:
    """Return what a pass has seen before its first step."""
    return Seen(torch.empty(0, dtype=torch.int64))


def joined(parts: list[Tensor | None]) -> Tensor | None:
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
    once (Good 1953). Values are counted, not samples, so that one blank image counts once.

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
    found = int(common.sum())
    # of the values that came those in the old set, and the other way round
    sides = ((len(values), times), (len(old), counts))
    beyond = [found > _by_chance(*side, missed=0) for side in sides]
    surely = [found > _by_chance(*side, missed=_MISSED) for side in sides]
    certain = any(surely) and found > max(_MISSED, _SHARE * min(len(values), len(old)))
    if not (certain or all(beyond)):
        return None
    return Again(int(counts[common].sum()), len(new), certain)


def _by_chance(asked: int, times: Tensor, missed: int) -> float:
    """Return how many of the values asked for a set may have, with its values so many times."""
    samples = int(times.sum()) + missed
    share = (int(times[times > 1].sum()) + missed) / max(1, samples)
    # the spread of what is asked, and of the share itself, of which samples come in pairs
    spread = share * (1 - share) * (asked + 2 * asked**2 / max(1, samples))
    return asked * share + _SIGMAS * math.sqrt(spread)
