"""What a fit costs, in operations and in memory: formulas, used before any is allocated."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from scodkit.errors import InsufficientMemoryError
from scodkit.factors.products import Passes, Portions

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
        matrix-free (1000 times fewer operations): 1.0e+10 operations a batch, 12,928 passes,
        512.0 MiB; explicit gradients: 1.0e+13 operations a batch, 64,000 passes, 1.0 GiB
    """

    rows: Cost
    products: Cost
    by_products: bool
    why: str

    def __str__(self) -> str:
        if self.by_products:
            return f"matrix-free ({self.why}): {self.products}; explicit gradients: {self.rows}"
        return f"explicit gradients ({self.why}): {self.rows}; matrix-free: {self.products}"


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
        why = f"matrix-free would take {1 / fewer:.2g} times the operations"
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
        first_bytes: What is held before the sketch: projections while they are learnt, a whole
            gradient that projected ones are compared with; 0 for whole weights.
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
    first_bytes: int = 0

    @property
    def by_products(self) -> bool:
        """Whether the fit takes products with the curvature rather than rows."""
        return self.costs is not None and self.costs.by_products

    @property
    def fit_bytes(self) -> int:
        """Peak while fitting, beyond the model."""
        streaming = self.kept_bytes + self.making_bytes + self.working_bytes
        return max(self.first_bytes, self.sketch_bytes + max(streaming, self._solving))

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
