"""One pass over the training data: batches in, sketch and basis out; counted, resumable."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from scodkit import artifact
from scodkit.errors import BatchError, MismatchError, NonFiniteError, OptionError
from scodkit.factors import FactorsOf, FactorSource, choose_engine, row_bytes
from scodkit.fitted import Fingerprints, Fitted
from scodkit.likelihoods import Likelihood
from scodkit.mixed import sum_dtype
from scodkit.network import Inputs, Network
from scodkit.parameters import ParameterSet, Selection, select
from scodkit.plan import Plan
from scodkit.sketch import Sketch, SketchState
from scodkit.stream import (
    batch_digest,
    batches_of,
    check_deterministic,
    data_identity,
    num_batches,
    num_samples,
    open_stream,
)

# pieces a GPU may be behind before it is waited for
_LATE = 2

_CHECKPOINT = "checkpoint"
_STATE = "state."


@dataclass(frozen=True)
class FitOptions:
    """How a pass over the data behaves.

    Args:
        progress: Show a progress bar.
        on_bad: What a sample with a NaN or an infinity does: raise, or be skipped and counted.
        check_deterministic: Compare two runs of the model on the first batch, and two reads of
            the first item of the data set.
        checkpoint: Where to keep the state of an unfinished pass.
        every: Batches between two checkpoints.
        precision: Run the model, and form gradients, in this dtype; None for the model's own.
    """

    progress: bool = True
    on_bad: Literal["raise", "skip"] = "raise"
    check_deterministic: bool = True
    checkpoint: Path | None = None
    every: int = 100
    precision: torch.dtype | None = None

    def __post_init__(self) -> None:
        if self.on_bad not in ("raise", "skip"):
            raise OptionError(f"expected on_bad='raise' or 'skip', got {self.on_bad!r}")
        if self.every < 1:
            raise OptionError(f"expected every >= 1 batches, got {self.every}")
        if self.precision not in (None, torch.bfloat16):  # float16 loses small gradients
            raise OptionError(
                f"expected precision=torch.bfloat16 or None, got {self.precision}"
            )


def check_options(
    model: object, likelihood: object, rank: object, sketch: object, prior_scale: float
) -> None:
    """Refuse what a monitor cannot be made of, at once rather than after a pass.

    Raises:
        OptionError: With what to type instead.
    """
    problem = None
    if not isinstance(model, nn.Module) or isinstance(model, torch.jit.ScriptModule):
        problem = f"an nn.Module that is not scripted, got {type(model).__name__}"
    elif not isinstance(likelihood, Likelihood):
        problem = (
            f"a likelihood object, got {likelihood!r}; type Categorical(), Gaussian(), "
            "Bernoulli() or another from scodkit"
        )
    elif not isinstance(rank, int) or rank < 1:
        problem = f"an integer rank >= 1, got {rank!r}"
    elif not isinstance(sketch, Sketch):
        problem = f"a sketch object, got {sketch!r}; type Nystrom() or another, with brackets"
    elif not 1e-100 < prior_scale < 1e100:
        problem = f"a positive, finite prior_scale, got {prior_scale!r}"
    if problem:
        raise OptionError(f"expected {problem}")


@dataclass(frozen=True)
class Recipe:
    """What to fit.

    Args:
        likelihood: What distribution the output parametrises.
        rank: ``k``.
        sketch: How the curvature is summarised.
        selection: Which weights.
        budget: Bytes that rows in weight space may take at a time.
    """

    likelihood: Likelihood
    rank: int
    sketch: Sketch
    selection: Selection
    budget: int

    def plan(
        self, network: Network, parameters: ParameterSet, call: Inputs, num_data: int | None
    ) -> Plan:
        """Return the memory a fit takes on batches like ``call``."""
        output = first_output(network, call)
        directions = self.likelihood.num_directions(output.shape[1:])
        num_rows = None if num_data is None else num_data * directions
        columns = self.sketch.columns(parameters.num_parameters, self.rank, num_rows)
        one_row = row_bytes(network, parameters)
        # a batch's rows fill the budget at most, but one is formed in any case
        working = max(one_row, min(self.budget, call.batch_size * directions * one_row))
        working += directions * output[0].numel() * output.itemsize
        return Plan.of(
            num_parameters=parameters.num_parameters,
            directions=directions,
            columns=columns,
            rank=self.rank,
            itemsize=sum_dtype(output).itemsize,
            kept_bytes=self.sketch.scratch_bytes(parameters.num_parameters, columns),
            working_bytes=working,
            device=network.device,
        )

    def source(self, network: Network, parameters: ParameterSet, call: Inputs) -> FactorSource:
        """Return what turns batches into factors; the engine is chosen on ``call``."""
        shape = tuple(first_output(network, call).shape[1:])
        engine = choose_engine(network, parameters, call)
        return FactorSource(engine, self.likelihood, shape, self.budget)


class _Check:
    """Whether the samples of a piece were finite, to be asked once a GPU has found out."""

    def __init__(self, good: Tensor, finite: Tensor, first: int, progress: Progress) -> None:
        self._good, self._finite, self._first = good, finite, first
        self._batch, self._before = progress.batches, progress.samples

    def ask(self) -> None:
        """Refuse samples with a NaN or an infinity.

        Raises:
            NonFiniteError: With the first of them.
        """
        if bool(self._good.all()):
            return
        place = int((~self._good).nonzero()[0])
        what = "gradients" if bool(self._finite[place]) else "inputs or output"
        row = self._first + place
        raise NonFiniteError(
            f"expected finite numbers, got a NaN or an infinity in the {what} of sample "
            f"{self._before + row} (batch {self._batch}, row {row}); mend or remove it, "
            "or type fit(..., on_bad='skip') to leave such samples out and count them"
        )


@dataclass
class Progress:
    """How far a pass has come.

    Args:
        state: The sketch so far.
        batches: Batches finished.
        samples: Samples read, good or bad.
        data_digest: Hash of all batches read, kept only for checkpoints.
        skipped: Samples left out because they were not finite.
        unchecked: Pieces not yet known to be finite: asking at once would idle a GPU.
    """

    state: SketchState
    batches: int = 0
    samples: int = 0
    skipped: int = 0
    data_digest: str = ""
    unchecked: list[_Check] = field(default_factory=list)

    def check(self, but: int = 0) -> None:
        """Refuse pieces that were not finite, the last few left for later."""
        while len(self.unchecked) > but:
            self.unchecked.pop(0).ask()


def fit(
    network: Network, recipe: Recipe, loader: Iterable[Any], options: FitOptions
) -> tuple[Fitted, FactorSource]:
    """Summarise the training data in one pass.

    Args:
        network: The model.
        recipe: What to fit.
        loader: Batches; any iterable, read once.
        options: How the pass behaves.

    Returns:
        The fit, and the engine that was chosen for it.

    Raises:
        BatchError: If the first batch has no samples to choose an engine with.
    """
    if options.checkpoint:
        artifact.check_folder(options.checkpoint)
    first, batches = open_stream(loader)
    with network.evaluating():
        call = network.inputs_of(first)
        if call.batch_size == 0:
            raise BatchError("expected samples in the first batch, got none; leave it out")
        if options.check_deterministic:
            check_deterministic(network, call, loader)
        parameters = select(recipe.selection, network, call)
        recipe.plan(network, parameters, call, num_samples(loader)).check()
        source = recipe.source(network, parameters, call)
        dtype = sum_dtype(first_output(network, call))

    fingerprints = Fingerprints.of(network.model, parameters)
    identity: dict[str, Any] = {}
    if options.checkpoint:
        identity = {
            "likelihood": artifact.describe(recipe.likelihood),
            "sketch": artifact.describe(recipe.sketch),
            "rank": recipe.rank,
            "precision": str(options.precision),
            "weights": vars(fingerprints),
            "data": data_identity(loader, call),
        }
    state = recipe.sketch.zero(parameters.num_parameters, recipe.rank, dtype, network.device)
    batches = batches_of(batches, num_batches(loader), "sketching", options.progress)
    engine = source.engine.of(network.at_precision(options.precision))
    done = _run(replace(source, engine=engine), state, batches, options, identity)
    basis = recipe.sketch.eigenbasis(done.state, recipe.rank)
    if options.precision is not None:  # a certificate would be one of rounded gradients
        basis = replace(basis, certified=False)
    fitted = Fitted(
        recipe.likelihood,
        parameters,
        basis,
        done.state,
        fingerprints,
        source.shape,
        done.skipped,
    )
    return fitted, source


def first_output(network: Network, call: Inputs) -> Tensor:
    """Return the model's output on the first samples of a batch, ``(b, *shape)``."""
    with torch.no_grad():
        return network(call.samples(slice(0, 2)))


