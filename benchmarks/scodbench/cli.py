"""``scodbench``: the paper's experiments, from data to rows, tables and figures."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import torch
import typer
from typer.core import TyperGroup

from scodbench import rows as result_rows
from scodbench import runner
from scodbench.data.cli import app as data_verbs
from scodbench.domains import DOMAINS, OPTIONAL_DOMAINS
from scodbench.identity import check_device, device_name
from scodbench.jobs import ALL_DOMAINS, Where
from scodbench.methods import METHODS
from scodbench.rows import (
    FUSED_ROWS_FILE,
    FUSED_SWEEP_FILE,
    PROJECTED_SWEEP_FILE,
    ROWS_FILE,
    SWEEPS_FILE,
    Row,
)
from scodbench.speed.cli import alarms, layers, prior, sketch, speed
from scodbench.sweeps import SWEEPS
from scodkit import __version__
from scodkit.cli import output as shown
from scodkit.cli.app import run_app
from scodkit.errors import OptionError

if TYPE_CHECKING:
    from scodbench.tables.paper import Table


class _InOrder(TyperGroup):
    """Verbs in the order of the work, not groups after commands."""

    def list_commands(self, ctx: object) -> list[str]:
        return [
            *("run", "sweep", "table", "figures", "fused", "projected"),
            *("data", "speed", "sketch", "alarms", "layers", "prior"),
        ]


app = typer.Typer(
    name="scodbench", cls=_InOrder, no_args_is_help=True, pretty_exceptions_enable=False
)
app.add_typer(data_verbs, name="data")
app.command()(speed)
app.command()(sketch)
app.command()(alarms)
app.command()(layers)
app.command()(prior)

_SLOW = ("taxinet", "cifar10", "cifar10_all", "taxinet_xplane")  # on a CPU
_HOURS = "its large network takes hours on a CPU; type --device cuda"
_FAILED = 1  # exit code, when there are rows that failed


def _names(known: Iterable[str]) -> str:
    return f"May be repeated; all by default: {', '.join(known)}."


_DOMAINS = f"{_names(DOMAINS)[:-1]}; only by name: {', '.join(OPTIONAL_DOMAINS)}."


RowsOption = Annotated[Path, typer.Option("--rows", help="File of result rows, JSON lines.")]
RowFilesOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--rows",
        help=f"File of result rows; may be repeated, {ROWS_FILE} and {FUSED_ROWS_FILE} by "
        "default. Of the same job the later rows count.",
        show_default=False,
    ),
]
SweepsOption = Annotated[Path, typer.Option("--sweeps", help="File of the rows of sweeps.")]
DomainOption = Annotated[list[str] | None, typer.Option("--domain", help=_DOMAINS)]
SeedsOption = Annotated[int, typer.Option(min=1, help="Trained networks per domain.")]
DeviceOption = Annotated[str, typer.Option(help="cpu, or cuda.")]
ProcessesOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="That work at a time, and wait while one times; one per core by default, with "
        "a GPU one.",
        show_default=False,
    ),
]
DataOption = Annotated[
    Path | None,
    typer.Option("--data", help="Folder of the data; else SCODKIT_DATA, else a cache."),
]


@app.callback()
def _options(
    ctx: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
) -> None:
    """Run the paper's domains; make its tables and figures; measure speed and sketches."""
    ctx.ensure_object(dict)["debug"] = debug


@app.command()
def run(
    domain: DomainOption = None,
    method: Annotated[list[str] | None, typer.Option(help=_names(METHODS))] = None,
    seeds: SeedsOption = 5,
    device: DeviceOption = "cpu",
    processes: ProcessesOption = None,
    rows: RowsOption = ROWS_FILE,
    data: DataOption = None,
) -> None:
    """Train, fit, score and judge; add a row for each domain, method, seed and unknown set.

    Rows that are there are kept, so a run that was stopped goes on where it was.

    Example: scodbench run --domain wine --seeds 5
    """
    from scodbench.tables.paper import methods_table, paper_table

    methods = _chosen("method", method, METHODS)
    where = Where(rows, data, device=device)
    domains, found = _run(domain, methods, seeds, where, processes, sweep=False)
    tables = {"paper_table": paper_table(found, rows)}
    _print_tables({**tables, "methods_table": methods_table(found, rows)})
    _say_what_is_missing(found, where, domain=domains, method=tuple(methods))


