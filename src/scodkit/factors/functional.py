"""Batched factors by function transforms: works for nearly every module, no layer rules."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.func import vjp, vmap

from scodkit.factors.checks import check_alone
from scodkit.factors.engine import Engine, Factors, HeldFactors, Linearization
from scodkit.model.network import Inputs, Network
from scodkit.model.parameters import ParameterSet


class FunctionalEngine(Engine):
    """``vmap`` over samples and directions of ``vjp`` of the model."""

    def linearize(self, call: Inputs) -> Linearization:
        """Return the output; pulling back runs the model again, each sample alone."""
        return _FunctionalLinearization(self.network, self.parameters, call)


class _FunctionalLinearization(Linearization):
    def __init__(self, network: Network, parameters: ParameterSet, call: Inputs) -> None:
        self._network = network
        self._parameters = parameters
        self._call = call
        with torch.no_grad():
            self.output = network(call).detach()

    def pull_back(self, rows: Tensor) -> Factors:
        weights = self._parameters.weights(self._network.model)

        def one_sample(
            tensors: list[Tensor], own_rows: Tensor
        ) -> tuple[Tensor, dict[str, Tensor]]:
            args, kwargs = self._call.with_tensors([t[None] for t in tensors])

            def output_at(at: dict[str, Tensor]) -> Tensor:
                return self._network.at_raw(at, args, kwargs, 1)[0].flatten()

            output, pull, *_ = vjp(output_at, weights)
            return output, vmap(lambda row: pull(row)[0])(own_rows)

        alone, pulled = vmap(one_sample)(self._call.tensors(), rows)
        if len(alone) > 1:
            check_alone(self._network, self.output.flatten(1), alone)
        return HeldFactors.of(self._parameters, {k: v.detach() for k, v in pulled.items()})
