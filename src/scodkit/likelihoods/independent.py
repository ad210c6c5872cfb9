"""Outputs that are independent of one another: the Fisher information is diagonal."""

from __future__ import annotations

import functools
import math
import warnings
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from scodkit.errors import BatchError, LikelihoodWarning, OptionError
from scodkit.likelihoods.likelihood import Likelihood, between_0_and_1

# outputs, of which fewer may all lie in [0, 1] by chance
_FEWEST_TO_TELL = 16


class Independent(Likelihood):
    """Outputs that do not depend on one another: ``F_theta`` is diagonal."""

    closed = True

    @abstractmethod
    def root(self, output: Tensor) -> Tensor:
        """Return the square roots of the diagonal of ``F_theta``, ``(B, d)``.

        Args:
            output: What the model returned, ``(B, *shape)``.
        """

    def factor(self, output: Tensor, keys: Tensor | None = None) -> Tensor:
        """See `Likelihood.factor`; ``p = d``.

        Returns:
            Diagonal rows ``(B, d, d)``.
        """
        return torch.diag_embed(self.root(output))

    def curvature_times(
        self, output: Tensor, vectors: Tensor, keys: Tensor | None = None
    ) -> Tensor:
        """See `Likelihood.curvature_times`.

        Returns:
            ``(B, q, d)``: entry by entry.
        """
        return vectors * self.root(output).square().to(vectors.dtype)[:, None]

    def curvature_trace(self, output: Tensor) -> Tensor:
        """See `Likelihood.curvature_trace`.

        Returns:
            The sum of the diagonal.
        """
        return self.root(output).double().square().sum(1)

    def num_directions(self, shape: Sequence[int]) -> int:
        """Return ``d``."""
        return math.prod(shape)


@dataclass(frozen=True)
class Gaussian(Independent):
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
        if not isinstance(self.variance, (int, float)):
            values = torch.as_tensor(self.variance, dtype=torch.float64).flatten()
            object.__setattr__(self, "variance", tuple(values.tolist()))
        if not self._values() or not all(v > 0 and math.isfinite(v) for v in self._values()):
            raise OptionError(
                f"expected positive, finite variances, got {self.variance}; for a network "
                "that predicts its own variance use HeteroscedasticGaussian()"
            )

    def _values(self) -> tuple[float, ...]:
        return self.variance if isinstance(self.variance, tuple) else (float(self.variance),)

    def root(self, output: Tensor) -> Tensor:
        """See `Independent.root`.

        Returns:
            ``variance^(-1/2)`` everywhere, ``(B, d)``.

        Raises:
            BatchError: If there are several variances, but not one per output.
        """
        return self.noise_variance(output).rsqrt().expand_as(output.flatten(1))

    def noise_variance(self, output: Tensor) -> Tensor:
        """Return the variance of the noise on each output, ``(d,)`` in squared output units.

        Args:
            output: What the model returned, ``(B, *shape)``.

        Raises:
            BatchError: If there are several variances, but not one per output.
        """
        variance = _constants(self._values(), output.dtype, output.device)
        outputs = math.prod(output.shape[1:])
        if variance.numel() not in (1, outputs):
            raise BatchError(
                f"expected {variance.numel()} outputs, one per variance given to Gaussian, got "
                f"{outputs}; pass one variance or {outputs} of them"
            )
        return variance.expand(outputs)


@dataclass(frozen=True)
class HeteroscedasticGaussian(Independent):
    """Regression whose network predicts mean and log-variance.

    The output's first axis after the batch holds the means, then as many natural logarithms
    of variances, as ``chunk(2, dim=1)`` splits it.
    The Fisher information is diagonal: ``exp(-s)`` of a mean, ``1/2`` of a log-variance ``s``.

    Examples:
        >>> rows = HeteroscedasticGaussian().factor(torch.tensor([[0.3, 0.0]]))
        >>> rows.diagonal(dim1=1, dim2=2) ** 2
        tensor([[1.0000, 0.5000]])
    """

    def root(self, output: Tensor) -> Tensor:
        """See `Independent.root`.

        Returns:
            Of means, then of log-variances, ``(B, d)``.

        Raises:
            BatchError: If the outputs cannot be split into means and log-variances.
        """
        mean, log_variance = self.halves(output)
        root = torch.cat([(-0.5 * log_variance).exp(), torch.full_like(mean, 0.5**0.5)], dim=1)
        return root.flatten(1)

    def halves(self, output: Tensor, axis: int = 1) -> tuple[Tensor, Tensor]:
        """Return the means and the log-variances, the two halves of an axis.

        Args:
            output: What the model returned, ``(B, ...)``, or several networks.
            axis: The axis, of even length.

        Raises:
            BatchError: If its length is odd.
        """
        if output.shape[axis] % 2:
            raise BatchError(
                "expected an even number of outputs (means, then log-variances) along axis 1, "
                f"got {output.shape[axis]}; for a known noise level use Gaussian(variance=...)"
            )
        means, log_variances = output.chunk(2, dim=axis)
        return means, log_variances


@dataclass(frozen=True)
class Bernoulli(Independent):
    """Binary classification, one or many independent logits: ``R = diag(sqrt(q (1 - q)))``.

    Examples:
        >>> Bernoulli().factor(torch.zeros(1, 1))
        tensor([[[0.5000]]])
    """

    def root(self, output: Tensor) -> Tensor:
        """See `Independent.root`.

        Returns:
            ``sqrt(q (1 - q))``, ``(B, d)``.
        """
        theta = output.flatten(1)
        # in logarithms: q (1 - q) underflows long before its root does
        root: Tensor = (0.5 * (logsigmoid(theta) + logsigmoid(-theta))).exp()
        return root

    def check_output(self, output: Tensor) -> None:
        """See `Likelihood.check_output`; logits may be in [0, 1], too, so this only warns."""
        values = output.detach()[output.isfinite()]
        if values.numel() < _FEWEST_TO_TELL or not between_0_and_1(values):
            return
        if bool((values != values[:1]).any()):
            warnings.warn(
                f"expected logits for Bernoulli(), but all {values.numel()} numbers in the "
                "first outputs are in [0, 1]: are they probabilities? Remove the Sigmoid at "
                "the model's end, or type Monitor(..., outputs=torch.logit). If they are "
                "logits, type warnings.filterwarnings('ignore', "
                "category=scodkit.errors.LikelihoodWarning)",
                LikelihoodWarning,
                stacklevel=2,
            )


@functools.lru_cache(maxsize=64)
def _constants(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return numbers as a tensor, cached: each copy to a GPU would synchronise with it."""
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=dtype, device=device)
