"""Loaders of other libraries, whose batches are brought into our form as they are read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Batches:
    """The batches of a loader, changed; it can be read as often as the loader.

    Args:
        loader: What is read.
        change: Returns the new batch, or None to leave one out.

    Examples:
        >>> list(Batches([1, 2, 3], lambda batch: None if batch == 2 else 10 * batch))
        [10, 30]
    """

    loader: Iterable[Any]
    change: Callable[[Any], Any]

    def __iter__(self) -> Iterator[Any]:
        for batch in self.loader:
            changed = self.change(batch)
            if changed is not None:
                yield changed

    @property
    def dataset(self) -> Any:
        """The data set behind the loader, which a fit reads twice to notice augmentation."""
        return getattr(self.loader, "dataset", None)
