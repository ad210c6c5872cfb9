"""Libraries that only some features need, imported when such a feature is used."""

from __future__ import annotations

import importlib
from typing import Any

from scodkit.errors import MissingPeerError


def optional(module: str, extra: str) -> Any:
    """Import a module that is not among the core's dependencies.

    Args:
        module: Its full name, such as ``"scipy.special"``.
        extra: The extra of scodkit that installs it.

    Returns:
        The module.

    Raises:
        MissingPeerError: If it is not installed, with what to type.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise MissingPeerError(
            f"expected {module.partition('.')[0]}, which this needs, found none; type: "
            f'pip install "scodkit[{extra}]"'
        ) from error
