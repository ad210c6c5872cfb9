"""``scod explain``: what the scores of inputs are made of."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Context, Option, echo

import scodkit
from scodkit.cli import options
from scodkit.cli import output as shown
from scodkit.errors import OptionError


def explain(  # noqa: PLR0913 (each a choice of its own)
    ctx: Context,
    monitor: options.MonitorArgument,
    model: options.ModelArgument,
    inputs: Annotated[
        str,
        Argument(
            metavar="INPUTS",
            help="A file of arrays (.npy, .npz, .csv), a folder of images, or a callable that "
            "returns a tensor.",
        ),
    ],
    top: Annotated[int, Option(min=1, help="Explain this many, the most atypical.")] = 3,
    sample: Annotated[
        list[int] | None,
        Option(help="Explain this one instead, counted from 0; may be repeated."),
    ] = None,
    references: Annotated[
        str | None, Option(help=f"Name the nearest of these, too: {options.DATA_FORMS}.")
    ] = None,
    saliency: Annotated[
        bool, Option("--saliency", help="Slopes of the score in the input, too.")
    ] = False,
    classes: Annotated[
        str | None, Option(help="Names of the classes, in the order of the model: cat,dog.")
    ] = None,
    plot: Annotated[Path | None, Option(help="Draw the first one: .png, .svg or .pdf.")] = None,
    weights: options.WeightsOption = None,
    batch_size: options.BatchSizeOption = 64,
    device: options.DeviceOption = "cpu",
    config: options.ConfigOption = None,
    force: options.ForceOption = False,
    as_json: options.JsonOption = False,
) -> None:
    """Split scores into shares of layers and output directions.

    \b
    scod explain monitor.scod model.py:net new.csv --top 1 --plot why.png
    scod explain monitor.scod model.py:net new.csv --sample 4 \\
      --references train.csv
    """  # noqa: D301, DOC501 (\b keeps the lines of the examples; shown as help)
    import torch

    from scodkit.cli.files import samples_of
    from scodkit.cli.loading import batches_of, open_monitor, running, scored_batches

    with shown.stoppable("no file was changed; type the same command again"):
        if plot is not None:
            shown.check_picture(plot, ctx.params)
        opened, form = open_monitor(monitor, model, weights, device)
        batches = batches_of(inputs, batch_size, form)
        samples = samples_of(batches)
        if samples is None:
            raise OptionError(
                f"expected inputs that can be read one by one, got batches from {inputs}; let "
                "it return a tensor, or pass a file"
            )
        for row in sample or ():
            if not 0 <= row < len(samples):
                raise OptionError(
                    f"expected a sample from 0 to {len(samples) - 1}, got {row}; type "
                    "--sample 0"
                )
        rows = sample
        if not rows:
            scores = torch.cat([part.score for _, part in scored_batches(opened, batches)])
            rows = scores.argsort(descending=True, stable=True)[:top].tolist()
        with running(opened):
            known = None
            if references is not None:
                alike = batches_of(references, batch_size, form)
                known = opened.references(alike, progress=shown.shows_progress())
            batch = samples.batch(rows)
            explanation = opened.explain(
                batch,
                saliency=saliency,
                references=known,
                classes=classes and classes.split(","),
            )
            names = [samples.name(row) for row in rows]
            if plot is not None:
                name = names[0]
                called = shown.visible(name) if isinstance(name, str) else f"sample {name}"
                shown.write_picture(plot, explanation.plot(0, called))
    for place, name in enumerate(names):
        _show(explanation, place, name, as_json)
    if plot is not None:
        shown.note(f"drew {names[0]} in {plot}")


def _show(explanation: scodkit.Explanation, place: int, name: int | str, as_json: bool) -> None:
    """Print the explanation of one input."""
    if as_json:
        shown.show_json({"input": name, **_document(explanation, place)})
        return
    if place:
        echo()
    lines = [("input", str(name))]
    for topic, text in explanation.sentences(place).items():
        lines += [(topic, line) for line in text.splitlines()]
    shown.show_table((), lines)


def _document(explanation: scodkit.Explanation, place: int) -> dict[str, object]:
    """Return the explanation of one input as plain data."""
    document: dict[str, object] = {"score": float(explanation.score[place])}
    if explanation.p_value is not None:
        document["p_value"] = float(explanation.p_value[place])
    document["prediction"] = explanation.predictions[place]
    for topic, shares in (
        ("layers", explanation.layers),
        ("directions", explanation.directions),
    ):
        values = shares.values[place].tolist()
        document[topic] = dict(zip(shares.names, values, strict=True))
    table = explanation.columns
    if table is not None:
        numbers = (table.values[place], table.distance[place], table.outside[place])
        rows = zip(*(each.tolist() for each in numbers), strict=True)
        document["columns"] = {
            name: dict(zip(("value", "spreads", "outside"), row, strict=True))
            for name, row in zip(table.names, rows, strict=True)
        }
    if explanation.nearest is not None:
        nearest, distances = explanation.nearest.index, explanation.nearest.distance
        pairs = zip(nearest[place].tolist(), distances[place].tolist(), strict=True)
        document["nearest"] = [{"sample": row, "distance": away} for row, away in pairs]
    if explanation.saliency is not None:
        document["slopes"] = explanation.saliency.gradient[place].tolist()
    return document