def _run(
    source: FactorSource,
    state: SketchState,
    batches: Iterable[Any],
    options: FitOptions,
    identity: dict[str, Any],
) -> Progress:
    network = source.engine.network
    progress = _resume(options.checkpoint, state, identity)
    done_before = progress.batches
    digest, read = "", 0
    for read, batch in enumerate(batches, start=1):
        call = network.inputs_of(batch)
        if options.checkpoint:
            digest = batch_digest(call, digest)
        if read == done_before and digest != progress.data_digest:
            raise _other_data(options.checkpoint)
        if read <= done_before:
            continue
        # the model is held batch by batch, so that others can score meanwhile
        with network.evaluating():
            _absorb(source, call, progress, options)
        progress.check(but=_LATE if network.device.type == "cuda" else 0)
        progress.batches, progress.data_digest = read, digest
        if options.checkpoint and progress.batches % options.every == 0:
            progress.check()
            _save(options.checkpoint, progress, identity)
    if read < done_before:
        raise _other_data(options.checkpoint)
    progress.check()
    if progress.state.num_data == 0:
        raise NonFiniteError(
            f"expected finite samples, but all {progress.skipped} had a NaN or an infinity; "
            "look at the data and at the model's outputs"
        )
    if options.checkpoint:
        _save(options.checkpoint, progress, identity)
    return progress


