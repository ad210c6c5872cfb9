"""One pass over the training data: batches in, sketch and basis out; counted, resumable."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from scodkit.errors import (
    BatchError,
    EmptyLoaderError,
    MismatchError,
    NonFiniteError,
    OptionError,
    RepeatedDataWarning,
)
from scodkit.factors import (
    FactorsOf,
    FactorSource,
    Piece,
    ProductSource,
    distinct,
    name_of,
)
from scodkit.fit.checkpoint import Checkpoint, FiniteCheck, Progress
from scodkit.fit.fitted import Fitted
from scodkit.fit.preparing import Preparation, check_first, check_ways
from scodkit.fit.probes import Probes
from scodkit.fit.processes import Processes
from scodkit.fit.reading import Reader, data_identity
from scodkit.fit.recipe import Recipe, first_output
from scodkit.fit.seen import digests_of, joined, seen_again
from scodkit.fit.stream import (
    batches_of,
    check_deterministic,
    num_batches,
    num_samples,
    open_stream,
)
from scodkit.model import ranges
from scodkit.model.network import Form, Inputs, Network
from scodkit.model.parameters import ParameterSet, select, select_names
from scodkit.model.state import Fingerprints
from scodkit.numerics.matmul import sum_dtype
from scodkit.parts import Part, part_behind, sampled_hash

# pieces a GPU may be behind before it is waited for
_LATE = 2

# samples to choose an engine with, no two alike; and batches to look for them in
_DISTINCT = 3
_AHEAD = 16
_SHARD = (
    "DataLoader(Shard(dataset, rank, world_size)), from scodkit.parts, or fit alone with "
    "together=False"
)


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
        together: Add up the fits of all processes of torch's process group, if there is one.
        products: Whether to sketch products with the curvature rather than rows; None for the
            cheaper way.
    """

    progress: bool = True
    on_bad: Literal["raise", "skip"] = "raise"
    check_deterministic: bool = True
    checkpoint: Path | None = None
    every: int = 100
    precision: torch.dtype | None = None
    together: bool = True
    products: bool | None = None

    def __post_init__(self) -> None:
        if self.on_bad not in ("raise", "skip"):
            raise OptionError(f"expected on_bad='raise' or 'skip', got {self.on_bad!r}")
        if not isinstance(self.every, int) or self.every < 1:
            raise OptionError(f"expected every >= 1 batches, got {self.every!r}")
        check_ways(self.precision, self.products)


@torch.inference_mode(mode=False)  # or the sums could not be added to in place
def fit(
    network: Network, recipe: Recipe, loader: Iterable[Any], options: FitOptions
) -> tuple[Fitted, FactorSource | None]:
    """Summarise the training data in one pass, by this process or by several together.

    Args:
        network: The model.
        recipe: What to fit.
        loader: Batches; any iterable, read once.
        options: How the pass behaves.

    Returns:
        The fit, and what batches were turned into factors with: None if this process had none.

    Raises:
        NonFiniteError: If there was not one finite sample.
    """
    processes = Processes.here(options.together)
    own = _Pass(network, recipe, loader, options, processes)
    with processes.failing_together():
        begun = own.begin()
    terms = own.agree(begun)
    with processes.failing_together():
        done = own.run(begun, terms)
        part = own.part(done)
    own_words = {
        "skipped": done.skipped,
        "part": part and part.document(),
        "engine": None if begun is None else name_of(begun.source.engine),
        "range": done.input_range,
        "probes": None if begun is None else begun.probes,
    }
    told = processes.gathered(own_words)
    parts, samples = _parts(told), _samples(processes.gathered(done.seen.all()))
    probes = next((one["probes"] for one in told if one["probes"]), None)
    skipped = sum(one["skipped"] for one in told)
    state = processes.add_up(done.state)
    if state.num_data == 0:
        raise NonFiniteError(
            f"expected finite samples, but all {skipped} had a NaN or an infinity; "
            "look at the data and at the model's outputs"
        )
    basis = recipe.sketch.eigenbasis(state, recipe.rank)
    if options.precision is not None:  # a certificate would be one of rounded gradients
        basis = replace(basis, certified=False)
    engine = next((one["engine"] for one in told if one["engine"]), None)
    input_range = reduce(ranges.joined, (one["range"] for one in told))
    data = (parts, engine, input_range, samples, terms.form, probes)
    about = (terms.fingerprints, terms.shape, skipped, *data)
    fitted = Fitted(recipe.likelihood, terms.parameters, basis, state, *about)
    return fitted, None if begun is None else begun.source


