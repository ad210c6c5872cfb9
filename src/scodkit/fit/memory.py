"""How a fit computes, and in how much memory: said before any of it is allocated.

Rows or products, the engine, and the pieces a batch is cut into. A fit goes by formulas that
err high; `Monitor.plan` counts what a piece of a batch takes instead.
"""

from __future__ import annotations

import math
import os
import warnings
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from scodkit.errors import EngineFallbackWarning, InsufficientMemoryError, OptionError
from scodkit.factors.choose import choose_jacobian
from scodkit.factors.engine import row_bytes
from scodkit.factors.pieces import MANY, FactorSource
from scodkit.factors.products import Passes, Portions, ProductSource, count_passes
from scodkit.fit.fitted import Recipe
from scodkit.model.inputs import Inputs
from scodkit.model.network import Network
from scodkit.model.parameters import ParameterSet
from scodkit.numerics.matmul import sum_dtype

# how many times the operations must be fewer for products to be taken
_WORTH = 4


@dataclass(frozen=True)
class Cost:
    """What a batch takes one way.

    Args:
        operations: Floating-point operations, in products of matrices and convolutions.
        passes: Forward and backward passes of one sample or vector, counted together.
        bytes: Of memory, beyond the sketch.
    """

    operations: int
    passes: int
    bytes: int

    def __str__(self) -> str:
        return (
            f"{self.operations:.1e} operations a batch, {self.passes:,} passes, "
            f"{readable(self.bytes)}"
        )


@dataclass(frozen=True)
class Costs:
    """Both ways to fit, side by side.

    *Rows* are gradients: one backward pass for each direction of each sample, and every row
    is multiplied with the ``T`` columns of the sketch. *Products* take the columns through the
    network instead, each forward and back once for a whole batch.

    Args:
        rows: What a batch costs in rows.
        products: What it costs in products.
        by_products: Which way is taken.
        why: Because of what.

    Examples:
        >>> rows, products = Cost(10**13, 64_000, 1 << 30), Cost(10**10, 12_928, 1 << 29)
        >>> print(Costs(rows, products, True, "1000 times fewer operations"))
        ... # doctest: +NORMALIZE_WHITESPACE
        by products (1000 times fewer operations): 1.0e+10 operations a batch, 12,928 passes,
        512.0 MiB; in rows: 1.0e+13 operations a batch, 64,000 passes, 1.0 GiB
    """

    rows: Cost
    products: Cost
    by_products: bool
    why: str

    def __str__(self) -> str:
        if self.by_products:
            return f"by products ({self.why}): {self.products}; in rows: {self.rows}"
        return f"in rows ({self.why}): {self.rows}; by products: {self.products}"