def _other_data(path: Path | None) -> MismatchError:
    return MismatchError(
        f"expected the data of the checkpoint at {path}, got other batches; go on with the "
        "same data in the same order, or delete the checkpoint"
    )


def _absorb(
    source: FactorSource, call: Inputs, progress: Progress, options: FitOptions
) -> None:
    whole = None
    if options.on_bad == "skip" and source.splits_samples:
        # a sample is skipped whole: look at all its directions before using any
        whole = _finite_samples(source, call)
    for piece in source.pieces(call, hold=True):
        norms = piece.factors.squared_norms()
        good = norms.isfinite() & piece.finite
        if whole is not None:
            good &= whole[piece.samples]
        factors, kept = piece.factors, len(good)
        if options.on_bad == "raise":
            progress.unchecked.append(_Check(good, piece.finite, piece.samples.start, progress))
        elif not bool(good.all()):
            factors, norms, kept = FactorsOf(factors, good), norms[good], int(good.sum())
        progress.state.sketch.update(
            progress.state, factors, norms.sum(), kept if piece.complete else 0
        )
        if piece.complete:
            progress.skipped += len(good) - kept
    progress.samples += call.batch_size


def _finite_samples(source: FactorSource, call: Inputs) -> Tensor:
    finite = torch.ones(call.batch_size, dtype=torch.bool, device=source.engine.network.device)
    for piece in source.pieces(call, hold=True):
        finite[piece.samples] &= piece.factors.squared_norms().isfinite() & piece.finite
    return finite


def _resume(path: Path | None, state: SketchState, identity: dict[str, Any]) -> Progress:
    if path is None or not path.exists():
        return Progress(state)
    header, tensors = artifact.read(path, _CHECKPOINT)
    differing = [
        f"{key}: {header['identity'].get(key)} there, {value} here"
        for key, value in identity.items()
        if header["identity"].get(key) != value
    ]
    if differing:
        raise MismatchError(
            f"expected a checkpoint of this fit at {path}, got one of another ("
            + "; ".join(differing)
            + "); delete it or choose another path"
        )
    held = next(iter(state.tensors.values()))
    resumed = artifact.unpack_state(header["state"], tensors, _STATE, state.sketch)
    counts = {k: header[k] for k in ("batches", "samples", "skipped", "data_digest")}
    return Progress(resumed.to(held.device), **counts)


def _save(path: Path, progress: Progress, identity: dict[str, Any]) -> None:
    header, tensors = artifact.pack_state(progress.state, _STATE)
    counts = {k: getattr(progress, k) for k in ("batches", "samples", "skipped", "data_digest")}
    artifact.write(
        path, _CHECKPOINT, {"state": header, "identity": identity, **counts}, tensors
    )
