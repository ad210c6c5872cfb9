"""Products with the Jacobian of a network at a batch, from both sides.

The cost of a product does not depend on the number of outputs, and no gradient of a single
sample is ever formed.
"""

from __future__ import annotations

import functools
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor
from torch.func import jvp, vmap

from scodkit.model.network import Inputs, Network, differentiable_attention, ordinary
from scodkit.model.parameters import ParameterSet


class Jacobian(ABC):
    """A network at one batch: its output, its Jacobian and the transpose of that.

    Args:
        network: The model, held in eval mode.
        parameters: The chosen weights.
        call: The batch.

    Attributes:
        together: Whether several vectors go through the model at once.
    """

    together: ClassVar[bool] = False

    def __init__(self, network: Network, parameters: ParameterSet, call: Inputs) -> None:
        self._network = network
        self._parameters = parameters
        self._call = call
        # leaves of our own; the other weights lose theirs, so that no graph leads to them
        self._weights = {
            name: weight.requires_grad_()
            for name, weight in parameters.weights(network.model).items()
        }
        self._others = {
            name: ordinary(weight.detach())
            for name, weight in network.model.named_parameters()
            if name not in self._weights
        }

    @functools.cached_property
    def _graph(self) -> Tensor:
        return self._output_at(self._weights)

    @functools.cached_property
    def output(self) -> Tensor:
        """What the model returned, ``(B, *shape)``, detached."""
        return self._graph.detach()

    @abstractmethod
    def push(self, tangents: Tensor) -> Tensor:
        """Return ``J_i v`` for every vector ``v`` and sample ``i``.

        Args:
            tangents: Vectors in weight space, ``(t, N)``.

        Returns:
            ``(t, B, d)``, detached.
        """

    def pull(self, cotangents: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Return ``sum_i J_i^T r_i`` for every vector of one row ``r_i`` per sample.

        Args:
            cotangents: Vectors at the flattened output, ``(t, B, d)``.

        Yields:
            Ranges of columns with their share of the sums, ``(t, *shape of the parameter)``.
            Those of weights the output does not depend on are left out: they are zero.
        """
        if not self._graph.requires_grad:
            return
        shaped = cotangents.reshape(len(cotangents), *self._graph.shape)
        pulled = self._backward([self._graph], list(self._weights.values()), [shaped])
        for block, gradient in zip(self._parameters.blocks, pulled, strict=True):
            if gradient is not None and gradient.numel():
                yield block.columns, gradient

    def _output_at(self, weights: dict[str, Tensor]) -> Tensor:
        with differentiable_attention():
            return self._network.at({**self._others, **weights}, self._call)

    def _named(self, tangents: Tensor) -> dict[str, Tensor]:
        """Return vectors ``(t, N)`` cut up by name, ``(t, *shape of the parameter)``."""
        return {
            b.name: tangents[:, b.columns]
            .reshape(len(tangents), *b.shape)
            .to(self._weights[b.name].dtype)
            for b in self._parameters.blocks
        }

    def _backward(
        self, outputs: list[Tensor], inputs: list[Tensor], vectors: list[Tensor]
    ) -> list[Tensor | None]:
        """Return the pull-back of ``t`` vectors at outputs to inputs, ``(t, ...)`` each."""
        if self.together:
            return _gradients(outputs, inputs, vectors, batched=True)
        one_by_one = [
            _gradients(outputs, inputs, [v[i] for v in vectors], batched=False)
            for i in range(len(vectors[0]))
        ]
        return [
            None if own[0] is None else torch.stack([g for g in own if g is not None])
            for own in zip(*one_by_one, strict=True)
        ]


class ForwardJacobian(Jacobian):
    """Vectors go through the model beside its activations (forward-mode differentiation)."""

    together: ClassVar[bool] = True

    def push(self, tangents: Tensor) -> Tensor:
        """See `Jacobian.push`.

        Returns:
            ``(t, B, d)``.
        """

        def along(tangent: dict[str, Tensor]) -> Tensor:
            pushed: Tensor = jvp(self._output_at, (self._weights,), (tangent,))[1]
            return pushed.flatten(1)

        named = self._named(tangents)
        _load_forward_mode()
        with torch.no_grad():
            if self.together:
                pushed: Tensor = vmap(along)(named)
                return pushed
            count = range(len(tangents))
            return torch.stack([along({n: t[i] for n, t in named.items()}) for i in count])


class ForwardJacobianInTurn(ForwardJacobian):
    """The same, one vector after the other, for models that cannot be batched."""

    together: ClassVar[bool] = False


class BackwardJacobian(Jacobian):
    """By backward passes alone: ``J v`` is the slope in ``r`` of ``(J^T r) . v``.

    For modules with a backward pass of their own, through which no vectors go forward.
    """

    def __init__(self, network: Network, parameters: ParameterSet, call: Inputs) -> None:
        super().__init__(network, parameters, call)
        self._slope = torch.zeros_like(self.output, requires_grad=True)

    def push(self, tangents: Tensor) -> Tensor:
        """See `Jacobian.push`.

        Returns:
            ``(t, B, d)``.
        """
        zero = self.output.new_zeros(len(tangents), *self.output.shape).flatten(2)
        if not self._graph.requires_grad:
            return zero
        pulled = torch.autograd.grad(
            self._graph,
            list(self._weights.values()),
            self._slope,
            create_graph=True,
            allow_unused=True,
        )
        found = {n: g for n, g in zip(self._weights, pulled, strict=True) if g is not None}
        named = self._named(tangents)
        (pushed,) = self._backward(
            list(found.values()), [self._slope], [named[name] for name in found]
        )
        return zero if pushed is None else pushed.flatten(2)


def _gradients(
    outputs: list[Tensor], inputs: list[Tensor], vectors: list[Tensor], batched: bool
) -> list[Tensor | None]:
    found = torch.autograd.grad(
        outputs,
        inputs,
        vectors,
        retain_graph=True,
        allow_unused=True,
        is_grads_batched=batched,
    )
    return [None if g is None else g.detach().to_dense() for g in found]


@functools.cache
def _load_forward_mode() -> None:
    """Let torch load its rules for forward mode, at which it warns of what it does itself."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        jvp(torch.exp, (torch.zeros(1),), (torch.ones(1),))
