"""Where data is looked for."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pooch

from scodbench.data.errors import MissingDataError

VARIABLE = "SCODKIT_DATA"


def data_folder(folder: str | Path | None = None) -> Path:
    """Return the folder data is read from and fetched to; it need not exist yet.

    Args:
        folder: An explicit choice; without one the variable ``SCODKIT_DATA`` decides, and
            without that it is a folder in the user's cache.

    Examples:
        >>> data_folder("elsewhere").name
        'elsewhere'
    """
    if folder is not None:
        return Path(folder).expanduser()
    named = os.environ.get(VARIABLE)
    if named:
        return Path(named).expanduser()
    return cache_folder()


def cache_folder() -> Path:
    """Return where programs may keep files that can be made or fetched again."""
    return Path(pooch.os_cache("scodkit"))


def locate(
    name: str,
    layouts: Sequence[Sequence[str]],
    remedy: str,
    folder: str | Path | None = None,
) -> list[Path]:
    """Return the files of the first layout that is there.

    Args:
        name: Of the data set.
        layouts: Ways the data can be stored, best first: the files each one needs, relative
            to the folder.
        remedy: What to do where there is none.
        folder: As for `data_folder`.

    Returns:
        Their paths, in the layout's order.

    Raises:
        MissingDataError: If no layout is complete.
    """
    root = data_folder(folder)
    for layout in layouts:
        paths = [root / file for file in layout]
        if all(path.is_file() for path in paths):
            return paths
    looked_for = ", or ".join(" with ".join(layout) for layout in layouts)
    missing = [f for layout in layouts for f in layout if not (root / f).is_file()]
    raise MissingDataError(
        f"expected the data set {name} in {root} ({_chosen_by(folder)}): {looked_for}; "
        f"not there: {', '.join(missing)}; {remedy}"
    )


def _chosen_by(folder: str | Path | None) -> str:
    if folder is not None:
        return "the folder that was given"
    if os.environ.get(VARIABLE):
        return f"named by the variable {VARIABLE}"
    return f"the user's cache, as the variable {VARIABLE} is not set"
