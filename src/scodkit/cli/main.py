"""``scod``: the command itself."""

from __future__ import annotations

import errno
import io
import sys
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from scodkit import errors

_NO_TYPER = "expected the command line's own libraries; type: pip install 'scodkit[cli]'"
_UNFORESEEN, _BAD = 1, 2  # exit codes

_FULL = "free some space, or choose another place, and type the same command again"
_INSTEAD = {
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL,
    errno.EFBIG: _FULL,
    errno.EACCES: "choose a place you may use",
    errno.EPERM: "choose a place you may use",
    errno.EROFS: "choose a place you may use",
}


@dataclass
class Run:
    """How one run of a command behaves.

    Args:
        debug: Show tracebacks.
    """

    debug: bool = False


def main() -> None:
    """Run ``scod``.

    Raises:
        ImportError: If something else than the command line's own libraries is missing.
    """
    try:
        import rich  # noqa: F401 (which verbs import later)

        from scodkit.cli.app import app
    except ImportError as error:
        if error.name not in ("typer", "rich", "click"):
            raise
        sys.exit(_NO_TYPER)
    run_app("scod", app)


def run_app(name: str, app: Callable[..., object]) -> None:
    """Run a command; errors are one paragraph, and an exit code.

    Args:
        name: Of the command, before its messages.
        app: What runs it, with a `Run` as ``obj`` and its name as ``prog_name``.
    """
    run = Run()
    warnings.showwarning = partial(_warn, name)
    if isinstance(sys.stdout, io.TextIOWrapper):  # some locales have few letters
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        # typer itself ends well where a reader has had enough, and on Ctrl-C
        app(obj=run, prog_name=name)
    except Exception as error:
        if run.debug:
            traceback.print_exception(error)
        text, code = _said(error, name)
        sys.stderr.write(f"{name}: {_visible(' '.join(text.split()))}\n")
        sys.exit(code)


def _said(error: Exception, name: str) -> tuple[str, int]:
    """Return what to say about an error, and the exit code."""
    if isinstance(error, errors.ScodError):
        return str(error), _BAD
    if isinstance(error, OSError):
        where = "" if error.filename is None else f" ({error.filename})"
        instead = _INSTEAD.get(error.errno or 0)
        reason = str(error) if error.errno is None else f"{error.strerror}{where}"
        return reason if instead is None else f"{reason}; nothing was changed: {instead}", _BAD
    if isinstance(error, MemoryError):
        return "not enough memory; type --batch-size or --rank with a smaller number", _BAD
    if type(error).__name__ == "SafetensorError":  # what it calls a disk that is full
        return f"the file could not be written ({error}); nothing was changed: {_FULL}", _BAD
    what = f"{type(error).__name__}: {error}"
    return f"an error nobody foresaw ({what}); type {name} --debug and the same again", (
        _UNFORESEEN
    )


def _visible(text: str) -> str:
    from scodkit.cli.output import visible  # which imports what may be missing

    return visible(text)


def _warn(
    name: str, message: Warning | str, category: type[Warning], *where: Any, **_: Any
) -> None:
    """Show a warning: of ours the words alone, of others as Python does."""
    if category.__module__ == errors.__name__:
        sys.stderr.write(f"{name}: warning: {_visible(str(message))}\n")
    else:
        sys.stderr.write(warnings.formatwarning(message, category, *where[:2]))


if __name__ == "__main__":
    main()
