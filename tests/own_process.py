"""Programs that need a process of their own, such as those that measure its memory."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap


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
