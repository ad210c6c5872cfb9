"""``scod compare``: how well methods tell unknown inputs apart, and what they cost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Context, Option

from scodkit.cli import messages, options
from scodkit.cli import output as shown
from scodkit.cli.report import named_data
from scodkit.errors import OptionError

if TYPE_CHECKING:
    from torch import nn

    from scodkit.baselines import Baseline
    from scodkit.comparison import Method


def compare(  # noqa: PLR0913 (each a choice of its own)
    ctx: Context,
    model: options.ModelArgument,
    methods: Annotated[
        list[str],
        Argument(
            metavar="METHODS...",
            help="Saved monitors, Fused or baselines, as FILE or NAME=FILE; or names of "
            "baselines, such as Energy or, with --train, KNN.",
        ),
    ],
    known: Annotated[
        str,
        Option(
            metavar="DATA",
            help="Inputs like the training data, which no method has seen: "
            f"{options.DATA_FORMS}.",
        ),
    ],
    unknown: Annotated[
        list[str],
        Option(
            metavar="DATA",
            help="Inputs unlike the training data, as DATA or NAME=DATA. May be repeated.",
        ),
    ],
    train: Annotated[
        str | None,
        Option(metavar="DATA", help="Training data, for named baselines that learn."),
    ] = None,
    plot: Annotated[Path | None, Option(help="Draw it: .png, .svg or .pdf.")] = None,
    weights: options.WeightsOption = None,
    batch_size: options.BatchSizeOption = 64,
    device: options.DeviceOption = "cpu",
    config: options.ConfigOption = None,
    force: options.ForceOption = False,
    as_json: options.JsonOption = False,
) -> None:
    """Compare methods on the same inputs: separation, time, memory.

    \b
    scod compare model.py:net a.scod Energy --known a.csv --unknown b.csv
    scod compare model.py:net KNN --train t/ --known day/ --unknown night/
    """  # noqa: D301 (\b keeps the lines of the examples; shown as help)
    import scodkit
    from scodkit.cli.files import Form
    from scodkit.cli.loading import batches_of, load_model, running

    with shown.stoppable("no file was changed; type the same command again"):
        if plot is not None:
            shown.check_picture(plot, ctx.params)
        network = load_model(model, weights, device)
        specs = _distinct(methods, "method")
        saved = {
            name: _saved(spec, network, weights)
            for name, spec in specs.items()
            if spec not in _baselines()
        }
        notes = [one.notes for one in saved.values() if isinstance(one, scodkit.Monitor)]
        form = Form.of_fit(notes[0] if notes else {}, network)
        with running(next(iter(saved.values()), None)):
            for name in specs.keys() - saved.keys():
                data = None if train is None else batches_of(train, batch_size, form)
                saved[name] = _fitted(specs[name], network, saved, data)
            comparison = scodkit.compare(
                {name: saved[name] for name in specs},
                known=batches_of(known, batch_size, form),
                unknown={
                    name: batches_of(data, batch_size, form)
                    for name, data in _distinct(unknown, "unknown set").items()
                },
                progress=shown.shows_progress(),
            )
            if plot is not None:
                shown.write_picture(plot, comparison.plot())
    if as_json:
        shown.show_json({"rows": comparison.rows, "notes": comparison.notes})
    else:
        headings, *rows = comparison.table()
        shown.show_table(headings, rows)
        for line in comparison.legend.splitlines():
            shown.note(line)
    for note in comparison.notes:
        shown.note(note)


def _distinct(specs: Iterable[str], what: str) -> dict[str, str]:
    """Return what is named by its name: ``NAME=DATA``, or ``DATA`` alone, as in a report.

    Raises:
        OptionError: If a name is there twice.
    """
    found: dict[str, str] = {}
    for name, value in map(named_data, specs):
        if name in found:
            raise OptionError(
                f"expected a name of its own for each {what}, got {name!r} twice; type "
                f"another={value}"
            )
        found[name] = value
    return found


def _baselines() -> dict[str, type[Baseline]]:
    """Return the baselines of a single network by name."""
    from scodkit import baselines

    kinds = {name: getattr(baselines, name) for name in baselines.__all__}
    several = (baselines.Baseline, baselines.DeepEnsemble)
    return {
        name: kind
        for name, kind in kinds.items()
        if hasattr(kind, "learns") and kind not in several
    }


def _saved(spec: str, network: nn.Module, weights: Path | None) -> Method:
    """Return a saved method of a network.

    Raises:
        OptionError: If there is no such file, nor a baseline of that name.
    """
    from scodkit import Fused
    from scodkit.cli.loading import load_monitor
    from scodkit.numerics.artifact import header_of

    path = Path(spec)
    if not path.exists():
        raise OptionError(
            f"expected a saved monitor, Fused or baseline, or the name of one of the baselines "
            f"{', '.join(_baselines())}, found no {spec}; {_instead_of(spec)}"
        )
    header = header_of(path)
    if header.get("kind") == "fused":
        return Fused.load(path, network)
    if header.get("kind") == "baseline" and header.get("method") in _baselines():
        return _baselines()[header["method"]].load(path, network)
    return load_monitor(path, network, weights)


def _instead_of(spec: str) -> str:
    """Return what to type where there is neither a file nor a baseline of a name."""
    near = messages.nearest(spec, _baselines())
    return (
        messages.file_advice(spec)
        if near is None
        else f"type: {messages.corrected(spec, near)}"
    )


def _fitted(
    name: str, network: nn.Module, saved: Mapping[str, Any], train: Iterable[Any] | None
) -> Baseline:
    """Return a baseline by its name, with the likelihood of what was saved.

    Raises:
        OptionError: If nothing was saved, or training data is missing.
    """
    kind = _baselines()[name]
    if not saved:
        raise OptionError(
            f"expected a saved method, whose likelihood {name} takes, got none; type scod fit "
            "first, and the name of its monitor here"
        )
    if kind.learns and train is None:
        raise OptionError(f"expected training data for {name}, got none; type --train DATA")
    method = kind(network, next(iter(saved.values())).likelihood)
    return method.fit(train or (), progress=shown.shows_progress())
