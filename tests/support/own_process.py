"""Programs that need a process of their own, such as those that measure its memory."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator


def printed_by(program: str, *arguments: object, **environment: str) -> str:
    """Run a program in a process of its own, and return what it printed; it must not fail."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Start processes that Ctrl-C ends, even where this one ignores it, as shells' jobs do."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
