"""How a fit computes, and in how much memory: said before any of it is allocated.

Rows or products, the engine, and the pieces a batch is cut into. A fit goes by formulas that
err high; `Monitor.plan` counts what a few samples take instead.
"""

from __future__ import annotations

import math
import os
import warnings
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from scodkit.errors import EngineFallbackWarning, InsufficientMemoryError, OptionError
from scodkit.factors.choose import choose_jacobian
from scodkit.factors.engine import row_bytes
from scodkit.factors.pieces import MANY, FactorSource
from scodkit.factors.products import Passes, Portions, ProductSource, count_passes
from scodkit.fit.first_batch import first_output
from scodkit.fit.fitted import FitOptions, Recipe
from scodkit.model.inputs import Inputs
from scodkit.model.network import Network
from scodkit.model.parameters import select
from scodkit.numerics.matmul import sum_dtype

# how many times the operations must be fewer for products to be taken
_WORTH = 4

# samples whose rows counting forms at once, at most
_TRIED = 3


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
    demanded: bool | None = None,
) -> Costs:
    """Return both costs, and which way to take.

    Args:
        plan: Says how many weights, directions and columns there are.
        batch_size: ``B``.
        passes: What a pass of one sample costs.
        portions: How products are cut up to fit the memory.
        rows_bytes: What rows take.
        demanded: Whether products are demanded; None for the cheaper way, rows in doubt.
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
    if demanded is not None:
        return Costs(rows, products, demanded, "asked for")
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
        working_bytes: What a batch takes while fitting, activations and all, counted on a few
            samples and within the memory budget.
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
        self.parameters = select(recipe.selection, network, self.call)

    def sources(self) -> tuple[FactorSource, ProductSource | None]:
        """Choose how to compute.

        Returns:
            What turns batches into factors, and what turns them into products with their
            curvature: None for a fit in rows.
        """
        rough = self._rough_plan()
        rough.check()
        source, products, plan = self._chosen(rough, counted=False)
        plan.check()
        return source, products

    def plan(self) -> Plan:
        """Return the memory of a fit and of scoring, counted on a few samples.

        Returns:
            A rough plan, if not even sketch and basis fit.
        """
        rough = self._rough_plan()
        if not rough.fits:
            return rough
        source, _, plan = self._chosen(rough, counted=True)
        return replace(plan, score_working_bytes=self._score_bytes(source, plan))

    def _chosen(
        self, rough: Plan, counted: bool
    ) -> tuple[FactorSource, ProductSource | None, Plan]:
        """Return what turns batches into factors, what into products, and the plan of a fit.

        Args:
            rough: The plan of sketch and basis.
            counted: Whether to count the bytes of rows on a few samples, not by formula.
        """
        shape = tuple(self.output.shape[1:])
        source = self.recipe.source(self.network, self.parameters, self.example, shape)
        engine = source.engine.of(self.network.at_precision(self.options.precision))
        running = replace(source, engine=engine)
        if self.options.precision is not None:  # so that it knows how large its rows are
            engine.linearize(self.call.first(2))
        working = _row_bytes(running, self.call, hold=True)
        products, costs = self._product_source(rough, working)
        if products is not None:
            working = products.portions(self.call.batch_size).bytes
        elif counted:
            working = running.counted(self.call, hold=True) or working
            costs = costs and replace(costs, rows=replace(costs.rows, bytes=working))
        return source, products, replace(rough, costs=costs, working_bytes=working)

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

    def _score_bytes(self, source: FactorSource, plan: Plan) -> int:
        """Return what scoring a batch takes, beside the basis."""
        if source.ends_in_head:
            samples = min(source.heads_at_once(plan.rank), self.call.batch_size)
            head = source.counted_head(self.call)
            # the first batch is checked along a direction of the weights, which is held twice
            checked = 2 * plan.basis_bytes // max(1, plan.rank) if samples > 1 else 0
            if head is not None:
                return head.at(samples, plan.rank) + checked
            return source.head_bytes(plan.rank, samples)
        # rows at the output are formed of all directions at once: where these are as many as
        # pixels, even a few samples are too large to try
        at_output = plan.directions * math.prod(source.shape) * torch.float32.itemsize
        if _TRIED * at_output <= self.recipe.budget:
            counted = source.counted(self.call, hold=False, columns=plan.rank)
            if counted is not None:
                return counted
        samples = min(source.samples_at_once(False), self.call.batch_size)
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
        elif recipe.likelihood.draws:
            objection = f"{recipe.likelihood} draws a few rows, which are cheap"
        elif self.parameters.itemsize(self.network.model) < torch.float32.itemsize:
            objection = "products lose too many digits with weights in half precision"
        if demanded and objection:
            raise OptionError(
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
                raise OptionError(
                    f"expected {words} that agree with plain autograd, but all were passed "
                    f"over: {passed_over}; leave out products=True"
                )
            at_best = Portions(size, plan.columns, 0)  # all columns at once
            if compare(plan, size, passes, at_best, in_rows).by_products:
                warnings.warn(
                    f"{words} cannot be trusted, so it is fitted in rows, more slowly; passed "
                    f"over: {passed_over}",
                    EngineFallbackWarning,
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
