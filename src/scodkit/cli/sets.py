"""Sets of inputs with their scores, for a report."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, overload

import torch
from torch import Tensor

from scodkit import Monitor, Scored
from scodkit.cli.inputs import Batches
from scodkit.cli.loading import running
from scodkit.errors import BatchError
from scodkit.report import ScoredSet
from scodkit.stream import batches_of as with_progress
from scodkit.stream import num_batches

# bytes of inputs that are kept of data that can be read only once
_MOST_KEPT = 2**30


def scored_set(
    monitor: Monitor, name: str, batches: Batches | Iterable[Any], known: bool, progress: bool
) -> ScoredSet:
    """Return a set with its scores, and with inputs where they are tensors.

    Args:
        monitor: Fitted.
        name: Of the set.
        batches: Of its inputs.
        known: Whether they are like the training data.
        progress: Show a progress bar.

    Raises:
        BatchError: If there are none.
    """
    scored: list[Scored] = []
    kept: list[Tensor] = []
    held = 0
    with running(monitor):
        told = with_progress(batches, num_batches(batches), f"scoring {name}", progress)
        for batch in told:
            scored.append(monitor(batch))
            if not isinstance(batches, Batches) and held <= _MOST_KEPT:
                kept.append(_first_tensor(batch))
                held += kept[-1].numel() * kept[-1].element_size()
    scores = torch.cat([torch.empty(0), *(part.score.cpu() for part in scored)])
    if not len(scores):
        raise BatchError(f"expected inputs in {name!r}, found none; leave the set out")
    p_values = [part.p_value for part in scored if part.p_value is not None]
    return ScoredSet(
        name,
        scores,
        known,
        _Read(batches) if isinstance(batches, Batches) else _joined(kept, len(scores)),
        torch.cat([part.output.detach().cpu() for part in scored]),
        torch.cat(p_values) if p_values else None,
        _labels(batches),
    )


class _Read(Sequence[Tensor]):
    """Inputs that are read again when they are asked for: a page shows few of them."""

    def __init__(self, batches: Batches) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return len(self._batches.dataset)

    @overload
    def __getitem__(self, place: int) -> Tensor: ...

    @overload
    def __getitem__(self, place: slice) -> Sequence[Tensor]: ...

    def __getitem__(self, place: int | slice) -> Tensor | Sequence[Tensor]:
        if isinstance(place, slice):
            return list(self._batches.read(place))
        return self._batches.read(slice(place, place + 1))[0]


def _first_tensor(batch: object) -> Tensor:
    """Return the inputs of a batch, empty where they are not one tensor."""
    first = batch[0] if isinstance(batch, (tuple, list)) and batch else batch
    return first if isinstance(first, Tensor) else torch.empty(0)


def _joined(kept: Sequence[Tensor], count: int) -> Tensor | None:
    """Return all inputs, or None if not all were kept, or they differ in shape."""
    same = len({part.shape[1:] for part in kept}) == 1
    return torch.cat(list(kept)) if same and sum(map(len, kept)) == count else None


def _labels(batches: Batches | Iterable[Any]) -> list[str] | None:
    """Return the names of inputs that have names of their own, such as files."""
    if not isinstance(batches, Batches):
        return None
    names = [batches.dataset.name(row) for row in range(len(batches.dataset))]
    return [str(name) for name in names] if isinstance(names[0], str) else None
