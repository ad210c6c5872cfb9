"""Turns of processes: many work at a time, and one that times is alone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, ReadWriteLock


class Turns:
    """Lets processes work at a time, but for moments that one of them asks to be alone for.

    Who asks waits for those at work, and who begins to work waits for the one who asks.

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
        self._lock = ReadWriteLock(path)
        # filelock lets new readers pass a writer that waits in a process with several threads
        self._gate = FileLock(path.with_name(f"{path.name}.gate.lock"))

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Work while others do."""
        with self._gate:
            self._lock.acquire_read()
        try:
            yield
        finally:
            self._lock.release()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Be the only one, in the midst of work."""
        self._lock.release()  # first: two who ask do not wait for each other
        try:
            with self._gate, self._lock.write_lock():
                yield
        finally:
            self._lock.acquire_read()
