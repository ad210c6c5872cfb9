"""Local Ensembles (Madras, Atwood and D'Amour, 2019)."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.autograd.functional import vhp

from scodkit.baselines import predictions
from scodkit.baselines.baseline import State, TrainingData, check_finite, whole_number
from scodkit.baselines.predictions import CLOSED_FORM, negative_log_likelihood
from scodkit.baselines.weight_space import WeightSpaceBaseline, over_pieces
from scodkit.errors import NondeterministicError, OptionError, optional
from scodkit.factors.engine import Factors
from scodkit.likelihoods import Gaussian, Likelihood
from scodkit.model.inputs import Inputs
from scodkit.model.network import Network, differentiable_attention
from scodkit.model.parameters import ParameterSet
from scodkit.numerics.matmul import matmul, sum_dtype

# relative difference between the mean losses of two passes that rounding may explain
_SAME_LOSS = 1e-4


@dataclass(eq=False, repr=False, kw_only=True)
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
        inputs: Picks the model's inputs from a batch, as for `Monitor`.
        outputs: Picks the prediction from what the model returns, as for `Monitor`.
        targets: Picks the targets from a training batch; see `Picks`.

    Examples:
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> method = LocalEnsemble(model, Gaussian(), rank=1)
        >>> data = [(torch.tensor([[1.0, 0.0], [2.0, 0.0]]), torch.zeros(2))]
        >>> method.fit(data, progress=False).score(torch.tensor([[9.0, 0.0], [9.0, 4.0]]))
        tensor([0., 4.])
    """

    learnt: ClassVar = ("vectors",)
    handles: ClassVar = CLOSED_FORM
    because: ClassVar = "it needs the loss of training targets, and labels of its own"

    rank: int = 50
    labels: int = 10
    tolerance: float = 1e-4
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.rank = whole_number("rank", self.rank)
        self.labels = whole_number("labels", self.labels)
        if not 0 <= self.tolerance < 1:
            raise OptionError(f"expected 0 <= tolerance < 1, got {self.tolerance}")
        self._gradients = LabelGradients(self.likelihood, self.labels, self.seed)

    @property
    def takes_targets(self) -> bool:
        """Whether a fit reads the targets of the training data."""
        return True

    def _learn(self, data: TrainingData) -> State:
        data.check_repeatable("LocalEnsemble")
        parameters = self._parameters_beyond(self.rank, data.first())
        hessian = LossHessian(self._network, parameters, self.likelihood, data)
        generator = torch.Generator().manual_seed(self.seed)
        dtype = sum_dtype(*parameters.weights(self.model).values())
        start = torch.randn(parameters.num_parameters, dtype=dtype, generator=generator)
        start = start.to(self._network.device)
        return {"vectors": top_eigenspace(hessian.times, start, self.rank, self.tolerance)}

    def _output_and_score(self, call: Inputs, state: State) -> tuple[Tensor, Tensor]:
        source = replace(self._source(call), likelihood=self._gradients)

        def shortest(factors: Factors) -> Tensor:
            return lengths_outside(factors, state["vectors"]).amin(1)

        return over_pieces(source, call, shortest, torch.minimum, hold=True)


@dataclass(frozen=True)
class LabelGradients(Likelihood):
    """Rows at the output whose pull-backs are gradients of the loss, one per possible label.

    For a Gaussian with a single output there is one row, of the prediction itself.

    Args:
        family: The likelihood of the labels, whose negative logarithm is the loss.
        labels: How many labels to draw where more are possible.
        seed: Fixes a sample's draws, together with its key.

    Examples:
        >>> from scodkit import Categorical
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
        # in float64, as a draw is near its mean, which may be large; one copy per label
        theta = output.detach().double().repeat_interleave(targets.shape[1], 0)
        theta.requires_grad_()
        loss = negative_log_likelihood(self.family, theta, targets.flatten(0, 1)).sum()
        (rows,) = torch.autograd.grad(loss, theta)
        return rows.reshape(len(output), -1, output[0].numel()).to(output.dtype)

    def num_directions(self, shape: Sequence[int]) -> int:
        """Return how many rows there are for outputs of trailing shape ``shape``."""
        return 1 if self._is_prediction(shape) else self._num_listed(shape) or self.labels

    def _is_prediction(self, shape: Sequence[int]) -> bool:
        return isinstance(self.family, Gaussian) and math.prod(shape) == 1

    def _num_listed(self, shape: Sequence[int]) -> int:
        """Return how many labels are possible; 0 for numbers, and for more than ``labels``."""
        variables, values = predictions.variables(self.family, shape)
        # a map of classes has astronomically many: beyond 64 variables, too many in any case
        possible = values ** min(variables, 64)
        return possible if possible <= self.labels else 0

    def _targets(self, output: Tensor, keys: list[int]) -> Tensor:
        """Return the labels of each sample, ``(B, q, variables)`` on the CPU."""
        variables, values = predictions.variables(self.family, output.shape[1:])
        if self._num_listed(output.shape[1:]):
            every = torch.cartesian_prod(*[torch.arange(values)] * variables)
            return every.reshape(-1, variables).expand(len(keys), -1, -1)
        generator, noise = torch.Generator(), []
        draw = torch.rand if values else torch.randn
        for key in keys:
            generator.manual_seed((self.seed * 0x9E3779B97F4A7C15 + key) % 2**63)
            size = self.labels, variables
            noise.append(draw(size, dtype=torch.float64, generator=generator))
        return predictions.targets_at(self.family, output.double().cpu(), torch.stack(noise))


def lengths_outside(factors: Factors, vectors: Tensor) -> Tensor:
    """Return the length of each row's part outside a subspace, ``(b, q)`` in float64.

    The part inside is subtracted from the row: the difference of two squared lengths would lose
    half of the digits where little is left.

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


