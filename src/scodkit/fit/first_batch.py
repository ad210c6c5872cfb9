"""What is chosen on the first batch, and refused: at once or not at all.

Rows or products, the engine, and the pieces a batch is cut into. A fit goes by formulas that
err high; `Monitor.plan` counts what a few samples take instead.
"""

from __future__ import annotations

import inspect
import itertools
import math
import warnings
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from scodkit import errors
from scodkit.factors.choose import at_precision, choose_jacobian
from scodkit.factors.engine import Engine, row_bytes
from scodkit.factors.pieces import MANY, FactorSource, distinct
from scodkit.factors.products import Portions, ProductSource, count_passes
from scodkit.fit.fitted import FitOptions, Recipe
from scodkit.fit.learn import learn, learning_bytes
from scodkit.fit.memory import Costs, Plan, available_bytes, compare
from scodkit.likelihoods import Likelihood
from scodkit.model.inputs import Inputs
from scodkit.model.network import Network, check_not_sharded
from scodkit.model.parameters import ParameterSet, select
from scodkit.model.projected import Projected, ProjectedSet
from scodkit.numerics.matmul import sum_dtype
from scodkit.parts import read_by_position

# samples of the first batch whose outputs are looked at
_LOOKED_AT = 16

# samples to choose an engine with, no two alike; and batches to look for them in
_DISTINCT = 3
_AHEAD = 16