@dataclass(frozen=True)
class _Begun:
    """A pass before its first step, in a process that has data.

    Args:
        call: The inputs of the first batch.
        form: That batches have.
        reader: All batches.
        parameters: The chosen weights.
        source: Turns batches into factors.
        products: Turns batches into products with their curvature; None for a pass in rows.
        dtype: Of the sums.
        probes: What the model answers to inputs that were made up.
    """

    call: Inputs
    form: Form
    reader: Reader
    parameters: ParameterSet
    source: FactorSource
    products: ProductSource | None
    dtype: torch.dtype
    probes: Probes | None


@dataclass(frozen=True)
class _Terms:
    """What the processes of a fit agree on.

    Args:
        parameters: The chosen weights.
        shape: Of a typical sample's output.
        dtype: Of the sums.
        fingerprints: Of the weights.
        form: That batches have.
    """

    parameters: ParameterSet
    shape: tuple[int, ...]
    dtype: torch.dtype
    fingerprints: Fingerprints
    form: Form


@dataclass(frozen=True)
class _Pass:
    """The pass of one process over its own data."""

    network: Network
    recipe: Recipe
    loader: Iterable[Any]
    options: FitOptions
    processes: Processes

    def begin(self) -> _Begun | None:
        """Return what is chosen on the first batch; None where only other processes have one.

        Raises:
            EmptyLoaderError: If there is no batch, and there are no others.
            BatchError: If the first batch has no samples to choose an engine with, or cannot be
                right.
        """
        network, recipe = self.network, self.recipe
        if self.options.checkpoint:
            self.processes.check_files(self.options.checkpoint)
        try:
            first, batches = open_stream(self.loader)
        except EmptyLoaderError:
            if self.processes.count == 1:
                raise
            return None
        with network.evaluating():
            call = network.inputs_of(first)
            check_first(network, recipe.likelihood, first, call)
            example, batches = with_example(network, call, batches)
            if self.options.check_deterministic:
                check_deterministic(network, call, self.loader)
            parameters = select(recipe.selection, network, call)
            options = (self.options.products, self.options.precision)
            about = (recipe, network, parameters, call, num_samples(self.loader))
            prepared = Preparation(*about, *options, example).prepared()
            dtype = sum_dtype(first_output(network, call))
            probes = Probes.of(network, first, call)
        form, reader = Form.of(first, call), Reader(self.loader, batches)
        source, products = prepared.source, prepared.products
        return _Begun(call, form, reader, parameters, source, products, dtype, probes)

    def agree(self, begun: _Begun | None) -> _Terms:
        """Return what all processes fit; those without data fit what the others do.

        Raises:
            MismatchError: If they do not agree.
            BatchError: If none has data.
        """
        own = None
        if begun is not None:
            own = {
                "parameters": list(begun.parameters.names),
                "output shape": list(begun.source.shape),
                "dtype": str(begun.dtype).removeprefix("torch."),
                "exempt": sorted(self.network.volatile),
            }
        told = [one for one in self.processes.gathered(own) if one is not None]
        forms = self.processes.gathered(begun and begun.form.document())
        if not told:
            raise BatchError("expected data in one of the processes, got empty loaders in all")
        mine = {**(own or told[0]), **self._identity}
        del mine["exempt"]  # which depends on the data
        self._compare(mine)
        with self.processes.failing_together():
            parameters = select_names(self.network.model, told[0]["parameters"])
            exempt = {name for one in told for name in one["exempt"]}
            fingerprints = Fingerprints.of(self.network.model, parameters, exempt)
        self._compare({"weights": fingerprints.document()})
        shape, dtype = tuple(told[0]["output shape"]), getattr(torch, told[0]["dtype"])
        form = Form(**next(one for one in forms if one is not None))
        return _Terms(parameters, shape, dtype, fingerprints, form)

    def _compare(self, mine: dict[str, Any]) -> None:
        """Make sure all processes say the same.

        Raises:
            MismatchError: If they do not.
        """
        difference = self.processes.first_difference(mine)
        if difference is not None:
            what, rank, first, other = difference
            raise MismatchError(
                f"expected the same fit in all processes, but the {what} of process 0 and of "
                f"process {rank} differ: {first} and {other}; start all with the same model "
                "and options, or fit alone with together=False"
            )

    @property
    def _identity(self) -> dict[str, Any]:
        return {**self.recipe.identity, "precision": str(self.options.precision)}

    def run(self, begun: _Begun | None, terms: _Terms) -> Progress:
        """Return how far the pass has come: to the end of this process's data."""
        recipe, size = self.recipe, terms.parameters.num_parameters
        state = recipe.sketch.zero(size, recipe.rank, terms.dtype, self.network.device)
        if begun is None:
            return Progress(state)
        checkpoint = self._checkpoint(begun, terms)
        progress = Progress(state) if checkpoint is None else checkpoint.resume(state)
        engine = begun.source.engine.of(self.network.at_precision(self.options.precision))
        source, network = replace(begun.source, engine=engine), engine.network
        products = begun.products and begun.products.of(network)
        done_before, read = progress.batches, 0
        calls = begun.reader.calls(network, done_before, hashed=checkpoint is not None)
        shown = self.options.progress and self.processes.rank == 0
        told = batches_of(calls, num_batches(self.loader), "sketching", shown)
        for read, (digest, call) in enumerate(told, start=1):
            if checkpoint and read == done_before and digest != progress.data_digest:
                raise checkpoint.other_data()
            if call is None:
                continue
            # the model is held batch by batch, so that others can score meanwhile
            with network.evaluating():
                if products is None:
                    absorb(source, call, progress, self.options.on_bad)
                else:
                    _absorb_products(products, call, progress, self.options.on_bad)
            progress.check(but=_LATE if network.device.type == "cuda" else 0)
            progress.batches, progress.data_digest = read, digest
            if checkpoint and progress.batches % self.options.every == 0:
                progress.check()
                checkpoint.save(progress)
        if checkpoint and read < done_before:
            raise checkpoint.other_data()
        progress.check()
        if checkpoint:
            checkpoint.save(progress)
        return progress

    def _checkpoint(self, begun: _Begun, terms: _Terms) -> Checkpoint | None:
        """Return the file for an unfinished pass of this process, if one is wanted."""
        if self.options.checkpoint is None:
            return None
        path = self.processes.own_file(self.options.checkpoint)
        weights, data = terms.fingerprints.document(), data_identity(self.loader, begun.call)
        about = {**self._identity, "weights": weights, "outputs": list(terms.shape)}
        return Checkpoint(path, {**about, "data": data})

    def part(self, done: Progress) -> Part | None:
        """Return which samples the pass was over, None if over none.

        Args:
            done: The pass. Data that does not know which part it is goes by its sketch.
        """
        if done.state.num_data == 0:
            return None
        # and by its norm: of mostly zeros, as with large embeddings, a few numbers say nothing
        salt = f"{done.samples} {float(done.state.squared_norm)!r}"
        unnamed = sampled_hash(done.state.tensors, salt)
        return part_behind(self.loader) or Part(unnamed, 0, done.samples)


