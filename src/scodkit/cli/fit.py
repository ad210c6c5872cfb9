"""``scod fit``: from a trained model and its training data to a monitor in a file."""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Iterator, Mapping
from enum import Enum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Context, Option

import scodkit
from scodkit.cli import options
from scodkit.cli import output as shown
from scodkit.cli.inspect import show_fit
from scodkit.errors import EmptyLoaderError, OptionError

if TYPE_CHECKING:
    from types import ModuleType

    from torch import nn

    from scodkit.fit.processes import Processes
    from scodkit.model.parameters import Selection

_likelihood_option = partial(Option, rich_help_panel="The likelihood")
_sketch_option = partial(Option, rich_help_panel="The sketch")
_weights_option = partial(Option, rich_help_panel="Which weights")


class LikelihoodName(str, Enum):
    """What the output parametrises; members are named as classes of `scodkit.likelihoods`."""

    Categorical = "categorical"
    Gaussian = "gaussian"
    Bernoulli = "bernoulli"
    HeteroscedasticGaussian = "heteroscedastic"


class SketchName(str, Enum):
    """How the curvature is summarised; members are named as classes of `scodkit.sketch`."""

    Nystrom = "nystrom"
    TwoSided = "two-sided"
    FrequentDirections = "frequent-directions"
    Exact = "exact"


class PoolName(str, Enum):
    """How the positions of sequences and maps make one score."""

    SUM = "sum"
    MEAN = "mean"
    MAX = "max"
    LAST = "last"


class PrecisionName(str, Enum):
    """The precision a fit runs the model in, as torch names it."""

    BFLOAT16 = "bfloat16"


class OnBad(str, Enum):
    """What a sample with a NaN does to a fit."""

    RAISE = "raise"
    SKIP = "skip"


