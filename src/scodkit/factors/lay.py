"""Where the samples of a batch lie in a tensor, and in what a torch function is given."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from torch import Tensor


class Lay(NamedTuple):
    """Where the samples lie: position ``i`` of an axis belongs to sample ``i // inner % B``.

    Args:
        axis: The axis that holds them.
        outer: How often all samples come one after the other along it.
        inner: Neighbours along it that belong to one sample.
    """

    axis: int
    outer: int = 1
    inner: int = 1


FIRST = Lay(0)  # each sample has one place on the first axis
MIXED = Lay(-1)  # several samples, or nobody knows whose
COUNTED = Lay(-2)  # of no sample: the numbers 0 to B - 1
NEW = Lay(-3)  # of no sample yet: nobody has seen it since it was made
NOBODYS = (None, COUNTED, NEW)

# where the samples lie in a tensor; None for nowhere: it is the same whatever the samples are
Where = Lay | None


class Call:
    """One call of a torch function, and where the samples lie in what it was given.

    Args:
        size: ``B``.
        where_of: Says where the samples lie in a tensor.
        args: What the function was given.
        kwargs: Likewise.
    """

    def __init__(
        self,
        size: int,
        where_of: Callable[[Tensor], Where],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> None:
        self.size, self.args, self.kwargs = size, args, kwargs
        self.tensors = tensors_in(args)
        if kwargs:
            first = [kwargs["input"]] if "input" in kwargs else []
            rest = (value for name, value in kwargs.items() if name != "input")
            self.tensors += tensors_in((*first, *rest))
        self.wheres = [where_of(tensor) for tensor in self.tensors]

    def where_of(self, tensor: Tensor) -> Where:
        """Return where the samples lie in one of the tensors it was given."""
        places = zip(self.tensors, self.wheres, strict=True)
        return next(where for own, where in places if own is tensor)

    def argument(self, position: int, *names: str, default: Any = None) -> Any:
        """Return an argument, by its position or one of its names."""
        if len(self.args) > position:
            return self.args[position]
        return next((self.kwargs[name] for name in names if name in self.kwargs), default)

    def given(self) -> list[tuple[Tensor, Lay]]:
        """Return the tensors that samples lie in."""
        places = zip(self.tensors, self.wheres, strict=True)
        return [(t, w) for t, w in places if w is not None and w not in NOBODYS]

    def only(self) -> tuple[Tensor, Lay] | None:
        """Return the first tensor, if samples lie there and nowhere else."""
        given = self.given()
        return given[0] if len(given) == 1 and given[0][0] is self.tensors[0] else None

    def alike(self) -> tuple[Tensor, Lay] | None:
        """Return one of the tensors, if samples lie alike in those that they lie in."""
        given = self.given()
        return given[0] if len({where for _, where in given}) == 1 else None


def tensors_in(values: Iterable[Any]) -> list[Tensor]:
    """Return the tensors among some values, in lists, tuples and dicts of them, too."""
    found = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += tensors_in(value)
        elif isinstance(value, dict):
            found += tensors_in(value.values())
    return found


def matched(given: list[tuple[Tensor, Lay]], result: Tensor) -> Where:
    """Return where samples lie after broadcasting: axes match from the last one."""
    found: Where = None
    for tensor, where in given:
        moved = where._replace(axis=where.axis + result.ndim - tensor.ndim)
        fits = moved.axis >= 0 and result.shape[moved.axis] == tensor.shape[where.axis]
        if not fits or found not in (None, moved):
            return MIXED
        found = moved
    return found
