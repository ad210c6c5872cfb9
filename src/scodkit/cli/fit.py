"""``scod fit``: from a trained model and its training data to a monitor in a file."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from scodkit.cli import output as shown
from scodkit.cli.config import ConfigOption, resolved
from scodkit.cli.options import (
    DATA_FORMS,
    BatchSizeOption,
    DeviceOption,
    FitBad,
    ForceOption,
    JsonOption,
    LikelihoodName,
    ModelArgument,
    PrecisionName,
    SketchName,
    WeightsOption,
)
from scodkit.errors import EmptyLoaderError, OptionError

if TYPE_CHECKING:
    from scodkit import Monitor

_OUTPUT = "The likelihood"
_SKETCH = "The sketch"
_WEIGHTS = "Which weights"


def fit(  # noqa: PLR0913 (each a choice of its own)
    ctx: typer.Context,
    model: ModelArgument,
    data: Annotated[
        str,
        typer.Argument(
            metavar="DATA", help=f"Training data: {DATA_FORMS}.", show_default=False
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Where the monitor goes.")],
    likelihood: Annotated[
        LikelihoodName,
        typer.Option(help="What the output parametrises.", rich_help_panel=_OUTPUT),
    ],
    variance: Annotated[
        list[float] | None,
        typer.Option(
            metavar="NUMBER",
            help="Of gaussian noise: once, or for each output in turn.",
            rich_help_panel=_OUTPUT,
        ),
    ] = None,
    directions: Annotated[
        int | None,
        typer.Option(help="Of categorical: only this many, faster.", rich_help_panel=_OUTPUT),
    ] = None,
    class_dim: Annotated[
        int | None,
        typer.Option(
            help="Of categorical: the axis of the classes, in maps and sequences.",
            rich_help_panel=_OUTPUT,
        ),
    ] = None,
    rank: Annotated[
        int, typer.Option(min=1, help="Directions to keep.", rich_help_panel=_SKETCH)
    ] = 50,
    sketch: Annotated[
        SketchName,
        typer.Option(help="How the curvature is summarised.", rich_help_panel=_SKETCH),
    ] = SketchName.NYSTROM,
    size: Annotated[
        int | None, typer.Option(help="Columns the sketch holds.", rich_help_panel=_SKETCH)
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Of a random sketch.", rich_help_panel=_SKETCH)
    ] = None,
    products: Annotated[
        bool | None,
        typer.Option(
            "--products/--rows",
            help="How hundreds of outputs are fitted; by the cheaper way, if not said. Only "
            "rows give certificates.",
            show_default=False,
            rich_help_panel=_SKETCH,
        ),
    ] = None,
    last_layers: Annotated[
        int | None,
        typer.Option(help="Only this many, from the end.", rich_help_panel=_WEIGHTS),
    ] = None,
    last_fraction: Annotated[
        float | None,
        typer.Option(help="Only this share of the layers.", rich_help_panel=_WEIGHTS),
    ] = None,
    parameters: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Only these, by name or pattern ('head.*'); may be repeated.",
            rich_help_panel=_WEIGHTS,
        ),
    ] = None,
    prior_scale: Annotated[
        float, typer.Option(help="Standard deviation of a weight before data.")
    ] = 1.0,
    weights: WeightsOption = None,
    columns: Annotated[
        str | None, typer.Option(help="Of a .csv with names: which, as a,b,c.")
    ] = None,
    batch_size: BatchSizeOption = 64,
    on_bad: Annotated[
        FitBad, typer.Option(help="What a sample with a NaN or an infinity does.")
    ] = FitBad.RAISE,
    check_deterministic: Annotated[
        bool, typer.Option(help="Make sure model and data give the same twice.")
    ] = True,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Keep an unfinished fit here, to go on from.")
    ] = None,
    every: Annotated[int, typer.Option(min=1, help="Batches between checkpoints.")] = 100,
    precision: Annotated[
        PrecisionName | None, typer.Option(help="Of the fit: faster on a GPU.")
    ] = None,
    shard: Annotated[
        str | None,
        typer.Option(
            metavar="INDEX/COUNT",
            help="Only this part of the data, from 1/8 to 8/8; then scod merge.",
        ),
    ] = None,
    device: DeviceOption = "cpu",
    config: ConfigOption = None,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Summarise training data in one pass, and save the monitor. Labels are not needed.

    \b
    scod fit model.py:net train.csv -o monitor.scod --likelihood gaussian
    scod fit shop.nets:resnet shop.data:train -o monitor.scod \\
      --likelihood categorical --weights resnet.safetensors \\
      --last-layers 2 --device cuda --checkpoint fit.ckpt
    scod fit --config scod.toml
    torchrun --nproc-per-node=2 -m scodkit fit model.py:net train.csv ...
    """  # noqa: D301 (\b keeps the lines of the examples)
    from scodkit import Monitor
    from scodkit.cli.choices import PRECISIONS, likelihood_of, selection_of, sketch_of
    from scodkit.cli.inputs import Batches, Form, batches_of, shard_of
    from scodkit.cli.loading import load_model, running
    from scodkit.cli.processes import part_of, started

    if checkpoint is None:
        afterwards = "nothing was written; with --checkpoint F a stopped fit goes on from F"
    else:
        afterwards = f"the same command goes on from the last checkpoint in {checkpoint}"
    with shown.stoppable(afterwards), started(device) as share:
        _check_outputs(output, checkpoint, ctx.params, force)
        network = load_model(model, weights, share.device)
        monitor = Monitor(
            network,
            likelihood_of(likelihood, variance, directions, class_dim),
            rank,
            sketch=sketch_of(sketch, size, seed),
            parameters=selection_of(last_layers, last_fraction, parameters),
            prior_scale=prior_scale,
        )
        batches = batches_of(
            data,
            batch_size,
            Form.before_fit(network),
            finite=on_bad is FitBad.RAISE,
            columns=None if columns is None else columns.split(","),
            progress=shown.shows_progress(as_json),
        )
        if isinstance(batches, Batches):
            monitor.notes["inputs"] = batches.form().note()
        index, count = part_of(shard, share.processes)
        with running(monitor), _some_of(shard):
            monitor.fit(
                shard_of(batches, index, count),
                progress=shown.shows_progress(as_json),
                on_bad=on_bad.value,
                check_deterministic=check_deterministic,
                checkpoint=checkpoint,
                every=every,
                precision=None if precision is None else PRECISIONS[precision],
                products=products,
            )
        monitor.notes["fit"] = resolved(ctx)
        with share.processes.failing_together():  # or their checkpoints would be gone
            if share.first:
                monitor.save(output)
        if checkpoint is not None:
            share.processes.own_file(checkpoint).unlink(missing_ok=True)
    if share.first:
        if weights is None:
            shown.note(f"no --weights: the model as {model} returns it")
        show_fit(output, monitor, as_json)


