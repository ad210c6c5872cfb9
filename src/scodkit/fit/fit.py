"""One pass over the training data: batches in, sketch and basis out; counted, resumable."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from scodkit import errors
from scodkit.factors.choose import at_precision, name_of
from scodkit.factors.engine import Engine, FactorsOf
from scodkit.factors.pieces import FactorSource
from scodkit.factors.products import ProductSource
from scodkit.fit import data
from scodkit.fit.checkpoint import Progress
from scodkit.fit.first_batch import Preparation, check_deterministic, with_example
from scodkit.fit.fitted import FitOptions, Fitted, OnBad, Recipe
from scodkit.fit.learn import learn, read_ahead
from scodkit.fit.probes import Probes
from scodkit.fit.processes import Processes
from scodkit.likelihoods import Heads
from scodkit.model.failures import check_runs
from scodkit.model.input_range import InputRange
from scodkit.model.inputs import Form, Inputs, joined_ranges
from scodkit.model.network import Network
from scodkit.model.parameters import Fingerprints, ParameterSet, select_names
from scodkit.model.projected import Projected, ProjectedSet, Projections
from scodkit.numerics.matmul import sum_dtype
from scodkit.sketch import documents

# pieces a GPU may be behind before it is waited for
_LATE = 2


@torch.inference_mode(mode=False)  # or the sums could not be added to in place
def fit(
    network: Network, recipe: Recipe, loader: Iterable[Any], options: FitOptions
) -> tuple[Fitted, FactorSource | None]:
    """Summarise the training data in one pass, by this process or by several together.

    Args:
        network: The model.
        recipe: What to fit.
        loader: Batches; any iterable, read once; or all samples as one array or tensor.
        options: How the pass behaves.

    Returns:
        The fit, and what turned batches into factors: None if this process had no batches.

    Raises:
        NonFiniteError: If there was not one finite sample.
    """
    processes = Processes.here(options.together)
    loader = data.as_loader(loader)
    order = network.ordering(options.columns)
    fit_pass = _Pass(network, recipe, loader, options, processes, order)
    with processes.failing_together():
        opened = fit_pass.open()
    opened = fit_pass.project(opened)
    with processes.failing_together():
        begun = None if opened is None else fit_pass.begin(opened)
    terms = fit_pass.agree(begun)
    # processes that share every batch fail in the same place anyway
    with contextlib.nullcontext() if options.sharded else processes.failing_together():
        done, source = fit_pass.run(begun, terms)
    reports = processes.gathered(
        {
            "skipped": done.skipped,
            "engine": source and name_of(source.engine),
            "range": done.input_range,
            "columns": {} if done.columns is None else done.columns.pack(),
            "probes": begun and begun.probes,
            "samples": done.seen.all(),
        }
    )
    if options.sharded:
        reports = reports[:1]  # all have seen the same data, and save the same bits
    skipped = sum(report["skipped"] for report in reports)
    samples = _samples([report["samples"] for report in reports])
    state = done.state if options.sharded else processes.add_up(done.state)
    if state.num_data == 0:
        raise errors.NonFiniteError(
            f"expected finite samples, but all {skipped} had a NaN or an infinity; "
            "look at the data and at the model's outputs"
        )
    basis = recipe.sketch.eigenbasis(state, recipe.rank)
    if options.precision is not None:  # a certificate would be one of rounded gradients
        basis = replace(basis, certified=False)
    if options.sharded:  # the sketch bounds it by the rows of this process alone
        basis = replace(basis, residual_rank=terms.parameters.num_parameters)
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
        columns=reduce(InputRange.merged, (InputRange(each["columns"]) for each in reports)),
        samples=samples,
        form=terms.form,
        probes=next((report["probes"] for report in reports if report["probes"]), None),
    )
    return fitted, source


@dataclass(frozen=True)
class _Opened:
    """The data of a process.

    Args:
        first: The first batch.
        batches: All batches.
        prepared: What was chosen on the first batch.
    """

    first: Any
    batches: Iterable[Any]
    prepared: Preparation


@dataclass(frozen=True)
class _Begun:
    """What a process with data has chosen on its first batch.

    Args:
        batches: All batches.
        terms: What must be the same in all processes, by name.
        form: Of the first batch.
        source: Turns batches into factors.
        engine: That of the source, in the precision of the pass.
        products: Turns batches into products with their curvature; None for a pass in rows.
        probes: The model's answers to made-up inputs.
    """

    batches: Iterable[Any]
    terms: dict[str, Any]
    form: Form
    source: FactorSource
    engine: Engine
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
        form: Of the batches.
    """

    parameters: ParameterSet
    shape: tuple[int, ...]
    dtype: torch.dtype
    fingerprints: Fingerprints
    form: Form