def with_example(
    network: Network, first: Inputs, batches: Iterable[Any]
) -> tuple[Inputs, Iterable[Any]]:
    """Return samples to choose an engine with, and all batches again.

    Those of the first batch, unless they are too few, or alike: then more batches are read.

    Args:
        network: Takes inputs out of batches.
        first: The inputs of the first batch.
        batches: All of them.
    """
    stream = iter(batches)
    found, read = first, [next(stream)]
    while len(distinct(found, _DISTINCT)) < _DISTINCT and len(read) < _AHEAD:
        more = list(itertools.islice(stream, 1))
        if not more:
            break
        read += more
        found = found.joined(network.inputs_of(more[0]))
    return found, itertools.chain(read, stream)


def _parts(told: list[Any]) -> tuple[Part, ...]:
    """Return the parts of all processes.

    Raises:
        MismatchError: If two have samples in common.
    """
    parts = {rank: Part(**one["part"]) for rank, one in enumerate(told) if one["part"]}
    for rank, part in parts.items():
        for other in range(rank):
            if other in parts and part.overlaps(parts[other]):
                raise MismatchError(
                    f"expected other data in every process, but process {other} and process "
                    f"{rank} had the same ({part}), which would count twice; type {_SHARD}"
                )
    return tuple(parts.values())


