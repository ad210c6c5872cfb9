"""What a batch of a fit costs in rows and in products, and which of the two is taken."""

from __future__ import annotations

from dataclasses import dataclass

from scodkit.factors import Passes, Portions

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
        >>> passes = Passes(2_000_000, 2_000_000)
        >>> work = Work(batch_size=64, directions=999, num_parameters=513_000, columns=100)
        >>> costs = compare(work, passes, Portions(64, 100, 1 << 29), rows_bytes=1 << 30)
        >>> print(costs)  # doctest: +NORMALIZE_WHITESPACE
        by products (512 times fewer operations): 2.6e+10 operations a batch, 12,928 passes,
        512.0 MiB; in rows: 1.3e+13 operations a batch, 64,000 passes, 1.0 GiB
    """

    rows: Cost
    products: Cost
    by_products: bool
    why: str

    def __str__(self) -> str:
        if self.by_products:
            return f"by products ({self.why}): {self.products}; in rows: {self.rows}"
        return f"in rows ({self.why}): {self.rows}; by products: {self.products}"


@dataclass(frozen=True)
class Work:
    """What there is to do for a batch.

    Args:
        batch_size: ``B``.
        directions: ``p``, rows of a sample.
        num_parameters: ``N``.
        columns: ``T``.
    """

    batch_size: int
    directions: int
    num_parameters: int
    columns: int


def compare(
    work: Work, passes: Passes, portions: Portions, rows_bytes: int, wanted: bool | None = None
) -> Costs:
    """Return both costs, and which way to take.

    Args:
        work: What there is to do.
        passes: What a pass of one sample costs.
        portions: How products are cut up to fit the memory.
        rows_bytes: What rows take.
        wanted: The way that is asked for; None for the cheaper one, rows in doubt.
    """
    b, p, n, t = work.batch_size, work.directions, work.num_parameters, work.columns
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