@dataclass(frozen=True)
class _Pass:
    """The pass of one process over its data; `order` is applied to each batch."""

    network: Network
    recipe: Recipe
    loader: Iterable[Any]
    options: FitOptions
    processes: Processes
    order: Callable[[Any], Any]

    def open(self) -> _Opened | None:
        """Return the data and its first batch; None where only other processes have some.

        Raises:
            EmptyLoaderError: If there is no batch, and no other process may have one.
        """
        if self.options.checkpoint:
            self.processes.check_files(self.options.checkpoint)
        try:
            first, batches = data.open_stream(self.loader, self.order)
        except errors.EmptyLoaderError:
            if self.processes.count == 1 or self.options.sharded:
                raise
            return None
        with self.network.evaluating():
            samples = data.num_samples(self.loader)
            prepared = Preparation(self.network, self.recipe, self.options, first, samples)
        return _Opened(first, batches, prepared)

    def project(self, opened: _Opened | None) -> _Opened | None:
        """Return the data, read again from its start, once projections are known if any are.

        One process learns them, the first that has data; the others are given its.
        """
        selection, rank = self.recipe.selection, self.processes.rank
        if not isinstance(selection, Projected) or selection.given is not None:
            return opened
        having = self.processes.gathered(opened is not None)
        learnt = None
        with self.processes.failing_together():
            if opened is not None and rank == having.index(True):
                opened, learnt = self._learnt(opened, selection)
        if True in having:
            learnt = self.processes.gathered(learnt)[having.index(True)]
        if opened is not None and learnt is not None:
            parameters = opened.prepared.parameters
            opened.prepared.parameters = learnt.of(parameters)
        return opened

    def _learnt(self, opened: _Opened, projected: Projected) -> tuple[_Opened, Projections]:
        """Return projections learnt from the first samples, and all of the data again."""
        prepared = opened.prepared
        network = self.network.at_precision(self.options.precision)
        with network.evaluating():
            calls, batches = read_ahead(
                network, prepared.call, opened.batches, projected.samples
            )
            learnt = learn(
                projected,
                network,
                prepared.parameters,
                self.recipe.likelihood,
                prepared.shape,
                calls,
                self.recipe.budget,
            )
        return replace(opened, batches=batches), learnt

    def begin(self, opened: _Opened) -> _Begun:
        """Return what is chosen on the first batch."""
        network, recipe, options = self.network, self.recipe, self.options
        first, batches, prepared = opened.first, opened.batches, opened.prepared
        with network.evaluating():
            call, output, parameters = prepared.call, prepared.output, prepared.parameters
            if options.check_deterministic:
                check_deterministic(network, call, output, self.loader)
            prepared.example, batches = with_example(network, call, batches)
            if options.sharded:
                names, _ = parameters.divided(self.processes.rank, self.processes.count)
                part = select_names(network.model, names)
                source = recipe.source(network, part, prepared.example, prepared.shape)
                engine = at_precision(source.engine, options.precision, prepared.example)
                products = None
            else:
                source, engine, products = prepared.sources()
            checked = options.check_deterministic
            probes = Probes.of(network, first, call, deterministic=checked)
        terms = {
            "parameters": parameters.names,
            "output shape": prepared.shape,
            "dtype": sum_dtype(output),
        }
        if isinstance(parameters, ProjectedSet):
            terms["projections"] = parameters.projections
        if isinstance(recipe.likelihood, Heads):
            terms["heads"] = recipe.likelihood.shapes
        form = Form.of(first, call, network.by_name)
        terms["columns"] = form.columns
        if options.sharded:
            terms["first batch"] = data.batch_digest(call)
        return _Begun(batches, terms, form, source, engine, products, probes)

    def agree(self, begun: _Begun | None) -> _Terms:
        """Return what all processes fit; those without data fit what the others do.

        Raises:
            MismatchError: If they do not agree.
            BatchError: If none has data.
        """
        # which buffers a forward pass changes, and the form of batches, depend on the data
        proposal = begun and (begun.terms, begun.form, self.network.volatile)
        proposals = [p for p in self.processes.gathered(proposal) if p is not None]
        if not proposals:
            raise errors.BatchError(
                "expected data in one of the processes, got empty loaders in all"
            )
        terms, form, _ = proposals[0]
        self._compare({**(begun.terms if begun else terms), **self._identity})
        if isinstance(self.recipe.likelihood, Heads):  # whose shapes a pass shows
            self.recipe.likelihood.shapes.update(terms["heads"])
        with self.processes.failing_together():
            parameters = select_names(self.network.model, terms["parameters"])
            if "projections" in terms:
                parameters = terms["projections"].of(parameters)
            exempt = {name for *_, volatile in proposals for name in volatile}
            fingerprints = Fingerprints.of(self.network.model, parameters, exempt)
        self._compare({"weights": fingerprints.document()})
        return _Terms(parameters, terms["output shape"], terms["dtype"], fingerprints, form)

    def _compare(self, mine: dict[str, Any]) -> None:
        """Make sure all processes say the same.

        Raises:
            MismatchError: If they do not.
        """
        first, *others = self.processes.gathered(mine)
        advice = "start all with the same model and options, or fit alone with together=False"
        if self.options.sharded:
            advice = (
                "pass the same model, options and batches to each: they divide the weights, "
                "not the data"
            )
        for rank, other in enumerate(others, start=1):
            for what in first:
                if first[what] != other[what]:
                    raise errors.MismatchError(
                        f"expected the same {what} in all processes, but the {what} of "
                        f"process 0 and of process {rank} differ: {first[what]} and "
                        f"{other[what]}; {advice}"
                    )

    @property
    def _identity(self) -> dict[str, Any]:
        return {
            "likelihood": documents.describe(self.recipe.likelihood),
            "sketch": documents.describe(self.recipe.sketch),
            "rank": self.recipe.rank,
            "precision": str(self.options.precision),
        }

    def run(self, begun: _Begun | None, terms: _Terms) -> tuple[Progress, FactorSource | None]:
        """Read all data of this process.

        Returns:
            What the pass has found, and what turns batches into factors: None without data.
        """
        recipe, options, processes = self.recipe, self.options, self.processes
        size, weights = terms.parameters.num_parameters, None
        if options.sharded:
            _, weights = terms.parameters.divided(processes.rank, processes.count)
        state = recipe.sketch.zero(size, recipe.rank, terms.dtype, self.network.device, weights)
        if begun is None:
            return Progress(state), None
        chosen = begun.source
        if options.sharded:
            state.add_up = processes.summed
            chosen = shared(chosen, processes)
        progress = Progress(state)
        if options.checkpoint is not None:
            self._resume(progress, options.checkpoint, terms)
        source, network = replace(chosen, engine=begun.engine), begun.engine.network
        late = _LATE if network.device.type == "cuda" else 0
        number = -1
        for number, call in self._calls(network, begun.batches, progress.batches):
            if progress.covers(number, call):
                continue
            # the model is held batch by batch, so that others can score meanwhile
            try:
                with network.evaluating():
                    if begun.products is None:
                        _absorb_rows(source, call, progress, options.on_bad)
                    else:
                        _absorb_products(begun.products, call, progress, options.on_bad)
            except Exception as error:
                check_runs(network, call, error, begun.form)
                raise
            progress.count(call, late)
        progress.finish(number + 1)
        return progress, chosen

    def _calls(
        self, network: Network, batches: Iterable[Any], done: int
    ) -> Iterator[tuple[int, Inputs]]:
        """Yield the inputs of batches with their numbers, behind a progress bar."""
        shown = self.options.progress and self.processes.rank == 0
        numbered = data.batches_from(self.loader, batches, done)
        total = data.num_batches(self.loader)
        stream = iter(tqdm(numbered, "sketching", total, unit="batch", disable=not shown))
        if not self.options.sharded:
            for number, batch in stream:
                yield number, network.inputs_of(self.order(batch))
            return
        for number in itertools.count():
            call = same_in_all(self.processes, network, lambda: next(stream, (0, None))[1])
            if call is None:
                return
            yield number, call

    def _resume(self, progress: Progress, checkpoint: Path, terms: _Terms) -> None:
        """Go on from a checkpoint of this process, if there is one."""
        data.check_order(self.loader)
        identity = {
            **self._identity,
            "weights": terms.fingerprints.document(),
            "outputs": list(terms.shape),
            "samples": data.num_samples(self.loader),
            "batches": data.num_batches(self.loader),
        }
        if isinstance(terms.parameters, ProjectedSet):
            identity["projections"] = terms.parameters.projections.digest
        own_file = self.processes.own_file(checkpoint)
        progress.resume(own_file, identity, self.options.every)


