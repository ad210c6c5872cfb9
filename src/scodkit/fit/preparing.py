"""What a fit chooses on its first batch: how it computes, and in how much memory."""

from __future__ import annotations

import inspect
import math
import warnings
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from scodkit.errors import (
    BatchError,
    EngineFallbackWarning,
    ModelCallError,
    OptionError,
    ScodError,
    first_line,
)
from scodkit.factors import (
    MANY,
    FactorSource,
    Memory,
    Portions,
    ProductSource,
    choose_jacobian,
    count_passes,
    row_bytes,
)
from scodkit.fit.costs import Costs, Work, compare
from scodkit.fit.plan import Plan, available_bytes
from scodkit.fit.recipe import Recipe, first_output
from scodkit.likelihoods import Likelihood
from scodkit.model.network import Inputs, Network
from scodkit.model.parameters import ParameterSet
from scodkit.numerics.matmul import sum_dtype

# samples whose rows counting forms at once, at most
_TRIED = 3

# samples of the first batch whose outputs are looked at, and so many at a time: there may be
# no memory for more
_LOOKED_AT, _AT_A_TIME = 64, 8


def check_first(network: Network, likelihood: Likelihood, batch: object, call: Inputs) -> None:
    """Refuse on the first batch what cannot be right, before there is much to do.

    Args:
        network: The model, held in eval mode.
        likelihood: Of its outputs.
        batch: As the loader yielded it.
        call: The inputs in it.

    Raises:
        BatchError: If there are no samples, weights have no gradients, or the likelihood does
            not take the outputs.
        ModelCallError: If the model cannot be run on the batch.
    """  # noqa: DOC501 (others are passed on)
    call.check_some()
    _check_not_quantised(network.model)
    try:
        with torch.no_grad():
            network(call.samples(slice(0, 2)))
            first = range(0, min(call.batch_size, _LOOKED_AT), _AT_A_TIME)
            some = [call.samples(slice(i, i + _AT_A_TIME)) for i in first]
            outputs = [network(own).detach() for own in some]
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # whatever a model raises
        advice = _advice(network, batch, call)
        if "DefaultCPUAllocator" in str(error) or (
            isinstance(error, ScodError) and advice is None
        ):
            raise
        cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
        raise ModelCallError(
            "expected a batch that the model can be run on, but it raised "
            f"{first_line(cause)}; "
            + (advice or "pick its inputs with Monitor(..., inputs=lambda batch: ...)")
        ) from cause
    if len({output.shape[1:] for output in outputs}) == 1:  # some differ by what is in a batch
        likelihood.check_output(torch.cat(outputs))


