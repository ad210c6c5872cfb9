"""Single-pass Nystrom approximation of the Fisher information; the default sketch.

Tropp, Yurtsever, Udell, Cevher (2017), "Fixed-rank approximation of a positive-semidefinite
matrix from streaming data". Linear, and never above ``F``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from scodkit.eigenbasis import Eigenbasis
from scodkit.errors import OptionError
from scodkit.factors import Factors
from scodkit.sketch.base import (
    Sketch,
    SketchState,
    empty_state,
    flat_rows,
    tall_chunks,
    tall_svd,
    tall_times,
)
from scodkit.sketch.maps import Map, SparseSign, project

# columns held per rank kept when no size is given: the fewest that keep the nuclear error
# within 1.5 times the best of that rank on real nets (benchmarks/sketch_accuracy.py)
_SIZE_PER_RANK = 2


@dataclass(frozen=True)
class Nystrom(Sketch):
    """``Y = F Omega`` in one pass; ``F_hat = Y (Omega^T Y)^+ Y^T``.

    Args:
        size: ``T``, vectors of ``N`` numbers held while fitting; twice the rank by default.
        map: Family of the test matrix.
        seed: Which test matrix; sketches merge only if theirs agree.

    Example:
        >>> Nystrom(size=100).columns(num_parameters=10_000, rank=50)
        100
    """

    certified: ClassVar[bool] = True
    linear: ClassVar[bool] = True

    size: int | None = None
    map: Map = SparseSign()  # noqa: RUF009 (frozen)
    seed: int = 0

    def columns(self, num_parameters: int, rank: int, num_rows: int | None = None) -> int:
        """See `Sketch.columns`; never more than ``N``.

        Returns:
            ``T``.

        Raises:
            OptionError: If the size is below the rank.
        """
        size = _SIZE_PER_RANK * rank if self.size is None else self.size
        if size < rank:
            raise OptionError(
                f"expected size >= rank, got size={size}, rank={rank}; "
                f"type Nystrom(size={_SIZE_PER_RANK * rank})"
            )
        return min(size, num_parameters)

    def zero(
        self, num_parameters: int, rank: int, dtype: torch.dtype, device: torch.device | str
    ) -> SketchState:
        """See `Sketch.zero`.

        Returns:
            A state with ``Y`` of shape ``(N, T)``.
        """
        size = self.columns(num_parameters, rank)
        y = torch.zeros(num_parameters, size, dtype=dtype, device=device)
        return empty_state(self, num_parameters, {"y": y}, device)

    def absorb(self, state: SketchState, factors: Factors) -> None:
        """Add ``G^T (G Omega)``: two sweeps over the blocks, one product each."""
        add_product(state.tensors["y"], factors, self.map, self.seed)

    def eigenbasis(self, state: SketchState, rank: int) -> Eigenbasis:
        """See `Sketch.eigenbasis`.

        Returns:
            A certified basis. ``Y`` is shifted by ``nu Omega`` for stability and the shift is
            taken back off the eigenvalues; what that may cost is in ``slack``.
        """
        num_data = max(1, state.num_data)
        y = state.tensors["y"]
        # eps of the sums' dtype: their own rounding is what the shift must drown
        nu = torch.finfo(y.dtype).eps * float(torch.linalg.vector_norm(y))
        vectors, values = self._decompose(y, nu)
        kept = values > 0
        basis = Eigenbasis(
            values=(values[kept] / num_data).to(y.dtype),
            vectors=vectors[:, kept],
            num_data=state.num_data,
            trace=float(state.squared_norm) / num_data,
            certified=True,
            residual_norm=float("inf"),
            residual_rank=min(state.num_parameters, state.num_rows),
            slack=nu / num_data,
            clamped=int((~kept).sum()),
        )
        return basis.bounded_by_trace().truncate(rank)

    def _decompose(self, y: Tensor, nu: float) -> tuple[Tensor, Tensor]:
        shape = (y.shape[0], y.shape[1])
        core = torch.zeros(shape[1], shape[1], dtype=torch.float64, device=y.device)
        shifted = torch.empty_like(y)
        for chunk in tall_chunks(shape[0]):
            omega = self.map.rows(chunk.start, chunk.stop, shape, self.seed, y).double()
            block = y[chunk].double() + nu * omega
            core += omega.mT @ block
            shifted[chunk] = block.to(y.dtype)
        # an eigendecomposition where the textbook has Cholesky: directions lost to rounding
        # are dropped, and what remains is again a Nystrom approximation
        weights, directions = torch.linalg.eigh((core + core.mT) / 2)
        kept = weights > torch.finfo(torch.float64).eps * shape[1] * weights[-1].clamp_min(0)
        root = directions[:, kept] / weights[kept].sqrt()
        vectors, singular, _ = tall_svd(tall_times(shifted, root, overwrite=True))
        return vectors, singular.square() - nu


def add_product(y: Tensor, factors: Factors, mapping: Map, seed: int) -> None:
    """Add ``G^T (G Omega)`` to ``y (N, T)`` in place, for the rows ``G`` of some factors."""
    shape = (y.shape[0], y.shape[1])
    total: Tensor | None = None
    for block, rows in factors.blocks():
        part = project(mapping, flat_rows(rows, y), block.columns.start, shape, seed)
        total = part if total is None else total + part
    if total is None:
        return
    for block, rows in factors.blocks():
        y[block.columns].addmm_(flat_rows(rows, y).mT, total)
