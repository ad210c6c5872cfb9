"""The SCOD paper's sketch: range and co-range, symmetrised and truncated.

Tropp, Yurtsever, Udell, Cevher (2017), "Practical sketching algorithms for low-rank matrix
approximation". Linear, but indefinite: its scores carry no certificate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from scodkit.errors import OptionError
from scodkit.numerics.matmul import tall_bytes, tall_svd, tall_times
from scodkit.sketch.base import SeededSketch, SketchMemory, SketchState
from scodkit.sketch.eigenbasis import Eigenbasis
from scodkit.sketch.maps import SRFT, Map


@dataclass(frozen=True)
class TwoSided(SeededSketch):
    """``Y = F Omega`` and ``W = Psi F`` in one pass; ``F_hat`` from both, symmetrised.

    Args:
        size: ``T = r + s``, vectors of ``N`` numbers held; ``6 k + 4`` by default. The range
            gets ``r = (T - 1) // 3`` of them, so at most ``2 r`` eigenpairs come out.
        map: Family of the test matrices.
        seed: Which test matrices; sketches merge only if theirs agree.

    Examples:
        >>> TwoSided().columns(num_parameters=10_000, rank=50)
        304
    """

    certified: ClassVar[bool] = False

    map: Map = SRFT()  # noqa: RUF009 (frozen)

    def columns(self, num_parameters: int, rank: int, num_rows: int | None = None) -> int:
        """See `Sketch.columns`.

        Returns:
            ``T``.

        Raises:
            OptionError: If the size cannot give the rank, or there are too few parameters.
        """
        size = 6 * rank + 4 if self.size is None else self.size
        r, s = _split(size)
        if 2 * r < rank:
            raise OptionError(
                f"expected a rank of at most 2 (T - 1) // 3 = {2 * r} for size={size}, got "
                f"rank={rank}; type TwoSided(size={6 * rank + 4})"
            )
        if s > num_parameters:
            raise OptionError(
                f"expected at least {s} parameters for a two-sided sketch of size {size}, got "
                f"{num_parameters}; type sketch=Exact(), which is small here"
            )
        return size

    def memory(self, num_parameters: int, columns: int, device: torch.device) -> SketchMemory:
        """See `Sketch.memory`.

        Returns:
            For a basis ``Q`` and ``X``, and a copy of both side by side.
        """
        r, _ = _split(columns)
        memory = super().memory(num_parameters, columns, device)
        scratch = tall_bytes(num_parameters, 2 * r, device)
        return memory._replace(solve_columns=4 * r, solve_bytes=scratch)

    def _shapes(self, num_weights: int, columns: int) -> dict[str, tuple[int, int]]:
        r, s = _split(columns)
        return {"y": (num_weights, r), "w": (num_weights, s)}

    def eigenbasis(self, state: SketchState, rank: int) -> Eigenbasis:
        """See `Sketch.eigenbasis`.

        Returns:
            An uncertified basis; negative eigenvalues are dropped and counted in ``clamped``.
        """
        y, w = state.tensors["y"], state.tensors["w"]
        q, _, _ = tall_svd(y.clone(), state.add_up)
        # X = (Psi Q)^+ W, so that F ~ Q X
        psi_q = state.add_up(self.test_matrices(state)["w"].project(q.mT.contiguous(), 0))
        x_transposed = tall_times(w, torch.linalg.pinv(psi_q.mT.double()).mT)
        # both halves at the same scale, or rounding would swallow the smaller
        norm = torch.linalg.vector_norm(x_transposed).double()
        unit = math.sqrt(state.add_up(norm.square())) or 1.0
        both = torch.cat([q, x_transposed.div_(unit)], dim=1)
        basis, singular, right = tall_svd(both, state.add_up)
        # [Q, X^T] = basis [R1, R2]; the symmetric part of R1 R2^T is F_hat in that basis
        joint = singular[:, None] * right.mT
        r1, r2 = joint[:, : q.shape[1]], joint[:, q.shape[1] :]
        core = unit * r1 @ r2.mT
        values, turn = torch.linalg.eigh((core + core.mT) / 2)
        values, turn = values.flip(0), turn.flip(1)
        positive = int((values > 0).sum())
        top = min(positive, rank)
        return self._basis(
            state,
            rank,
            values[:top],
            tall_times(basis, turn[:, :top]),
            residual_rank=state.num_parameters,
            clamped=len(values) - positive,
        )


def _split(size: int) -> tuple[int, int]:
    r = (size - 1) // 3
    return r, size - r