class Preparation:
    """What a fit chooses on its first batch.

    Args:
        network: The model, held in eval mode.
        recipe: What to fit.
        options: How to fit.
        batch: The first batch, as the loader yields it; refused if it cannot be right.
        num_data: Samples to come, where known.

    Attributes:
        call: The inputs of the batch.
        output: What the model made of its first samples, ``(b, *shape)``.
        shape: Of a typical sample's output.
        parameters: The chosen weights.
        example: Samples to choose an engine with.
    """

    def __init__(
        self,
        network: Network,
        recipe: Recipe,
        options: FitOptions,
        batch: object,
        num_data: int | None,
    ) -> None:
        self.network, self.recipe, self.options = network, recipe, options
        self.num_data = num_data
        self.call = self.example = network.inputs_of(batch)
        self.output = first_output(network, recipe.likelihood, batch, self.call)
        self.shape = tuple(self.output.shape[1:])
        self.parameters = self._selected()

    def _selected(self) -> ParameterSet:
        """Return the weights; those to be projected with the projections that are given."""
        selection = self.recipe.selection
        if not isinstance(selection, Projected):
            return select(selection, self.network, self.call)
        if selection.given is None:
            return select(selection.layers, self.network, self.call)
        names = selection.given.names
        return selection.given.of(select(names, self.network, self.call))

    def sources(self) -> tuple[FactorSource, Engine, ProductSource | None]:
        """Choose how to compute.

        Returns:
            What turns batches into factors; its engine in the precision of the pass; and what
            turns batches into products with their curvature: None for a fit in rows.
        """
        rough = self._rough_plan()
        rough.check()
        source, engine, products, plan = self._chosen(rough, counted=False)
        plan.check()
        return source, engine, products

    def plan(self) -> Plan:
        """Return the memory of a fit and of scoring, counted on a piece of the batch.

        Returns:
            A rough plan, if not even sketch and basis fit.
        """
        selection = self.recipe.selection
        if isinstance(selection, Projected) and not isinstance(self.parameters, ProjectedSet):
            # of the same shapes as those to be learnt
            random = replace(selection, moments="random")
            learnt = learn(
                random,
                self.network,
                self.parameters,
                self.recipe.likelihood,
                self.shape,
                [self.call],
                self.recipe.budget,
            )
            self.parameters = learnt.of(self.parameters)
        rough = self._rough_plan()
        if not rough.fits:
            return rough
        source, _, _, plan = self._chosen(rough, counted=True)
        return replace(plan, score_working_bytes=self._score_bytes(source, plan))

    def _chosen(
        self, rough: Plan, counted: bool
    ) -> tuple[FactorSource, Engine, ProductSource | None, Plan]:
        """Return what `sources` does, and the plan of a fit.

        Args:
            rough: The plan of sketch and basis.
            counted: Whether to count the bytes of a piece's rows, not to go by formula.
        """
        source = self.recipe.source(self.network, self.parameters, self.example, self.shape)
        engine = at_precision(source.engine, self.options.precision, self.example)
        running = replace(source, engine=engine)
        working = _row_bytes(running, self.call, hold=True)
        products, costs = self._product_source(rough, working)
        if products is not None:
            working = products.portions(self.call.batch_size).bytes
        elif counted:
            if replace(rough, working_bytes=working).fits:  # a bound: then it can be tried
                working = running.counted(self.call, hold=True) or working
            costs = costs and replace(costs, rows=replace(costs.rows, bytes=working))
        return source, engine, products, replace(rough, costs=costs, working_bytes=working)

    def _rough_plan(self) -> Plan:
        """Return the memory of sketch and basis, and of a single row: the least there can be.

        Nothing of it is allocated, nor is a gradient formed.
        """
        recipe, parameters, device = self.recipe, self.parameters, self.network.device
        directions = recipe.likelihood.num_directions(self.shape)
        num_rows = None if self.num_data is None else self.num_data * directions
        columns = recipe.sketch.columns(parameters.num_parameters, recipe.rank, num_rows)
        one_row = row_bytes(self.network, parameters)
        vector = parameters.num_parameters * sum_dtype(self.output).itemsize
        rank = min(recipe.rank, columns)
        memory = recipe.sketch.memory(parameters.num_parameters, columns, device)
        return Plan(
            num_parameters=parameters.num_parameters,
            directions=directions,
            columns=columns,
            rank=rank,
            sketch_bytes=columns * vector,
            basis_bytes=rank * vector,
            kept_bytes=memory.kept_bytes,
            making_bytes=memory.making_bytes,
            solve_bytes=memory.solve_columns * vector,
            chunk_bytes=max(memory.making_bytes, memory.solve_bytes),
            working_bytes=one_row,
            score_working_bytes=one_row,
            available_bytes=available_bytes(device),
            first_bytes=self._first_bytes(),
        )

    def _first_bytes(self) -> int:
        """Return what is held before the sketch; see `Plan`."""
        selection, parameters = self.recipe.selection, self.parameters.in_full()
        if not isinstance(selection, Projected):
            return 0
        itemsize = math.ceil(parameters.itemsize(self.network.model))
        held = learning_bytes(selection, parameters, itemsize)
        if selection.given is not None or selection.moments == "random":
            return held
        directions = self.recipe.likelihood.num_directions(self.shape)
        rows = min(self.call.batch_size, selection.samples) * directions
        return held + min(self.recipe.budget, 2 * rows * parameters.widest * itemsize)

    def _score_bytes(self, source: FactorSource, plan: Plan) -> int:
        """Return what scoring a batch takes, beside the basis."""
        if source.ends_in_head:
            samples = min(source.heads_at_once(plan.rank), self.call.batch_size)
            head = source.counted_head(self.call, plan.rank)
            # the first batch is checked along a direction of the weights, which is held twice
            checked = 2 * plan.basis_bytes // max(1, plan.rank) if samples > 1 else 0
            if head is not None:
                return head + checked
            return source.head_bytes(plan.rank, samples)
        # rows at the output are formed of all directions at once: where these are as many as
        # pixels, a piece may be too large to try
        at_output = plan.directions * math.prod(source.shape) * torch.float32.itemsize
        samples = min(source.samples_at_once(False), self.call.batch_size)
        if samples * at_output <= self.recipe.budget:
            counted = source.counted(self.call, hold=False, columns=plan.rank)
            if counted is not None:
                return counted
        return _row_bytes(source, self.call, hold=False) + samples * at_output

    def _product_source(
        self, plan: Plan, in_rows: int
    ) -> tuple[ProductSource | None, Costs | None]:
        """Return how to take products, if they are taken; and what both ways cost.

        Args:
            plan: A rough one.
            in_rows: Bytes that rows take.

        Raises:
            OptionError: If products are demanded where they cannot be taken.
        """
        recipe, demanded, objection = self.recipe, self.options.products, None
        if not recipe.sketch.takes_products:
            objection = f"{recipe.sketch} takes rows only: type sketch=Nystrom() or TwoSided()"
        elif isinstance(self.parameters, ProjectedSet):
            objection = "gradients of projected weights are short, and formed as rows"
        elif recipe.likelihood.draws:
            objection = f"{recipe.likelihood} draws a few rows, which are cheap"
        elif self.parameters.itemsize(self.network.model) < torch.float32.itemsize:
            objection = "products lose too many digits with weights in half precision"
        if demanded and objection:
            raise errors.OptionError(
                f"expected a fit that can be made by products, but {objection}; or leave out "
                "products=True"
            )
        considered = plan.directions >= MANY if demanded is None else demanded
        if objection or not considered:
            return None, None
        size = self.call.batch_size
        passes = count_passes(self.network, self.parameters, self.call)
        together, passed_over = choose_jacobian(self.network, self.parameters, self.example)
        if together is None:
            words = f"products with the curvature of {type(self.network.model).__name__}"
            if demanded:
                raise errors.OptionError(
                    f"expected {words} that agree with plain autograd, but all were passed "
                    f"over: {passed_over}; leave out products=True"
                )
            at_best = Portions(size, plan.columns, 0)  # all columns at once
            if compare(plan, size, passes, at_best, in_rows).by_products:
                warnings.warn(
                    f"{words} cannot be trusted, so it is fitted in rows, more slowly; passed "
                    f"over: {passed_over}",
                    errors.EngineFallbackWarning,
                    stacklevel=2,
                )
            return None, None
        source = ProductSource(
            self.network.at_precision(self.options.precision),
            self.parameters,
            together,
            recipe.likelihood,
            plan.columns,
            recipe.budget,
        )
        source = replace(source, memory=source.counted(self.call))
        costs = compare(plan, size, passes, source.portions(size), in_rows, demanded)
        return (source if costs.by_products else None), costs


