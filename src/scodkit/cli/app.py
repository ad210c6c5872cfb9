"""The verbs of ``scod``, put together.

Nothing here, nor at the top of a verb's module, imports torch: help and completion are to be
there at once. A verb imports what it works with when it is run.
"""

from __future__ import annotations

from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from scodkit import __version__
from scodkit.cli.main import Run
from scodkit.errors import OptionError

_VERBS = (
    *("demo", "fit", "calibrate", "score", "explain"),
    *("renew", "merge", "inspect", "report"),
)
_NOT_IMPORTED = TyperCommand(name=None)

_AnyWords = Annotated[list[str] | None, typer.Argument(hidden=True)]


class _Verbs(TyperGroup):
    """Verbs that are imported when they are asked for, each from the module of its name.

    Args:
        settings: As of any group.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = {**dict.fromkeys(_VERBS, _NOT_IMPORTED), **self.commands}

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a verb, or None if there is none of that name.

        Args:
            ctx: Of the command.
            cmd_name: Of the verb.
        """
        if self.commands.get(cmd_name) is _NOT_IMPORTED:
            alone = typer.Typer(add_completion=False)
            alone.command()(getattr(import_module(f"scodkit.cli.{cmd_name}"), cmd_name))
            self.commands[cmd_name] = typer.main.get_command(alone)
        return super().get_command(ctx, cmd_name)


app = typer.Typer(
    name="scod",
    cls=_Verbs,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


@app.command(hidden=True, context_settings={"ignore_unknown_options": True})
def bench(words: _AnyWords = None) -> None:
    """Moved: pip install ./benchmarks, then scodbench."""
    _moved("bench")


@app.command(hidden=True, context_settings={"ignore_unknown_options": True})
def data(words: _AnyWords = None) -> None:
    """Moved: pip install ./benchmarks, then scodbench data."""
    _moved("data")


def _moved(verb: str) -> None:
    now = "scodbench" if verb == "bench" else "scodbench data"
    raise OptionError(
        f"scod {verb} is a command of its own, in the folder benchmarks/ of a clone; type: "
        f"pip install ./benchmarks, then: {now} --help"
    )


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"scodkit {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    ctx: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, help="Say the version and stop.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
) -> None:
    """Know when a neural network is out of its depth.

    Exit codes: 0 done, 1 an error nobody foresaw, 2 bad input, 3 an alarm (scod score
    --fail-on-alarm), 130 stopped with Ctrl-C. Results go to stdout, all else to stderr.
    """
    ctx.ensure_object(Run).debug = debug
