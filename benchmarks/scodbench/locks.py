"""Locks on files, which end with the process that holds them, however it ends."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path


def lock(handle: int, *, shared: bool = False, wait: bool = True) -> bool:
    """Lock a file until it is closed; a lock it has already is changed into the new one.

    Args:
        handle: Of the open file.
        shared: Let others lock it so, too; else nobody.
        wait: Until no other lock is in the way.

    Returns:
        Whether it is locked; without `wait` it may not be.
    """
    if sys.platform == "win32":  # has no such lock
        return True
    import fcntl

    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    fcntl.flock(handle, fcntl.LOCK_UN)  # as not all file systems do by themselves
    try:
        fcntl.flock(handle, kind if wait else kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class Turns:
    """Lets processes work at a time, but for moments that one of them asks to be alone for.

    Who asks waits for those at work, and who begins to work waits for those who ask.

    Args:
        path: Of a hidden file that all of them lock; another is beside it.

    Examples:
        >>> import tempfile
        >>> turns = Turns(Path(tempfile.mkdtemp()) / ".turns.lock")
        >>> with turns.working():
        ...     with turns.alone():
        ...         print("quiet")
        quiet
    """

    def __init__(self, path: Path) -> None:
        self._path, self._gate = path, path.with_name(f"{path.name}.gate.lock")
        self._handle: int | None = None

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Work while others do."""
        with self._path.open("a+") as file:
            with self._gate.open("a+") as gate:
                lock(gate.fileno())
                lock(file.fileno(), shared=True)
            self._handle = file.fileno()
            try:
                yield
            finally:
                self._handle = None

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Be the only one, in the midst of work."""
        assert self._handle is not None
        with self._gate.open("a+") as gate:
            lock(gate.fileno(), shared=True)  # nobody begins
            lock(self._handle)  # gives up what it shares first: two who ask do not block
            try:
                yield
            finally:
                lock(self._handle, shared=True)
