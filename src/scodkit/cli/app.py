"""The verbs of ``scod``, put together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from scodkit.cli import (
    bench,
    calibrate,
    data,
    demo,
    explain,
    fit,
    inspect,
    merge,
    report,
    score,
)
from scodkit.version import __version__

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
app.add_typer(data.app, name="data")
app.add_typer(bench.app, name="bench")


@dataclass
class Run:
    """How one run of the command behaves.

    Args:
        debug: Show tracebacks.
    """

    debug: bool = False


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
