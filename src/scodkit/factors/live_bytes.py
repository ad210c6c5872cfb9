"""Peak memory of a computation: measured while it runs, or extrapolated from small runs."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from scodkit.numerics.torch_private import TorchDispatchMode

# samples, and vectors, of the measured runs: a single one is often computed differently
COUNTED_SIZES = (2, 3)


class LiveBytes(TorchDispatchMode):
    """Dispatch mode that counts the bytes of the tensors created in it while they are alive.

    The workspace of kernels is not counted.

    Attributes:
        now: Bytes alive.
        after_each: The id of each operation so far, with the bytes alive after it.

    Examples:
        >>> with LiveBytes() as live:
        ...     a = torch.zeros(100)
        ...     b = (a + 1).sum()
        >>> live.now, live.most
        (404, 804)
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        self.after_each: list[tuple[int, int]] = []
        self._known: set[int] = set()

    @property
    def most(self) -> int:
        """Bytes at the peak."""
        return max((size for _, size in self.after_each), default=0)

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Return the result of an operation, and count its new storages."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        for tensor in _tensors((result,)):
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key not in self._known and not _among(key, (args, kwargs.values())):
                self._known.add(key)
                size = storage.nbytes()
                self.now += size
                weakref.finalize(storage, self._forget, key, size)
        self.after_each.append((id(func), self.now))  # ids are faster to compare
        return result

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


def _tensors(values: Iterable[object]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            if value.layout == torch.strided:
                yield value
        elif isinstance(value, Iterable) and not isinstance(value, str):
            yield from _tensors(value)


def _among(key: int, values: Iterable[object]) -> bool:
    """Return whether a storage belongs to one of the arguments."""
    return any(tensor.untyped_storage()._cdata == key for tensor in _tensors(values))


def peak_bytes(run: Callable[[], object]) -> int | None:
    """Return the peak memory of a computation, in bytes.

    Args:
        run: The computation.

    Returns:
        None if the model cannot be run under a dispatch mode.
    """
    try:
        return _watched(run).most
    except Exception:  # whatever a third-party module raises under a dispatch mode
        return None


def _watched(run: Callable[[], object]) -> LiveBytes:
    live = LiveBytes()
    with live:
        run()
    return live


@dataclass(frozen=True)
class Memory:
    """Memory of a computation for ``b`` samples with ``q`` vectors each, in bytes.

    At any moment ``c + s b + v q + w b q`` bytes are alive: shapes are products of sizes. So
    four small runs determine any size, and the peak is the maximum over all moments.

    Args:
        terms: ``(moments, 4)``: ``c, s, v, w`` in bytes.
    """

    terms: Tensor

    @staticmethod
    def bound(samples: int, vectors: int, forward: int, most: int) -> Memory:
        """Return an upper bound from a single run with a few vectors.

        All memory is attributed to samples. Vectors may share any part of what the backward
        pass allocates, as they share patches of images: a single vector counts with all of it.

        Args:
            samples: Samples of the run.
            vectors: Vectors per sample.
            forward: Bytes alive after the forward pass, which all vectors share.
            most: Bytes at the peak.
        """
        vector = (most - forward) / vectors
        terms = [0.0, most - vector, 0.0, vector]
        return Memory(torch.tensor([terms], dtype=torch.float64) / samples)

    @staticmethod
    def counted(run: Callable[[int, int], object]) -> Memory | None:
        """Return the memory of a computation, measured in runs of a few sizes.

        Args:
            run: Runs the computation, given the numbers of samples and of vectors.

        Returns:
            None if the model cannot be run under a dispatch mode.
        """
        sizes = [(b, q) for b in COUNTED_SIZES for q in COUNTED_SIZES]
        try:
            runs = [_watched(partial(run, b, q)).after_each for b, q in sizes]
        except Exception:  # whatever a third-party module raises under a dispatch mode
            return None
        factors = torch.tensor([[1, b, q, b * q] for b, q in sizes], dtype=torch.float64)
        return Memory(torch.linalg.solve(factors, torch.stack(_moments(runs))).T)

    def at(self, samples: int, vectors: int) -> int:
        """Return the bytes at the peak.

        Args:
            samples: ``b``.
            vectors: ``q``.
        """
        sizes = self.terms.new_tensor([1, samples, vectors, samples * vectors])
        return max(0, round(float((self.terms @ sizes).max())))

    def most_samples(self, budget: int, vectors: int) -> int:
        """Return how many samples fit into a budget, at least one.

        Args:
            budget: Bytes.
            vectors: ``q``.
        """
        fixed, sample, vector, both = self.terms.T
        return _most(budget - fixed - vectors * vector, sample + vectors * both)

    def most_vectors(self, budget: int, samples: int) -> int:
        """Return how many vectors fit into a budget, at least one.

        Args:
            budget: Bytes.
            samples: ``b``.
        """
        fixed, sample, vector, both = self.terms.T
        return _most(budget - fixed - samples * sample, vector + samples * both)


def _moments(runs: list[list[tuple[int, int]]]) -> list[Tensor]:
    """Return for each run the peak bytes between operations that all runs have in common.

    Some operations run more or less often depending on sizes, so indices do not correspond;
    operations that occur equally often in all runs, in the same order, are landmarks between
    which the runs correspond.
    """
    times = [Counter(name for name, _ in run) for run in runs]
    as_often = [n for n, c in times[0].most_common() if all(counts[n] == c for counts in times)]
    marks = set(as_often)
    if not _in_one_order(runs, marks):  # rare, and slow if there are many operations
        marks = set()
        for name in as_often:
            if _in_one_order(runs, marks | {name}):
                marks.add(name)
    peaks = []
    for run in runs:
        most = [0]
        for name, size in run:
            if name in marks:
                most.append(0)
            most[-1] = max(most[-1], size)
        peaks.append(torch.tensor(most, dtype=torch.float64))
    return peaks


def _in_one_order(runs: list[list[tuple[int, int]]], marks: set[int]) -> bool:
    orders = {tuple(name for name, _ in run if name in marks) for run in runs}
    return len(orders) == 1


def _most(left: Tensor, each: Tensor) -> int:
    """Return how many fit into the bytes left at every moment, at least one."""
    fitting = (left / each)[each > 0]
    return max(1, int(fitting.min())) if len(fitting) else 2**31