def _samples(told: list[Tensor | None]) -> Tensor | None:
    """Return the digests of all processes' samples.

    Raises:
        MismatchError: If one has samples of another.
    """
    for rank in range(1, len(told)):
        again = seen_again(joined(told[:rank]), told[rank])
        if again is None:
            continue
        words = (
            f"expected other data in every process, but {again} samples of process {rank} were "
            f"in others, which would count twice; type {_SHARD}"
        )
        if again.certain:
            raise MismatchError(words)
        warnings.warn(words, RepeatedDataWarning, stacklevel=4)
    return joined(told)


def absorb(
    source: FactorSource, call: Inputs, progress: Progress, on_bad: Literal["raise", "skip"]
) -> None:
    """Add a batch to a sketch.

    Args:
        source: Turns batches into factors.
        call: The batch.
        progress: How far the pass has come; changed.
        on_bad: What a sample with a NaN or an infinity does.
    """
    whole = None
    if on_bad == "skip" and source.splits_samples:
        # a sample is skipped whole: look at all its directions before using any
        whole = _finite_samples(source, call)
    digests = digests_of(call)
    for piece in source.pieces(call, hold=True):
        _absorb_piece(piece, progress, on_bad, whole, digests[piece.samples])
        del piece  # or its rows would be there while the next are formed
    progress.count(call)


def _absorb_piece(
    piece: Piece,
    progress: Progress,
    on_bad: Literal["raise", "skip"],
    whole: Tensor | None,
    digests: Tensor,
) -> None:
    norms = piece.factors.squared_norms()
    good = norms.isfinite() & piece.finite
    if whole is not None:
        good &= whole[piece.samples]
    factors, kept = piece.factors, len(good)
    if on_bad == "raise":
        progress.unchecked.append(
            FiniteCheck(good, piece.finite, piece.samples.start, progress)
        )
    elif not bool(good.all()):
        factors, norms, kept = FactorsOf(factors, good), norms[good], int(good.sum())
        digests = digests[good]
    progress.state.sketch.update(
        progress.state, factors, norms.sum(), kept if piece.complete else 0
    )
    if piece.complete:
        progress.skipped += len(good) - kept
        progress.seen.add(digests)


def _absorb_products(
    source: ProductSource, call: Inputs, progress: Progress, on_bad: Literal["raise", "skip"]
) -> None:
    digests = digests_of(call)
    for piece in source.pieces(call):
        progress.seen.add(digests[piece.samples][piece.good])
        if on_bad == "raise":
            first = piece.samples.start
            FiniteCheck(piece.good, piece.finite, first, progress).ask()
        if piece.curvature is not None:
            progress.state.sketch.update_by_products(progress.state, piece.curvature)
        progress.skipped += int((~piece.good).sum())
        del piece  # and with it a graph
    progress.count(call)


def _finite_samples(source: FactorSource, call: Inputs) -> Tensor:
    finite = torch.ones(call.batch_size, dtype=torch.bool, device=source.engine.network.device)
    for piece in source.pieces(call, hold=True):
        finite[piece.samples] &= piece.factors.squared_norms().isfinite() & piece.finite
        del piece
    return finite
