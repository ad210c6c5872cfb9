"""One of several classes, by logits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from scodkit.errors import BatchError, OptionError
from scodkit.likelihoods.likelihood import Likelihood, between_0_and_1
from scodkit.numerics.secular import leading_rows

# classes up to which a CPU is fastest with the whole matrix: a call instead of a few hundred
_FEW_CLASSES = 16
# a logarithm whose exponential is zero in every dtype
_LOG_ZERO = -1e4


@dataclass(frozen=True)
class Categorical(Likelihood):
    """Classification with logits: ``F_theta = diag(q) - q q^T``.

    Adding a number to all logits changes nothing, so one row less than classes is enough: the
    rows are that matrix's Cholesky factor.

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
        """See `Likelihood.factor`; ``p`` = positions x (classes - 1 or ``directions``).

        Returns:
            Rows ``(B, p, d)``, block diagonal over positions.
        """
        rows = self._per_position(self.logits(output))
        if rows.shape[1] == 1:
            return rows[:, 0]
        # put each position's rows where its logits sit in the flattened output
        places = torch.arange(output[0].numel(), device=output.device)
        where = self.logits(places.reshape(1, *output.shape[1:]))[:, :, None]
        full = rows.new_zeros(*rows.shape[:3], len(places))
        return full.scatter_(3, where.expand_as(rows), rows).flatten(1, 2)

    def check_output(self, output: Tensor) -> None:
        """See `Likelihood.check_output`.

        Raises:
            BatchError: If there is a single class, or they are probabilities.
        """
        rows = self.logits(output.detach()).flatten(0, 1)
        if rows.shape[1] == 1:
            raise BatchError(
                "expected logits of two classes or more, got a single output, of which every "
                "score would be 0; type Bernoulli() for one logit, or Gaussian() for a number"
            )
        if not rows.is_floating_point():
            return
        rounding = max(1e-4, 4 * torch.finfo(rows.dtype).eps)
        rows = rows[rows.isfinite().all(1)].double()
        sums = bool(((rows.sum(1) - 1).abs() < rounding).all())
        # one row may sum to one by chance, and many that are all the same
        if between_0_and_1(rows) and sums and bool((rows != rows[:1]).any()):
            raise BatchError(
                f"expected logits, got probabilities: all {len(rows)} rows of the first "
                "outputs are in [0, 1] and sum to one; remove the Softmax at the model's end, "
                "or type Monitor(..., outputs=lambda p: p.log())"
            )

    def curvature_times(
        self, output: Tensor, vectors: Tensor, keys: Tensor | None = None
    ) -> Tensor:
        """See `Likelihood.curvature_times`.

        Returns:
            ``(B, q, d)``: ``q v - q (q . v)`` at each position, in closed form.
        """
        logits, axis = self.logits(output), self.class_axis(output.ndim)
        batch, count = vectors.shape[:2]
        spread = vectors.reshape(batch, count, *output.shape[1:]).movedim(axis + 1, -1)
        by_position = spread.reshape(batch, count, *logits.shape[1:])
        if self.directions is None:
            times = _fisher_times(logits.to(vectors.dtype), by_position)
        else:
            rows = self._per_position(logits).to(vectors.dtype)
            times = torch.einsum("bqpc,bpkc,bpke->bqpe", by_position, rows, rows)
        return times.reshape(spread.shape).movedim(-1, axis + 1).reshape(vectors.shape)

    @property
    def closed(self) -> bool:
        """See `Likelihood.closed`."""
        return self.directions is None

    def curvature_trace(self, output: Tensor) -> Tensor:
        """See `Likelihood.curvature_trace`.

        Returns:
            The sum of ``q (1 - q)``; for a choice of directions by way of their rows.
        """
        if not self.closed:
            return super().curvature_trace(output)
        q = self.logits(output).double().softmax(-1)
        likeliest = q.argmax(-1, keepdim=True)
        # one less the largest as the sum of the others: next to nothing, but not nothing
        others = q.scatter(-1, likeliest, 0.0)
        rest = 1 - others
        rest.scatter_(-1, likeliest, others.sum(-1, keepdim=True))
        return (q * rest).sum((1, 2))

    def logits(self, output: Tensor) -> Tensor:
        """Return the logits of each variable, ``(B, positions, classes)``.

        Args:
            output: What the model returned, ``(B, *shape)``.
        """
        last = output.movedim(self.class_axis(output.ndim), -1)
        return last.reshape(last.shape[0], math.prod(last.shape[1:-1]), last.shape[-1])

    def _per_position(self, logits: Tensor) -> Tensor:
        classes = logits.shape[-1]
        if classes == 1:  # of which nothing can be learnt
            return torch.zeros_like(logits)[..., None]
        if self.directions is None or self.directions >= classes - 1:
            return _cholesky_rows(logits)
        # in float64: for a confident prediction the entries are differences of near-equals;
        # and NaN would make eigh raise, while the caller deals with non-finite samples
        q = logits.double().softmax(-1).nan_to_num()
        few = classes <= _FEW_CLASSES and not q.is_cuda
        leading = _eigenrows if few else leading_rows
        return leading(q, self.directions).to(logits.dtype)

    def class_axis(self, ndim: int) -> int:
        """Return which axis of an output holds the classes, > 0.

        Args:
            ndim: How many axes the output has, that of the batch included.

        Raises:
            BatchError: If there is no such axis, or several that may be it.
        """
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
        """Return positions x (classes - 1 or ``directions``)."""
        classes = shape[self.class_axis(len(shape) + 1) - 1]
        most = max(1, classes - 1)
        per_position = most if self.directions is None else min(self.directions, most)
        return math.prod(shape) // classes * per_position

    def named(self) -> Categorical:
        """Return a likelihood with a row for each class, unless only some directions count."""
        return _ByClass(class_dim=self.class_dim) if self.directions is None else self