@dataclass
class LossHessian:
    """Products with the Hessian of the mean training loss, by differentiating twice.

    Args:
        network: The model, held in eval mode.
        parameters: The chosen weights: the Hessian's rows and columns, in their order.
        likelihood: Its negative logarithm is the loss.
        data: Read once for each product; checked in the first pass.

    Examples:
        >>> from scodkit.model.parameters import select_names
        >>> net = Network(torch.nn.Linear(1, 1, bias=False))
        >>> data = TrainingData(net, [(torch.tensor([[3.0], [1.0]]), torch.zeros(2))])
        >>> hessian = LossHessian(net, select_names(net.model, ["weight"]), Gaussian(), data)
        >>> hessian.times(torch.ones(1))  # the mean of 3^2 and 1^2
        tensor([5.])
    """

    network: Network
    parameters: ParameterSet
    likelihood: Likelihood
    data: TrainingData
    # number of samples and mean loss of the first pass
    _first: tuple[int, float] | None = None

    def times(self, vector: Tensor) -> Tensor:
        """Return the Hessian times a vector ``(N,)``, both on the model's device.

        Raises:
            BatchError: If the loss is not defined for the data.
            NonFiniteError: If the data has a NaN or an infinity.
            NondeterministicError: If the data is not what it was in the first pass.
        """
        weights = self.parameters.weights(self.network.model)
        blocks = self.parameters.blocks
        along = tuple(
            vector[block.columns].reshape(block.shape).to(weights[block.name])
            for block in blocks
        )
        total = torch.zeros_like(vector, dtype=torch.float64)
        num_data, loss_sum = 0, total.new_zeros(())
        for call, targets in self.data.pairs():
            if self._first is None:
                self._check(call, targets)
            loss_at = functools.partial(self._loss, call, targets)
            with differentiable_attention():
                loss, products = vhp(loss_at, tuple(weights.values()), along)  # type: ignore[no-untyped-call]
            for block, product in zip(blocks, products, strict=True):
                total[block.columns] += product.flatten()
            num_data += call.batch_size
            loss_sum += loss  # on a GPU: synchronised once, after the last batch
        mean_loss = float(loss_sum) / num_data
        self._first = self._first or (num_data, mean_loss)
        first_num_data, first_loss = self._first
        off = abs(mean_loss - first_loss)
        if num_data != first_num_data or not off <= _SAME_LOSS * max(abs(first_loss), 1e-6):
            raise NondeterministicError(
                f"expected the same data in every pass, got {first_num_data} samples of mean "
                f"loss {first_loss:.6g} in the first and {num_data} of {mean_loss:.6g} in a "
                "later one; switch random augmentation, and dropping of a last batch, off"
            )
        return (total / num_data).to(vector.dtype)

    def _loss(self, call: Inputs, targets: Tensor, *weights: Tensor) -> Tensor:
        """Return the summed loss of a batch at other weights, in the parameters' order."""
        named = dict(zip(self.parameters.names, weights, strict=True))
        output = self.network.at(named, call)
        return negative_log_likelihood(self.likelihood, output, targets).sum()

    def _check(self, call: Inputs, targets: Tensor) -> None:
        with torch.no_grad():
            output = self.network(call)
        for tensor in (*call.tensors(), output, targets):
            if tensor.is_floating_point():
                check_finite(tensor, "training data")
        predictions.check_targets(self.likelihood, output, targets)


def top_eigenspace(
    times: Callable[[Tensor], Tensor], like: Tensor, rank: int, tolerance: float
) -> Tensor:
    """Return the eigenvectors of a symmetric matrix for its eigenvalues largest in magnitude.

    By Lanczos with implicit restarts (ARPACK); dense where Lanczos would take as much memory.

    Args:
        times: Multiplies the matrix with a vector like ``like``.
        like: The vector to start from, ``(N,)`` in float32 or float64.
        rank: How many eigenvectors, fewer than ``N``.
        tolerance: How far ``A v`` may be from ``value v``, over the eigenvalue; 0 for rounding.

    Returns:
        ``(N, rank)``, orthonormal.

    Raises:
        OptionError: If they are not found.
    """
    size = len(like)
    if 2 * rank + 1 >= size:  # vectors that Lanczos would hold
        unit = torch.eye(size, dtype=like.dtype, device=like.device)
        dense = torch.stack([times(row) for row in unit]).double()
        values, vectors = torch.linalg.eigh((dense + dense.mT) / 2)
        dense_top: Tensor = vectors[:, values.abs().argsort(descending=True)[:rank]]
        return dense_top.to(like)

    def on_host(vector: np.ndarray) -> np.ndarray:
        return times(torch.from_numpy(vector.reshape(-1)).to(like)).cpu().numpy()

    linalg = optional("scipy.sparse.linalg", "peers")
    start = like.cpu().numpy()
    matrix = linalg.LinearOperator((size, size), matvec=on_host, dtype=start.dtype)
    # newer versions restart an exhausted Lanczos from a generator, which must be seeded
    seeded = {"rng": 0} if "rng" in inspect.signature(linalg.eigsh).parameters else {}
    try:
        _, top = linalg.eigsh(matrix, rank, which="LM", v0=start, tol=tolerance, **seeded)
    except linalg.ArpackError as error:
        raise OptionError(
            f"expected {rank} directions of curvature, but they were not found ({error}); "
            "type a smaller rank=, or a larger tolerance="
        ) from error
    return torch.from_numpy(top).to(like)
