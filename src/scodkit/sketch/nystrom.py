"""Single-pass Nystrom approximation of the Fisher information; the default sketch.

Tropp, Yurtsever, Udell, Cevher (2017), "Fixed-rank approximation of a positive-semidefinite
matrix from streaming data". Linear, and never above ``F``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from scodkit.errors import OptionError
from scodkit.numerics.matmul import tall_chunks, tall_svd
from scodkit.sketch.base import SeededSketch, SketchState
from scodkit.sketch.eigenbasis import Eigenbasis
from scodkit.sketch.maps import Fold, Map

# columns held per rank kept when no size is given: the fewest that keep the nuclear error
# within 1.5 times the best of rank 38 and 77 on real nets (scodbench sketch)
_SIZE_PER_RANK = 2


@dataclass(frozen=True)
class Nystrom(SeededSketch):
    """``Y = F Omega`` in one pass; ``F_hat = Y (Omega^T Y)^+ Y^T``.

    Args:
        size: ``T``, vectors of ``N`` numbers held while fitting; twice the rank by default.
        map: Family of the test matrix.
        seed: Which test matrix; sketches merge only if theirs agree.

    Examples:
        >>> Nystrom(size=100).columns(num_parameters=10_000, rank=50)
        100
    """

    certified: ClassVar[bool] = True

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

    def _shapes(self, num_weights: int, columns: int) -> dict[str, tuple[int, int]]:
        return {"y": (num_weights, columns)}

    def _map_of(self, state: SketchState) -> Map:
        """Return `map`, but `Fold` for a square ``Omega``, which is orthogonal for certain."""
        return Fold() if state.num_parameters == state.columns else self.map

    def eigenbasis(self, state: SketchState, rank: int) -> Eigenbasis:
        """See `Sketch.eigenbasis`.

        Rounding made ``Y`` into ``F Omega + E``. With orthonormal columns in ``Omega`` that is
        ``(F + S) Omega`` for a symmetric ``S`` with ``|S| <= 3 |E|``. Shifted by ``nu = |E|``,
        the approximation lies at most ``nu + |S| + |S|^2 / nu`` above ``F``.

        Returns:
            A certified basis, unless norms are estimated. ``Y`` is shifted by ``nu Omega`` for
            stability and the shift is taken back off the eigenvalues; what that may cost is
            in ``slack``.
        """
        y = state.tensors["y"]
        root, nu = self._root(state)
        factor = y.new_empty(y.shape[0], root.shape[1])
        for chunk in tall_chunks(y):
            shifted = self.test_matrices(state)["y"].rows(chunk, y).mul_(nu).add_(y[chunk])
            factor[chunk] = (shifted @ root).to(y.dtype)
        vectors, singular, _ = tall_svd(factor, state.add_up)
        values = singular.square() - nu
        positive = int((values > 0).sum())  # they come in descending order
        # the result itself is rounded to the dtype of the sums
        stored = 4 * torch.finfo(y.dtype).eps * float(values[:1].sum())
        return self._basis(
            state,
            rank,
            values[:positive],
            vectors[:, :positive],
            residual_rank=min(state.num_parameters, state.num_rows),
            slack=13 * nu + stored,
            clamped=len(values) - positive,
        )

    def _root(self, state: SketchState) -> tuple[Tensor, float]:
        """Return ``C (T, r)`` and ``nu``: ``F_hat = Z C C^T Z^T`` with ``Z = Y + nu Omega``."""
        y = state.tensors["y"]
        gram = torch.zeros(y.shape[1], y.shape[1], dtype=torch.float64, device=y.device)
        core = torch.zeros_like(gram)
        matrix = self.test_matrices(state)["y"]
        for chunk in tall_chunks(y):
            omega = matrix.rows(chunk, y)
            gram += omega.mT @ omega
            core += omega.mT @ y[chunk].double()
        gram, core = state.add_up(torch.stack([gram, core]))
        widths, turn = torch.linalg.eigh(gram)
        wide = widths > 1e-8 * widths[-1]  # fewer where N is hardly above T
        orthonormal = turn[:, wide] / widths[wide].sqrt()
        # narrow directions magnify rounding: that of Y once, that of the core twice
        narrowest = float(widths[wide][0]) if bool(wide.any()) else 1.0
        nu = _rounding(state) / math.sqrt(narrowest)
        nu += torch.finfo(torch.float64).eps * float(core.norm()) / narrowest
        if state.num_estimated:
            nu = max(nu, _asymmetry(core, state.num_parameters) / math.sqrt(narrowest))
        core = orthonormal.mT @ core @ orthonormal
        core += nu * torch.eye(len(core), dtype=torch.float64, device=y.device)
        # an eigendecomposition where the textbook has Cholesky: directions lost to rounding
        # are dropped, and what remains is again a Nystrom approximation
        weights, directions = torch.linalg.eigh((core + core.mT) / 2)
        floor = torch.finfo(torch.float64).eps * y.shape[1]
        significant = weights > floor * weights[-1:].clamp_min(0)
        return orthonormal @ (directions[:, significant] / weights[significant].sqrt()), nu


def _rounding(state: SketchState) -> float:
    """Return how large the rounding errors in ``Y`` are together, in spectral norm.

    In the usual model of rounding as independent noise: an error of ``eps`` times the sum so
    far from each update, which add up like a random walk, and one of ``eps`` times its own
    size from each row's product. The spectral norm of noise in ``T`` columns is its Frobenius
    norm over ``sqrt(T)``; twice that, since the columns differ.
    """
    y = state.tensors["y"]
    size = math.sqrt(state.add_up(torch.linalg.vector_norm(y).double().square()))
    sums = (1 + math.sqrt(state.num_updates) / 4) * size
    products = float(state.squared_norm) * math.sqrt(y.shape[1] / state.num_parameters)
    noise = torch.finfo(y.dtype).eps * (sums + products / math.sqrt(max(1, state.num_rows)))
    return noise * min(1.0, 2 / math.sqrt(y.shape[1]))


def _asymmetry(core: Tensor, num_parameters: int) -> float:
    """Return how large the errors in products with the curvature are, in spectral norm.

    A product goes forward through the network and back again, and is rounded differently both
    ways; so ``Omega^T Y`` is no longer symmetric, and shows as much of the errors as falls on
    ``T`` of ``N`` directions. As for rounding, twice what even noise would have.

    Args:
        core: ``Omega^T Y``, ``(T, T)``.
        num_parameters: ``N``.
    """
    seen = float((core - core.mT).norm()) / math.sqrt(2)
    everywhere = seen * math.sqrt(num_parameters / len(core))
    return everywhere * min(1.0, 2 / math.sqrt(len(core)))
