"""``scodbench data``: the data sets of the paper's domains, found, fetched and checked."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    help="List, fetch and check the data sets of the paper's domains.", no_args_is_help=True
)

FolderOption = Annotated[
    Path | None,
    typer.Option("--data", help="Folder of the data; else SCODKIT_DATA, else a cache."),
]
NamesArgument = Annotated[
    list[str] | None, typer.Argument(help="Data sets; all by default.", show_default=False)
]


@app.command("list")
def list_() -> None:
    """Say which data sets there are, and under which terms."""
    from scodbench.data import DATASETS

    for name, dataset in DATASETS.items():
        how = f"scodbench data get {name}" if dataset.fetched else "not fetched"
        typer.echo(f"{name:15} {how:30} {dataset.licence}")


@app.command()
def get(names: NamesArgument = None, data: FolderOption = None) -> None:
    """Fetch data sets from where they are published, and check them.

    A file has its name only when all of it has come and its sha256 is right.

    Example: scodbench data get mnist wine
    """
    from scodbench import data as sets

    wanted = names or [name for name, dataset in sets.DATASETS.items() if dataset.fetched]
    for name in wanted:
        for path in sets.get(name, data):
            typer.echo(str(path))


@app.command()
def check(names: NamesArgument = None, data: FolderOption = None) -> None:
    """Say what is there, missing or wrong; exit code 1 if a data set is not complete.

    Example: scodbench data check
    """  # noqa: DOC501 (shown as help)
    from scodbench import data as sets

    complete = True
    for name in names or sets.DATASETS:
        found = sets.check_dataset(name, data)
        complete &= found.complete
        typer.echo(f"{name}: {'complete' if found.complete else 'not complete'}")
        for state in found.files:
            typer.echo(f"  {state.condition.value:15} {state.path} {state.wrong}".rstrip())
    if not complete:
        raise typer.Exit(1)
