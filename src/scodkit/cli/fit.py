"""``scod fit``: from a trained model and its training data to a monitor in a file."""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Iterator, Mapping
from enum import Enum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from scodkit.cli import options
from scodkit.cli import output as shown
from scodkit.errors import EmptyLoaderError, OptionError

if TYPE_CHECKING:
    from scodkit import Likelihood, Monitor
    from scodkit.fit.processes import Processes
    from scodkit.model.parameters import Selection
    from scodkit.sketch import Sketch

_Kind = TypeVar("_Kind")

_likelihood_option = partial(typer.Option, rich_help_panel="The likelihood")
_sketch_option = partial(typer.Option, rich_help_panel="The sketch")
_weights_option = partial(typer.Option, rich_help_panel="Which weights")


class LikelihoodName(str, Enum):
    """What the output parametrises."""

    CATEGORICAL = "categorical"
    GAUSSIAN = "gaussian"
    BERNOULLI = "bernoulli"
    HETEROSCEDASTIC = "heteroscedastic"


class SketchName(str, Enum):
    """How the curvature is summarised."""

    NYSTROM = "nystrom"
    TWO_SIDED = "two-sided"
    FREQUENT_DIRECTIONS = "frequent-directions"
    EXACT = "exact"


class PrecisionName(str, Enum):
    """The precision a fit runs the model in, as torch names it."""

    BFLOAT16 = "bfloat16"


class OnBad(str, Enum):
    """What a sample with a NaN does to a fit."""

    RAISE = "raise"
    SKIP = "skip"


def fit(  # noqa: PLR0913 (each a choice of its own)
    ctx: typer.Context,
    model: options.ModelArgument,
    data: options.TrainingDataArgument,
    output: Annotated[Path, typer.Option("--output", "-o", help="Where the monitor goes.")],
    likelihood: Annotated[
        LikelihoodName, _likelihood_option(help="What the output parametrises.")
    ],
    variance: Annotated[
        list[float] | None,
        _likelihood_option(
            metavar="NUMBER", help="Of gaussian noise: once, or for each output in turn."
        ),
    ] = None,
    directions: Annotated[
        int | None, _likelihood_option(help="Of categorical: only this many, faster.")
    ] = None,
    class_dim: Annotated[
        int | None,
        _likelihood_option(
            help="Of categorical: the axis of the classes, in maps and sequences."
        ),
    ] = None,
    rank: Annotated[int, _sketch_option(min=1, help="Directions to keep.")] = 50,
    sketch: Annotated[
        SketchName, _sketch_option(help="How the curvature is summarised.")
    ] = SketchName.NYSTROM,
    size: Annotated[int | None, _sketch_option(help="Columns the sketch holds.")] = None,
    seed: Annotated[int | None, _sketch_option(help="Of a random sketch.")] = None,
    products: Annotated[
        bool | None,
        _sketch_option(
            "--products/--rows",
            help="How hundreds of outputs are fitted; by the cheaper way, if not said. Only "
            "rows give certificates.",
            show_default=False,
        ),
    ] = None,
    last_layers: Annotated[
        int | None, _weights_option(help="Only this many, from the end.")
    ] = None,
    last_fraction: Annotated[
        float | None, _weights_option(help="Only this share of the layers.")
    ] = None,
    parameters: Annotated[
        list[str] | None,
        _weights_option(
            metavar="NAME", help="Only these, by name or pattern ('head.*'); may be repeated."
        ),
    ] = None,
    prior_scale: Annotated[
        float, typer.Option(help="Standard deviation of a weight before data.")
    ] = 1.0,
    weights: options.WeightsOption = None,
    columns: Annotated[
        str | None, typer.Option(help="Of a .csv with names: which, as a,b,c.")
    ] = None,
    batch_size: options.BatchSizeOption = 64,
    on_bad: Annotated[
        OnBad, typer.Option(help="What a sample with a NaN or an infinity does.")
    ] = OnBad.RAISE,
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
    device: options.DeviceOption = "cpu",
    config: options.ConfigOption = None,
    force: options.ForceOption = False,
    as_json: options.JsonOption = False,
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
    import torch

    from scodkit import Monitor
    from scodkit.cli.files import Batches, Form
    from scodkit.cli.loading import batches_of, load_model, running, shard_of

    if checkpoint is None:
        afterwards = "nothing was written; with --checkpoint F a stopped fit goes on from F"
    else:
        afterwards = f"the same command goes on from the last checkpoint in {checkpoint}"
    with shown.stoppable(afterwards), _process_group(device) as (processes, device):
        _check_outputs(output, checkpoint, ctx.params, force)
        network = load_model(model, weights, device)
        monitor = Monitor(
            network,
            _likelihood(likelihood.value, variance, directions, class_dim),
            rank,
            sketch=_sketch(sketch.value, size, seed),
            parameters=_selection(last_layers, last_fraction, parameters),
            prior_scale=prior_scale,
        )
        batches = batches_of(
            data,
            batch_size,
            Form.before_fit(network),
            finite=on_bad is OnBad.RAISE,
            columns=None if columns is None else columns.split(","),
            progress=shown.shows_progress(as_json),
        )
        if isinstance(batches, Batches):
            monitor.notes["inputs"] = batches.form().note()
        index, count = part_of(shard, processes)
        with running(monitor), _empty_shard_named(shard):
            monitor.fit(
                shard_of(batches, index, count),
                progress=shown.shows_progress(as_json),
                on_bad=on_bad.value,
                check_deterministic=check_deterministic,
                checkpoint=checkpoint,
                every=every,
                precision=None if precision is None else getattr(torch, precision.value),
                products=products,
            )
        monitor.notes["fit"] = options.noted_options(ctx)
        with processes.failing_together():  # or their checkpoints would be gone
            if processes.rank == 0:
                monitor.save(output)
        if checkpoint is not None:
            processes.own_file(checkpoint).unlink(missing_ok=True)
    if processes.rank == 0:
        if weights is None:
            shown.note(f"no --weights: the model as {model} returns it")
        show_fit(output, monitor, as_json)


@contextlib.contextmanager
def _process_group(device: str) -> Iterator[tuple[Processes, str]]:
    """Join the processes that ``torchrun`` has started, if it has.

    Args:
        device: As the user names it; of several GPUs each process takes its own.

    Yields:
        The processes, and the device of this one.
    """
    import torch
    from torch import distributed

    from scodkit.fit.processes import Processes

    if "TORCHELASTIC_RUN_ID" not in os.environ:
        yield Processes(), device
        return
    on_gpu = torch.device(device).type == "cuda"
    if on_gpu:
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
    distributed.init_process_group("nccl" if on_gpu else "gloo")
    try:
        yield Processes.here(), device
    finally:
        distributed.destroy_process_group()


def part_of(shard: str | None, processes: Processes) -> tuple[int, int]:
    """Return which part of the data a process takes, from 0, and of how many.

    Args:
        shard: ``INDEX/COUNT`` on the command line, from 1; None for all of the data.
        processes: Among which that is divided further.

    Raises:
        OptionError: If it is not of that form.

    Examples:
        >>> from scodkit.fit.processes import Processes
        >>> part_of("2/3", Processes()), part_of("2/3", Processes(rank=0, count=2))
        ((1, 3), (2, 6))
    """
    index, _, count = (shard or "1/1").partition("/")
    if not (index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count)):
        raise OptionError(
            f"expected a part of the data as INDEX/COUNT, from 1/8 to 8/8, got {shard!r}"
        )
    first = (int(index) - 1) * processes.count
    return first + processes.rank, int(count) * processes.count


