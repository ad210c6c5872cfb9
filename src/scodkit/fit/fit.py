"""One pass over the training data: batches in, sketch and basis out; counted, resumable."""

from __future__ import annotations

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
from scodkit.factors.choose import name_of
from scodkit.factors.engine import FactorsOf
from scodkit.factors.pieces import FactorSource, Piece
from scodkit.factors.products import ProductSource
from scodkit.fit import data
from scodkit.fit.checkpoint import Checkpoint, FiniteCheck, Progress
from scodkit.fit.first_batch import check_deterministic, first_output, with_example
from scodkit.fit.fitted import Fitted, Recipe
from scodkit.fit.memory import Preparation, check_ways
from scodkit.fit.probes import Probes
from scodkit.fit.processes import Processes
from scodkit.model.inputs import Form, Inputs, joined_ranges
from scodkit.model.network import Network
from scodkit.model.parameters import Fingerprints, ParameterSet, select, select_names
from scodkit.numerics.matmul import sum_dtype

# pieces a GPU may be behind before it is waited for
_LATE = 2

OnBad = Literal["raise", "skip"]


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
    on_bad: OnBad = "raise"
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
    fit_pass = _Pass(network, recipe, loader, options, processes)
    with processes.failing_together():
        begun = fit_pass.begin()
    terms = fit_pass.agree(begun)
    with processes.failing_together():
        done = fit_pass.run(begun, terms)
    reports = processes.gathered(
        {
            "skipped": done.skipped,
            "engine": begun and name_of(begun.source.engine),
            "range": done.input_range,
            "probes": begun and begun.probes,
            "samples": done.seen.all(),
        }
    )
    skipped = sum(report["skipped"] for report in reports)
    samples = _samples([report["samples"] for report in reports])
    state = processes.add_up(done.state)
    if state.num_data == 0:
        raise NonFiniteError(
            f"expected finite samples, but all {skipped} had a NaN or an infinity; "
            "look at the data and at the model's outputs"
        )
    basis = recipe.sketch.eigenbasis(state, recipe.rank)
    if options.precision is not None:  # a certificate would be one of rounded gradients
        basis = replace(basis, certified=False)
    fitted = Fitted(
        likelihood=recipe.likelihood,
        parameters=terms.parameters,
        basis=basis,
        state=state,
        fingerprints=terms.fingerprints,
        shape=terms.shape,
        skipped=skipped,
        engine=next((report["engine"] for report in reports if report["engine"]), None),
        input_range=reduce(joined_ranges, (report["range"] for report in reports)),
        samples=samples,
        form=terms.form,
        probes=next((report["probes"] for report in reports if report["probes"]), None),
    )
    return fitted, None if begun is None else begun.source


