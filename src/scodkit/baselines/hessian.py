"""The Hessian of the mean training loss, and the directions in which it is largest."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from scodkit.baselines.data import TrainingData, check_finite
from scodkit.baselines.targets import check_targets
from scodkit.errors import NondeterministicError, OptionError
from scodkit.likelihoods import (
    Bernoulli,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    Likelihood,
)
from scodkit.model.network import Inputs, Network, differentiable_attention
from scodkit.model.parameters import ParameterSet
from scodkit.numerics.optional import optional

# relative difference between the mean losses of two passes that rounding may explain
_SAME_LOSS = 1e-4


def negative_log_likelihood(likelihood: Likelihood, output: Tensor, targets: Tensor) -> Tensor:
    """Return the training loss of each sample, ``(B,)`` in nats, but for a constant.

    Half the squared error over the variance, cross entropy, or the mean's and log-variance's
    loss; summed over a sample's variables. In a form whose gradient keeps its digits where
    the prediction is confident and right.

    Args:
        likelihood: Gaussian (with or without its own variance), Bernoulli or Categorical.
        output: ``(B, *shape)``.
        targets: Numbers, or class indices for Categorical: ``(B, ...)``, in the outputs' order.
    """
    if isinstance(likelihood, Categorical):
        logits = likelihood.logits(output)
        own = targets.reshape(logits.shape[:2])[..., None].long()
        # log(q / (1 - q)) of the target's class, without 1 - q
        others = logits.scatter(-1, own, -torch.inf).logsumexp(-1)
        return -logsigmoid(logits.gather(-1, own)[..., 0] - others).sum(1)
    theta = output.flatten(1)
    if isinstance(likelihood, Bernoulli):
        y = targets.reshape(theta.shape).to(theta)
        return -(y * logsigmoid(theta) + (1 - y) * logsigmoid(-theta)).sum(1)
    if isinstance(likelihood, HeteroscedasticGaussian):
        mean, log_variance = (half.flatten(1) for half in output.chunk(2, dim=1))
        y = targets.reshape(mean.shape).to(mean)
        return 0.5 * ((mean - y).square() * (-log_variance).exp() + log_variance).sum(1)
    assert isinstance(likelihood, Gaussian)
    variance = torch.as_tensor(likelihood.variance, dtype=theta.dtype, device=theta.device)
    return 0.5 * ((theta - targets.reshape(theta.shape).to(theta)).square() / variance).sum(1)


class LossHessian:
    """Products with the Hessian of the mean training loss, by differentiating twice.

    Args:
        network: The model, held in eval mode.
        parameters: The chosen weights: the Hessian's rows and columns, in their order.
        likelihood: Says which loss.
        data: Read once now, to check it, and once for each product.

    Attributes:
        dtype: Of the products: float64 if a chosen weight is, else float32.

    Examples:
        >>> from scodkit.model.parameters import select_names
        >>> net = Network(torch.nn.Linear(1, 1, bias=False))
        >>> data = TrainingData(net, [(torch.tensor([[3.0], [1.0]]), torch.zeros(2))])
        >>> hessian = LossHessian(net, select_names(net.model, ["weight"]), Gaussian(), data)
        >>> hessian.times(torch.ones(1))  # the mean of 3^2 and 1^2
        tensor([5.])
    """

    def __init__(
        self,
        network: Network,
        parameters: ParameterSet,
        likelihood: Likelihood,
        data: TrainingData,
    ) -> None:
        self._network, self._parameters = network, parameters
        self._likelihood, self._data = likelihood, data
        weights = parameters.weights(network.model).values()
        wide = any(weight.dtype == torch.float64 for weight in weights)
        self.dtype = torch.float64 if wide else torch.float32
        self._num_data, self._mean_loss = 0, 0.0
        self._num_data, self._mean_loss = self._check()

    @property
    def size(self) -> int:
        """``N``."""
        return self._parameters.num_parameters

    def times(self, vector: Tensor) -> Tensor:
        """Return the Hessian times a vector ``(N,)``, both on the model's device.

        Raises:
            NondeterministicError: If the data is not what it was in the first pass.
        """
        weights = self._parameters.weights(self._network.model)
        leaves = [weight.requires_grad_() for weight in weights.values()]
        along = [
            vector[block.columns].reshape(block.shape).to(leaf)
            for block, leaf in zip(self._parameters.blocks, leaves, strict=True)
        ]
        total = torch.zeros(self.size, dtype=torch.float64, device=vector.device)
        num_data, loss_sum = 0, total.new_zeros(())
        for call, targets in self._pairs():
            with differentiable_attention():
                output = self._network.at(weights, call)
                loss = negative_log_likelihood(self._likelihood, output, targets).sum()
                slope = _directional(loss, leaves, along)
                for block, second in zip(
                    self._parameters.blocks, _gradients(slope, leaves), strict=True
                ):
                    if second is not None:
                        total[block.columns] += second.detach().flatten()
            num_data += call.batch_size
            loss_sum += loss.detach()  # a GPU is waited for at the end, not for each batch
        self._compare(num_data, float(loss_sum) / num_data)
        return (total / num_data).to(vector.dtype)

    def _check(self) -> tuple[int, float]:
        """Return how many samples there are, and their mean loss; refuse those without one."""
        num_data, loss_sum = 0, 0.0
        with torch.no_grad():
            for call, targets in self._pairs():
                output = self._network(call)
                for tensor in (*call.tensors(), output, targets):
                    if tensor.is_floating_point():
                        check_finite(tensor, "training data")
                check_targets(self._likelihood, output, targets)
                loss = negative_log_likelihood(self._likelihood, output, targets)
                num_data += call.batch_size
                loss_sum += float(loss.sum())
        return num_data, loss_sum / num_data

    def _pairs(self) -> Iterator[tuple[Inputs, Tensor]]:
        return self._data.pairs()

    def _compare(self, num_data: int, mean_loss: float) -> None:
        near = abs(mean_loss - self._mean_loss) <= _SAME_LOSS * max(abs(self._mean_loss), 1e-6)
        if num_data != self._num_data or not near:
            raise NondeterministicError(
                f"expected the same data in every pass, got {self._num_data} samples of mean "
                f"loss {self._mean_loss:.6g} in the first and {num_data} of {mean_loss:.6g} in "
                "a later one; switch random augmentation, and dropping of a last batch, off"
            )


def top_eigenspace(
    times: Callable[[Tensor], Tensor], like: Tensor, rank: int, tolerance: float
) -> Tensor:
    """Return eigenvectors of a symmetric matrix, of the eigenvalues largest in magnitude.

    By Lanczos with implicit restarts (ARPACK), where that holds less than the whole matrix.

    Args:
        times: Multiplies the matrix with a vector like ``like``.
        like: The vector to start from, ``(N,)`` in float32 or float64.
        rank: How many, fewer than ``N``.
        tolerance: How far ``A v`` may be from ``value v``, over the eigenvalue; 0 for rounding.

    Returns:
        ``(N, rank)``, orthonormal.

    Raises:
        OptionError: If they are not found.
    """
    size = len(like)
    if 2 * rank + 1 >= size:  # what Lanczos would hold
        unit = torch.eye(size, dtype=like.dtype, device=like.device)
        dense = torch.stack([times(row) for row in unit]).double()
        values, vectors = torch.linalg.eigh((dense + dense.mT) / 2)
        largest = values.abs().argsort(descending=True)[:rank]
        found: Tensor = vectors[:, largest].to(like)
        return found

    def on_host(vector: np.ndarray) -> np.ndarray:
        return times(torch.from_numpy(vector.reshape(-1)).to(like)).cpu().numpy()

    linalg = optional("scipy.sparse.linalg", "peers")
    start = like.cpu().numpy()
    matrix = linalg.LinearOperator((size, size), matvec=on_host, dtype=start.dtype)
    # newer ones draw what they need after an exhausted start from a fresh generator
    seeded = {"rng": 0} if "rng" in inspect.signature(linalg.eigsh).parameters else {}
    try:
        _, top = linalg.eigsh(matrix, rank, which="LM", v0=start, tol=tolerance, **seeded)
    except linalg.ArpackError as error:
        raise OptionError(
            f"expected {rank} directions of curvature, but they were not found ({error}); "
            "type a smaller rank=, or a larger tolerance="
        ) from error
    return torch.from_numpy(top).to(like)


def _directional(loss: Tensor, leaves: list[Tensor], along: list[Tensor]) -> Tensor:
    """Return the slope of a loss along a vector, with its graph."""
    gradients = _gradients(loss, leaves, create_graph=True)
    parts = [(g * v).sum() for g, v in zip(gradients, along, strict=True) if g is not None]
    return sum(parts, loss.new_zeros(()))


def _gradients(
    value: Tensor, leaves: list[Tensor], create_graph: bool = False
) -> tuple[Tensor | None, ...]:
    if not value.requires_grad:  # it depends on no chosen weight
        return (None,) * len(leaves)
    return torch.autograd.grad(value, leaves, create_graph=create_graph, allow_unused=True)