def _check_not_quantised(model: nn.Module) -> None:
    """Refuse models whose weights were rounded to integers.

    Raises:
        BatchError: If there are such.
    """
    for name, module in model.named_modules():
        kind = type(module)
        packed = kind.__module__.startswith("torch.") and ".quantized." in kind.__module__
        if packed and not kind.__name__.endswith("FloatFunctional"):
            raise BatchError(
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


def check_ways(precision: object, products: object) -> None:
    """Refuse ways to compute that there are not.

    Args:
        precision: As in `Preparation`.
        products: Likewise, ``wanted``.

    Raises:
        OptionError: With those there are.
    """
    if precision not in (None, torch.bfloat16):  # float16 loses small gradients
        raise OptionError(f"expected precision=torch.bfloat16 or None, got {precision!r}")
    if products not in (None, True, False):
        raise OptionError(f"expected products=True, False or None, got {products!r}")


@dataclass(frozen=True)
class Prepared:
    """A fit before its first step.

    Args:
        source: Turns batches into factors.
        products: Turns batches into products with their curvature; None for a fit in rows.
        plan: The memory of it.
    """

    source: FactorSource
    products: ProductSource | None
    plan: Plan


@dataclass(frozen=True)
class Preparation:
    """What there is to prepare for.

    Args:
        recipe: What to fit.
        network: The model, held in eval mode.
        parameters: The chosen weights.
        call: The first batch.
        num_data: Samples to come, where known.
        wanted: Whether to fit by products with the curvature rather than in rows; None for
            the cheaper way.
        precision: That the model is run in; None for its own.
        example: Samples to choose an engine with; None for those of the first batch.
    """

    recipe: Recipe
    network: Network
    parameters: ParameterSet
    call: Inputs
    num_data: int | None = None
    wanted: bool | None = None
    precision: torch.dtype | None = None
    example: Inputs | None = None

    def __post_init__(self) -> None:
        check_ways(self.precision, self.wanted)

    def plan(self) -> Plan:
        """Return the memory of a fit and of scoring; a rough plan, if not even that fits."""
        rough = self._rough_plan()
        if not rough.fits:
            return rough
        prepared = self._prepared(rough)
        return replace(prepared.plan, score_working_bytes=self._score_bytes(prepared))

    def prepared(self) -> Prepared:
        """Choose how to compute, and count the memory of that on a few samples.

        Returns:
            What the fit begins with.

        Raises:
            InsufficientMemoryError: If it does not fit.
            OptionError: If products are asked for where there are none.
        """
        rough = self._rough_plan()
        rough.check()
        prepared = self._prepared(rough)
        prepared.plan.check()
        return prepared

    def _rough_plan(self) -> Plan:
        """Return the memory of sketch and basis, and of a single row: the least there can be.

        Nothing of it is allocated, nor is a gradient formed.
        """
        recipe, parameters = self.recipe, self.parameters
        output = first_output(self.network, self.call)
        directions = recipe.likelihood.num_directions(output.shape[1:])
        num_rows = None if self.num_data is None else self.num_data * directions
        columns = recipe.sketch.columns(parameters.num_parameters, recipe.rank, num_rows)
        sizes = (parameters.num_parameters, columns)
        one_row = row_bytes(self.network, parameters)
        vector = parameters.num_parameters * sum_dtype(output).itemsize
        rank, device = min(recipe.rank, columns), self.network.device
        memory = recipe.sketch.memory(*sizes, device)
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
        )

    def _prepared(self, rough: Plan) -> Prepared:
        source = self.recipe.source(self.network, self.parameters, self.example or self.call)
        used = self.network.at_precision(self.precision)
        running = replace(source, engine=source.engine.of(used))
        if self.precision is not None:  # so that it knows how large its rows are
            running.engine.linearize(self.call.first(2))
        products, costs = self._products(rough, running, used)
        if products is None:
            memory = running.counted(self.call, hold=True)
            source, running = (replace(one, memory=memory) for one in (source, running))
            working = self._row_bytes(running, memory, hold=True)
            costs = costs and replace(costs, rows=replace(costs.rows, bytes=working))
        else:
            working = products.portions(self.call.batch_size).bytes
        return Prepared(source, products, replace(rough, costs=costs, working_bytes=working))

    def _score_bytes(self, prepared: Prepared) -> int:
        """Return what scoring a batch takes, beside the basis."""
        source, plan = prepared.source, prepared.plan
        if source.ends_in_head:
            samples = min(source.heads_at_once(plan.rank), self.call.batch_size)
            head = source.counted_head(self.call)
            # the first batch is checked along a direction of the weights, which is held twice
            checked = 2 * plan.basis_bytes // max(1, plan.rank) if samples > 1 else 0
            if head is not None:
                return head.at(samples, plan.rank) + checked
            return source.head_bytes(plan.rank, samples)
        # rows at the output are formed of all directions at once: as many as pixels, they are
        # not to be tried, only told
        at_output = plan.directions * math.prod(source.shape) * torch.float32.itemsize
        memory = None
        if _TRIED * at_output <= self.recipe.budget:
            memory = source.counted(self.call, hold=False, columns=plan.rank)
        found = self._row_bytes(source, memory, hold=False)
        if memory is None:
            samples = min(source.samples_at_once(False), self.call.batch_size)
            found += samples * at_output
        return found

    def _row_bytes(self, source: FactorSource, memory: Memory | None, hold: bool) -> int:
        """Return the bytes of rows as they are formed; of all there are, if nobody counted."""
        rows, directions = source.rows_at_once(hold), max(1, source.directions)
        samples = min(source.samples_at_once(hold), self.call.batch_size)
        if memory is not None:
            return memory.at(samples, min(rows, directions))
        return min(rows, samples * directions) * source.engine.row_bytes(hold)

    def _products(
        self, plan: Plan, source: FactorSource, used: Network
    ) -> tuple[ProductSource | None, Costs | None]:
        """Return how to take products, if they are taken; and what both ways cost.

        Raises:
            OptionError: If they are asked for where there are none.
        """
        if not self._may_take_products(plan.directions):
            return None, None
        passes = count_passes(self.network, self.parameters, self.call)
        about = (self.call.batch_size, plan.directions, plan.num_parameters, plan.columns)
        in_rows = self._row_bytes(source, None, hold=True)
        # with all columns at once there is least to do
        at_best = Portions(self.call.batch_size, plan.columns, 0)
        missed = compare(Work(*about), passes, at_best, in_rows, self.wanted).by_products
        found = self._product_source(missed)
        if found is None:
            return None, None
        running = found.of(used)
        found = replace(running, memory=running.counted(self.call))
        portions = found.portions(self.call.batch_size)
        costs = compare(Work(*about), passes, portions, in_rows, self.wanted)
        return (found if costs.by_products else None), costs

    def _may_take_products(self, directions: int) -> bool:
        """Return whether products are worth a thought.

        Raises:
            OptionError: If they are asked for where there are none.
        """
        recipe, objection = self.recipe, None
        if not recipe.sketch.takes_products:
            objection = f"{recipe.sketch} takes rows only: type sketch=Nystrom() or TwoSided()"
        elif recipe.likelihood.draws:
            objection = f"{recipe.likelihood} draws a few rows, which are cheap"
        elif self.parameters.itemsize(self.network.model) < torch.float32.itemsize:
            objection = "products lose too many digits with weights in half precision"
        if self.wanted and objection:
            raise OptionError(
                f"expected a fit that can be made by products, but {objection}; or leave out "
                "products=True"
            )
        many = self.wanted is None and directions >= MANY
        return not objection and (bool(self.wanted) or many)

    def _product_source(self, missed: bool) -> ProductSource | None:
        """Return what turns batches into products with their curvature.

        Args:
            missed: Whether a fit in rows is slower.

        Returns:
            None, with a warning if missed, where the model does not allow it and it is not
            asked for.

        Raises:
            OptionError: If the model does not allow it, and it is asked for.
        """
        network, parameters, recipe = self.network, self.parameters, self.recipe
        together, passed_over = choose_jacobian(network, parameters, self.example or self.call)
        if together is not None:
            columns = recipe.sketch.columns(parameters.num_parameters, recipe.rank)
            about = (together, recipe.likelihood, columns, recipe.budget)
            return ProductSource(network, parameters, *about)
        words = f"products with the curvature of {type(network.model).__name__}"
        if self.wanted:
            raise OptionError(
                f"expected {words} that agree with plain autograd, but all were passed over: "
                f"{passed_over}; leave out products=True"
            )
        if not missed:
            return None
        warnings.warn(
            f"{words} cannot be trusted, so it is fitted in rows, more slowly; passed over: "
            f"{passed_over}",
            EngineFallbackWarning,
            stacklevel=2,
        )
        return None