@app.command()
def table(
    rows: RowFilesOption = None,
    sweeps: SweepsOption = SWEEPS_FILE,
    output: Annotated[
        Path | None, typer.Option(help="Folder for Markdown and CSV files as well.")
    ] = None,
) -> None:
    """Print the paper's table, its figures beside ours, and all others there are rows for.

    Example: scodbench table --output results
    """
    from scodbench.tables import choices
    from scodbench.tables.checks import checks
    from scodbench.tables.headline import headline, winners
    from scodbench.tables.paper import methods_table, paper_table
    from scodbench.tables.sweeps import fidelity_table, sketch_table

    files = _files(rows)
    found, swept, told = _rows_in(*files), result_rows.read(sweeps), _named(files)
    tables = {
        "winners": winners(found, result_rows.latest(result_rows.read(FUSED_SWEEP_FILE)), told),
        "headline": headline(found, told),
        "paper_table": paper_table(found, told),
        "methods_table": methods_table(found, told),
        "sketch_table": sketch_table(swept, sweeps),
        "fidelity_table": fidelity_table(swept, sweeps),
        "checks": checks(found, swept),
        "layers_table": choices.layers_table(swept, sweeps),
        "rank_table": choices.rank_table(swept, sweeps),
        "prior_table": choices.prior_table(swept, sweeps),
    }
    _print_tables({name: own for name, own in tables.items() if own.lines}, output)


@app.command()
def sweep(
    domain: DomainOption = None,
    name: Annotated[list[str] | None, typer.Option("--sweep", help=_names(SWEEPS))] = None,
    seeds: SeedsOption = 1,
    device: DeviceOption = "cpu",
    processes: ProcessesOption = None,
    rows: RowsOption = SWEEPS_FILE,
    data: DataOption = None,
) -> None:
    """Vary one choice at a time: rank, prior, layers, sketch; and compare with no sketch.

    Rows that are there are kept, so a run that was stopped goes on where it was.

    Example: scodbench sweep --domain mnist --sweep rank
    """
    names = _chosen("sweep", name, SWEEPS)
    where = Where(rows, data, device=device)
    domains, found = _run(domain, names, seeds, where, processes, sweep=True)
    _say_what_is_missing(found, where, domain=domains, sweep=tuple(names))


@app.command()
def figures(
    rows: RowFilesOption = None,
    sweeps: SweepsOption = SWEEPS_FILE,
    output: Annotated[Path, typer.Option(help="Folder for SVG and PNG files.")] = Path(
        "results/figures"
    ),
) -> None:
    """Draw every figure there are rows for.

    Example: scodbench figures
    """  # noqa: DOC501 (shown as help)
    from scodbench.figures import draw

    files = _files(rows)
    found = _rows_in(*files)
    if not sweeps.exists():
        shown.note(f"no rows of sweeps in {sweeps}; for their figures type: scodbench sweep")
    written = draw(found, result_rows.read(sweeps), output)
    if not written:
        raise OptionError(
            f"expected rows of {', '.join(ALL_DOMAINS)} in {_named(files)}, found none to "
            "draw; type: scodbench run"
        )
    for path in written:
        typer.echo(str(path))


@app.command()
def fused(
    rows: RowsOption = FUSED_ROWS_FILE,
    sweeps: SweepsOption = FUSED_SWEEP_FILE,
    output: Annotated[Path | None, typer.Option(help="Folder for tables as well.")] = None,
    figures: Annotated[Path | None, typer.Option(help="Folder for the figure.")] = None,
) -> None:
    """Print the tables of the study of Fused, from rows of all methods and of its sweep.

    Example: scodbench fused --output results --figures docs
    """
    from scodbench.figures.fused import draw_fused
    from scodbench.tables import fused as study
    from scodbench.tables.headline import headline

    found, swept = _rows_in(rows), result_rows.latest(_rows_in(sweeps))
    tables = {
        "fused_methods": headline(found, rows),
        "fused_parts": study.parts_table(swept, sweeps),
        "fused_ways": study.ways_table(swept, sweeps),
        "fused_left_out": study.left_out_table(swept, sweeps),
        "fused_alarms": study.alarms_table(swept, sweeps),
        "fused_absurd": study.absurd_table(swept, sweeps),
        "fused_failures": study.failures_table(swept, sweeps),
        "fused_cost": study.cost_table(found, rows),
    }
    _print_tables({name: own for name, own in tables.items() if own.lines}, output)
    if figures is not None:
        for path in draw_fused(found, figures):
            typer.echo(str(path))


