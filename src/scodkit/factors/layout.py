"""Where the samples of a batch lie: in a tensor, in a call's arguments, after indexing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scodkit.numerics.torch_private import without_torch_function


class Lay(NamedTuple):
    """Where the samples lie: position ``i`` of an axis belongs to sample ``i // inner % B``.

    Args:
        axis: The axis with the samples.
        outer: How often the sequence of all samples is repeated along it.
        inner: Adjacent positions along it that belong to one sample.
    """

    axis: int
    outer: int = 1
    inner: int = 1


FIRST = Lay(0)  # the first axis is the batch axis
MIXED = Lay(-1)  # depends on several samples, or on unknown ones
COUNTED = Lay(-2)  # depends on no sample: the numbers 0 to B - 1, along the first axis
NEW = Lay(-3)  # depends on no sample yet, and has no views: just allocated
NOBODYS = (None, COUNTED, NEW)

# where the samples lie in a tensor; None if it does not depend on them
Where = Lay | None


class Call:
    """One call of a torch function, and where the samples lie in its arguments.

    Args:
        size: Batch size ``B``.
        where_of: Returns where the samples lie in a tensor.
        args: Positional arguments of the function.
        kwargs: Keyword arguments.
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
        """Return where the samples lie in one of the arguments."""
        places = zip(self.tensors, self.wheres, strict=True)
        return next(where for given, where in places if given is tensor)

    def argument(self, position: int, *names: str, default: Any = None) -> Any:
        """Return an argument by its position or one of its names."""
        if len(self.args) > position:
            return self.args[position]
        return next((self.kwargs[name] for name in names if name in self.kwargs), default)

    def given(self) -> list[tuple[Tensor, Lay]]:
        """Return the tensors that have samples, and where these lie."""
        places = zip(self.tensors, self.wheres, strict=True)
        return [(t, w) for t, w in places if w is not None and w not in NOBODYS]

    def only(self) -> tuple[Tensor, Lay]:
        """Return the first tensor, which must be the only one with samples.

        Raises:
            ValueError: If it is not.
        """
        ((tensor, where),) = self.given()
        if tensor is not self.tensors[0]:
            raise ValueError("samples in another argument than the first")
        return tensor, where

    def alike(self) -> tuple[Tensor, Lay]:
        """Return the first tensor with samples; they must lie in the same place in all.

        Raises:
            ValueError: If they do not.
        """
        given = self.given()
        if len({where for _, where in given}) != 1:
            raise ValueError("samples that lie in several ways")
        return given[0]


def tensors_in(values: Iterable[Any]) -> list[Tensor]:
    """Return the tensors among values, also those in lists, tuples, dicts and slices."""
    tensors = []
    for value in values:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, (list, tuple)):
            tensors += tensors_in(value)
        elif isinstance(value, dict):
            tensors += tensors_in(value.values())
        elif isinstance(value, slice):
            tensors += tensors_in((value.start, value.stop, value.step))
    return tensors


def matched(given: list[tuple[Tensor, Lay]], result: Tensor) -> Where:
    """Return where samples lie after broadcasting, which aligns axes from the last one."""
    common: Where = None
    for tensor, where in given:
        moved = where._replace(axis=where.axis + result.ndim - tensor.ndim)
        fits = moved.axis >= 0 and result.shape[moved.axis] == tensor.shape[where.axis]
        if not fits or common not in (None, moved):
            return MIXED
        common = moved
    return common


# --- Indexing ------------------------------------------------------------------------------


def indexed(call: Call, results: list[Tensor]) -> Where:
    """Return where the samples lie in ``x[index]``."""
    tensor, index = call.args
    if call.wheres[0] in NOBODYS:  # a lookup in a table: the index may have samples
        single = isinstance(index, Tensor) and index.dtype != torch.bool
        return call.where_of(index) if single else MIXED
    return _kept_by_index(call, tensor, index)


