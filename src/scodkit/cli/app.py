"""The verbs of ``scod``, put together."""

from __future__ import annotations

from typing import Annotated

import typer

from scodkit.cli import (
    calibrate,
    demo,
    explain,
    fit,
    inspect,
    merge,
    report,
    score,
)
from scodkit.cli.main import Run
from scodkit.errors import OptionError
from scodkit.version import __version__

_AnyWords = Annotated[list[str] | None, typer.Argument(hidden=True)]

app = typer.Typer(
    name="scod",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command()(demo.demo)
app.command()(fit.fit)
app.command()(calibrate.calibrate)
app.command()(score.score)
app.command()(explain.explain)
app.command()(merge.merge)
app.command()(inspect.inspect)
app.command()(report.report)


@app.command(hidden=True, context_settings={"ignore_unknown_options": True})
def bench(words: _AnyWords = None) -> None:
    """Say where the experiments went."""
    _moved("bench")


@app.command(hidden=True, context_settings={"ignore_unknown_options": True})
def data(words: _AnyWords = None) -> None:
    """Say where the data sets of the experiments went."""
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