def fit(  # noqa: PLR0913 (each a choice of its own)
    ctx: Context,
    model: options.ModelArgument,
    data: options.TrainingDataArgument,
    output: Annotated[Path, Option("--output", "-o", help="Where the monitor goes.")],
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
    samples: Annotated[
        int | None,
        _likelihood_option(
            min=1, help="Of categorical: rows drawn in place of directions, for vocabularies."
        ),
    ] = None,
    pool: Annotated[
        PoolName | None,
        _likelihood_option(help="Of categorical: how positions make a score; their sum."),
    ] = None,
    rank: Annotated[int, _sketch_option(min=1, help="Directions to keep.")] = 50,
    sketch: Annotated[
        SketchName, _sketch_option(help="How the curvature is summarised.")
    ] = SketchName.Nystrom,
    size: Annotated[int | None, _sketch_option(help="Columns the sketch holds.")] = None,
    seed: Annotated[int | None, _sketch_option(help="Of a random sketch.")] = None,
    products: Annotated[
        bool | None,
        _sketch_option(
            "--products/--rows",
            help="How hundreds of outputs are fitted; by the cheaper way, if not said. Only "
            "rows give certificates.",
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
    project: Annotated[
        int | None,
        _weights_option(
            min=1,
            metavar="RANK",
            help="Look at each layer through RANK^2 numbers: for large networks.",
        ),
    ] = None,
    projections: Annotated[
        Path | None,
        _weights_option(
            metavar="MONITOR", help="Project as in the fit of another part: then both merge."
        ),
    ] = None,
    prior_scale: Annotated[
        float, Option(help="Standard deviation of a weight before data.")
    ] = 1.0,
    weights: options.WeightsOption = None,
    columns: options.ColumnsOption = None,
    drop: options.DropOption = None,
    target: options.TargetOption = None,
    id: options.IdOption = None,
    batch_size: options.BatchSizeOption = 64,
    on_bad: Annotated[
        OnBad, Option(help="What a sample with a NaN or an infinity does.")
    ] = OnBad.RAISE,
    check_deterministic: Annotated[
        bool, Option(help="Make sure model and data give the same twice.")
    ] = True,
    checkpoint: Annotated[
        Path | None, Option(help="Keep an unfinished fit here, to go on from.")
    ] = None,
    every: Annotated[int, Option(min=1, help="Batches between checkpoints.")] = 100,
    precision: Annotated[
        PrecisionName | None, Option(help="Of the fit: faster on a GPU.")
    ] = None,
    shard: Annotated[
        str | None,
        Option(
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
    scod fit model.py:net wine.csv -o monitor.scod --likelihood categorical \\
      --target class --id bottle
    scod fit shop.nets:resnet shop.data:train -o monitor.scod \\
      --likelihood categorical --weights resnet.safetensors \\
      --last-layers 2 --device cuda --checkpoint fit.ckpt
    scod fit --config scod.toml
    torchrun --nproc-per-node=2 -m scodkit fit model.py:net train.csv ...
    """  # noqa: D301 (\b keeps the lines of the examples)
    import torch

    from scodkit import likelihoods
    from scodkit import sketch as sketches
    from scodkit.cli.files import Form, samples_of
    from scodkit.cli.loading import batches_of, load_model, name_columns, running, shard_of
    from scodkit.cli.tables import Columns

    if checkpoint is None:
        afterwards = "nothing was written; with --checkpoint F a stopped fit goes on from F"
    else:
        afterwards = f"the same command goes on from the last checkpoint in {checkpoint}"
    noise: object = None
    if variance:
        noise = variance[0] if len(variance) == 1 else tuple(variance)
    with shown.stoppable(afterwards), _process_group(device) as (processes, device):
        _check_outputs(output, checkpoint, ctx.params)
        network = load_model(model, weights, device)
        of_likelihood = {"variance": noise, "directions": directions, "class_dim": class_dim}
        of_likelihood |= {"samples": samples, "pool": pool and pool.value}
        monitor = scodkit.Monitor(
            network,
            _built(likelihoods, "--likelihood", likelihood, of_likelihood),
            rank,
            sketch=_built(sketches, "--sketch", sketch, {"size": size, "seed": seed}),
            parameters=_selection(network, ctx.params),
            prior_scale=prior_scale,
        )
        batches = batches_of(
            data,
            batch_size,
            Form.of_fit({}, network),
            finite=on_bad is OnBad.RAISE,
            columns=Columns.of(columns=columns, drop=drop, target=target, id=id),
        )
        found = samples_of(batches)
        if found is not None:
            monitor.notes["inputs"] = found.first_form().note()
        with running(monitor, columns_typed=columns is not None), _empty_shard_named(shard):
            monitor.fit(
                shard_of(batches, *part_of(shard, processes)),
                progress=shown.shows_progress(),
                on_bad=on_bad.value,
                check_deterministic=check_deterministic,
                checkpoint=checkpoint,
                every=every,
                precision=None if precision is None else getattr(torch, precision.value),
                products=products,
            )
        name_columns(monitor)
        monitor.notes["fit"] = options.noted_options(ctx)
        with processes.failing_together():  # or their checkpoints would be gone
            if processes.rank == 0:
                monitor.save(output)
        if checkpoint is not None:
            processes.own_file(checkpoint).unlink(missing_ok=True)
    if processes.rank == 0:
        if weights is None:
            shown.note(f"no --weights: the model as {model.rpartition(':')[2]}() returns it")
        show_fit(output, monitor, as_json, ctx.params)


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


def _built(
    library: ModuleType, choice: str, chosen: Enum, options: Mapping[str, object]
) -> Any:
    """Return the chosen likelihood or sketch, constructed.

    Args:
        library: The package of the classes.
        choice: The option that names one of them.
        chosen: The name; members of its enumeration are named as the classes.
        options: Arguments of the class; None for those that were not given.

    Raises:
        OptionError: If an option belongs to another class.
    """
    classes = {name: getattr(library, name.name) for name in type(chosen)}
    given = {option: value for option, value in options.items() if value is not None}
    for option in given:
        takers = [
            name
            for name, kind in classes.items()
            if option in inspect.signature(kind).parameters
        ]
        if chosen not in takers:
            raise OptionError(
                f"expected no --{option.replace('_', '-')} with {choice} {chosen.value}, got "
                f"it, which belongs to {' and '.join(name.value for name in takers)}; leave it "
                "out"
            )
    return classes[chosen](**given)


def _selection(network: nn.Module, params: Mapping[str, Any]) -> Selection | scodkit.Projected:
    """Return the selection of weights that one of four options makes; all by default.

    Projected, if a rank is given.

    Args:
        network: The model.
        params: Options of the command line, by name.

    Raises:
        OptionError: If more than one is given.
    """
    ways = ("last_layers", "last_fraction", "parameters", "projections")
    used = [name for name in ways if params[name] not in (None, ())]
    if params["projections"] is not None and params["project"] is not None:
        used.append("project")
    if len(used) > 1:
        flags = " and ".join(f"--{name.replace('_', '-')}" for name in used)
        raise OptionError(f"expected one way to choose weights, got {flags}; leave one out")
    if params["projections"] is not None:
        first = scodkit.Monitor.load(params["projections"], network)
        return scodkit.Projected(given=first.projections)
    layers: Selection = params["parameters"] or "all"
    if used and not params["parameters"]:
        layers = scodkit.LastLayers(
            fraction=params["last_fraction"], count=params["last_layers"]
        )
    rank = params["project"]
    return layers if rank is None else scodkit.Projected(rank, layers)


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


def _check_outputs(output: Path, checkpoint: Path | None, given: Mapping[str, object]) -> None:
    shown.check_output(output, given)
    if checkpoint is not None:
        # what is there is read, and refused if it is not of this fit
        shown.check_output(checkpoint, given, lambda _: True)
        if checkpoint.resolve() == output.resolve():  # it is deleted in the end
            raise OptionError(
                f"expected another file for the checkpoint than the monitor's, {output}; type "
                "--checkpoint fit.ckpt"
            )