def shared(source: FactorSource, processes: Processes) -> FactorSource:
    """Return a source that adds up over processes, in pieces that fit all of them.

    Args:
        source: Of the weights of this process.
        processes: Those that divide the weights.
    """
    rows = processes.gathered(source.rows_at_once(hold=True))
    return replace(source, add_up=processes.summed, most_rows=min(rows))


def same_in_all(
    processes: Processes, network: Network, read: Callable[[], Any], form: Form | None = None
) -> Inputs | None:
    """Return the inputs of a batch that is the same in all processes; None if there is none.

    Args:
        processes: Those that divide the weights.
        network: The model.
        read: Returns the batch; None at the end of the data.
        form: Of the batches of the fit.

    Raises:
        MismatchError: If processes have different batches.
    """
    with processes.failing_together():
        batch = read()
        call = None if batch is None else network.inputs_of(batch, form)
    digests = processes.gathered(None if call is None else data.batch_digest(call))
    if len(set(digests)) > 1:
        raise errors.MismatchError(
            "expected the same batch in all processes, got different batches, or none in "
            "some; pass the same data to each: they divide the weights, not the data"
        )
    return call


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
            raise errors.MismatchError(words)
        warnings.warn(words, errors.RepeatedDataWarning, stacklevel=4)
    return data.joined(by_rank)


