"""``scod explain``: what the scores of inputs are made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from scodkit.cli import options
from scodkit.cli import output as shown
from scodkit.errors import OptionError
from scodkit.numerics.files import replacing

if TYPE_CHECKING:
    from scodkit import Explanation, Monitor
    from scodkit.cli.files import Batches
    from scodkit.explain import Shares

_PICTURES = (".png", ".svg", ".pdf")
_MARK = "drawn by scod explain"  # in every picture, which may be replaced by another
_LARGEST = 5  # shares on a line for people


def explain(  # noqa: PLR0913 (each a choice of its own)
    ctx: typer.Context,
    monitor: options.MonitorArgument,
    model: options.ModelArgument,
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
        typer.Option(help=f"Name the nearest of these, too: {options.DATA_FORMS}."),
    ] = None,
    saliency: Annotated[
        bool, typer.Option("--saliency", help="Slopes of the score in the input, too.")
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option(help="Draw the first one: .png, .svg or .pdf."),
    ] = None,
    weights: options.WeightsOption = None,
    batch_size: options.BatchSizeOption = 64,
    device: options.DeviceOption = "cpu",
    config: options.ConfigOption = None,
    force: options.ForceOption = False,
    as_json: options.JsonOption = False,
) -> None:
    """Split scores into shares of layers and of output directions, which sum to them.

    \b
    scod explain monitor.scod model.py:net new.csv --top 1 --plot why.png
    scod explain monitor.scod model.py:net new.csv --sample 4 --references train.csv
    """  # noqa: D301, DOC501 (\b keeps the lines of the examples; shown as help)
    import torch

    from scodkit.cli.files import Batches
    from scodkit.cli.loading import batches_of, open_monitor, running

    with shown.stoppable("no file was changed; type the same command again"):
        if plot is not None:
            _check_plot(plot, ctx.params, force)
        opened, form = open_monitor(monitor, model, weights, device)
        progress = shown.shows_progress(as_json)
        batches = batches_of(inputs, batch_size, form, progress=progress)
        if not isinstance(batches, Batches):
            raise OptionError(
                f"expected inputs that can be read one by one, got batches from {inputs}; let "
                "it return a tensor, or pass a file"
            )
        rows = _rows(opened, batches, sample, top, progress)
        with running(opened):
            known = None
            if references is not None:
                alike = batches_of(references, batch_size, form, progress=progress)
                known = opened.references(alike, progress=progress)
            batch = torch.cat([batches.read(slice(row, row + 1)) for row in rows])
            explanation = opened.explain(batch, saliency=saliency, references=known)
            if plot is not None:
                with replacing(plot) as temporary:
                    explanation.plot(0).savefig(
                        temporary, format=plot.suffix[1:].lower(), metadata={"Creator": _MARK}
                    )
    names = [batches.dataset.name(row) for row in rows]
    _show(names, explanation, as_json)
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
    monitor: Monitor, batches: Batches, sample: list[int] | None, top: int, progress: bool
) -> list[int]:
    """Return which samples to explain, the most atypical first if none is named.

    Raises:
        OptionError: If one that is named is not there.
    """
    import torch

    from scodkit.cli.loading import scored_batches

    for row in sample or ():
        if not 0 <= row < len(batches.dataset):
            raise OptionError(
                f"expected a sample from 0 to {len(batches.dataset) - 1}, got {row}; type "
                "--sample 0"
            )
    if sample:
        return sample
    scores = torch.cat([one.score for _, one in scored_batches(monitor, batches, progress)])
    rows: list[int] = scores.argsort(descending=True, stable=True)[:top].tolist()
    return rows


def _show(names: Sequence[int | str], explanation: Explanation, as_json: bool) -> None:
    for place, name in enumerate(names):
        document = _document(name, explanation, place)
        if as_json:
            shown.show_json(document)
            continue
        facts = {
            "input": str(name),
            "score": f"{shown.number(document['score'])} nats",
            "layers": _largest(document["layers"]),
            "directions": _largest(document["directions"]),
        }
        if explanation.nearest is not None:
            facts["nearest"] = ", ".join(
                f"sample {near['sample']} at {shown.number(near['distance'])}"
                for near in document["nearest"]
            )
        if explanation.saliency is not None:
            slopes = explanation.saliency.gradient[place].flatten()
            most = slopes.abs().argsort(descending=True)[:_LARGEST].tolist()
            facts["slopes"] = ", ".join(f"{i}: {shown.number(float(slopes[i]))}" for i in most)
        shown.show_facts(facts)
        if place + 1 < len(names):
            typer.echo()


def _document(name: int | str, explanation: Explanation, place: int) -> dict[str, Any]:
    document: dict[str, Any] = {
        "input": name,
        "score": float(explanation.score[place]),
        "layers": _by_name(explanation.layers, place),
        "directions": _by_name(explanation.directions, place),
    }
    if explanation.nearest is not None:
        samples = explanation.nearest.index[place].tolist()
        distances = explanation.nearest.distance[place].tolist()
        document["nearest"] = [
            {"sample": sample, "distance": distance}
            for sample, distance in zip(samples, distances, strict=True)
        ]
    if explanation.saliency is not None:
        document["slopes"] = explanation.saliency.gradient[place].tolist()
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
