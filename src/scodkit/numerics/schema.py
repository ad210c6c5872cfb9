"""What may stand in a file: headers and tensors, by type and by range.

A digest tells that a file is as it was written, not who wrote it. So what is read is held
against a table of what there may be before it is used; each entry of such a table is a `Check`.
"""

from __future__ import annotations

import math
import reprlib
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from scodkit.errors import CorruptArtifactError

# takes the name of a value, for messages, and the value; raises CorruptArtifactError
Check = Callable[[str, Any], None]

WIDE = (torch.float64, torch.float32)
_FLOATING = (*WIDE, torch.bfloat16, torch.float16)


def that(words: str, holds: Callable[[Any], bool]) -> Check:
    """Return a check that a value is as it should be.

    Args:
        words: How that is.
        holds: Says whether a value is so; must not fail on any.

    Examples:
        >>> that("text", lambda value: type(value) is str)("the name", "Ada")
    """

    def check(name: str, value: Any) -> None:
        if not holds(value):
            refuse(f"{words} as {name}", _short(value))

    return check


def refuse(expected: str, got: str) -> NoReturn:
    """Refuse a file in which something is not as it must be, both in words.

    Raises:
        CorruptArtifactError: In any case.
    """
    raise CorruptArtifactError(
        f"expected {expected}, got {got}; the file was altered, or written by something else: "
        "save it again"
    )


def whole(least: int = 0, most: int = 2**63 - 1) -> Check:
    """Return a check for whole numbers; true and 1.0 are none."""
    words = f"a whole number >= {least}" + ("" if most > 2**32 else f" and <= {most}")
    return that(words, lambda value: type(value) is int and least <= value <= most)


def number(
    words: str = "a finite number >= 0",
    holds: Callable[[float], bool] = lambda value: value >= 0,
) -> Check:
    """Return a check for finite numbers.

    Args:
        words: Which.
        holds: Says whether a finite number is one of those.
    """
    largest = sys.float_info.max

    def is_one(value: Any) -> bool:
        return type(value) in (int, float) and abs(value) <= largest and holds(value)

    return that(words, is_one)


TEXT = that("text", lambda value: type(value) is str)
FLAG = that("true or false", lambda value: type(value) is bool)
OBJECT = that("an object", lambda value: type(value) is dict)
LIST = that("a list", lambda value: type(value) is list)
INTEGER = that("a whole number", lambda value: type(value) is int)
SHARE = number("a number between 0 and 1", lambda value: 0 < value < 1)


def all_of(*checks: Check) -> Check:
    """Return a check that is several, one after the other."""

    def check_all(name: str, value: Any) -> None:
        for check in checks:
            check(name, value)

    return check_all


def maybe(check: Check) -> Check:
    """Return a check that takes null, too."""
    return lambda name, value: None if value is None else check(name, value)


def each(check: Check) -> Check:
    """Return a check of every entry of a list."""

    def check_all(name: str, value: Any) -> None:
        LIST(name, value)
        for place, one in enumerate(value):
            check(f"{name}[{place}]", one)

    return check_all


def table(check: Check) -> Check:
    """Return a check of every value of an object, whatever their names."""

    def check_all(name: str, value: Any) -> None:
        OBJECT(name, value)
        for key, one in value.items():
            check(f"{name}.{key[:40]}", one)

    return check_all


def fields(
    needed: Mapping[str, Check], allowed: Mapping[str, Check] = {}, *, others: bool = False
) -> Check:
    """Return a check of an object's values, by their names.

    Args:
        needed: Those that must be there.
        allowed: Those that may be.
        others: Whether there may be more, which nobody reads.
    """
    known = {**needed, **allowed}

    def check(name: str, value: Any) -> None:
        OBJECT(name, value)
        missing = [key for key in needed if key not in value]
        unknown = [] if others else [key for key in value if key not in known]
        if missing:
            refuse(f"{missing[0]} in {name}", "none")
        if unknown:
            refuse(f"no more than {', '.join(known)} in {name}", _short(unknown[0]))
        for key in value:
            if key in known:
                known[key](f"{key} of {name}", value[key])

    return check


def finite(numbers: Tensor) -> bool:
    """Return whether there is neither a NaN nor an infinity."""
    # a NaN is the least and the largest; 20 times as fast as asking every number
    return not numbers.numel() or all(math.isfinite(end) for end in numbers.aminmax())


def falling(numbers: Tensor) -> bool:
    """Return whether numbers are finite, none negative, and none larger than the one before."""
    return finite(numbers) and bool((numbers >= 0).all() and (numbers.diff() <= 0).all())


def tensor(
    shape: Sequence[int | None],
    dtypes: Collection[torch.dtype] = _FLOATING,
    holds: Callable[[Tensor], bool] = finite,
    words: str = "finite numbers",
) -> Check:
    """Return a check of a tensor.

    Args:
        shape: Its own; None for an axis of any length.
        dtypes: Which of them it may have; real numbers by default.
        holds: Says whether its numbers are right; finite by default.
        words: Which numbers those are.
    """
    sizes = ", ".join("any" if size is None else str(size) for size in shape)

    def is_one(value: Any) -> bool:
        return (
            isinstance(value, Tensor)
            and value.dtype in dtypes
            and len(value.shape) == len(shape)
            and all(s in (None, n) for s, n in zip(shape, value.shape, strict=True))
            and holds(value)
        )

    listed = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    return that(f"a tensor ({sizes}) of {words} in {listed}", is_one)


SCORES = tensor(
    (None,),
    (torch.float64,),
    lambda found: found.numel() > 0 and finite(found),
    "finite scores",
)
ANY_TENSOR = that("a tensor", lambda value: isinstance(value, Tensor))
NUMBERS = that(
    "a tensor without NaN or infinity",
    lambda value: isinstance(value, Tensor) and not value.is_complex() and finite(value),
)
FINITE = that(
    "a tensor of finite numbers in float32 or float64",
    lambda value: value.dtype in WIDE and finite(value),
)


def _short(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype} {tuple(value.shape)}"
    return reprlib.repr(value)


# smallest and largest value of each input, by its name
RANGES = table(
    all_of(
        each(number("a finite number", lambda _: True)),
        that(
            "a smallest value and a largest",
            lambda ends: len(ends) == 2 and ends == sorted(ends),
        ),
    )
)

# of samples, eight bytes each
DIGESTS = tensor((None,), (torch.int64,))
