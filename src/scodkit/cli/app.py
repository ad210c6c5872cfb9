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
from scodkit.cli import messages, output

_VERBS = ["demo", "fit", "calibrate", "score", "explain", "renew", "merge", "inspect"]
_VERBS += ["compare", "report"]
_NOT_IMPORTED = TyperCommand(name=None)
_MOVED = {"bench": "scodbench", "data": "scodbench data"}
_UNFORESEEN, _BAD = 1, 2  # exit codes
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class _Verb(TyperCommand):
    """A verb whose help fits a narrow terminal: two columns, options in their groups."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments and options.

        Args:
            ctx: The command's context.
            formatter: Takes the rows.
        """
        groups: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                kind = f"{param.param_type_name}s".capitalize()
                group = getattr(param, "rich_help_panel", None) or kind
                groups.setdefault(group, []).append(record)
        for name, records in groups.items():
            with formatter.section(name):
                formatter.write_dl(records)


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
                f"expected a verb of scod, got {cmd_name}, a command of its own in the folder "
                f"benchmarks/ of a clone; type: pip install ./benchmarks && "
                f"{_MOVED[cmd_name]} --help"
            )
        if self.commands.get(cmd_name) is _NOT_IMPORTED:
            alone = typer.Typer(add_completion=False, rich_markup_mode=None)
            alone.command(cls=_Verb)(
                getattr(import_module(f"scodkit.cli.{cmd_name}"), cmd_name)
            )
            self.commands[cmd_name] = typer.main.get_command(alone)
        return super().get_command(ctx, cmd_name)


app = typer.Typer(
    name="scod",
    cls=_Verbs,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


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
    """Run a command; an error becomes a few lines on stderr and an exit code.

    Args:
        name: Name of the command, which its messages begin with.
        app: Runs it; takes the name as ``prog_name``, and as ``obj`` a dict in which it
            sets ``debug`` to have tracebacks shown.
    """
    settings: dict[str, bool] = {}
    messages.program = name
    warnings.showwarning = _show_warning
    if isinstance(sys.stdout, io.TextIOWrapper):  # some locales have few letters
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        # typer itself ends well where a reader closes the pipe, and on Ctrl-C
        code = app(obj=settings, prog_name=name, standalone_mode=False)
    except Exception as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # nothing was typed
            typer.echo(str(error), err=True)
            sys.exit(_BAD)
        if settings.get("debug"):
            traceback.print_exception(error)
        text, code = _explained(error)
        output.say(text, more=errors.more_about(type(error)))
    sys.exit(code if isinstance(code, int) else 0)


def _explained(error: Exception) -> tuple[str, int]:
    """Return the message for an error, and the exit code."""
    if isinstance(error, messages.UsageError):
        return messages.usage_text(error), _BAD
    if isinstance(error, errors.MissingFileError) and error.path:
        return f"{error}; {messages.file_advice(error.path)}", _BAD
    if isinstance(error, errors.ScodError):
        return str(error), _BAD
    if isinstance(error, MemoryError):
        return (
            "expected enough memory, got too little; type --batch-size or --rank with a "
            "smaller number"
        ), _BAD
    if isinstance(error, OSError):
        where = "" if error.filename is None else f" ({error.filename})"
        reason = str(error) if error.errno is None else f"{error.strerror}{where}"
        todo = "look at the file, and type the same command again"
        if error.errno in _NO_SPACE:
            todo = "nothing was changed: free some space, and type the same command again"
        return f"expected to read and write files, got {reason}; {todo}", _BAD
    what = f"{type(error).__name__}: {error}".replace("; ", ", ")
    return (
        f"expected to come through, got an error nobody foresaw ({what}); type: "
        f"{messages.debug_command()}"
    ), _UNFORESEEN


def _show_warning(
    message: Warning | str, category: type[Warning], *where: Any, **_: Any
) -> None:
    """Show a warning: in lines of its parts if it is ours, otherwise as Python does."""
    if category.__module__ == errors.__name__:
        output.say(str(message), "warning: ", errors.more_about(category))
    else:
        sys.stderr.write(warnings.formatwarning(message, category, *where[:2]))