def _kept_by_index(call: Call, tensor: Tensor, index: Any) -> Lay:
    """Return where the samples lie in ``tensor[index]``."""
    where, index = call.wheres[0], index if isinstance(index, tuple) else (index,)
    where = FIRST if where is None or where is NEW else where
    if isinstance(index[0], Tensor) and call.where_of(index[0]) is COUNTED:
        return _picked_from_each(call, where, index[0].ndim, index[1:])
    num_indexed = sum(_axes_of(i) for i in index)
    arrays = [i for i in index if isinstance(i, (Tensor, list))]
    if len(arrays) > 1 or (arrays and any(type(i) is int for i in index)):
        return MIXED
    before = after = 0
    for i in (*index, ...) if ... not in [j for j in index if j is ...] else index:
        if i is None:
            after += 1
            continue
        taken = tensor.ndim - num_indexed if i is ... else _axes_of(i)
        full = i is ... or (isinstance(i, slice) and _is_full(i, tensor.shape[before]))
        if before <= where.axis < before + taken:
            return where._replace(axis=after + where.axis - before) if full else MIXED
        before += taken
        after += taken if i is ... else _axes_left(call, i)
    return MIXED


def _axes_of(index: Any) -> int:
    """Return how many axes an index consumes."""
    if index is None or index is ...:
        return 0
    return index.ndim if isinstance(index, Tensor) and index.dtype == torch.bool else 1


def _axes_left(call: Call, index: Any) -> int:
    """Return how many axes of the result come from an index.

    Raises:
        TypeError: If that is unknown.
    """
    if isinstance(index, slice):
        return 1
    if type(index) is int:
        return 0
    if isinstance(index, list) and all(type(i) is int for i in index):
        return 1
    if isinstance(index, Tensor) and index.ndim and call.where_of(index) in NOBODYS:
        return 1 if index.dtype == torch.bool else index.ndim
    raise TypeError(type(index))


def _is_full(index: slice, length: int) -> bool:
    return index.indices(length) == (0, length, 1)


def only_reshaped(func: Callable[..., Any], call: Call) -> bool:
    """Return whether a function adds axes of length one, or none, and keeps all entries."""
    if func is not Tensor.__getitem__:
        return func in (Tensor.unsqueeze, torch.unsqueeze, Tensor.to, Tensor.long)
    index = call.args[1] if isinstance(call.args[1], tuple) else (call.args[1],)
    return all(i is None or (isinstance(i, slice) and i == slice(None)) for i in index)


def _picked_from_each(call: Call, where: Lay, ndim: int, rest: tuple[Any, ...]) -> Lay:
    """Return where samples lie in ``x[arange(B), i, ...]``: entries of each sample.

    Args:
        call: The call.
        where: Where samples lie in ``x``.
        ndim: Axes of the counting index; those after the first have length one.
        rest: The other indices, which are broadcast against it.
    """

    def of_each(i: Any) -> bool:
        if not isinstance(i, Tensor):
            return type(i) is int
        if i.dtype not in (torch.int64, torch.int32) or not 0 < i.ndim <= ndim:
            return False
        return call.where_of(i) in NOBODYS or (i.ndim == ndim and call.where_of(i) == FIRST)

    return FIRST if where == FIRST and all(map(of_each, rest)) else MIXED


def written(call: Call) -> Lay:
    """Return where the samples lie in ``x`` after ``x[index] = value``."""
    (tensor, index, value), where = call.args, call.wheres[0]
    # without a place, it may share its memory with tensors that are not tracked
    if where is None or where is COUNTED or MIXED in call.wheres:
        return MIXED
    try:
        place = _kept_by_index(call, tensor, index)
    except TypeError:
        return MIXED
    after = FIRST if where is NEW else where
    given = [(value, w) for t, w in call.given() if t is value]
    if given:
        with without_torch_function():
            part = tensor[index]
        return after if place != MIXED and matched(given, part) == place else MIXED
    return after if place != MIXED else MIXED
