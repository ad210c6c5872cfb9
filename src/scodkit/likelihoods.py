"""What distribution the output parametrises, as a square root of its Fisher information.

A likelihood turns an output ``theta`` of shape ``(B, *shape)``, flattened to ``d`` numbers per
sample, into rows ``R`` of shape ``(B, p, d)`` with ``R^T R = F_theta``: what matters at the
output. ``p`` is the number of directions, ``d`` unless the likelihood truncates or samples.
"""

from __future__ import annotations

import functools
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.distributions import Distribution

from scodkit.errors import BatchError, OptionError

# squarings of a matrix: eigenvalues that differ by a thousandth are told apart
_SQUARINGS = 13


class Likelihood(ABC):
    """Square root of the output Fisher information of a family of distributions.

    Attributes:
        draws: True when `factor` draws random numbers, and so needs the samples' keys.
    """

    draws: ClassVar[bool] = False

    @abstractmethod
    def factor(self, output: Tensor, keys: Tensor | None = None) -> Tensor:
        """Return rows ``R`` of shape ``(B, p, d)`` with ``R^T R`` the output Fisher.

        Args:
            output: What the model returned, ``(B, *shape)``, with ``d = prod(shape)``.
            keys: One integer per sample, ``(B,)``; likelihoods that draw random numbers draw
                the same ones for the same key, whatever else is in the batch.

        Returns:
            Rows in the dtype of ``output``. They can be differentiated where that has a graph,
            unless they are drawn.
        """

    @abstractmethod
    def num_directions(self, shape: Sequence[int]) -> int:
        """Return ``p`` for outputs of trailing shape ``shape``."""


@dataclass(frozen=True)
class Gaussian(Likelihood):
    """Regression with known noise: the output is the mean, ``R = diag(variance)^(-1/2)``.

    Args:
        variance: Noise variance in squared output units: one number, or one per output.

    Examples:
        >>> Gaussian(variance=4.0).factor(torch.zeros(1, 2))
        tensor([[[0.5000, 0.0000],
                 [0.0000, 0.5000]]])
    """

    variance: float | tuple[float, ...] = 1.0

    def __post_init__(self) -> None:
        given = self.variance
        if isinstance(given, Tensor) or not isinstance(given, (int, float)):
            values = torch.as_tensor(given, dtype=torch.float64).flatten().tolist()
            object.__setattr__(self, "variance", tuple(values))
        if not self._values() or not all(v > 0 and math.isfinite(v) for v in self._values()):
            raise OptionError(
                f"expected positive, finite variances, got {self.variance}; for a network "
                "that predicts its own variance use HeteroscedasticGaussian()"
            )

    def _values(self) -> tuple[float, ...]:
        return self.variance if isinstance(self.variance, tuple) else (float(self.variance),)

    def factor(self, output: Tensor, keys: Tensor | None = None) -> Tensor:
        """See `Likelihood.factor`; ``p = d``.

        Returns:
            Diagonal rows ``(B, d, d)``.

        Raises:
            BatchError: If there are as many variances as do not fit the outputs.
        """
        theta = _flat(output)
        root = _constants(self._values(), theta.dtype, theta.device).rsqrt()
        if root.numel() not in (1, theta.shape[1]):
            raise BatchError(
                f"expected {root.numel()} outputs, one per variance given to Gaussian, got "
                f"{theta.shape[1]}; pass one variance or {theta.shape[1]} of them"
            )
        return torch.diag_embed(root.expand_as(theta))

    def num_directions(self, shape: Sequence[int]) -> int:
        """Return ``d``."""
        return math.prod(shape)


@dataclass(frozen=True)
class HeteroscedasticGaussian(Likelihood):
    """Regression whose network predicts mean and log-variance.

    The output's first axis after the batch holds the means, then as many natural logarithms
    of variances, as ``chunk(2, dim=1)`` splits it.
    The Fisher information is diagonal: ``exp(-s)`` of a mean, ``1/2`` of a log-variance ``s``.

    Examples:
        >>> rows = HeteroscedasticGaussian().factor(torch.tensor([[0.3, 0.0]]))
        >>> rows.diagonal(dim1=1, dim2=2) ** 2
        tensor([[1.0000, 0.5000]])
    """

    def factor(self, output: Tensor, keys: Tensor | None = None) -> Tensor:
        """See `Likelihood.factor`; ``p = d``.

        Returns:
            Diagonal rows ``(B, d, d)``.

        Raises:
            BatchError: If the outputs cannot be split into means and log-variances.
        """
        if output.shape[1] % 2:
            raise BatchError(
                "expected an even number of outputs (means, then log-variances) along axis 1, "
                f"got {output.shape[1]}; for a known noise level use Gaussian(variance=...)"
            )
        mean, log_variance = output.chunk(2, dim=1)
        root = torch.cat([(-0.5 * log_variance).exp(), torch.full_like(mean, 0.5**0.5)], dim=1)
        return torch.diag_embed(_flat(root))

    def num_directions(self, shape: Sequence[int]) -> int:
        """Return ``d``."""
        return math.prod(shape)