def _row_bytes(source: FactorSource, call: Inputs, hold: bool) -> int:
    """Return a bound on the bytes of rows as they are formed, with all that takes."""
    rows, directions = source.rows_at_once(hold), max(1, source.directions)
    samples = min(source.samples_at_once(hold), call.batch_size)
    if hold and source.engine.memory is not None:
        return source.engine.memory.at(samples, min(rows, directions))
    return min(rows, samples * directions) * source.engine.row_bytes(hold)


def first_output(
    network: Network, likelihood: Likelihood, batch: object, call: Inputs
) -> Tensor:
    """Return the model's output on the first samples; refuse what cannot be right.

    Args:
        network: The model, held in eval mode.
        likelihood: Of its outputs.
        batch: As the loader yielded it.
        call: The inputs in it.

    Returns:
        ``(b, *shape)``, detached, of the samples of `looked_at`.

    Raises:
        BatchError: If there are no samples, weights have no gradients, or the likelihood does
            not take the outputs.
        ModelCallError: If the model cannot be run on the batch.
    """  # noqa: DOC501 (others are passed on)
    call.check_some()
    _check_not_quantised(network.model)
    check_not_sharded(network.model)
    try:
        with torch.no_grad():
            output = network(looked_at(call))
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # whatever a model raises
        advice = _advice(network, batch, call)
        if "DefaultCPUAllocator" in str(error) or (
            isinstance(error, errors.ScodError) and advice is None
        ):
            raise
        cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
        raise errors.ModelCallError(
            "expected a batch that the model can be run on, but it raised "
            f"{errors.first_line(cause)}; "
            + (advice or "pick its inputs with Monitor(..., inputs=lambda batch: ...)")
        ) from cause
    likelihood.check_output(output)
    return output


def looked_at(call: Inputs) -> Inputs:
    """Return the first samples of a batch; not all, if there are three or more.

    A model that takes as many samples as the batch has, and not fewer, is found out so.
    """
    return call.samples(slice(0, min(_LOOKED_AT, max(2, call.batch_size - 1))))


