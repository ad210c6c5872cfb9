"""A linear layer at a network's end, chosen alone: squared lengths without a single row.

With ``output = W a + b`` a row ``r`` at the output is ``r (a, 1)^T`` in weight space. So
``|L|_F^2`` is ``(|a|^2 + 1) tr F_theta``, and along a vector of weights ``u``, which moves the
output by ``v = U_W a + u_b``, it is ``v^T F_theta v``: one product for each vector, whatever
the number of outputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from scodkit.factors.rules.layer import activations_along
from scodkit.likelihoods import Likelihood
from scodkit.numerics.matmul import sum_dtype


@dataclass(frozen=True)
class Head:
    """The layer, at one batch.

    Args:
        inputs: ``a``, ``(B, i)``.
        weight: Where ``W`` sits among the chosen columns; None if it is not chosen.
        bias: Where ``b`` does.
    """

    inputs: Tensor
    weight: slice | None
    bias: slice | None

    def energies(
        self, output: Tensor, likelihood: Likelihood, matrix: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the squared lengths of the factors, in all and along each column.

        Args:
            output: Of the network, ``(B, o)``, finite.
            likelihood: With a closed form.
            matrix: ``(N, k)``; if it is on another device, it is sent there.

        Returns:
            ``|L|_F^2 (B,)`` and ``|u^T L|^2 (B, k)``, in float64.
        """
        device, count = output.device, matrix.shape[1]
        lengths = output.new_zeros(len(output), dtype=torch.float64)
        moved = output.new_zeros(len(output), count, output.shape[1], dtype=torch.float64)
        if self.weight is not None:
            wide = sum_dtype(self.inputs)
            a = self.inputs.to(wide)
            columns = matrix[self.weight].to(device, wide)
            moved += activations_along(a, columns).permute(1, 2, 0)
            lengths += a.double().square().sum(1)
        if self.bias is not None:
            moved += matrix[self.bias].to(device).mT
            lengths += 1
        along = torch.linalg.vecdot(moved, likelihood.curvature_times(output, moved))
        return lengths * likelihood.curvature_trace(output), along.clamp_min(0)
