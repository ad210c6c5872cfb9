"""Engines that run one sample at a time: plain autograd, and function transforms."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.func import vjp, vmap

from scodkit.factors.engine import Engine, Factors, HeldFactors, Linearization
from scodkit.factors.pieces import check_alone
from scodkit.factors.projected import held_factors
from scodkit.model.inputs import Inputs, ordinary
from scodkit.model.network import Network
from scodkit.model.parameters import ParameterSet
from scodkit.model.projected import ProjectedSet
from scodkit.numerics.torch_private import flattened, pull_back

Tried = Callable[[Network, ParameterSet, Inputs], Engine | None]


class AloneEngine(Engine):
    """An engine that runs one sample at a time.

    Args:
        network: The model.
        parameters: The chosen weights.
        graph: Whether outputs and rows keep their graph to the inputs, for second derivatives.
            No weight of the model is part of it.
    """

    def __init__(
        self, network: Network, parameters: ParameterSet, *, graph: bool = False
    ) -> None:
        super().__init__(network, parameters)
        self.graph = graph

    def _others(self) -> dict[str, Tensor]:
        """Return the weights that are not chosen, detached; none without a graph."""
        named = self.network.model.named_parameters() if self.graph else ()
        chosen = self.parameters.names
        return {name: ordinary(w.detach()) for name, w in named if name not in chosen}


class LoopEngine(AloneEngine):
    """One ordinary backward pass per sample and row: slow, and obviously right.

    The oracle for the other engines, the last resort for modules that no transform supports,
    and the fastest engine for a single sample with few rows.
    """

    def linearize(self, call: Inputs) -> Linearization:
        """Return the network linearised one sample at a time; refuse interacting samples."""
        linear = self.alone(call)
        if call.batch_size > 1:
            with torch.no_grad():
                check_alone(self.network, self.network(call), linear.output)
        return linear

    def alone(self, call: Inputs) -> Linearization:
        """Return the network linearised one sample at a time, not compared with the batch."""
        # separate leaves: the model's requires_grad flags and .grad fields stay untouched
        leaves = {
            name: weight.requires_grad_()
            for name, weight in self.parameters.weights(self.network.model).items()
        }
        size = call.batch_size
        samples = [call] if size == 1 else [call.samples(slice(i, i + 1)) for i in range(size)]
        weights = {**self._others(), **leaves}
        outputs = [self.network.at(weights, sample) for sample in samples]
        return _LoopLinearization(self.parameters, leaves, outputs, self.graph)


class SingleEngine(LoopEngine):
    """Plain autograd for batches of one sample, with the model's weights as cached leaves.

    A caller that keeps one must watch the model, and build another when a weight is moved.
    """

    def __init__(self, network: Network, parameters: ParameterSet) -> None:
        super().__init__(network, parameters)
        weights = parameters.weights(network.model)
        self._leaves = {name: weight.requires_grad_() for name, weight in weights.items()}

    def linearize(self, call: Inputs) -> Linearization:
        """Return the network linearised at the single sample."""
        outputs = [self.network.run_at(self._leaves, call)]
        return _LoopLinearization(self.parameters, self._leaves, outputs)


class _LoopLinearization(Linearization):
    def __init__(
        self,
        parameters: ParameterSet,
        leaves: dict[str, Tensor],
        outputs: list[Tensor],
        graph: bool = False,
    ) -> None:
        self._projected = parameters if isinstance(parameters, ProjectedSet) else None
        self._leaves, self._outputs, self._graph = list(leaves.values()), outputs, graph
        shown = outputs if graph else [output.detach() for output in outputs]
        self.output = torch.cat(shown) if len(shown) > 1 else shown[0]

    def pull_back(self, rows: Tensor) -> Factors:
        count = rows.shape[1]
        flat_rows = [rows] if rows.shape[:2] == (1, 1) else rows.flatten(0, 1).unbind()
        if self._projected is not None:  # one whole row at a time
            return self._projected_rows(self._projected, rows)
        pulled = [
            flattened(self._gradients(self._outputs[i // count], row))
            for i, row in enumerate(flat_rows)
        ]
        flat = pulled[0] if len(pulled) == 1 else torch.stack(pulled)
        return HeldFactors([(slice(0, flat.shape[-1]), flat.view(*rows.shape[:2], -1))])

    def _projected_rows(self, parameters: ProjectedSet, rows: Tensor) -> Factors:
        """Return rows in projected coordinates, each from a whole gradient."""

        def projected(output: Tensor, row: Tensor) -> HeldFactors:
            named = zip(parameters.names, self._gradients(output, row), strict=True)
            return held_factors(parameters, {name: own[None, None] for name, own in named})

        each = [
            projected(self._outputs[i // rows.shape[1]], row)
            for i, row in enumerate(rows.flatten(0, 1))
        ]
        whole = torch.cat([own for held in each for _, own in held.blocks()])
        outside = torch.cat([held.outside for held in each if held.outside is not None])
        size = rows.shape[:2]
        return HeldFactors(
            [(slice(0, whole.shape[2]), whole.view(*size, -1))], outside.view(*size, -1)
        )

    def _gradients(self, output: Tensor, row: Tensor) -> list[Tensor]:
        """Return ``J^T r`` of one sample, by weight."""
        leaves = self._leaves
        if not output.requires_grad:  # the output depends on no chosen weight
            return [torch.zeros_like(leaf) for leaf in leaves]
        row = row.view(output.shape)
        gradients: Sequence[Tensor | None]
        if self._graph:
            gradients = torch.autograd.grad(
                output, leaves, row, create_graph=True, allow_unused=True
            )
        else:
            gradients = pull_back((output,), (row,), inputs=tuple(leaves))
        dense = []
        for leaf, gradient in zip(leaves, gradients, strict=True):
            if gradient is None:
                gradient = torch.zeros_like(leaf)
            elif gradient.layout is not torch.strided:
                gradient = gradient.to_dense()
            dense.append(gradient)
        return dense


class FunctionalEngine(AloneEngine):
    """``vmap`` of the model's ``vjp``, over samples and directions.

    Attributes:
        tried: Called with the network, the weights and the first batch whose samples have
            other shapes than those before: the transform of a function may be wrong for some.
            Returns the engine for these shapes, or None if this one is right.
        by_shape: What it returned.
    """

    def __init__(
        self, network: Network, parameters: ParameterSet, *, graph: bool = False
    ) -> None:
        super().__init__(network, parameters, graph=graph)
        self.tried: Tried | None = None
        self.by_shape: dict[object, Engine | None] = {}

    def linearize(self, call: Inputs) -> Linearization:
        """Return a linearisation whose `pull_back` runs the model again, sample by sample."""
        if self.graph:
            weights = {**self._others(), **self.parameters.weights(self.network.model)}
            return _FunctionalLinearization(self, call, self.network.at(weights, call))
        if self.tried is not None:
            shape = shapes_of_samples(call)
            if shape not in self.by_shape:
                self.by_shape[shape] = self.tried(self.network, self.parameters, call)
            engine = self.by_shape[shape]
            if engine is not None:
                return engine.linearize(call)
        with torch.no_grad():
            return _FunctionalLinearization(self, call, self.network(call).detach())

    def of(self, network: Network) -> Engine:
        """See `Engine.of`.

        Returns:
            An engine whose choices for each shape are the same.
        """
        engine = super().of(network)
        assert isinstance(engine, FunctionalEngine)
        engine.by_shape = {s: e and e.of(network) for s, e in self.by_shape.items()}
        return engine


def shapes_of_samples(call: Inputs) -> object:
    """Return the shape of one sample of each input, to tell batches apart by."""
    return tuple((tensor.shape[1:], tensor.dtype) for tensor in call.tensors())


class _FunctionalLinearization(Linearization):
    def __init__(self, engine: FunctionalEngine, call: Inputs, output: Tensor) -> None:
        self._engine, self._call, self.output = engine, call, output

    def pull_back(self, rows: Tensor) -> Factors:
        network, parameters = self._engine.network, self._engine.parameters
        weights, others = parameters.weights(network.model), self._engine._others()

        def one_sample(
            tensors: list[Tensor], sample_rows: Tensor
        ) -> tuple[Tensor, dict[str, Tensor]]:
            sample = self._call.with_tensors(t[None] for t in tensors)

            def output_at(at: dict[str, Tensor]) -> Tensor:
                return network.at({**others, **at}, sample)[0].flatten()

            output, pull, *_ = vjp(output_at, weights)
            return output, vmap(lambda row: pull(row)[0])(sample_rows)

        alone, pulled = vmap(one_sample)(self._call.tensors(), rows)
        if len(alone) > 1:
            check_alone(network, self.output.flatten(1), alone)
        if not self._engine.graph:
            pulled = {name: rows.detach() for name, rows in pulled.items()}
        return held_factors(parameters, pulled)