@dataclass(frozen=True)
class Bernoulli(Likelihood):
    """Binary classification, one or many independent logits: ``R = diag(sqrt(q (1 - q)))``.

    Examples:
        >>> Bernoulli().factor(torch.zeros(1, 1))
        tensor([[[0.5000]]])
    """

    def factor(self, output: Tensor, keys: Tensor | None = None) -> Tensor:
        """See `Likelihood.factor`; ``p = d``.

        Returns:
            Diagonal rows ``(B, d, d)``.
        """
        theta = _flat(output)
        # in logarithms: q (1 - q) underflows long before its root does
        log_root = 0.5 * (
            torch.nn.functional.logsigmoid(theta) + torch.nn.functional.logsigmoid(-theta)
        )
        return torch.diag_embed(log_root.exp())

    def num_directions(self, shape: Sequence[int]) -> int:
        """Return ``d``."""
        return math.prod(shape)


@dataclass(frozen=True)
class Categorical(Likelihood):
    """Classification with logits: ``F_theta = diag(q) - q q^T``.

    The rows are ``R = diag(sqrt q)(I - 1 q^T)``.


    Outputs with more axes are independent categorical variables, one per position (pixels,
    tokens); then say which axis holds the classes.

    Args:
        directions: Keep only this many directions of the output Fisher per position, the
            largest ones. Fewer backward passes, and a score that can only be lower.
        class_dim: Axis of the classes in the output: 1 for maps ``(B, C, H, W)``, -1 for
            sequences ``(B, S, C)``. May be left out for ``(B, C)``.

    Examples:
        >>> rows = Categorical().factor(torch.tensor([[0.0, 0.0]], dtype=torch.float64))
        >>> rows[0].T @ rows[0]
        tensor([[ 0.2500, -0.2500],
                [-0.2500,  0.2500]], dtype=torch.float64)
    """

    directions: int | None = None
    class_dim: int | None = None

    def __post_init__(self) -> None:
        if self.directions is not None and self.directions < 1:
            raise OptionError(f"expected directions >= 1 or None (all), got {self.directions}")
        if self.class_dim == 0:
            raise OptionError("expected class_dim other than 0, which is the batch axis")

    def factor(self, output: Tensor, keys: Tensor | None = None) -> Tensor:
        """See `Likelihood.factor`; ``p`` = positions x (classes or ``directions``).

        Returns:
            Rows ``(B, p, d)``, block diagonal over positions.
        """
        logits = self.logits(output)
        batch, _, classes = logits.shape
        rows = self._per_position(logits)
        positions, kept = rows.shape[1], rows.shape[2]
        if positions == 1:
            return rows[:, 0]
        # put each position's rows where its logits sit in the flattened output
        where = torch.arange(output[0].numel(), device=output.device).reshape(output.shape[1:])
        where = where.movedim(self._axis(output.ndim) - 1, -1).reshape(positions, 1, classes)
        full = rows.new_zeros(batch, positions, kept, output[0].numel())
        full.scatter_(3, where.expand(batch, positions, kept, classes), rows)
        return full.reshape(batch, positions * kept, -1)

    def logits(self, output: Tensor) -> Tensor:
        """Return the logits of each variable, ``(B, positions, classes)``.

        Args:
            output: What the model returned, ``(B, *shape)``.
        """
        last = output.movedim(self._axis(output.ndim), -1)
        return last.reshape(len(last), math.prod(last.shape[1:-1]), last.shape[-1])

    def _per_position(self, logits: Tensor) -> Tensor:
        q = logits.softmax(-1)
        if self.directions is None or self.directions >= q.shape[-1]:
            root = (0.5 * logits.log_softmax(-1)).exp()  # whose slope stays finite at q = 0
            return torch.diag_embed(root) - root[..., :, None] * q[..., None, :]
        # in float64: for a confident prediction the entries are differences of near-equals;
        # and NaN would make eigh raise, while the caller deals with non-finite samples
        wide = logits.double().softmax(-1).nan_to_num()
        fisher = torch.diag_embed(wide) - wide[..., :, None] * wide[..., None, :]
        if self.directions == 1 and fisher.is_cuda:
            return _leading_row(fisher).to(q.dtype)
        values, vectors = torch.linalg.eigh(fisher)
        values, vectors = values[..., -self.directions :], vectors[..., -self.directions :]
        rows: Tensor = values.clamp_min(0).sqrt()[..., None] * vectors.mT
        return rows.to(q.dtype)

    def _axis(self, ndim: int) -> int:
        if self.class_dim is None:
            if ndim > 2:
                raise BatchError(
                    f"expected logits of shape (B, classes), got {ndim} axes; say which one "
                    "holds the classes: Categorical(class_dim=1) for maps (B, C, H, W), "
                    "Categorical(class_dim=-1) for sequences (B, S, C)"
                )
            return 1
        axis = self.class_dim if self.class_dim > 0 else ndim + self.class_dim
        if not 0 < axis < ndim:
            raise BatchError(
                f"expected an output with an axis {self.class_dim} after the batch, got "
                f"{ndim} axes; pass the right class_dim to Categorical"
            )
        return axis

    def num_directions(self, shape: Sequence[int]) -> int:
        """Return positions x (classes or ``directions``)."""
        classes = shape[self._axis(len(shape) + 1) - 1]
        kept = classes if self.directions is None else min(self.directions, classes)
        return math.prod(shape) // classes * kept


