"""Libraries that only some formats need: imported when they are used, not before."""

from __future__ import annotations

import importlib
from typing import Any

from scodkit.errors import MissingPeerError


def extra(module: str, format_name: str) -> Any:
    """Return a module.

    Args:
        module: Its name.
        format_name: What needs it, for the message.

    Raises:
        MissingPeerError: If it is not installed, with what to type.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingPeerError(
            f"expected the module {module}, which reads {format_name}, got: {error}; type "
            "pip install ./benchmarks"
        ) from error
