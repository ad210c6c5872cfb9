"""Data frames: their columns are known by name, and come in the order of the fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from numbers import Integral
from typing import Any

import numpy as np
import numpy.typing as npt

from scodkit.errors import BatchError
from scodkit.model.kinds import LABEL_KEYS, as_array, first_part, is_array

# names of the columns of each data frame of a batch, by position or keyword in the call
Columns = dict[str, list[str]]


class NamedRows(np.ndarray[Any, Any]):
    """Rows of a data frame as an array, whose columns have kept their names.

    Attributes:
        columns: The names; None for arrays made of this one, such as some of its columns.
    """

    columns: list[str] | None = None

    @staticmethod
    def of(rows: npt.NDArray[Any], columns: list[str]) -> NamedRows:
        """Return an array with names for its columns."""
        named = rows.view(NamedRows)
        named.columns = columns
        return named


def labels_of(value: object) -> list[str] | None:
    """Return the names of the columns of a data frame, as text; None for anything else.

    Args:
        value: Anything; a data frame is an array with ``columns`` that are names or numbers.
    """
    labels = getattr(value, "columns", None) if is_array(value) else None
    if labels is None or not all(isinstance(label, (str, Integral)) for label in labels):
        return None
    return [str(label) for label in labels]


def columns_of(batch: object) -> Columns | None:
    """Return the names of the columns of a batch's data frames; None if it has none.

    Args:
        batch: As the loader yields it; of a tuple or list the first element counts.
    """
    first = first_part(batch)
    parts = first if isinstance(first, Mapping) else {0: first}
    named = {str(key): labels_of(part) for key, part in parts.items() if key not in LABEL_KEYS}
    return {key: labels for key, labels in named.items() if labels} or None


def in_order(batch: Any, columns: Columns) -> Any:
    """Return a batch whose data frames have their columns in a given order.

    Args:
        batch: As the loader yields it.
        columns: Their names, from `columns_of`.

    Raises:
        BatchError: If a data frame has other columns.
    """
    if isinstance(batch, (tuple, list)) and batch:
        first = in_order(batch[0], columns)
        return batch if first is batch[0] else [first, *batch[1:]]
    if isinstance(batch, Mapping):
        return {key: _ordered(part, columns.get(str(key))) for key, part in batch.items()}
    return _ordered(batch, columns.get("0"))


def ordering(columns: Columns | None) -> Callable[[Any], Any]:
    """Return a function that puts the data frames of all batches into one order.

    Args:
        columns: Names in that order; None for the order of the first batch.
    """

    def ordered(batch: Any) -> Any:
        nonlocal columns
        if columns is not None:
            return in_order(batch, columns)
        columns = columns_of(batch)
        return batch

    return ordered


def are_numbered(labels: list[str]) -> bool:
    """Return whether columns are numbered from 0 on, as those that were given no names are."""
    return labels == [str(place) for place in range(len(labels))]


def alike(one: Columns, other: Columns) -> bool:
    """Return whether fits of these columns are of the same: names agree where there are any."""
    names = [(own, other[key]) for key, own in one.items() if key in other]
    return all(a == b or are_numbered(a) or are_numbered(b) for a, b in names)


def in_words(columns: Columns) -> str:
    """Return the names of columns as a list to read."""
    return "; ".join(", ".join(names) for names in columns.values())


def _ordered(frame: Any, names: list[str] | None) -> Any:
    """Return a data frame, or an array of it with its columns in the order of names.

    Raises:
        BatchError: If it has other columns.
    """
    labels = labels_of(frame) if names else None
    if names is None or labels is None or labels == names:
        return frame
    if len({*labels}) == len(labels) == len(names) and {*labels} == {*names}:
        return as_array(frame)[:, [labels.index(name) for name in names]]
    if are_numbered(labels) or are_numbered(names):
        return frame  # these are no names, but places
    _refuse(labels, names)


def _refuse(labels: list[str], names: list[str]) -> None:
    """Refuse a data frame with other columns than those of the fit.

    Raises:
        BatchError: Always, with what to type.
    """
    missing = [name for name in names if name not in labels]
    unknown = [label for label in labels if label not in names]
    repeated = sorted({label for label in labels if labels.count(label) > 1})
    got = [f"without {', '.join(missing)}"] if missing else []
    got += [f"with {', '.join(unknown)}, which the fit did not have"] if unknown else []
    got += [f"with {', '.join(repeated)} more than once"] if repeated else []
    near = {label: get_close_matches(label, missing, 1) for label in unknown}
    renamed = {label: match[0] for label, match in near.items() if match}
    if renamed:
        meant = " and ".join(f"{new!r} by {old!r}" for old, new in renamed.items())
        advice = f"did you mean {meant}? Type x.rename(columns={renamed})"
    elif unknown and not (missing or repeated):
        advice = f"type x.drop(columns={unknown})"
    else:
        advice = "name the columns as at the fit, each once"
    raise BatchError(
        f"expected a data frame with the columns of the fit, {', '.join(names)}, got one "
        f"{' and '.join(got)}; {advice}"
    )
