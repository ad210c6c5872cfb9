"""Whether rows are those of their samples: they are held against slopes had another way.

The slope of a sample's output along a direction of the weights is the product of its row with
that direction. Vectors that go forward through the model, or plain autograd, know the slope
without knowing rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from scodkit.factors.alone import LoopEngine
from scodkit.factors.checks import tolerance
from scodkit.factors.engine import Linearization
from scodkit.factors.jacobian import BackwardJacobian, ForwardJacobianInTurn, Jacobian
from scodkit.factors.pieces import finite_samples
from scodkit.model.network import Inputs, Network
from scodkit.model.parameters import ParameterSet

# weights up to which a direction among them is at hand beside the batch
_MANY_WEIGHTS = 50_000_000

# rows that must not be zero, to prove anything
_TWO = 2


class Checksum:
    """What rows must agree with, for a model and a choice of weights.

    Args:
        network: The model.
        parameters: The chosen weights.
    """

    def __init__(self, network: Network, parameters: ParameterSet) -> None:
        self._network, self._parameters = network, parameters
        self._ways: list[type[Jacobian]] = [ForwardJacobianInTurn, BackwardJacobian]
        self._count = 0  # of checks, so that each takes other random numbers

    def distance(self, call: Inputs, linear: Linearization) -> float | None:
        """Return how far rows are from what they must be, relative to their size.

        Args:
            call: A batch.
            linear: The network at it.

        Returns:
            None where rows are zero, which proves nothing.
        """
        self._count += 1
        generator = torch.Generator().manual_seed(self._count)
        shape = (call.batch_size, 1, linear.output[0].numel())
        rows = torch.randn(shape, generator=generator).to(linear.output)
        rows = rows.masked_fill(~finite_samples(call, linear.output)[:, None, None], 0.0)
        if self._parameters.num_parameters > _MANY_WEIGHTS:
            return self._by_halves(linear, rows, generator)
        direction = torch.randn(self._parameters.num_parameters, generator=generator).to(rows)
        norms, along = linear.pull_back(rows).project(direction[:, None])
        found: float | None = None
        for way in list(self._ways):
            try:
                slope = way(self._network, self._parameters, call).push(direction[None])[0]
            except Exception:  # whatever a third-party module raises under a transform
                self._ways.remove(way)
                continue
            error = (along[:, 0, 0] - (slope * rows[:, 0]).double().sum(1)).abs()
            found = _relative(error, norms.sqrt())
            if found is None or found <= tolerance(rows):
                return found
            # forward mode does not stop where a model says no_grad, and a derivative of one's
            # own may have none itself: plain autograd decides
            self._ways.remove(way)
        if found is None:
            return self._by_halves(linear, rows, generator)
        plain = LoopEngine(self._network, self._parameters).linearize(call)
        expected = plain.pull_back(rows).project(direction[:, None])[1]
        return _relative((along - expected)[:, 0, 0].abs(), norms.sqrt())

    @staticmethod
    def _by_halves(
        linear: Linearization, rows: Tensor, generator: torch.Generator
    ) -> float | None:
        """Return how much arrives at samples without a row, of what others are given."""
        half = torch.randperm(len(rows), generator=generator) < len(rows) // 2
        others = rows.masked_fill(half.to(rows.device)[:, None, None], 0.0)
        norms = linear.pull_back(others).squared_norms().sqrt()
        return _relative(norms * half.to(norms.device), norms.max().expand_as(norms))


def _relative(error: Tensor, size: Tensor) -> float | None:
    """Return the largest error relative to its size; None if fewer than two have one."""
    usable = (size > 0) & size.isfinite()
    if bool((error[~usable].nan_to_num(0.0) > 0).any()):
        return float("inf")
    if int(usable.sum()) < _TWO:
        return None
    return float((error[usable] / size[usable]).max())
