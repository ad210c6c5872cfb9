"""Libraries that only some features need, imported when such a feature is used."""

from __future__ import annotations

import importlib
from typing import Any

from scodkit.errors import MissingPeerError

_PACKAGES = {"PIL": "pillow", "sklearn": "scikit-learn"}  # whose modules have other names


def optional(module: str, extra: str, then: str = "") -> Any:
    """Import a module that is not among the core's dependencies.

    Args:
        module: Its full name, such as ``"scipy.special"``.
        extra: The extra of scodkit that installs it.
        then: What else is to be typed.

    Returns:
        The module.

    Raises:
        MissingPeerError: If it is not installed, with what to type.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        library = module.partition(".")[0]
        raise MissingPeerError(
            f"expected {_PACKAGES.get(library, library)}, which this needs, found none "
            f'that can be imported ({error}); type: pip install "scodkit[{extra}]"{then}'
        ) from error
