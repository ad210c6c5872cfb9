"""Checks on real batches that every row belongs to its sample.

What the samples of a batch are alone, they must be together; and each sample's row must agree
with the slope of its output along a direction of the weights, which is had another way.
"""

from __future__ import annotations

import torch
from torch import Tensor

from scodkit.errors import BatchError
from scodkit.factors.engine import Linearization
from scodkit.factors.jacobian import BackwardJacobian, ForwardJacobianInTurn, Jacobian
from scodkit.factors.pieces import finite_samples, sample_keys
from scodkit.network import Inputs, Network
from scodkit.parameters import ParameterSet

# relative distance allowed between two ways to round the same numbers
_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3}
_TOLERANCE_HALF = 1e-1
# and between a sample's output alone and in a batch, which differ by the order of sums alone
_TOLERANCE_ALONE = {torch.float64: 1e-10, torch.float32: 3e-4}

# weights up to which a direction among them is at hand beside the batch
_MANY_WEIGHTS = 50_000_000

# samples of a batch that are run alone
_ALONE = 3
# rows that must not be zero, to prove anything
_TWO = 2

ADVICE = (
    "the score of a sample must not depend on its batch: set batch_first=True in recurrent "
    "layers, give BatchNorm its running statistics, pick inputs with the batch first "
    "(inputs=lambda batch: ...)"
)


def tolerance(like: Tensor) -> float:
    """Return the relative distance allowed between gradients of this dtype."""
    return _TOLERANCE.get(like.dtype, _TOLERANCE_HALF)


def distinct(call: Inputs, count: int) -> list[int]:
    """Return which samples to try something with: finite ones, no two alike, if there are any.

    Args:
        call: A batch.
        count: How many to return at most.
    """
    nothing = torch.zeros(call.batch_size, 1, device=call.tensors()[0].device)
    finite = finite_samples(call, nothing).tolist()
    first = {key: i for i, key in reversed(list(enumerate(sample_keys(call).tolist())))}
    alike = sorted(first.values())
    return [i for i in alike if finite[i]][:count] or alike[:count]


def pick(call: Inputs, which: list[int]) -> Inputs:
    """Return some samples of a batch."""
    return call.map(lambda t: t[torch.tensor(which, device=t.device)])


def check_alone(network: Network, together: Tensor, alone: Tensor) -> None:
    """Make sure samples have the same output alone and in a batch.

    Args:
        network: The model.
        together: Their outputs in a batch, ``(b, *shape)``.
        alone: The same of each alone.

    Raises:
        BatchError: If they have not.
    """
    limit = _TOLERANCE_ALONE.get(network.precision or alone.dtype, _TOLERANCE_HALF)
    if together.is_cuda and torch.backends.cuda.matmul.allow_tf32:
        limit = max(limit, 1e-2)
    expected, actual = alone.detach().double(), together.detach().double()
    known = expected.isfinite()
    gap = torch.where(known, actual - expected, 0.0).nan_to_num(torch.inf).abs().max()
    scale = torch.where(known, expected, 0.0).abs().max()
    if float(gap) > limit * max(float(scale), 1e-6):
        raise BatchError(
            "expected the same output for a sample alone and in a batch, got outputs "
            f"{float(gap):.1e} apart; {ADVICE}"
        )


def check_some_alone(network: Network, call: Inputs, output: Tensor) -> bool:
    """Make sure a few samples of a batch have the same output alone.

    Args:
        network: The model.
        call: The batch.
        output: What the model made of it.

    Returns:
        Whether that proves anything: of samples that are all alike nothing can be told.
    """
    which = distinct(call, _ALONE)
    with torch.no_grad():
        each = [network(call.samples(slice(i, i + 1)).map(torch.clone)) for i in which]
    alone = torch.cat(each)
    check_alone(network, output[torch.tensor(which, device=output.device)], alone)
    return bool((alone != alone[:1]).any())


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
            # forward mode does not stop where a model says no_grad
        return self._by_halves(linear, rows, generator) if found is None else found

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
