"""The kinds of data that people hold: arrays, tables, lists of rows, whole loaders."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from numbers import Number
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from scodkit.errors import BatchError

_Found = TypeVar("_Found")

# numpy's kinds of numbers that torch has, too: booleans, integers, floats, complex ones
_NUMBERS = "biufc"

# keys of a batch under which its targets are
LABEL_KEYS = ("label", "labels", "target", "targets")


def first_part(batch: Any) -> Any:
    """Return what a batch has first, if it is a tuple or list; or else the batch."""
    return batch[0] if isinstance(batch, (tuple, list)) and batch else batch


def is_array(value: object) -> bool:
    """Return whether a value is an array of another library: numpy's, a pandas table.

    Args:
        value: Anything.
    """
    return hasattr(value, "__array__") and not isinstance(value, (Tensor, Number))


def is_rows(value: object) -> bool:
    """Return whether a value is a list of rows: of numbers, lists of them, or flat arrays.

    A tuple is a batch of several parts, and so is a list of anything else.

    Args:
        value: Anything.
    """
    inner = value
    while type(inner) is list and inner:
        inner = inner[0]
    if inner is value:
        return False
    return isinstance(inner, Number) or (is_array(inner) and np.ndim(inner) == 1)  # type: ignore[arg-type]


def holds_arrays(batch: object) -> bool:
    """Return whether a batch comes as arrays or rows, so that results go back as arrays.

    Args:
        batch: As the loader yields it.
    """
    if isinstance(batch, Mapping):
        return any(is_array(value) for value in batch.values())
    if is_array(batch) or is_rows(batch):
        return True
    return isinstance(batch, (tuple, list)) and len(batch) > 0 and holds_arrays(batch[0])


def as_tensors(batch: object, dtype: torch.dtype) -> object:
    """Return a batch with its arrays and rows as tensors; the rest is passed on as it is.

    Arrays that are not of numbers, as labels may be, are left.

    Args:
        batch: As the loader yields it.
        dtype: Of what was in floating point, as numpy's own default is another than torch's.

    Raises:
        BatchError: If rows differ in length.
    """
    if isinstance(batch, Tensor):
        return batch
    if is_array(batch) or is_rows(batch):
        return _tensor(batch, dtype)
    if isinstance(batch, Mapping) and holds_arrays(batch):
        return {key: as_tensors(value, dtype) for key, value in batch.items()}
    if type(batch) is tuple or type(batch) is list:
        return type(batch)(as_tensors(part, dtype) for part in batch)
    return batch


def as_array(value: Any) -> npt.NDArray[Any]:
    """Return an array, a table or rows as a numpy array.

    Args:
        value: What `is_array` or `is_rows` says is one.

    Raises:
        BatchError: If rows differ in length, or entries are masked.
    """
    if np.ma.is_masked(value):
        raise BatchError(
            "expected an array with all its entries, got one where some are masked, which a "
            "model would take as they are; type x.filled(...) with what training data had there"
        )
    try:
        return np.asarray(value)
    except ValueError as error:
        raise BatchError(
            "expected rows of one length, got some that differ; pad them, or pass one row at a "
            f"time ({error})"
        ) from error


def _tensor(value: Any, dtype: torch.dtype) -> Any:
    array = as_array(value)
    if array.dtype.kind not in _NUMBERS:
        return value
    # torch has neither other orders of bytes nor steps backwards, nor what cannot be written to
    plain = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("="))
    tensor = torch.from_numpy(plain if plain.flags.writeable else plain.copy())
    return tensor.reshape(array.shape).to(dtype if tensor.is_floating_point() else tensor.dtype)


def is_loader(value: object, *, picked: bool = False) -> bool:
    """Return whether a value is a loader of batches, not a batch.

    Args:
        value: What a user passes for a batch.
        picked: Whether a function of theirs picks inputs from batches, which may then be
            anything that can be iterated, too, such as a tuple of lists.
    """
    if isinstance(value, (DataLoader, Iterator)):
        return True
    if type(value) is list or (
        type(value) is tuple and not picked
    ):  # of batches, each of several parts
        parts = [isinstance(part, (tuple, list, Mapping)) for part in value]
        return bool(parts) and all(parts) and not is_rows(value)
    if picked or isinstance(value, (Tensor, Mapping, str, tuple, list)) or is_array(value):
        return False
    return isinstance(value, Iterable)


def over_batches(
    run: Callable[[Any], _Found], batch: object, batches: Callable[[Any], Iterable[Any]] | None
) -> _Found:
    """Return what a function finds in a batch, or in all batches of a loader, joined.

    Results are arrays where arrays came, else tensors; of a loader they are on the CPU.

    Args:
        run: Takes a batch; returns a tensor ``(B, ...)``, or a dataclass or dict of them.
        batch: A batch, or the loader.
        batches: Yields the batches of the loader; None for a batch.
    """
    if isinstance(batch, Tensor):
        return run(batch)
    if batches is None:
        return as_given(run(batch), batch)
    arrays, parts = False, []
    for each in batches(batch):
        arrays = arrays or holds_arrays(each)
        parts.append(_mapped(run(each), Tensor.cpu))
    joined: _Found = _joined(parts)
    return _mapped(joined, _array) if arrays else joined


def as_given(found: _Found, batch: object) -> _Found:
    """Return results as arrays if a batch came as such, else as they are.

    Args:
        found: A tensor, or a dataclass or dict of them; None stays None.
        batch: As the loader yields it.
    """
    return _mapped(found, _array) if holds_arrays(batch) else found


def _array(tensor: Tensor) -> Any:
    tensor = tensor.detach().cpu()
    # numpy has no such numbers
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()


def _mapped(found: _Found, function: Callable[[Tensor], Any]) -> _Found:
    if isinstance(found, Tensor):
        return cast("_Found", function(found))
    if is_dataclass(found) and not isinstance(found, type):
        values = {f.name: _mapped(getattr(found, f.name), function) for f in fields(found)}
        return replace(found, **values)
    if isinstance(found, Mapping):
        return cast("_Found", {name: _mapped(each, function) for name, each in found.items()})
    return found


def _joined(parts: list[Any]) -> Any:
    first = parts[0]
    if isinstance(first, Tensor):
        shapes = sorted({tuple(part.shape[1:]) for part in parts})
        if len(shapes) > 1:
            raise BatchError(
                f"expected outputs of one shape to join those of a loader, got {shapes}; type "
                "monitor.score(loader) for the scores alone, or pass batch by batch"
            )
        return torch.cat(parts)
    if isinstance(first, Mapping):
        return {name: _joined([part[name] for part in parts]) for name in first}
    names = [f.name for f in fields(first) if getattr(first, f.name) is not None]
    return replace(
        first, **{name: _joined([getattr(part, name) for part in parts]) for name in names}
    )
