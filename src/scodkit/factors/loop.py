"""Factors by plain autograd, one sample and one row at a time: slow, and obviously right.

The oracle of the other engines, and the last resort for modules no transform supports.
"""

from __future__ import annotations

import torch
from torch import Tensor

from scodkit.factors.checks import check_alone
from scodkit.factors.engine import Engine, Factors, HeldFactors, Linearization
from scodkit.model.network import Inputs, Network
from scodkit.model.parameters import ParameterSet


class LoopEngine(Engine):
    """One ordinary backward pass per sample and row."""

    def linearize(self, call: Inputs) -> Linearization:
        """Return the outputs of the samples one by one, each with its graph."""
        return _LoopLinearization(self.network, self.parameters, call)


class _LoopLinearization(Linearization):
    def __init__(self, network: Network, parameters: ParameterSet, call: Inputs) -> None:
        self._parameters = parameters
        # leaves of our own: the model's requires_grad flags and .grad fields stay untouched
        self._weights = {
            name: weight.requires_grad_()
            for name, weight in parameters.weights(network.model).items()
        }
        self._outputs = [
            network.at(self._weights, call.samples(slice(i, i + 1)))
            for i in range(call.batch_size)
        ]
        self.output = torch.cat([output.detach() for output in self._outputs])
        if call.batch_size > 1:
            with torch.no_grad():
                check_alone(network, network(call), self.output)

    def pull_back(self, rows: Tensor) -> Factors:
        leaves = list(self._weights.values())
        shape = rows.shape[:2]
        pulled = {
            name: weight.new_zeros(*shape, *weight.shape)
            for name, weight in self._weights.items()
        }
        for i, output in enumerate(self._outputs):
            if not output.requires_grad:  # this output depends on no chosen weight
                continue
            for j in range(shape[1]):
                gradients = torch.autograd.grad(
                    output,
                    leaves,
                    grad_outputs=rows[i, j].reshape(output.shape),
                    retain_graph=True,
                    allow_unused=True,
                )
                for name, gradient in zip(self._weights, gradients, strict=True):
                    if gradient is not None:
                        pulled[name][i, j] = gradient.to_dense()
        return HeldFactors.of(self._parameters, pulled)
