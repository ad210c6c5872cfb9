"""The verbs of ``scod``, and how errors and warnings are reported.

Neither this module nor the top of a verb's module imports torch, so that help and completion
come at once. A verb imports what it works with when it is run.
"""

from __future__ import annotations

import errno
import io
import sys
import traceback
import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from scodkit import __version__, errors
from scodkit.cli import output

_VERBS = ["demo", "fit", "calibrate", "score", "explain", "renew", "merge", "inspect"]
_VERBS += ["compare", "report"]
_NOT_IMPORTED = TyperCommand(name=None)
_MOVED = {"bench": "scodbench", "data": "scodbench data"}
_UNFORESEEN, _BAD = 1, 2  # exit codes
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class _Verbs(TyperGroup):
    """A group that imports a verb when it is needed, from the module of the same name.

    Args:
        settings: Settings of the group.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = dict.fromkeys(_VERBS, _NOT_IMPORTED)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a verb, or None if there is none of that name.

        Args:
            ctx: The command's context.
            cmd_name: Name of the verb.

        Raises:
            OptionError: If the verb has moved to another command.
        """
        if cmd_name in _MOVED:
            raise errors.OptionError(
                f"scod {cmd_name} is a command of its own, in the folder benchmarks/ of a "
                f"clone; type: pip install ./benchmarks, then: {_MOVED[cmd_name]} --help"
            )
        if self.commands.get(cmd_name) is _NOT_IMPORTED:
            alone = typer.Typer(add_completion=False)
            alone.command()(getattr(import_module(f"scodkit.cli.{cmd_name}"), cmd_name))
            self.commands[cmd_name] = typer.main.get_command(alone)
        return super().get_command(ctx, cmd_name)


app = typer.Typer(name="scod", cls=_Verbs, no_args_is_help=True, pretty_exceptions_enable=False)


def _show_version(requested: bool) -> None:
    if requested:
        typer.echo(f"scodkit {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    ctx: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, help="Say the version and stop."),
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
) -> None:
    """Know when a neural network is out of its depth.

    Exit codes: 0 done, 1 an error nobody foresaw, 2 bad input, 3 an alarm (scod score
    --fail-on-alarm), 130 stopped with Ctrl-C. Results go to stdout, all else to stderr.
    """
    ctx.ensure_object(dict)["debug"] = debug


def run_app(name: str, app: Callable[..., object]) -> None:
    """Run a command; an error becomes one paragraph on stderr and an exit code.

    Args:
        name: Name of the command, which its messages begin with.
        app: Runs it; takes the name as ``prog_name``, and as ``obj`` a dict in which it
            sets ``debug`` to have tracebacks shown.
    """
    settings: dict[str, bool] = {}
    output.program = name
    warnings.showwarning = _show_warning
    if isinstance(sys.stdout, io.TextIOWrapper):  # some locales have few letters
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        # typer itself ends well where a reader closes the pipe, and on Ctrl-C
        app(obj=settings, prog_name=name)
    except Exception as error:
        if settings.get("debug"):
            traceback.print_exception(error)
        text, code = _explained(error)
        output.note(" ".join(text.split()))
        sys.exit(code)


def _explained(error: Exception) -> tuple[str, int]:
    """Return the message for an error, and the exit code."""
    if isinstance(error, errors.ScodError):
        return str(error), _BAD
    if isinstance(error, MemoryError):
        return "not enough memory; type --batch-size or --rank with a smaller number", _BAD
    if isinstance(error, OSError):
        where = "" if error.filename is None else f" ({error.filename})"
        reason = str(error) if error.errno is None else f"{error.strerror}{where}"
        if error.errno in _NO_SPACE:
            reason += "; nothing was changed: free some space, and type the same command again"
        return reason, _BAD
    what = f"{type(error).__name__}: {error}"
    again = f"type {output.program} --debug and the same again"
    return f"an error nobody foresaw ({what}); {again}", _UNFORESEEN


def _show_warning(
    message: Warning | str, category: type[Warning], *where: Any, **_: Any
) -> None:
    """Show a warning: the message alone if it is ours, otherwise as Python does."""
    if category.__module__ == errors.__name__:
        output.note(f"warning: {message}")
    else:
        sys.stderr.write(warnings.formatwarning(message, category, *where[:2]))
