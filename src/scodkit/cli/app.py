"""The verbs of ``scod``, put together."""

from __future__ import annotations

from typing import Annotated

import typer

from scodkit.cli import bench, data
from scodkit.version import __version__

app = typer.Typer(
    name="scod",
    help="Know when a neural network is out of its depth.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.add_typer(data.app, name="data")
app.add_typer(bench.app, name="bench")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"scodkit {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, help="Say the version and stop.")
    ] = False,
) -> None:
    """Know when a neural network is out of its depth."""