def _absorb_rows(source: FactorSource, call: Inputs, progress: Progress, on_bad: OnBad) -> None:
    """Add the rows of a batch to the sketch."""
    whole = None
    if on_bad == "skip" and source.splits_samples:
        # a sample is skipped whole: look at all its directions before using any
        whole = _finite_samples(source, call)
    digests = data.digests_of(call)
    for piece in source.pieces(call, hold=True):
        factors, norms = piece.factors, piece.factors.squared_norms()
        good = norms.isfinite() & piece.finite
        if whole is not None:
            good &= whole[piece.samples]
        seen, used = digests[piece.samples], len(good)
        if on_bad == "raise":
            progress.check_later(good, piece.finite, piece.samples.start)
        elif not bool(good.all()):
            factors, norms, used = FactorsOf(factors, good), norms[good], int(good.sum())
            seen = seen[good]
        progress.state.sketch.update(
            progress.state, factors, norms.sum(), used if piece.complete else 0
        )
        if piece.complete:
            progress.skipped += len(good) - used
            progress.seen.add(seen)
        del piece, factors  # or its rows would be there while the next are formed


def _absorb_products(
    source: ProductSource, call: Inputs, progress: Progress, on_bad: OnBad
) -> None:
    """Add the products of a batch's curvature to the sketch."""
    digests = data.digests_of(call)
    for piece in source.pieces(call):
        progress.seen.add(digests[piece.samples][piece.good])
        if on_bad == "raise":
            progress.check_later(piece.good, piece.finite, piece.samples.start)
            progress.check()
        if piece.curvature is not None:
            progress.state.sketch.update_by_products(progress.state, piece.curvature)
        progress.skipped += int((~piece.good).sum())
        del piece  # and with it a graph


def _finite_samples(source: FactorSource, call: Inputs) -> Tensor:
    finite = torch.ones(call.batch_size, dtype=torch.bool, device=source.engine.network.device)
    for piece in source.pieces(call, hold=True):
        finite[piece.samples] &= piece.factors.squared_norms().isfinite() & piece.finite
        del piece
    return finite
