"""Products with the Jacobian of a network at a batch, from both sides.

The cost of a product does not depend on the number of outputs, and no gradient of a single
sample is ever formed.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.func import jvp, vmap

from scodkit.model.inputs import Inputs, ordinary
from scodkit.model.network import Network, differentiable_attention
from scodkit.model.parameters import ParameterSet


class Jacobian:
    """A network at one batch: its output, its Jacobian and the transpose of that.

    Args:
        network: The model, held in eval mode.
        parameters: The chosen weights.
        call: The batch.
        together: Whether several vectors go through the model at once; one after the other
            otherwise, for models that cannot be vectorised.
    """

    def __init__(
        self, network: Network, parameters: ParameterSet, call: Inputs, together: bool = False
    ) -> None:
        self._network = network
        self._parameters = parameters
        self._call = call
        self._together = together
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

    def push(self, tangents: Tensor) -> Tensor:
        """Return ``J_i v`` for every vector ``v`` and sample ``i``, by forward-mode autograd.

        Args:
            tangents: Vectors in weight space, ``(t, N)``.

        Returns:
            ``(t, B, d)``, detached.
        """

        def along(tangent: dict[str, Tensor]) -> Tensor:
            pushed: Tensor = jvp(self._output_at, (self._weights,), (tangent,))[1]
            return pushed.flatten(1)

        named = {
            b.name: tangents[:, b.columns]
            .reshape(len(tangents), *b.shape)
            .to(self._weights[b.name].dtype)
            for b in self._parameters.blocks
        }
        _load_forward_mode()
        with torch.no_grad():
            if self._together:
                pushed: Tensor = vmap(along)(named)
                return pushed
            count = range(len(tangents))
            return torch.stack([along({n: t[i] for n, t in named.items()}) for i in count])

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
        if self._together:
            pulled = self._gradients(shaped)
        else:
            each = zip(*map(self._gradients, shaped), strict=True)
            pulled = [None if own[0] is None else torch.stack(own) for own in each]
        for block, gradient in zip(self._parameters.blocks, pulled, strict=True):
            if gradient is not None and gradient.numel():
                yield block.columns, gradient

    def _output_at(self, weights: dict[str, Tensor]) -> Tensor:
        with differentiable_attention():
            return self._network.at({**self._others, **weights}, self._call)

    def _gradients(self, rows: Tensor) -> list[Tensor | None]:
        """Return the pull-back of rows at the output, batched if they go together."""
        found = torch.autograd.grad(
            self._graph,
            list(self._weights.values()),
            rows,
            retain_graph=True,
            allow_unused=True,
            is_grads_batched=self._together,
        )
        return [None if g is None else g.detach().to_dense() for g in found]


@functools.cache
def _load_forward_mode() -> None:
    """Let torch load its rules for forward mode, at which it warns of what it does itself."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        jvp(torch.exp, (torch.zeros(1),), (torch.ones(1),))
