"""What is kept of the training set: the top eigenpairs of its Fisher information."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from scodkit.numerics.files import file_errors, own_folder, target_of


@dataclass(frozen=True)
class Eigenbasis:
    """Low-rank Fisher ``F_hat = U diag(values) U^T`` of a data set, with its known error.

    Args:
        values: Eigenvalues ``(k,)``, >= 0, descending; units of nats per squared weight.
        vectors: Orthonormal columns ``U`` ``(N, k)``.
        num_data: ``M``, the number of samples behind it.
        trace: ``tr F``, exactly: the mean of ``|L|_F^2`` over the samples. After a fit by
            products an estimate. Of projected weights it is that of all weights.
        certified: True when ``F_hat <= F`` (in the Loewner order, up to ``slack``): then every
            score is an over-estimate of the exact one, unless weights are projected.
        residual_norm: A bound on the largest eigenvalue of ``F - F_hat``; infinite when
            nothing is known.
        residual_rank: A bound on the rank of ``F - F_hat``.
        slack: ``F_hat <= F + slack I``: what rounding may have added.
        clamped: How many eigenvalues came out negative and were set to zero or dropped.
        offloaded: Whether the vectors stay in the CPU's memory, or in a file, wherever the
            model goes.
        outside: The part of the trace that is not in the projected space, where weights are
            projected. Then ``F_hat``, and what is said of it, is of ``P^T F P``.
    """

    values: Tensor
    vectors: Tensor
    num_data: int
    trace: float
    certified: bool
    residual_norm: float
    residual_rank: int
    slack: float = 0.0
    clamped: int = 0
    offloaded: bool = False
    outside: float = 0.0

    @property
    def rank(self) -> int:
        """``k``, the number of eigenpairs kept."""
        return self.values.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of values and vectors."""
        return self.values.nbytes + self.vectors.nbytes

    @property
    def captured(self) -> float:
        """Captured curvature, ``sum(values) / tr F``: 1 means nothing of the data is lost."""
        if self.trace == 0.0:
            return 1.0
        return float(self.values.double().sum()) / self.trace

    @property
    def inside(self) -> float:
        """Share of ``tr F`` in the projected space, exactly; 1 if weights are not projected."""
        return 1.0 - self.outside / self.trace if self.trace else 1.0

    @property
    def over_estimates(self) -> bool:
        """Whether every score is known to be an over-estimate of the exact one."""
        return self.certified and not self.outside

    @property
    def residual_trace(self) -> float:
        """``tr(F - F_hat)``; for a certified basis the exact nuclear-norm error."""
        return max(0.0, self.trace - self.outside - float(self.values.double().sum()))

    def bounded_by_trace(self) -> Eigenbasis:
        """Return the basis with ``residual_norm`` bounded by the residual's trace if certified.

        The residual of a certified basis has no eigenvalue below ``-slack``, so none can be
        above its trace by more than ``slack`` per negative one.
        """
        if not self.certified:
            return self
        bound = self.residual_trace + self.rank * self.slack
        return replace(self, residual_norm=min(self.residual_norm, bound))

    def truncate(self, rank: int) -> Eigenbasis:
        """Return the basis with only its ``rank`` largest eigenpairs.

        Args:
            rank: Number of pairs to keep; a larger number than there are keeps all.

        Returns:
            A basis that is certified if this one is, in memory of no more than its size.
        """
        if rank >= self.rank and self.vectors.is_contiguous():
            return self
        if rank >= self.rank:  # scoring would stride over what was cut off
            return replace(self, vectors=self.vectors.contiguous())
        dropped = float(self.values[rank])
        return replace(
            self,
            values=self.values[:rank].clone(),
            vectors=self.vectors[:, :rank].contiguous(),
            residual_norm=self.residual_norm + dropped,
            residual_rank=min(self.vectors.shape[0], self.residual_rank + self.rank - rank),
        ).bounded_by_trace()

    def compress(self, dtype: torch.dtype = torch.bfloat16) -> Eigenbasis:
        """Return the basis with its vectors in half precision: half the memory and traffic.

        Args:
            dtype: Of the vectors; products with them are still summed in float32.

        Returns:
            A basis that is no longer certified: its vectors are rounded.
        """
        return replace(self, vectors=self.vectors.to(dtype), certified=False)

    def offload(self, path: Path | None = None) -> Eigenbasis:
        """Return the basis with its vectors in the CPU's memory, or in a file.

        Args:
            path: Where to write a file that is mapped into memory; the system caches as much
                of it as there is room for. The file is unlinked at once: nobody can change it
                or cut it off under a score, and it goes with its last reader.

        Returns:
            A basis whose vectors stay there; a GPU is sent them piece by piece.
        """
        vectors = self.vectors.cpu()
        if path is not None:
            with file_errors(path, "written"), own_folder(target_of(path)) as folder:
                save_file({"vectors": vectors}, folder / path.name)
                vectors = load_file(folder / path.name)["vectors"]  # mapped, not read
        return replace(self, vectors=vectors, offloaded=True)

    def to(self, device: torch.device | str) -> Eigenbasis:
        """Return the basis on another device (itself if it is there already)."""
        if self.values.device == torch.device(device):
            return self
        vectors = self.vectors if self.offloaded else self.vectors.to(device)
        return replace(self, values=self.values.to(device), vectors=vectors)
