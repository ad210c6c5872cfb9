"""Local Ensembles (Madras, Atwood and D'Amour, 2019)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from scodkit.baselines.baseline import Picks, State
from scodkit.baselines.data import TrainingData
from scodkit.baselines.hessian import LossHessian, negative_log_likelihood, top_eigenspace
from scodkit.baselines.options import whole_number
from scodkit.baselines.weight_space import WeightSpaceBaseline
from scodkit.errors import OptionError
from scodkit.factors import Factors, FactorSource
from scodkit.likelihoods import (
    Bernoulli,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    Likelihood,
)
from scodkit.model.network import Inputs
from scodkit.model.parameters import Selection
from scodkit.numerics.matmul import matmul


class LocalEnsemble(WeightSpaceBaseline):
    """Length of a gradient outside the directions the training loss determines.

    Those are the eigenvectors of the Hessian of the mean training loss whose eigenvalues are
    largest in magnitude (a direction of strong negative curvature changes the loss, too; the
    authors sort them so). The gradient is that of the prediction for regression with one
    output. Otherwise it is that of the loss, and the score the minimum over labels: every
    label where there are at most ``labels`` of them, as the authors have it, and else
    ``labels`` draws from the model's own prediction, as the SCOD paper (Sharma, Azizan and
    Pavone, 2021) has it. What is drawn for a sample depends on that sample and the seed alone.

    The fit needs targets and reads the data some 2.5 times ``rank`` times, 40 at least. A score
    is a length, >= 0: output units or nats, per unit of weight.

    Args:
        model: The trained network.
        likelihood: Gaussian (with or without its own variance), Bernoulli or Categorical: its
            negative logarithm is the training loss.
        rank: How many eigenvectors.
        labels: How many labels a sample, at most; each costs a backward pass.
        tolerance: How far ``H v`` may be from ``value v``, over the eigenvalue; 0 for rounding.
        seed: Of the draws, and of the vector the eigensolver starts from.
        parameters: Which weights, as for `Monitor`.
        picks: ``inputs=``, ``outputs=``, ``targets=``; see `Picks`.

    Examples:
        >>> model = nn.Linear(2, 1, bias=False)
        >>> method = LocalEnsemble(model, Gaussian(), rank=1)
        >>> data = [(torch.tensor([[1.0, 0.0], [2.0, 0.0]]), torch.zeros(2))]
        >>> method.fit(data, progress=False).score(torch.tensor([[9.0, 0.0], [9.0, 4.0]]))
        tensor([0., 4.])
    """

    learnt: ClassVar = ("vectors",)
    handles: ClassVar[Any] = (Gaussian, HeteroscedasticGaussian, Bernoulli, Categorical)
    because: ClassVar = "it needs the loss of training targets, and labels of its own"

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood,
        *,
        rank: int = 50,
        labels: int = 10,
        tolerance: float = 1e-4,
        seed: int = 0,
        parameters: Selection = "all",
        **picks: Unpack[Picks],
    ) -> None:
        super().__init__(model, likelihood, parameters=parameters, **picks)
        rank, labels = whole_number("rank", rank), whole_number("labels", labels)
        if not 0 <= tolerance < 1:
            raise OptionError(f"expected 0 <= tolerance < 1, got {tolerance}")
        self.rank, self.labels, self.tolerance, self.seed = rank, labels, tolerance, seed
        self._gradients = LabelGradients(likelihood, labels, seed)

    def _learn(self, data: TrainingData) -> State:
        data.check_repeatable("LocalEnsemble")
        parameters = self._parameters(next(replace(data, doing=None).calls()))
        if self.rank >= parameters.num_parameters:
            raise OptionError(
                f"expected rank < {parameters.num_parameters}, the number of weights, got "
                f"{self.rank}: no gradient would be outside; type a smaller rank="
            )
        hessian = LossHessian(self._network, parameters, self.likelihood, data)
        generator = torch.Generator().manual_seed(self.seed)
        start = torch.randn(hessian.size, dtype=hessian.dtype, generator=generator)
        vectors = top_eigenspace(
            hessian.times, start.to(self._network.device), self.rank, self.tolerance
        )
        return {"vectors": vectors}

    def _judge(self, call: Inputs, state: State) -> tuple[Tensor, Tensor]:
        outputs: dict[int, Tensor] = {}
        shortest: dict[int, Tensor] = {}
        for piece in self._label_source(call).pieces(call, hold=True):
            start = piece.samples.start
            outputs[start] = piece.output
            found = lengths_outside(piece.factors, state["vectors"]).amin(1)
            shortest[start] = found.minimum(shortest.get(start, found))
        return torch.cat(list(outputs.values())), torch.cat(list(shortest.values()))

    def _label_source(self, call: Inputs) -> FactorSource:
        source = self._source(call)
        return replace(source, likelihood=self._gradients)

    def _options(self) -> Mapping[str, Any]:
        own = {name: getattr(self, name) for name in ("rank", "labels", "tolerance", "seed")}
        return {**own, **super()._options()}


@dataclass(frozen=True)
class LabelGradients(Likelihood):
    """Rows at the output that lead to gradients of the loss, one for each possible label.

    For a Gaussian with a single output there is one row, of the prediction itself.

    Args:
        family: Says what labels there are, and which loss.
        labels: How many to draw where there are more.
        seed: With a sample's key it fixes that sample's draws.

    Examples:
        >>> LabelGradients(Categorical(), 10, 0).factor(torch.zeros(1, 2), torch.tensor([7]))
        tensor([[[-0.5000,  0.5000],
                 [ 0.5000, -0.5000]]])
    """

    draws: ClassVar[bool] = True

    family: Likelihood
    labels: int
    seed: int

    def factor(self, output: Tensor, keys: Tensor | None = None) -> Tensor:
        """See `Likelihood.factor`; here ``R^T R`` is no Fisher information.

        Returns:
            Rows ``(B, q, d)``.
        """
        if self._is_prediction(output.shape[1:]):
            return torch.ones_like(output).flatten(1)[:, None]
        assert keys is not None
        targets = self._targets(output, keys.tolist()).to(output.device)
        # in float64: a draw is near its mean, which may be large; a copy for each label
        theta = output.detach().double().repeat_interleave(targets.shape[1], 0)
        theta.requires_grad_()
        loss = negative_log_likelihood(self.family, theta, targets.flatten(0, 1)).sum()
        (rows,) = torch.autograd.grad(loss, theta)
        return rows.reshape(len(output), -1, output[0].numel()).to(output.dtype)

    def num_directions(self, shape: Sequence[int]) -> int:
        """Return how many rows there are for outputs of trailing shape ``shape``."""
        if self._is_prediction(shape):
            return 1
        choices, variables = self._choices(shape)
        return choices**variables if self._can_list(choices, variables) else self.labels

    def _is_prediction(self, shape: Sequence[int]) -> bool:
        return isinstance(self.family, Gaussian) and math.prod(shape) == 1

    def _can_list(self, choices: int, variables: int) -> bool:
        # in logarithms: the labels of an image of classes are a number of many digits
        few = variables * math.log(max(choices, 1)) <= math.log(self.labels) + 1e-9
        return choices > 0 and few

    def _choices(self, shape: Sequence[int]) -> tuple[int, int]:
        """Return how many values a variable may have (0: any number), and their number."""
        if isinstance(self.family, Categorical):
            whole = torch.empty(1, *shape, device="meta")
            _, variables, classes = self.family.logits(whole).shape
            return classes, variables
        outputs = math.prod(shape)
        if isinstance(self.family, Bernoulli):
            return 2, outputs
        return 0, outputs // 2 if isinstance(self.family, HeteroscedasticGaussian) else outputs

    def _targets(self, output: Tensor, keys: list[int]) -> Tensor:
        """Return the labels of each sample, ``(B, q, variables)`` on the CPU."""
        choices, variables = self._choices(output.shape[1:])
        if self._can_list(choices, variables):
            one = torch.arange(choices)
            every = torch.cartesian_prod(*[one] * variables).reshape(-1, variables)
            return every.expand(len(keys), *every.shape)
        noise = torch.stack([self._noise(key, variables) for key in keys])
        return self._drawn(output.double().cpu(), noise)

    def _noise(self, key: int, variables: int) -> Tensor:
        """Return what makes a sample's draws: ``(labels, variables)``."""
        generator = torch.Generator()
        generator.manual_seed((self.seed * 0x9E3779B97F4A7C15 + key) % 2**63)
        form = torch.rand if isinstance(self.family, (Bernoulli, Categorical)) else torch.randn
        return form(self.labels, variables, dtype=torch.float64, generator=generator)

    def _drawn(self, output: Tensor, noise: Tensor) -> Tensor:
        if isinstance(self.family, Categorical):
            cumulated = self.family.logits(output).softmax(-1).cumsum(-1)[:, None]
            # the last class takes what rounding left of the sum
            return (noise[..., None] > cumulated[..., :-1]).sum(-1)
        if isinstance(self.family, Bernoulli):
            return (noise < output.flatten(1).sigmoid()[:, None]).double()
        if isinstance(self.family, HeteroscedasticGaussian):
            mean, log_variance = (half.flatten(1)[:, None] for half in output.chunk(2, dim=1))
            return mean + (0.5 * log_variance).exp() * noise
        assert isinstance(self.family, Gaussian)
        spread = torch.as_tensor(self.family.variance, dtype=torch.float64).sqrt()
        return output.flatten(1)[:, None] + spread * noise


def lengths_outside(factors: Factors, vectors: Tensor) -> Tensor:
    """Return the length of each row's part outside a subspace, ``(b, q)`` in float64.

    By taking the part inside away, and not from the difference of two squared lengths, which
    would lose half of the digits where little is left.

    Args:
        factors: Rows in weight space, held.
        vectors: An orthonormal basis of the subspace, ``(N, k)``.
    """
    blocks = list(factors.blocks())
    inside = [matmul(rows.flatten(0, 1), vectors[columns]) for columns, rows in blocks]
    along = torch.stack(inside).double().sum(0)
    squares = along.new_zeros(len(along))
    for columns, rows in blocks:
        part = matmul(along.to(vectors.dtype), vectors[columns].mT)
        rest = rows.flatten(0, 1) - part
        squares += torch.linalg.vector_norm(rest, dim=1, dtype=torch.float64).square()
    return squares.sqrt().reshape(blocks[0][1].shape[:2])
