"""Kronecker factors of the Fisher information, layer by layer (Martens and Grosse, 2015).

Of a layer with input ``a`` and gradient ``g`` at its output, for ``M`` samples: ``sum g g^T``
kron ``mean a a^T`` for the weight and ``sum g g^T`` for the bias, the sum over samples and
directions of the output Fisher. A convolution's positions count as samples of their own, over
which ``a a^T`` is averaged too. Computed by laplace-torch; what its factors leave out, or would
get wrong without a word, is refused here.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from scodkit.baselines.baseline import State, class_logits
from scodkit.baselines.data import check_finite
from scodkit.baselines.entropy import noise_variance
from scodkit.baselines.peers import peer
from scodkit.baselines.weight_sets import copies
from scodkit.likelihoods import Gaussian, Likelihood
from scodkit.network import Inputs, Network

_PARTS = ("output_vectors", "output_values", "input_vectors", "input_values")


@dataclass(frozen=True)
class Block:
    """The Fisher information of one parameter, as a Kronecker product of decomposed factors.

    Args:
        output_vectors: Eigenvectors of the factor of the layer's output, ``(o, o)``.
        output_values: Their eigenvalues, ``(o,)``, >= 0.
        input_vectors: The same for the input, ``(i, i)``; of a bias ``(1, 1)``.
        input_values: ``(i,)``.
    """

    output_vectors: Tensor
    output_values: Tensor
    input_vectors: Tensor
    input_values: Tensor

    @property
    def values(self) -> Tensor:
        """Eigenvalues of the product, ``(o, i)``."""
        return self.output_values[:, None] * self.input_values

    def quadratic(self, rows: Tensor, prior_precision: Tensor) -> Tensor:
        """Return ``row^T (F + prior_precision)^-1 row``, ``(...)``.

        Args:
            rows: ``(..., o * i)``.
            prior_precision: A single number.
        """
        return (self.turned(rows).square() / (self.values + prior_precision)).sum((-2, -1))

    def turned(self, rows: Tensor) -> Tensor:
        """Return rows ``(..., o * i)`` along the eigenvectors, ``(..., o, i)``."""
        rows = rows.reshape(*rows.shape[:-1], len(self.output_values), len(self.input_values))
        return self.output_vectors.mT @ rows @ self.input_vectors

    def deviations(self, turned_noise: Tensor, prior_precision: Tensor) -> Tensor:
        """Return draws from the Gaussian of precision ``F + prior_precision``.

        Args:
            turned_noise: Standard normal numbers, `turned`, ``(K, o, i)``: what is the same
                for every precision.
            prior_precision: A single number.

        Returns:
            ``(K, o * i)``, of mean zero.
        """
        scaled = turned_noise * (self.values + prior_precision).rsqrt()
        # back, by the symmetric root: the signs of eigenvectors, which are arbitrary, cancel
        return (self.output_vectors @ scaled @ self.input_vectors.mT).flatten(1)

    def products(self) -> int:
        """Return how many multiplications `quadratic` takes for a row."""
        o, i = self.values.shape
        return o * i * (o + i + 2)


def pack(blocks: Mapping[str, Block]) -> State:
    """Return the factors as tensors by name."""
    return {
        f"{part}:{name}": getattr(block, part)
        for name, block in blocks.items()
        for part in _PARTS
    }


def unpack(state: State, names: Iterable[str]) -> dict[str, Block]:
    """Return the factors of these parameters, from what `pack` returned."""
    return {name: Block(*(state[f"{part}:{name}"] for part in _PARTS)) for name in names}


class KroneckerFactors:
    """Sums up the factors over the training data, in one pass.

    Works on a copy of the network, which is dropped with the object.

    Args:
        network: The model, held in eval mode.
        likelihood: `Gaussian`; or `Categorical` or `Bernoulli`, with one variable.
        names: Parameters, by name; all of layers that have factors.
    """

    def __init__(self, network: Network, likelihood: Likelihood, names: Iterable[str]) -> None:
        self._names = list(names)
        model = copy.deepcopy(network.model)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in self._names)
        own = copy.copy(network)
        own.model = model
        self._regression = isinstance(likelihood, Gaussian)
        kind = "regression" if self._regression else "classification"
        with warnings.catch_warnings():
            # one of its backends, of which nothing is used, asks for it
            warnings.filterwarnings("ignore", "`torch.jit.script`", DeprecationWarning)
            curvature = peer("laplace.curvature")
        self._backend = curvature.CurvlinopsGGN(
            _Standardised(own, likelihood), kind, dict_key_x="first"
        )
        self._targets: Tensor | None = None  # of one sample
        self._sum: Any = None
        self._count = 0

    def add(self, call: Inputs) -> None:
        """Add a batch; its targets are not needed.

        Args:
            call: The batch; not empty.
        """
        batch = {"call": call, "first": call.tensors()[0]}
        # the factors do not depend on targets, the loss that comes with them is not used
        _, factors = self._backend.kron(batch, self._any_targets(call), N=1)
        self._sum = factors if self._sum is None else self._sum + factors
        self._count += call.batch_size

    def _any_targets(self, call: Inputs) -> Tensor:
        """Return targets of the right shape: ``(B,)`` classes or ``(B, d)`` numbers."""
        if self._targets is None:
            one = call.samples(slice(0, 1))
            with torch.no_grad():
                output = self._backend.model({"call": one})
            self._targets = output * 0 if self._regression else output[:, 0].long() * 0
        return self._targets.expand(call.batch_size, *self._targets.shape[1:])

    def decomposed(self) -> dict[str, Block]:
        """Return the factors of all data so far, by name of the parameter."""
        blocks = {}
        for name, factors in zip(self._names, self._sum.kfacs, strict=True):
            output, *rest = factors
            # summed with N=1: the mean of the inputs is still a sum
            (inner,) = [rest[0] / self._count] if rest else [torch.ones_like(output[:1, :1])]
            blocks[name] = Block(*_decomposed(output), *_decomposed(inner))
        return blocks


class _Standardised(nn.Module):
    """The model with what laplace-torch asks for: logits ``(B, C)``, or noise of variance 1."""

    def __init__(self, network: Network, likelihood: Likelihood) -> None:
        super().__init__()
        self.model = network.model  # whose parameters are looked for
        self._network = network
        self._likelihood = likelihood

    def forward(self, batch: Mapping[str, Any]) -> Tensor:
        output = check_finite(self._network(copies(batch["call"])), "outputs")
        if isinstance(self._likelihood, Gaussian):
            return output.flatten(1) * noise_variance(self._likelihood, output).rsqrt()
        return class_logits(self._likelihood, output)


def _decomposed(factor: Tensor) -> tuple[Tensor, Tensor]:
    """Return eigenvectors and eigenvalues of a factor, in its own dtype."""
    values, vectors = torch.linalg.eigh(check_finite(factor, "Kronecker factors").double())
    # contiguous, as they will be in a file: products are the same to the bit then
    return vectors.to(factor.dtype).contiguous(), values.clamp_min(0).to(factor.dtype)