def _leading_row(fisher: Tensor) -> Tensor:
    """Return ``sqrt(value) vector^T`` of the largest eigenpair, ``(..., 1, C)``.

    By squaring the matrix over and over: no eigensolver, for which a GPU would have to wait.
    ``F v / sqrt(v^T F v)`` never exceeds ``F``, however well ``v`` has converged.
    """
    tiny = torch.finfo(fisher.dtype).tiny
    power = fisher
    for _ in range(_SQUARINGS):
        power = power / power.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None].clamp_min(
            tiny
        )
        power = power @ power
    largest = power.diagonal(dim1=-2, dim2=-1).argmax(-1)
    index = largest[..., None, None].expand(*power.shape[:-1], 1)
    image = fisher @ power.gather(-1, index)
    size = (power.gather(-1, index) * image).sum(-2, keepdim=True)
    return (image / size.clamp_min(tiny).sqrt()).mT


# torch.distributions draws from the global generator only: one draw at a time, then restored
_GLOBAL_GENERATOR = threading.Lock()


@dataclass(frozen=True)
class MonteCarlo(Likelihood):
    """Any ``torch.distributions`` family, by sampling its score function; unbiased.

    Row ``s`` is the gradient of ``log p(y_s)`` in theta over ``sqrt(samples)``, with ``y_s``
    drawn from the prediction itself. Its cost does not depend on the number of outputs.

    Args:
        family: Maps an output ``(B, *shape)`` to a distribution with ``B`` as its first batch
            axis; log-probabilities are summed over all other axes. It is called on the CPU
            too (draws must not depend on the device), so tensors of its own must follow
            ``output.device``.
        samples: Draws per sample; the standard error falls with its root.
        seed: With a sample's key it fixes that sample's draws.

    Examples:
        >>> poisson = MonteCarlo(lambda out: torch.distributions.Poisson(out.exp()), samples=4)
        >>> poisson.factor(torch.zeros(3, 2)).shape
        torch.Size([3, 4, 2])
    """

    draws: ClassVar[bool] = True

    family: Callable[[Tensor], Distribution]
    samples: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise OptionError(f"expected samples >= 1, got {self.samples}")

    def factor(self, output: Tensor, keys: Tensor | None = None) -> Tensor:
        """See `Likelihood.factor`; ``p = samples``.

        Returns:
            Rows ``(B, samples, d)``.
        """
        if keys is None:
            keys = torch.arange(output.shape[0])
        with torch.inference_mode(False), torch.enable_grad():
            # a clone: what was made under inference_mode cannot be differentiated
            output = output.detach().clone()
            drawn = self._draw(output, keys.tolist()).to(output.device)
            # one copy of theta per draw: a single backward pass gives every gradient
            theta = output.expand(self.samples, *output.shape)
            theta = theta.reshape(-1, *output.shape[1:]).clone().requires_grad_()
            log_probability = self.family(theta).log_prob(drawn.flatten(0, 1))
            (gradient,) = torch.autograd.grad(log_probability.sum(), theta)
        rows = gradient.reshape(self.samples, output.shape[0], -1).transpose(0, 1)
        return rows / math.sqrt(self.samples)

    def _draw(self, output: Tensor, keys: list[int]) -> Tensor:
        # on the CPU, so that a draw does not depend on the device
        on_cpu = output.cpu()
        draws = []
        with _GLOBAL_GENERATOR:
            state = torch.default_generator.get_state()
            try:
                for i, key in enumerate(keys):
                    torch.default_generator.manual_seed(
                        (self.seed * 0x9E3779B97F4A7C15 + key) % 2**63
                    )
                    draws.append(self.family(on_cpu[i : i + 1]).sample((self.samples,)))
            finally:
                torch.default_generator.set_state(state)
        return torch.cat(draws, dim=1)

    def num_directions(self, shape: Sequence[int]) -> int:
        """Return ``samples``."""
        return self.samples


@functools.lru_cache(maxsize=64)
def _constants(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return numbers as a tensor; kept, because a GPU would wait for each copy of them."""
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=dtype, device=device)


def _flat(output: Tensor) -> Tensor:
    return output.flatten(1)
