"""Engines in which each sample is alone: plain autograd, and function transforms."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.func import vjp, vmap

from scodkit.factors.checks import check_alone
from scodkit.factors.engine import Engine, Factors, HeldFactors, Linearization
from scodkit.model.network import Inputs, Network
from scodkit.model.parameters import ParameterSet


class LoopEngine(Engine):
    """One ordinary backward pass per sample and row: slow, and obviously right.

    The oracle of the other engines, the last resort for modules that no transform supports,
    and the fastest there is for a single sample with few rows.
    """

    def linearize(self, call: Inputs) -> Linearization:
        """Return the outputs of the samples one by one, compared with those of the batch."""
        linear = self.alone(call)
        if call.batch_size > 1:
            with torch.no_grad():
                check_alone(self.network, self.network(call), linear.output)
        return linear

    def alone(self, call: Inputs) -> Linearization:
        """Return the outputs of the samples one by one, each with its graph."""
        # leaves of our own: the model's requires_grad flags and .grad fields stay untouched
        leaves = {
            name: weight.requires_grad_()
            for name, weight in self.parameters.weights(self.network.model).items()
        }
        size = call.batch_size
        each = [call] if size == 1 else [call.samples(slice(i, i + 1)) for i in range(size)]
        return _LoopLinearization(leaves, [self.network.at(leaves, one) for one in each])


class SingleEngine(LoopEngine):
    """Plain autograd for batches of one sample, of a model that is known to stay as it is."""

    def __init__(self, network: Network, parameters: ParameterSet) -> None:
        super().__init__(network, parameters)
        self._named = dict(network.model.named_parameters())
        self._at: list[int] = []

    def linearize(self, call: Inputs) -> Linearization:
        """Return the output of the sample, with its graph."""
        where = list(map(Tensor.data_ptr, self._named.values()))
        if where != self._at:
            names = self.parameters.names
            self._leaves = {n: self._named[n].detach().requires_grad_() for n in names}
            self._at = where
        return _LoopLinearization(self._leaves, [self.network.run_at(self._leaves, call)])


class _LoopLinearization(Linearization):
    def __init__(self, leaves: dict[str, Tensor], outputs: list[Tensor]) -> None:
        self._leaves, self._outputs = list(leaves.values()), outputs
        detached = [output.detach() for output in outputs]
        self.output = torch.cat(detached) if len(detached) > 1 else detached[0]

    def pull_back(self, rows: Tensor) -> Factors:
        pulled = [
            self._pulled(output, row)
            for output, own_rows in zip(self._outputs, rows, strict=True)
            for row in own_rows
        ]
        flat = pulled[0] if len(pulled) == 1 else torch.stack(pulled)
        return HeldFactors([(slice(0, flat.shape[-1]), flat.view(*rows.shape[:2], -1))])

    def _pulled(self, output: Tensor, row: Tensor) -> Tensor:
        """Return ``J^T r`` of one sample, ``(N,)``."""
        leaves = self._leaves
        if not output.requires_grad:  # it depends on no chosen weight
            return torch.cat([torch.zeros_like(leaf).flatten() for leaf in leaves])
        row = row.view(output.shape)
        found = torch.autograd.grad(output, leaves, row, retain_graph=True, allow_unused=True)
        flat = []
        for leaf, own in zip(leaves, found, strict=True):
            if own is None:
                own = torch.zeros_like(leaf)
            flat.append((own if own.layout is torch.strided else own.to_dense()).reshape(-1))
        return torch.cat(flat)


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