def compare(
    plan: Plan,
    batch_size: int,
    passes: Passes,
    portions: Portions,
    rows_bytes: int,
    wanted: bool | None = None,
) -> Costs:
    """Return both costs, and which way to take.

    Args:
        plan: Says how many weights, directions and columns there are.
        batch_size: ``B``.
        passes: What a pass of one sample costs.
        portions: How products are cut up to fit the memory.
        rows_bytes: What rows take.
        wanted: The way that is asked for; None for the cheaper one, rows in doubt.
    """
    b, p, n, t = batch_size, plan.directions, plan.num_parameters, plan.columns
    rounds = -(-t // portions.columns)  # the forward pass is run again in each
    rows = Cost(
        # every row times the test matrix, and again with what comes of it
        operations=b * (passes.forward + p * passes.backward + 4 * p * n * t),
        passes=b * (1 + p),
        bytes=rows_bytes,
    )
    products = Cost(
        operations=b * ((1 + rounds) * passes.forward + 2 * t * passes.backward),
        passes=b * (1 + rounds + 2 * t),
        bytes=portions.bytes,
    )
    fewer = rows.operations / max(1, products.operations)
    if wanted is not None:
        return Costs(rows, products, wanted, "asked for")
    if fewer < _WORTH:
        why = f"products would take {1 / fewer:.2g} times the operations"
        return Costs(rows, products, False, why)
    return Costs(rows, products, True, f"{fewer:.0f} times fewer operations")


def readable(size: int) -> str:
    """Return a number of bytes as people write it.

    Examples:
        >>> readable(3 * 2**30)
        '3.0 GiB'
    """
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


@dataclass(frozen=True)
class Plan:
    """The memory of a fit, in bytes.

    Args:
        num_parameters: ``N``, the weights chosen.
        directions: ``p``, rows per sample.
        columns: ``T``, vectors of ``N`` numbers the sketch holds.
        rank: ``k``, vectors kept for scoring.
        sketch_bytes: The sketch itself, held while fitting (and after, for updates).
        basis_bytes: The eigenbasis, held while scoring.
        kept_bytes: Test matrices, cached while fitting.
        making_bytes: Scratch to regenerate test matrices that are not cached.
        solve_bytes: Copies of the sketch while the basis is found in it.
        chunk_bytes: Chunks of the sketch, and small matrices, in float64.
        working_bytes: What a batch takes while fitting, activations and all, within the memory
            budget.
        score_working_bytes: What it takes while scoring.
        available_bytes: Free memory on the model's device; None when it cannot be known.
        costs: Rows and products side by side; None where there are too few directions for
            products to be thought of, or the sketch or the likelihood takes rows only.
    """

    num_parameters: int
    directions: int
    columns: int
    rank: int
    sketch_bytes: int
    basis_bytes: int
    kept_bytes: int
    making_bytes: int
    solve_bytes: int
    chunk_bytes: int
    working_bytes: int
    score_working_bytes: int
    available_bytes: int | None
    costs: Costs | None = None

    @property
    def by_products(self) -> bool:
        """Whether the fit takes products with the curvature rather than rows."""
        return self.costs is not None and self.costs.by_products

    @property
    def fit_bytes(self) -> int:
        """Peak while fitting, beyond the model."""
        streaming = self.kept_bytes + self.making_bytes + self.working_bytes
        return self.sketch_bytes + max(streaming, self._solving)

    @property
    def _solving(self) -> int:
        # test matrices are dropped before the basis is cut to its rank
        return self.solve_bytes + max(self.kept_bytes + self.chunk_bytes, self.basis_bytes)

    @property
    def score_bytes(self) -> int:
        """Peak while scoring without the sketch, beyond the model."""
        return self.basis_bytes + self.score_working_bytes

    @property
    def fits(self) -> bool:
        """Whether the fit fits; True when the free memory is unknown."""
        return self.available_bytes is None or self.fit_bytes <= self.available_bytes

    def __str__(self) -> str:
        free = "unknown" if self.available_bytes is None else readable(self.available_bytes)
        return (
            f"{self.num_parameters:,} parameters, {self.directions} directions per sample, "
            f"sketch of {self.columns} columns, rank {self.rank}: "
            f"fit {readable(self.fit_bytes)} (sketch {readable(self.sketch_bytes)}), "
            f"score {readable(self.score_bytes)} (basis {readable(self.basis_bytes)}), "
            f"free {free}" + ("" if self.costs is None else f"; {self.costs}")
        )

    def _most_columns(self, available: int) -> int:
        """Return the largest sketch that fits: all but what a batch takes goes with it."""
        streaming = (self.sketch_bytes + self.kept_bytes) / self.columns
        solving = (self.sketch_bytes + self._solving) / self.columns
        while_streaming = (available - self.making_bytes - self.working_bytes) / streaming
        return max(0, int(min(while_streaming, available / solving)))

    def check(self) -> None:
        """Refuse a fit that cannot fit.

        Raises:
            InsufficientMemoryError: With the largest sketch and rank that would fit.
        """
        if self.fits:
            return
        assert self.available_bytes is not None
        columns = self._most_columns(self.available_bytes)
        rank = max(0, self.rank * columns // self.columns)
        advice = (
            f"the largest that fits is a sketch of {columns} columns with rank={rank}"
            if rank
            else "not even rank 1 fits"
        )
        raise InsufficientMemoryError(
            f"expected a fit within {readable(self.available_bytes)} of free memory, but it "
            f"needs {readable(self.fit_bytes)} ({self}); {advice}; or choose fewer parameters: "
            "parameters=LastLayers(fraction=0.15); for many outputs: "
            "Categorical(directions=1) or MonteCarlo(...)"
        )


def available_bytes(device: torch.device) -> int | None:
    """Return the free memory of a device; None when it cannot be known."""
    if device.type == "cuda":
        # what torch keeps for itself but does not use is free to us
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + cached
    if device.type != "cpu":
        return None
    limits = [free for free in (_free_in_container(), _free_on_machine()) if free is not None]
    return min(limits, default=None)


def _free_on_machine(meminfo: Path = Path("/proc/meminfo")) -> int | None:
    try:
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def _free_in_container(group: Path = Path("/sys/fs/cgroup")) -> int | None:
    try:
        limit = (group / "memory.max").read_text().strip()
        used = int((group / "memory.current").read_text())
        for line in (group / "memory.stat").read_text().splitlines():
            if line.startswith("inactive_file "):  # cache the kernel gives up when asked
                used -= int(line.split()[1])
    except (OSError, ValueError):
        return None
    return None if limit == "max" else max(0, int(limit) - used)


def check_ways(precision: object, products: object) -> None:
    """Raise if ``precision`` or ``products`` is unsupported.

    Args:
        precision: As in `Preparation`.
        products: Likewise.

    Raises:
        OptionError: With the values that are supported.
    """
    if precision not in (None, torch.bfloat16):  # float16 loses small gradients
        raise OptionError(f"expected precision=torch.bfloat16 or None, got {precision!r}")
    if products not in (None, True, False):
        raise OptionError(f"expected products=True, False or None, got {products!r}")


@dataclass(frozen=True)
class Preparation:
    """What a fit chooses on its first batch.

    Args:
        recipe: What to fit.
        network: The model, held in eval mode.
        parameters: The chosen weights.
        call: The first batch.
        output: What the model made of its first samples, ``(b, *shape)``.
        num_data: Samples to come, where known.
        products: Whether to fit by products with the curvature rather than in rows; None for
            the cheaper way.
        precision: That the model is run in; None for its own.
        example: Samples to choose an engine with; None for those of the first batch.
    """

    recipe: Recipe
    network: Network
    parameters: ParameterSet
    call: Inputs
    output: Tensor
    num_data: int | None = None
    products: bool | None = None
    precision: torch.dtype | None = None
    example: Inputs | None = None

    def __post_init__(self) -> None:
        check_ways(self.precision, self.products)

    def sources(self) -> tuple[FactorSource, ProductSource | None]:
        """Choose how to compute.

        Returns:
            What turns batches into factors, and what turns them into products with their
            curvature: None for a fit in rows.

        Raises:
            InsufficientMemoryError: If the fit does not fit.
            OptionError: If products are asked for where there are none.
        """
        rough = self._rough_plan()
        rough.check()
        source, running = self._source()
        working = _row_bytes(running, self.call, hold=True)
        products, costs = self._product_source(rough, working)
        if products is not None:
            working = products.portions(self.call.batch_size).bytes
        replace(rough, costs=costs, working_bytes=working).check()
        return source, products

    def plan(self) -> Plan:
        """Return the memory of a fit and of scoring, counted on a piece of the batch.

        Returns:
            A rough plan, if not even sketch and basis fit.
        """
        rough = self._rough_plan()
        if not rough.fits:
            return rough
        source, running = self._source()
        working = _row_bytes(running, self.call, hold=True)
        products, costs = self._product_source(rough, working)
        if products is None:
            if replace(rough, working_bytes=working).fits:  # a bound: then it can be tried
                working = running.counted(self.call, hold=True) or working
            costs = costs and replace(costs, rows=replace(costs.rows, bytes=working))
        else:
            working = products.portions(self.call.batch_size).bytes
        scoring = self._score_bytes(source, rough)
        return replace(rough, costs=costs, working_bytes=working, score_working_bytes=scoring)

    def _rough_plan(self) -> Plan:
        """Return the memory of sketch and basis, and of a single row: the least there can be.

        Nothing of it is allocated, nor is a gradient formed.
        """
        recipe, parameters, device = self.recipe, self.parameters, self.network.device
        directions = recipe.likelihood.num_directions(self.output.shape[1:])
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
        )

    def _source(self) -> tuple[FactorSource, FactorSource]:
        """Return what turns batches into factors, and the same in the precision of the fit."""
        shape = tuple(self.output.shape[1:])
        example = self.example or self.call
        source = self.recipe.source(self.network, self.parameters, example, shape)
        used = self.network.at_precision(self.precision)
        running = replace(source, engine=source.engine.of(used))
        if self.precision is not None:  # so that it knows how large its rows are
            running.engine.linearize(self.call.first(2))
        return source, running

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
        """
        if not self._may_take_products(plan.directions):
            return None, None
        size = self.call.batch_size
        passes = count_passes(self.network, self.parameters, self.call)
        # with all columns at once there is least to do
        at_best = Portions(size, plan.columns, 0)
        missed = compare(plan, size, passes, at_best, in_rows, self.products).by_products
        together = self._trusted_products(missed)
        if together is None:
            return None, None
        found = ProductSource(
            self.network.at_precision(self.precision),
            self.parameters,
            together,
            self.recipe.likelihood,
            plan.columns,
            self.recipe.budget,
        )
        found = replace(found, memory=found.counted(self.call))
        costs = compare(plan, size, passes, found.portions(size), in_rows, self.products)
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
        if self.products and objection:
            raise OptionError(
                f"expected a fit that can be made by products, but {objection}; or leave out "
                "products=True"
            )
        many = self.products is None and directions >= MANY
        return not objection and (bool(self.products) or many)

    def _trusted_products(self, missed: bool) -> bool | None:
        """Return whether several vectors go through the model at once.

        Args:
            missed: Whether a fit in rows is slower.

        Returns:
            None, with a warning if missed, where the model does not allow for products and
            they are not asked for.

        Raises:
            OptionError: If the model does not allow for them, and they are asked for.
        """
        example = self.example or self.call
        together, passed_over = choose_jacobian(self.network, self.parameters, example)
        if together is not None:
            return together
        words = f"products with the curvature of {type(self.network.model).__name__}"
        if self.products:
            raise OptionError(
                f"expected {words} that agree with plain autograd, but all were passed over: "
                f"{passed_over}; leave out products=True"
            )
        if missed:
            warnings.warn(
                f"{words} cannot be trusted, so it is fitted in rows, more slowly; passed "
                f"over: {passed_over}",
                EngineFallbackWarning,
                stacklevel=2,
            )
        return None


def _row_bytes(source: FactorSource, call: Inputs, hold: bool) -> int:
    """Return a bound on the bytes of rows as they are formed, with all that takes."""
    rows, directions = source.rows_at_once(hold), max(1, source.directions)
    samples = min(source.samples_at_once(hold), call.batch_size)
    if hold and source.engine.memory is not None:
        return source.engine.memory.at(samples, min(rows, directions))
    return min(rows, samples * directions) * source.engine.row_bytes(hold)
