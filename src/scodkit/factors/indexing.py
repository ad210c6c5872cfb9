"""Where samples lie after an index: ``x[index]``, and ``x[index] = value``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from scodkit.factors.lay import COUNTED, FIRST, MIXED, NEW, NOBODYS, Call, Lay, Where, matched


def indexed(call: Call, results: list[Tensor]) -> list[Where]:
    """Return where the samples lie in ``x[index]``."""
    tensor, index = call.args
    if call.wheres[0] in NOBODYS:  # a table: whose entries are looked up?
        single = isinstance(index, Tensor) and index.dtype != torch.bool
        return [call.where_of(index) if single else MIXED]
    return [_kept_by_index(call, tensor, index)]


def _kept_by_index(call: Call, tensor: Tensor, index: Any) -> Lay:
    """Return where the samples lie in ``tensor[index]``."""
    where, index = call.wheres[0], index if isinstance(index, tuple) else (index,)
    where = FIRST if where is None or where is NEW else where
    if isinstance(index[0], Tensor) and call.where_of(index[0]) is COUNTED:
        return _picked_from_each(call, where, index[1:])
    spoken_of = sum(_axes_of(i) for i in index)
    arrays = [i for i in index if isinstance(i, (Tensor, list))]
    if len(arrays) > 1 or (arrays and any(type(i) is int for i in index)):
        return MIXED
    before = after = 0
    for i in (*index, ...) if ... not in [j for j in index if j is ...] else index:
        if i is None:
            after += 1
            continue
        taken = tensor.ndim - spoken_of if i is ... else _axes_of(i)
        full = i is ... or (isinstance(i, slice) and _is_full(i, tensor.shape[before]))
        if before <= where.axis < before + taken:
            return where._replace(axis=after + where.axis - before) if full else MIXED
        before += taken
        after += taken if i is ... else _axes_left(call, i)
    return MIXED


def _axes_of(index: Any) -> int:
    """Return how many axes an index speaks of."""
    if index is None or index is ...:
        return 0
    return index.ndim if isinstance(index, Tensor) and index.dtype == torch.bool else 1


def _axes_left(call: Call, index: Any) -> int:
    """Return how many axes an index leaves of those it speaks of.

    Raises:
        TypeError: If nobody knows.
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


def _picked_from_each(call: Call, where: Lay, rest: tuple[Any, ...]) -> Lay:
    """Return where samples lie in ``x[arange(B), i, ...]``: an entry of each."""

    def own(i: Any) -> bool:
        if not isinstance(i, Tensor):
            return type(i) is int
        whole = i.ndim == 1 and i.dtype in (torch.int64, torch.int32)
        return whole and call.where_of(i) in (*NOBODYS, FIRST)

    return FIRST if where == FIRST and all(map(own, rest)) else MIXED


def written(call: Call) -> Lay:
    """Return where the samples lie in ``x`` after ``x[index] = value``."""
    (tensor, index, value), where = call.args, call.wheres[0]
    if where is None or where is COUNTED or MIXED in call.wheres:  # others may see it, too
        return MIXED
    try:
        kept = _kept_by_index(call, tensor, index)
    except TypeError:
        return MIXED
    after = FIRST if where is NEW else where
    given = [(value, w) for t, w in call.given() if t is value]
    if given:
        with torch._C.DisableTorchFunction():
            part = tensor[index]
        return after if kept != MIXED and matched(given, part) == kept else MIXED
    return after if kept != MIXED else MIXED
