"""Options that count something."""

from __future__ import annotations

import operator

from scodkit.errors import OptionError


def whole_number(name: str, value: object, least: int = 1) -> int:
    """Return an option as a plain integer.

    Args:
        name: Of the option.
        value: What was given; numpy's integers will do.
        least: The least it may be.

    Raises:
        OptionError: If it is no integer, or too small.
    """
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or isinstance(value, bool) or number < least:
        raise OptionError(f"expected an integer {name} >= {least}, got {name}={value!r}")
    return number
