"""Samples of a domain: read in batches, on any device, as often as wanted."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from scodkit.errors import OptionError
from scodkit.numerics.hashing import digest_of


class Samples(ABC):
    """A number of inputs with their targets."""

    @abstractmethod
    def __len__(self) -> int:
        """Return how many there are."""

    @abstractmethod
    def take(self, which: Tensor | slice) -> Samples:
        """Return some of them, by their numbers ``(n,)`` or a range."""

    @abstractmethod
    def read(self, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
        """Return all inputs ``(n, ...)`` and targets ``(n, ...)`` at once, on a device."""

    @abstractmethod
    def digest(self) -> str:
        """Return a hash of what is stored, for those who keep what they made of it."""

    @functools.cached_property
    def probe(self) -> str:
        """A hash of the first two as they are read, which sees what became of the transform.

        They are read once, on the CPU, so that it is the same for every device.
        """
        x, y = self.take(slice(0, 2)).read()
        return digest_of({"inputs": x, "targets": y})

    def batches(
        self, size: int, device: torch.device | str = "cpu"
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield inputs and targets, so many at a time, in order."""
        for start in range(0, len(self), size):
            yield self.take(slice(start, start + size)).read(device)

    def shuffled(self, seed: int) -> Samples:
        """Return the same in an order drawn from a seed."""
        generator = torch.Generator().manual_seed(seed)
        return self.take(torch.randperm(len(self), generator=generator))


@dataclass(frozen=True)
class TensorSamples(Samples):
    """Samples that are held in memory.

    Args:
        inputs: ``(n, ...)`` as they are stored, bytes for images.
        targets: ``(n, ...)``.
        transform: Turns stored inputs into the network's.

    Examples:
        >>> few = TensorSamples(torch.arange(4.0), torch.zeros(4), lambda x: 2 * x)
        >>> [x.tolist() for x, _ in few.batches(3)]
        [[0.0, 2.0, 4.0], [6.0]]
    """

    inputs: Tensor
    targets: Tensor
    transform: Callable[[Tensor], Tensor] | None = None

    def __post_init__(self) -> None:
        if len(self.inputs) != len(self.targets):
            raise OptionError(
                f"expected as many targets as inputs, got {len(self.targets)} for "
                f"{len(self.inputs)}"
            )

    def __len__(self) -> int:
        return len(self.inputs)

    def take(self, which: Tensor | slice) -> TensorSamples:
        """Return some of them."""
        return replace(self, inputs=self.inputs[which], targets=self.targets[which])

    def read(self, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
        """Return all of them, transformed."""
        x = self.inputs.to(device)
        return x if self.transform is None else self.transform(x), self.targets.to(device)

    def digest(self) -> str:
        """Return a hash of the stored inputs and targets, and of the transform's name."""
        name = "" if self.transform is None else self.transform.__qualname__
        return digest_of({"inputs": self.inputs, "targets": self.targets}, salt=name)


@dataclass(frozen=True)
class Loader:
    """Samples as a fit reads them: an iterable of batches, as often as wanted.

    Args:
        samples: The samples.
        size: Of a batch.
        device: Where to put it.
    """

    samples: Samples
    size: int
    device: torch.device | str = "cpu"

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self.samples.batches(self.size, self.device)

    def __len__(self) -> int:
        return -(-len(self.samples) // self.size)