def _likelihood(
    name: str, variance: list[float] | None, directions: int | None, class_dim: int | None
) -> Likelihood:
    from scodkit import likelihoods

    kinds: dict[str, type[likelihoods.Likelihood]] = {
        "categorical": likelihoods.Categorical,
        "gaussian": likelihoods.Gaussian,
        "bernoulli": likelihoods.Bernoulli,
        "heteroscedastic": likelihoods.HeteroscedasticGaussian,
    }
    given: dict[str, Any] = {"directions": directions, "class_dim": class_dim}
    if variance:
        given["variance"] = variance[0] if len(variance) == 1 else tuple(variance)
    return _built("likelihood", name, kinds, given)


def _sketch(name: str, size: int | None, seed: int | None) -> Sketch:
    from scodkit import sketch

    kinds: dict[str, type[sketch.Sketch]] = {
        "nystrom": sketch.Nystrom,
        "two-sided": sketch.TwoSided,
        "frequent-directions": sketch.FrequentDirections,
        "exact": sketch.Exact,
    }
    return _built("sketch", name, kinds, {"size": size, "seed": seed})


def _built(
    what: str, name: str, kinds: Mapping[str, type[_Kind]], given: Mapping[str, Any]
) -> _Kind:
    """Return an object with its options; None stands for an option that was not given.

    Raises:
        OptionError: If one belongs to other kinds.
    """
    takers = {kind: inspect.signature(made).parameters for kind, made in kinds.items()}
    chosen = {option: value for option, value in given.items() if value is not None}
    for option in chosen:
        if option not in takers[name]:
            others = " and ".join(kind for kind, takes in takers.items() if option in takes)
            raise OptionError(
                f"expected no --{option.replace('_', '-')} with --{what} {name}: it belongs to "
                f"{others}; leave it out"
            )
    return kinds[name](**chosen)


def _selection(
    last_layers: int | None, last_fraction: float | None, parameters: list[str] | None
) -> Selection:
    """Return which weights are meant: at most one of three ways to say so, else all.

    Raises:
        OptionError: If there is more than one.
    """
    from scodkit import LastLayers

    given = {
        "--last-layers": last_layers,
        "--last-fraction": last_fraction,
        "--parameters": parameters or None,
    }
    used = [name for name, value in given.items() if value is not None]
    if len(used) > 1:
        raise OptionError(
            f"expected one way to choose weights, got {' and '.join(used)}; leave one out"
        )
    if parameters:
        return parameters
    return LastLayers(fraction=last_fraction, count=last_layers) if used else "all"


@contextlib.contextmanager
def _empty_shard_named(shard: str | None) -> Iterator[None]:
    """Name the shard where a fit fails because it is empty.

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
    """Show the summary of a fit, and what to type next.

    Args:
        path: Where the monitor was saved.
        monitor: The monitor.
        as_json: Show one JSON document.
    """
    summary = monitor.summary()
    document: dict[str, Any] = {
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
        shown.show_json(document)
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
