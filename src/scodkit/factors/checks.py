"""Whether the samples of a batch are alone what they are together: checks on real batches."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from scodkit.errors import BatchError
from scodkit.factors.pieces import finite_samples, sample_keys
from scodkit.model.inputs import Inputs
from scodkit.model.network import Network
from scodkit.model.parameters import ParameterSet

# relative distance allowed between two ways to round the same numbers
_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3}
_TOLERANCE_HALF = 1e-1
# and between a sample's output alone and in a batch, which differ by the order of sums alone
_TOLERANCE_ALONE = {torch.float64: 1e-10, torch.float32: 3e-4}

# samples that are run alone, and fewer for models whose rows are large
_SAMPLES, _FEWER_SAMPLES = 3, 2
_LARGE = 5_000_000

ADVICE = (
    "the score of a sample must not depend on its batch: set batch_first=True in recurrent "
    "layers, give BatchNorm its running statistics, pick inputs with the batch first "
    "(inputs=lambda batch: ...)"
)


class Alone(NamedTuple):
    """Samples that were run one by one.

    Args:
        samples: Their inputs.
        output: ``(b, *shape)``, detached.
    """

    samples: Inputs
    output: Tensor


def tolerance(like: Tensor) -> float:
    """Return the relative distance allowed between gradients of this dtype."""
    return _TOLERANCE.get(like.dtype, _TOLERANCE_HALF)


def num_alone(parameters: ParameterSet) -> int:
    """Return how many samples to run alone, to compare a batch with."""
    return _FEWER_SAMPLES if parameters.num_parameters > _LARGE else _SAMPLES


def distinct(call: Inputs, count: int) -> list[int]:
    """Return which samples to try something with: finite ones, no two alike, if there are any.

    Args:
        call: A batch.
        count: How many to return at most.
    """
    nothing = torch.zeros(call.batch_size, 1, device=call.tensors()[0].device)
    finite = finite_samples(call, nothing).tolist()
    first = {key: i for i, key in reversed(list(enumerate(sample_keys(call).tolist())))}
    unlike = sorted(first.values())
    return [i for i in unlike if finite[i]][:count] or unlike[:count]


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


def check_some_alone(
    network: Network, call: Inputs, output: Tensor, count: int, known: Alone | None = None
) -> bool:
    """Make sure a few samples of a batch have the same output alone.

    Args:
        network: The model.
        call: The batch.
        output: What the model made of it.
        count: How many samples.
        known: Samples that were run alone before; if these are the same, they are not again.

    Returns:
        Whether that proves anything: of samples that are all alike nothing can be told.
    """
    which = distinct(call, count)
    few = pick(call, which)
    if known is not None and _equal(few, known.samples):
        alone = known.output
    else:
        with torch.no_grad():
            alone = torch.cat(
                [network(few.samples(slice(i, i + 1))) for i in range(len(which))]
            )
    check_alone(network, output[torch.tensor(which, device=output.device)], alone)
    return bool((alone != alone[:1]).any())


def _equal(one: Inputs, other: Inputs) -> bool:
    return one.shapes == other.shapes and all(map(torch.equal, one.tensors(), other.tensors()))