@contextlib.contextmanager
def _some_of(shard: str | None) -> Iterator[None]:
    """Say of an empty part of the data that it is one.

    Raises:
        OptionError: If the part of the command line is empty.
        EmptyLoaderError: If all of the data is.
    """
    try:
        yield
    except EmptyLoaderError as error:
        if shard is None:
            raise
        raise OptionError(
            f"expected samples in part {shard} of the data, got none: there are fewer samples, "
            "or batches, than parts; type fewer parts, as --shard 1/2 and --shard 2/2"
        ) from error


def _check_outputs(
    output: Path, checkpoint: Path | None, given: Mapping[str, object], force: bool
) -> None:
    shown.check_output(output, given, force=force)
    if checkpoint is not None:
        # what is there is read, and refused if it is not of this fit
        shown.check_output(checkpoint, given, lambda _: True)
        if checkpoint.resolve() == output.resolve():  # it is deleted in the end
            raise OptionError(
                f"expected another file for the checkpoint than the monitor's, {output}; type "
                "--checkpoint fit.ckpt"
            )


def show_fit(path: Path, monitor: Monitor, as_json: bool) -> None:
    """Show what a fit has found.

    Args:
        path: Where it was saved.
        monitor: The monitor.
        as_json: As one JSON document.
    """
    summary = monitor.summary()
    found: dict[str, Any] = {
        "monitor": str(path),
        "samples": summary.num_data,
        "skipped": summary.skipped,
        "weights": summary.num_parameters,
        "rank": len(summary.values),
        "captured_curvature": summary.captured,
        "effective_rank": summary.effective_rank,
        "certified": summary.certified,
        "remarks": list(summary.notes),
    }
    if as_json:
        shown.show_json(found)
        return
    skipped = f", {summary.skipped} skipped" if summary.skipped else ""
    shown.show_facts(
        {
            "monitor": str(path),
            "samples": f"{summary.num_data}{skipped}",
            "weights": summary.chosen,
            "captured curvature": f"{summary.captured:.1%} with rank {len(summary.values)}",
            "certified": "yes" if summary.certified else "no",
            "looks wrong": "; ".join(summary.notes) or "nothing",
        }
    )
    todo = f"calibrate {path} MODEL HELD_OUT_DATA"
    if monitor.calibration is not None:
        todo = f"score {path} MODEL INPUTS"
    shown.note(f"next: scod {todo}")