def check_deterministic(network: Network, call: Inputs, output: Tensor, loader: object) -> None:
    """Make sure the model and the data give the same answer twice.

    Args:
        network: The model, held in eval mode.
        call: The first batch.
        output: What the model made of its first samples, from `first_output`.
        loader: What the batch came from; a map-style data set behind it is read twice.

    Raises:
        NondeterministicError: If either differs.
    """
    with torch.no_grad():
        again = network(looked_at(call))
    scale = float(output.abs().nan_to_num(0.0, 0.0, 0.0).max()) if output.numel() else 0.0
    if not torch.allclose(output, again, rtol=1e-3, atol=1e-3 * scale, equal_nan=True):
        raise errors.NondeterministicError(
            "expected the same output twice for the same batch in eval mode, got two; is there "
            "dropout that ignores eval mode, or sampling inside forward? Remove it, or type "
            "fit(..., check_deterministic=False)"
        )
    dataset: Any = getattr(loader, "dataset", None)
    if read_by_position(dataset) and len(dataset) and not _same(dataset[0], dataset[0]):
        raise errors.NondeterministicError(
            "expected the data set to give the same item twice, but item 0 differs between "
            "two reads; switch random augmentation off for fitting, or type "
            "fit(..., check_deterministic=False) to fit on augmented data"
        )


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
    example, read = first, [next(stream)]
    while len(distinct(example, _DISTINCT)) < _DISTINCT and len(read) < _AHEAD:
        more = list(itertools.islice(stream, 1))
        if not more:
            break
        read += more
        example = example.joined(network.inputs_of(more[0]))
    return example, itertools.chain(read, stream)


def _check_not_quantised(model: nn.Module) -> None:
    """Refuse models whose weights were rounded to integers.

    Raises:
        BatchError: If there are such.
    """
    for name, module in model.named_modules():
        kind = type(module)
        packed = kind.__module__.startswith("torch.") and ".quantized." in kind.__module__
        if packed and not kind.__name__.endswith("FloatFunctional"):
            raise errors.BatchError(
                f"expected weights that have gradients, got a quantised model ({name or 'it'} "
                f"is a {kind.__name__} from {kind.__module__}), whose weights are integers; "
                "fit and score with the model in floating point that it was made from"
            )


def _advice(network: Network, batch: object, call: Inputs) -> str | None:
    """Return what to type where a model fails on the first batch: something that works."""
    forward = inspect.signature(network.model.forward)
    parts = list(batch) if isinstance(batch, (tuple, list)) else []
    try:
        forward.bind(*call.args, **call.kwargs)
    except TypeError:
        needed = [p for p in forward.parameters.values() if p.default is p.empty]
        picked = ", ".join(f"batch[{i}]" for i in range(len(needed)))
        picked = f"({picked})" if len(needed) <= len(parts) else "..."
        return (
            f"it takes the inputs {forward}, and got {len(call.tensors())} of a batch of "
            f"{len(parts) or 'one'}; type Monitor(..., inputs=lambda batch: {picked})"
        )
    for place, part in enumerate(parts[1:], start=1):
        if isinstance(part, Tensor) and _takes(network, part):
            return (
                f"it can be run on part {place} of the batch; type Monitor(..., "
                f"inputs=lambda batch: batch[{place}])"
            )
    if _takes(network, call.map(lambda t: t[None])):
        return "these look like a single sample: type x[None] for a batch of one"
    if call.batch_size > 2 and _takes(network, call):
        return (
            f"it takes {call.batch_size} samples at a time and not fewer, and a score must not "
            "depend on its batch: is there a weight as long as the batch?"
        )
    return None


def _takes(network: Network, batch: object) -> bool:
    """Return whether a model can be run on a batch, or on such inputs."""
    try:
        with torch.no_grad():
            network(network.inputs_of(batch))
    except Exception:
        return False
    return True


def _same(a: Any, b: Any) -> bool:
    """Return whether two items agree; those that cannot be compared are taken to."""
    if isinstance(a, Tensor):
        if not isinstance(b, Tensor) or (a.shape, a.dtype) != (b.shape, b.dtype):
            return False
        return bool(((a == b) | ((a != a) & (b != b))).all())  # NaN differs from itself
    if isinstance(a, np.ndarray):
        real = a.dtype.kind in "fc"
        return bool(np.array_equal(a, np.asarray(b), equal_nan=real))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(_same, a, b))
    return True
