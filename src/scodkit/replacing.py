"""Files that are replaced whole: at every moment the old one or the new one is there."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

_LETTERS = 16  # that tell writers of one file from each other


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a path to write to, and give what was written its name at the end.

    Args:
        path: The file to be, with the rights of the one that was there, or of any new file. It
            is as it was, and nothing else is left, if writing fails.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder) / "note.txt"
        ...     with replacing(path) as temporary:
        ...         _ = temporary.write_text("whole")
        ...     path.read_text()
        'whole'
    """
    # in a folder of its own: some libraries write to a name of their choice beside it first
    folder = path.with_name(f".{path.name}.{secrets.token_hex(_LETTERS // 2)}")
    folder.mkdir()
    temporary = folder / path.name
    try:
        temporary.touch()
        rights = (path if path.is_file() else temporary).stat().st_mode
        yield temporary
        os.chmod(temporary, stat.S_IMODE(rights))  # and leave it to its owner alone
        flush(temporary)
        os.replace(temporary, path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    flush(path.parent)


def remove_leftovers(path: Path) -> None:
    """Remove what writers of a file left behind when they were killed.

    Args:
        path: The file; nobody is writing it now.
    """
    name = re.compile(re.escape(f".{path.name}.") + f"[0-9a-f]{{{_LETTERS}}}")
    for folder in path.parent.iterdir() if path.parent.is_dir() else ():
        if name.fullmatch(folder.name):
            shutil.rmtree(folder, ignore_errors=True)


def flush(path: str | Path) -> None:
    """Make sure a rename survives a power cut; some file systems cannot, and say so.

    Args:
        path: A file, or the folder it is in.
    """
    with contextlib.suppress(OSError):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
