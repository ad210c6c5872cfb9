"""What a pass through a network costs, counted on a few samples."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.utils.flop_counter import FlopCounterMode

from scodkit.factors.jacobian import ForwardJacobianInTurn
from scodkit.model.network import Inputs, Network
from scodkit.model.parameters import ParameterSet

_SAMPLES = 2


@dataclass(frozen=True)
class Passes:
    """What one sample costs.

    Args:
        forward: Floating-point operations of a forward pass.
        backward: Floating-point operations of a backward pass to the chosen weights. To take
            a vector forward, from the weights to the output, costs as many.
    """

    forward: int
    backward: int


def count_passes(network: Network, parameters: ParameterSet, call: Inputs) -> Passes:
    """Return what a pass costs, by running one forward and backward.

    Products of matrices and convolutions are counted, other operations are not.

    Args:
        network: The model, held in eval mode.
        parameters: The chosen weights.
        call: A batch, of which the first samples are run.
    """
    few = call.samples(slice(0, _SAMPLES))
    with FlopCounterMode(display=False) as forward:
        jacobian = ForwardJacobianInTurn(network, parameters, few)
        rows = torch.ones_like(jacobian.output).flatten(1)[None]
    with FlopCounterMode(display=False) as backward:
        list(jacobian.pull(rows))
    return Passes(
        forward=forward.get_total_flops() // few.batch_size,
        # every weight is multiplied once at least
        backward=max(
            backward.get_total_flops() // few.batch_size, 2 * parameters.num_parameters
        ),
    )