class _ByClass(Categorical):
    """The same Fisher information in rows of classes: ``R = diag(sqrt q)(I - 1 q^T)``."""

    def _per_position(self, logits: Tensor) -> Tensor:
        log_q = logits.log_softmax(-1)
        root = (0.5 * log_q).exp()  # whose slope stays finite at q = 0
        return torch.diag_embed(root) - root[..., :, None] * log_q.exp()[..., None, :]

    def num_directions(self, shape: Sequence[int]) -> int:
        """Return ``d``."""
        return math.prod(shape)


def _cholesky_rows(logits: Tensor) -> Tensor:
    """Return the Cholesky factor of ``diag(q) - q q^T`` in closed form, ``(..., C - 1, C)``.

    Row ``j`` weighs class ``j`` against those after it. In logarithms, so that neither a row
    nor its slope is lost where a probability underflows.
    """
    classes = logits.shape[-1]
    # a class that is ruled out by a logit of -inf counts as one whose probability underflows
    log_q = logits.log_softmax(-1).clamp_min(_LOG_ZERO)
    identity = torch.eye(classes, dtype=logits.dtype, device=logits.device)[:-1]
    upto = torch.ones(classes - 1, classes, dtype=torch.bool, device=logits.device).tril()
    later = log_q[..., None, :].masked_fill(upto, -torch.inf)
    tail = later.logsumexp(-1, keepdim=True)
    first = log_q[..., :-1, None]
    root = (0.5 * (first + tail - torch.logaddexp(first, tail))).exp()
    return root * (identity - (later - tail).exp())


def _fisher_times(logits: Tensor, vectors: Tensor) -> Tensor:
    """Return ``(diag(q) - q q^T) v`` for ``(B, P, C)`` logits and ``(B, q, P, C)`` vectors.

    A constant in ``v`` drops out, so the entry of the likeliest class is taken off first: what
    is left of a confident prediction is then no difference of near-equal numbers.
    """
    q = logits.softmax(-1)
    likeliest = q.argmax(-1)[:, None, :, None].expand(*vectors.shape[:-1], 1)
    relative = vectors - vectors.gather(-1, likeliest)
    mean = torch.einsum("bpc,bqpc->bqp", q, relative)
    # in place: the vectors of a batch may be what most of the memory goes to
    return relative.sub_(mean[..., None]).mul_(q[:, None])


def _eigenrows(q: Tensor, count: int) -> Tensor:
    """Return what `leading_rows` does, by way of the whole matrix."""
    values, vectors = torch.linalg.eigh(torch.diag_embed(q) - q[..., :, None] * q[..., None, :])
    values, vectors = values[..., -count:], vectors[..., -count:]
    return values.clamp_min(0).sqrt()[..., None] * vectors.mT