@app.command()
def projected(
    sweeps: SweepsOption = PROJECTED_SWEEP_FILE,
    output: Annotated[Path | None, typer.Option(help="Folder for the table as well.")] = None,
) -> None:
    """Print the table of the study of projected weights, from rows of its sweep.

    Example: scodbench projected --output results
    """
    from scodbench.tables.projected import projected_table

    found = result_rows.latest(_rows_in(sweeps))
    _print_tables({"projected": projected_table(found, sweeps)}, output)


def _run(
    domain: list[str] | None,
    names: Sequence[str],
    seeds: int,
    where: Where,
    processes: int | None,
    *,
    sweep: bool,
) -> tuple[tuple[str, ...], list[Row]]:
    """Return the domains that were run, and all rows.

    Raises:
        Exit: If Ctrl-C was pressed.
    """
    check_device(where.device)
    domains = _domains(domain, where.device)
    if processes is None:
        processes = _cores() if where.device == "cpu" else 1
    try:
        found = runner.run(domains, names, seeds, where, sweep=sweep, processes=processes)
    except KeyboardInterrupt:
        kept = len(result_rows.read(where.rows))
        shown.note(
            f"stopped; {kept} rows are in {where.rows}, and the same command goes on from there"
        )
        raise typer.Exit(shown.STOPPED) from None
    return domains, found


def _domains(given: list[str] | None, device: str) -> tuple[str, ...]:
    if not given:
        wanted = [name for name in DOMAINS if device != "cpu" or name not in _SLOW]
        for name in DOMAINS.keys() - wanted:
            shown.note(f"{name} is left out: {_HOURS}, or ask for it with --domain {name}")
        return tuple(wanted)
    wanted = _chosen("domain", given, ALL_DOMAINS)
    for name in wanted:
        if device == "cpu" and name in _SLOW:
            shown.note(f"{name}: {_HOURS}")
    return tuple(wanted)


def _cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _files(given: list[Path] | None) -> list[Path]:
    """Return the files of rows that are asked for: all there are, where nothing is said."""
    if given:
        return given
    return [ROWS_FILE, *(path for path in (FUSED_ROWS_FILE,) if path.exists())]


def _named(files: Sequence[Path]) -> str:
    return " and ".join(map(str, files))


def _rows_in(*files: Path) -> list[Row]:
    """Return the rows of files, one after the other.

    Raises:
        OptionError: If there are none.
    """
    found = [row for path in files for row in result_rows.read(path)]
    if not found:
        raise OptionError(
            f"expected rows in {_named(files)}, found none; type: scodbench run --rows "
            f"{files[0]}"
        )
    return found


def _print_tables(tables: Mapping[str, Table], output: Path | None = None) -> None:
    from scodbench.tables.paper import comma_separated, markdown

    for name, own in tables.items():
        typer.echo(markdown(own))
        if output is not None:
            output.mkdir(parents=True, exist_ok=True)
            shown.write_text(output / f"{name}.md", markdown(own))
            shown.write_text(output / f"{name}.csv", comma_separated(own))


def _say_what_is_missing(rows: Iterable[Row], where: Where, **wanted: tuple[str, ...]) -> None:
    """Print what has no figures, and why.

    Raises:
        Exit: If something failed.
    """
    device = device_name(torch.device(where.device))
    own = list(result_rows.select(rows, device=device, **wanted))
    for line in runner.left_out(own):
        typer.echo(line)
    others = sorted({str(row.get("scodkit")) for row in own} - {__version__})
    if others:
        shown.note(
            f"rows of scodkit {', '.join(others)} were kept, this is {__version__}; to make "
            "them anew type --rows and another file"
        )
    if any(row.get("failed") for row in result_rows.latest(own)):
        raise typer.Exit(_FAILED)


def _chosen(what: str, given: list[str] | None, known: Iterable[str]) -> list[str]:
    names = list(known)
    unknown = [name for name in given or [] if name not in names]
    if unknown:
        raise OptionError(
            f"expected a {what} among {', '.join(names)}, got {unknown[0]}; type "
            f"--{what} {names[0]}"
        )
    return given or names


def main() -> None:
    """Run the command; errors are one paragraph, and an exit code."""
    run_app("scodbench", app)


if __name__ == "__main__":
    main()
