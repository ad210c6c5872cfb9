"""``scod explain``: what the scores of inputs are made of."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from scodkit.cli import output as shown
from scodkit.cli.config import ConfigOption
from scodkit.cli.options import (
    DATA_FORMS,
    BatchSizeOption,
    DeviceOption,
    ForceOption,
    JsonOption,
    ModelArgument,
    MonitorArgument,
    WeightsOption,
)
from scodkit.errors import OptionError

if TYPE_CHECKING:
    from scodkit import Explanation, Monitor
    from scodkit.cli.inputs import Batches
    from scodkit.explain import Shares

_PICTURES = (".png", ".svg", ".pdf")
_MARK = "drawn by scod explain"  # in every one: it may be replaced by another
_LARGEST = 5  # shares on a line for people


def explain(  # noqa: PLR0913 (each a choice of its own)
    ctx: typer.Context,
    monitor: MonitorArgument,
    model: ModelArgument,
    inputs: Annotated[
        str,
        typer.Argument(
            metavar="INPUTS",
            help="A file of arrays (.npy, .npz, .csv), a folder of images, or a callable that "
            "returns a tensor.",
            show_default=False,
        ),
    ],
    top: Annotated[int, typer.Option(min=1, help="Explain this many, the most atypical.")] = 3,
    sample: Annotated[
        list[int] | None,
        typer.Option(help="Explain this one instead, counted from 0; may be repeated."),
    ] = None,
    references: Annotated[
        str | None,
        typer.Option(help=f"Name the nearest of these, too: {DATA_FORMS}."),
    ] = None,
    saliency: Annotated[
        bool, typer.Option("--saliency", help="Slopes of the score in the input, too.")
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option(help="Draw the first one: .png, .svg or .pdf."),
    ] = None,
    weights: WeightsOption = None,
    batch_size: BatchSizeOption = 64,
    device: DeviceOption = "cpu",
    config: ConfigOption = None,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Split scores into shares of layers and of output directions, which sum to them.

    \b
    scod explain monitor.scod model.py:net new.csv --top 1 --plot why.png
    scod explain monitor.scod model.py:net new.csv --sample 4 --references train.csv
    """  # noqa: D301, DOC501 (\b keeps the lines of the examples; shown as help)
    import torch

    from scodkit.cli.inputs import Batches, batches_of
    from scodkit.cli.loading import running
    from scodkit.cli.saved import open_monitor

    with shown.stoppable("no file was changed; type the same command again"):
        if plot is not None:
            _check_plot(plot, ctx.params, force)
        found, form = open_monitor(monitor, model, weights, device)
        progress = shown.shows_progress(as_json)
        asked = batches_of(inputs, batch_size, form, progress=progress)
        if not isinstance(asked, Batches):
            raise OptionError(
                f"expected inputs that can be read one by one, got batches from {inputs}; let "
                "it return a tensor, or pass a file"
            )
        rows = _rows(found, asked, sample, top, progress)
        with running(found):
            known = None
            if references is not None:
                alike = batches_of(references, batch_size, form, progress=progress)
                known = found.references(alike, progress=progress)
            batch = torch.cat([asked.read(slice(row, row + 1)) for row in rows])
            why = found.explain(batch, saliency=saliency, references=known)
            if plot is not None:
                _draw(plot, why)
    names = [asked.dataset.name(row) for row in rows]
    _show(names, why, as_json)
    if plot is not None:
        shown.note(f"drew {names[0]} in {plot}")


def _check_plot(path: Path, given: Mapping[str, object], force: bool) -> None:
    if path.suffix.lower() not in _PICTURES:
        raise OptionError(
            f"expected a file that ends in {', '.join(_PICTURES)} to draw in, got {path}"
        )
    shown.check_output(
        path, given, lambda file: _MARK.encode() in file.read_bytes(), force=force
    )


def _rows(
    monitor: Monitor, asked: Batches, sample: Sequence[int] | None, top: int, progress: bool
) -> list[int]:
    """Return which samples to explain, the most atypical first if none is named.

    Raises:
        OptionError: If one that is named is not there.
    """
    from scodkit.cli.answers import Alarm, answers_to

    for row in sample or ():
        if not 0 <= row < len(asked.dataset):
            raise OptionError(
                f"expected a sample from 0 to {len(asked.dataset) - 1}, got {row}; type "
                "--sample 0"
            )
    if sample:
        return list(sample)
    answers = answers_to(monitor, asked, Alarm(None), progress)
    order = sorted(range(len(answers)), key=lambda row: -answers[row].score)
    return order[:top]


def _draw(path: Path, why: Explanation) -> None:
    drawn = io.BytesIO()
    kind, mark = path.suffix[1:].lower(), {"Creator": _MARK}
    why.plot(0).savefig(drawn, format=kind, metadata=mark)
    shown.write_bytes(path, drawn.getvalue())


def _show(names: Sequence[int | str], why: Explanation, as_json: bool) -> None:
    for place, name in enumerate(names):
        document = _document(name, why, place)
        if as_json:
            shown.show_json(document)
            continue
        facts = {
            "input": str(name),
            "score": f"{shown.number(document['score'])} nats",
            "layers": _largest(document["layers"]),
            "directions": _largest(document["directions"]),
        }
        if why.nearest is not None:
            facts["nearest"] = ", ".join(
                f"sample {own['sample']} at {shown.number(own['distance'])}"
                for own in document["nearest"]
            )
        if why.saliency is not None:
            slopes = why.saliency.gradient[place].flatten()
            most = slopes.abs().argsort(descending=True)[:_LARGEST].tolist()
            facts["slopes"] = ", ".join(f"{i}: {shown.number(float(slopes[i]))}" for i in most)
        shown.show_facts(facts)
        if place + 1 < len(names):
            typer.echo()


def _document(name: int | str, why: Explanation, place: int) -> dict[str, Any]:
    document: dict[str, Any] = {
        "input": name,
        "score": float(why.score[place]),
        "layers": _by_name(why.layers, place),
        "directions": _by_name(why.directions, place),
    }
    if why.nearest is not None:
        near, far = why.nearest.index[place].tolist(), why.nearest.distance[place].tolist()
        document["nearest"] = [
            {"sample": one, "distance": away} for one, away in zip(near, far, strict=True)
        ]
    if why.saliency is not None:
        document["slopes"] = why.saliency.gradient[place].tolist()
    return document


def _by_name(shares: Shares, place: int) -> dict[str, float]:
    return dict(zip(shares.names, shares.values[place].tolist(), strict=True))


def _largest(shares: dict[str, float]) -> str:
    """Return the largest shares as percentages of their sum."""
    whole = sum(shares.values())
    order = sorted(shares, key=lambda name: -abs(shares[name]))
    parts = [f"{name} {shares[name] / whole if whole else 0:.0%}" for name in order[:_LARGEST]]
    left = len(order) - _LARGEST
    return ", ".join(parts) + (f" and {left} more" if left > 0 else "")
