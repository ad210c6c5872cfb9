"""``scod bench``: the paper's domains, from data to tables and figures."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from scodkit.errors import OptionError

app = typer.Typer(help="Run the paper's domains; make its tables and figures.")

ROWS = Path("results/rows.jsonl")
SWEEPS = Path("results/sweeps.jsonl")

RowsOption = Annotated[Path, typer.Option("--rows", help="File of result rows, JSON lines.")]
DomainOption = Annotated[
    list[str] | None, typer.Option("--domain", help="May be repeated; all by default.")
]
SeedsOption = Annotated[int, typer.Option(min=1, help="Trained networks per domain.")]
DeviceOption = Annotated[str, typer.Option(help="cpu, or cuda.")]
ProcessesOption = Annotated[int, typer.Option(min=1, help="That work at a time.")]
DataOption = Annotated[
    Path | None,
    typer.Option("--data", help="Folder of the data; else SCODKIT_DATA, else a cache."),
]


@app.command()
def run(
    domain: DomainOption = None,
    method: Annotated[
        list[str] | None, typer.Option(help="May be repeated; all by default.")
    ] = None,
    seeds: SeedsOption = 5,
    device: DeviceOption = "cpu",
    processes: ProcessesOption = 1,
    rows: RowsOption = ROWS,
    data: DataOption = None,
) -> None:
    """Train, fit, score and judge; add a row for each domain, method, seed and unknown set.

    Rows that are there are kept, so a run that was stopped goes on where it was.

    Example: scod bench run --domain wine --seeds 5
    """
    from scodkit.bench import runner
    from scodkit.bench.domains import DOMAINS
    from scodkit.bench.methods import METHODS

    _check_device(device)
    domains = _chosen("domain", domain, DOMAINS)
    methods = _chosen("method", method, METHODS)
    where = runner.Where(rows, data, device=device)
    runner.run(domains, methods, seeds, where, processes=processes)
    table(rows)


@app.command()
def table(
    rows: RowsOption = ROWS,
    output: Annotated[
        Path | None, typer.Option(help="Folder for Markdown and CSV files as well.")
    ] = None,
) -> None:
    """Print the paper's table, its figures beside ours, and that of all methods.

    Example: scod bench table --output results
    """  # noqa: DOC501 (shown as help)
    from scodkit.bench import rows as result_rows
    from scodkit.bench.table import comma_separated, markdown, methods_table, paper_table

    found = result_rows.read(rows)
    if not found:
        raise OptionError(f"expected rows in {rows}, found none; type: scod bench run")
    tables = {"paper_table": paper_table(found), "methods_table": methods_table(found)}
    for name, lines in tables.items():
        typer.echo(markdown(lines))
        if output is not None:
            output.mkdir(parents=True, exist_ok=True)
            (output / f"{name}.md").write_text(markdown(lines), encoding="utf-8")
            (output / f"{name}.csv").write_text(comma_separated(lines), encoding="utf-8")


@app.command()
def sweep(
    domain: DomainOption = None,
    name: Annotated[
        list[str] | None, typer.Option("--sweep", help="May be repeated; all by default.")
    ] = None,
    seeds: SeedsOption = 1,
    device: DeviceOption = "cpu",
    processes: ProcessesOption = 1,
    rows: RowsOption = SWEEPS,
    data: DataOption = None,
) -> None:
    """Vary one choice at a time: rank, prior, layers, sketch; and compare with no sketch.

    Example: scod bench sweep --domain mnist --sweep rank
    """
    from scodkit.bench import runner
    from scodkit.bench.domains import DOMAINS
    from scodkit.bench.sweeps import SWEEPS as KNOWN

    _check_device(device)
    domains = _chosen("domain", domain, DOMAINS)
    where = runner.Where(rows, data, device=device)
    runner.run(
        domains, _chosen("sweep", name, KNOWN), seeds, where, sweep=True, processes=processes
    )


@app.command()
def figures(
    rows: RowsOption = ROWS,
    sweeps: Annotated[Path, typer.Option(help="File of the rows of sweeps.")] = SWEEPS,
    output: Annotated[Path, typer.Option(help="Folder for SVG and PNG files.")] = Path(
        "results/figures"
    ),
) -> None:
    """Draw every figure there are rows for.

    Example: scod bench figures
    """
    from scodkit.bench import figures as drawing
    from scodkit.bench import rows as result_rows

    for path in drawing.draw(result_rows.read(rows), result_rows.read(sweeps), output):
        typer.echo(str(path))


def _check_device(device: str) -> None:
    import torch

    if device == "cpu" or (device.split(":")[0] == "cuda" and torch.cuda.is_available()):
        return
    there = "cpu or cuda" if torch.cuda.is_available() else "cpu (torch finds no GPU here)"
    raise OptionError(f"expected the device {there}, got {device}; type --device cpu")


def _chosen(what: str, given: list[str] | None, known: Iterable[str]) -> list[str]:
    names = list(known)
    unknown = [name for name in given or [] if name not in names]
    if unknown:
        raise OptionError(
            f"expected a {what} among {', '.join(names)}, got {unknown[0]}; type "
            f"--{what} {names[0]}"
        )
    return given or names