@dataclass(frozen=True)
class _Begun:
    """What a process with data has chosen on its first batch.

    Args:
        call: The inputs of the first batch.
        batches: All batches.
        terms: What this process would fit, as plain data, to be compared with the others'.
        source: Turns batches into factors.
        products: Turns batches into products with their curvature; None for a pass in rows.
        probes: What the model answers to inputs that were made up.
    """

    call: Inputs
    batches: Iterable[Any]
    terms: dict[str, Any]
    source: FactorSource
    products: ProductSource | None
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
        network, recipe, options = self.network, self.recipe, self.options
        if options.checkpoint:
            self.processes.check_files(options.checkpoint)
        try:
            first, batches = data.open_stream(self.loader)
        except EmptyLoaderError:
            if self.processes.count == 1:
                raise
            return None
        with network.evaluating():
            call = network.inputs_of(first)
            output = first_output(network, recipe.likelihood, first, call)
            if options.check_deterministic:
                check_deterministic(network, call, output, self.loader)
            example, batches = with_example(network, call, batches)
            parameters = select(recipe.selection, network, call)
            source, products = Preparation(
                recipe=recipe,
                network=network,
                parameters=parameters,
                call=call,
                output=output,
                num_data=data.num_samples(self.loader),
                products=options.products,
                precision=options.precision,
                example=example,
            ).sources()
            checked = options.check_deterministic
            probes = Probes.of(network, first, call, deterministic=checked)
        terms = {
            "parameters": list(parameters.names),
            "output shape": list(output.shape[1:]),
            "dtype": str(sum_dtype(output)).removeprefix("torch."),
            "exempt": sorted(network.volatile),
            "form": Form.of(first, call).document(),
        }
        return _Begun(call, batches, terms, source, products, probes)

    def agree(self, begun: _Begun | None) -> _Terms:
        """Return what all processes fit; those without data fit what the others do.

        Raises:
            MismatchError: If they do not agree.
            BatchError: If none has data.
        """
        gathered = self.processes.gathered(begun and begun.terms)
        proposals = [terms for terms in gathered if terms is not None]
        if not proposals:
            raise BatchError("expected data in one of the processes, got empty loaders in all")
        first = proposals[0]
        mine = {**(begun.terms if begun else first), **self._identity}
        for depends_on_data in ("exempt", "form"):
            del mine[depends_on_data]
        self._compare(mine)
        with self.processes.failing_together():
            parameters = select_names(self.network.model, first["parameters"])
            exempt = {name for terms in proposals for name in terms["exempt"]}
            fingerprints = Fingerprints.of(self.network.model, parameters, exempt)
        self._compare({"weights": fingerprints.document()})
        shape, dtype = tuple(first["output shape"]), getattr(torch, first["dtype"])
        return _Terms(parameters, shape, dtype, fingerprints, Form(**first["form"]))

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
        checkpoint = self._checkpoint(terms)
        progress = Progress(state) if checkpoint is None else checkpoint.resume(state)
        engine = begun.source.engine.of(self.network.at_precision(self.options.precision))
        source, network = replace(begun.source, engine=engine), engine.network
        done = number = progress.batches
        if checkpoint and done:
            checkpoint.check_batch(progress, 0, data.batch_digest(begun.call))
        shown = self.options.progress and self.processes.rank == 0
        batches = data.batches_from(self.loader, begun.batches, done)
        total = data.num_batches(self.loader)
        for number, batch in data.batches_of(batches, total, "sketching", shown):
            call = network.inputs_of(batch)
            digest = data.batch_digest(call) if checkpoint else 0
            if checkpoint and number < done:
                checkpoint.check_batch(progress, number, digest)
                continue
            # the model is held batch by batch, so that others can score meanwhile
            with network.evaluating():
                if begun.products is None:
                    absorb(source, call, progress, self.options.on_bad)
                else:
                    _absorb_products(begun.products, call, progress, self.options.on_bad)
            progress.check(but=_LATE if network.device.type == "cuda" else 0)
            progress.batches = number + 1
            if checkpoint:
                progress.digests.append(digest)
                if progress.batches % self.options.every == 0:
                    progress.check()
                    checkpoint.save(progress)
        if checkpoint and number + 1 < done:
            checkpoint.check_batch(progress, done - 1, None)
        progress.check()
        if checkpoint:
            checkpoint.save(progress)
        return progress

    def _checkpoint(self, terms: _Terms) -> Checkpoint | None:
        """Return the file for an unfinished pass of this process, if one is wanted."""
        if self.options.checkpoint is None:
            return None
        data.check_order(self.loader)
        path = self.processes.own_file(self.options.checkpoint)
        identity = {
            **self._identity,
            "weights": terms.fingerprints.document(),
            "outputs": list(terms.shape),
            "samples": data.num_samples(self.loader),
            "batches": data.num_batches(self.loader),
        }
        return Checkpoint(path, identity)


def _samples(by_rank: list[Tensor | None]) -> Tensor | None:
    """Return the digests of all processes' samples.

    Args:
        by_rank: The digests of each process; None where they are not known.

    Raises:
        MismatchError: If one has samples of another.
    """
    for rank in range(1, len(by_rank)):
        again = data.seen_again(data.joined(by_rank[:rank]), by_rank[rank])
        if again is None:
            continue
        words = (
            f"expected other data in every process, but {again} samples of process {rank} were "
            "in others, which would count twice; type DataLoader(Shard(dataset, rank, "
            "world_size)), from scodkit.parts, or fit alone with together=False"
        )
        if again.certain:
            raise MismatchError(words)
        warnings.warn(words, RepeatedDataWarning, stacklevel=4)
    return data.joined(by_rank)


def absorb(source: FactorSource, call: Inputs, progress: Progress, on_bad: OnBad) -> None:
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
    digests = data.digests_of(call)
    for piece in source.pieces(call, hold=True):
        _absorb_piece(piece, progress, on_bad, whole, digests[piece.samples])
        del piece  # or its rows would be there while the next are formed
    progress.count(call)


def _absorb_piece(
    piece: Piece,
    progress: Progress,
    on_bad: OnBad,
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
    source: ProductSource, call: Inputs, progress: Progress, on_bad: OnBad
) -> None:
    digests = data.digests_of(call)
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
