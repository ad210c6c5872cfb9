"""One of several classes, by logits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from scodkit.errors import BatchError, OptionError
from scodkit.likelihoods.likelihood import LATER, Likelihood, between_0_and_1
from scodkit.likelihoods.monte_carlo import seeds_of
from scodkit.numerics.hashing import hashed, shares
from scodkit.numerics.secular import leading_rows

# classes up to which a CPU is fastest with the whole matrix: a call instead of a few hundred
_FEW_CLASSES = 16
# probabilities that are looked at, or drawn by, at a time
_AT_ONCE = 1 << 22
# what a sample's positions are pooled by
_POOLS = ("sum", "mean", "max", "last")
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
        samples: In place of all directions, so many rows that each draw a class at every
            position from the prediction: the gradients of ``log p(y)``, without bias in
            expectation over draws. For vocabularies: ``samples x S x C`` numbers a sample.
        seed: With a sample's key it fixes that sample's draws.
        pool: What a sample's Fisher information is of its positions', in fits as in scores:
            ``"sum"``; ``"mean"``, for sequences of different lengths; ``"last"``, that of the
            last position of ``(B, S, C)`` alone, the next token's. Or ``"max"``: fits are of
            the sum, and a sample's score is the largest of its positions'. Every position
            counts: what is padding is not known here.

    Examples:
        >>> rows = Categorical().factor(torch.tensor([[0.0, 0.0]], dtype=torch.float64))
        >>> rows[0].T @ rows[0]
        tensor([[ 0.2500, -0.2500],
                [-0.2500,  0.2500]], dtype=torch.float64)
        >>> Categorical(class_dim=-1, samples=4).factor(torch.zeros(2, 10, 50)).shape
        torch.Size([2, 4, 500])
    """

    directions: int | None = None
    class_dim: int | None = None
    samples: int | None = field(default=None, kw_only=True, metadata=LATER)
    seed: int = field(default=0, kw_only=True, metadata=LATER)
    pool: str = field(default="sum", kw_only=True, metadata=LATER)

    def __post_init__(self) -> None:
        if self.directions is not None and self.directions < 1:
            raise OptionError(f"expected directions >= 1 or None (all), got {self.directions}")
        if self.class_dim == 0:
            raise OptionError("expected class_dim other than 0, which is the batch axis")
        if self.samples is not None and self.samples < 1:
            raise OptionError(f"expected samples >= 1 or None (no draws), got {self.samples}")
        if self.samples is not None and self.directions is not None:
            raise OptionError(
                f"expected directions or samples, got directions={self.directions} and "
                f"samples={self.samples}; type Categorical(samples={self.samples})"
            )
        if self.pool == "max" and self.samples is not None:
            raise OptionError(_draws_have_no_position(self.samples, ', pool="max"'))
        if self.pool not in _POOLS:
            raise OptionError(
                f"expected pool to be one of {', '.join(map(repr, _POOLS))}, got "
                f'{self.pool!r}; type Categorical(class_dim=-1, pool="mean")'
            )

    @property
    def draws(self) -> bool:
        """See `Likelihood`: whether ``samples`` is given."""
        return self.samples is not None

    @property
    def worst(self) -> bool:
        """See `Likelihood`: whether ``pool`` is ``"max"``."""
        return self.pool == "max"

    def factor(self, output: Tensor, keys: Tensor | None = None) -> Tensor:
        """See `Likelihood.factor`.

        Returns:
            Rows ``(B, p, d)``, block diagonal over positions, ``p`` = positions x (classes - 1
            or ``directions``); or ``samples`` rows over all positions.
        """
        logits = self._pooled(self.logits(output), 1)
        scale = math.sqrt(self._share(logits.shape[1]))
        if self.samples is not None:
            keys = torch.arange(len(logits)) if keys is None else keys
            scale /= math.sqrt(self.samples)
            rows = _drawn_rows(logits, self.samples, seeds_of(keys, self.seed), scale)
            return self._at_output(rows, output.shape)
        rows = self._per_position(logits)
        if self.pool == "mean":
            rows = rows * scale
        if rows.shape[1] == 1:
            return self._at_output(rows.transpose(1, 2), output.shape)
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
        rows = rows[: max(2, _AT_ONCE // rows.shape[1])]
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
        if self.samples is not None:
            return super().curvature_times(output, vectors, keys)
        logits, axis = self.logits(output), self.class_axis(output.ndim)
        batch, count = vectors.shape[:2]
        spread = vectors.reshape(batch, count, *output.shape[1:]).movedim(axis + 1, -1)
        by_position = self._pooled(spread.reshape(batch, count, *logits.shape[1:]), 2)
        logits = self._pooled(logits, 1)
        if self.directions is None:
            times = _fisher_times(logits.to(vectors.dtype), by_position)
        else:
            rows = self._per_position(logits).to(vectors.dtype)
            times = torch.einsum("bqpc,bpkc,bpke->bqpe", by_position, rows, rows)
        if self.pool == "mean":
            times = times * self._share(logits.shape[1])
        return self._at_output(times, output.shape)

    @property
    def closed(self) -> bool:
        """See `Likelihood.closed`."""
        return self.directions is None and self.samples is None

    def curvature_trace(self, output: Tensor) -> Tensor:
        """See `Likelihood.curvature_trace`.

        Returns:
            The sum of ``q (1 - q)``; for a choice of directions by way of their rows.
        """
        if self.samples is not None:
            return super().curvature_trace(output)
        logits = self._pooled(self.logits(output), 1)
        share = self._share(logits.shape[1])
        if self.directions is not None:
            return self._per_position(logits).double().square().sum((1, 2, 3)) * share
        q = logits.double().softmax(-1)
        likeliest = q.argmax(-1, keepdim=True)
        # one less the largest as the sum of the others: next to nothing, but not nothing
        others = q.scatter(-1, likeliest, 0.0)
        rest = 1 - others
        rest.scatter_(-1, likeliest, others.sum(-1, keepdim=True))
        return (q * rest).sum((1, 2)) * share

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
        if self.pool == "last" and ndim > 3:
            raise BatchError(
                f"expected outputs (B, S, C), of which there is a last position, got {ndim} "
                'axes; type Categorical(..., pool="mean")'
            )
        if not 0 < axis < ndim:
            raise BatchError(
                f"expected an output with an axis {self.class_dim} after the batch, got "
                f"{ndim} axes; pass the right class_dim to Categorical"
            )
        return axis

    def num_directions(self, shape: Sequence[int]) -> int:
        """Return positions x (classes - 1 or ``directions``), or ``samples``."""
        classes = shape[self.class_axis(len(shape) + 1) - 1]
        if self.samples is not None:
            return self.samples
        most = max(1, classes - 1)
        per_position = most if self.directions is None else min(self.directions, most)
        return self.num_positions(shape) * per_position

    def num_positions(self, shape: Sequence[int]) -> int:
        """Return how many positions have rows: one for ``pool="last"``.

        Args:
            shape: Of a sample's output.
        """
        classes = shape[self.class_axis(len(shape) + 1) - 1]
        return 1 if self.pool == "last" else math.prod(shape) // classes

    def groups(self, shape: Sequence[int]) -> Tensor:
        """See `Likelihood.groups`.

        Returns:
            The position of each row, ``(p,)``, in the order of the output.

        Raises:
            OptionError: If rows are drawn, each over all positions at once.
        """
        if self.samples is not None:
            raise OptionError(_draws_have_no_position(self.samples))
        positions = self.num_positions(shape)
        return torch.arange(positions).repeat_interleave(
            self.num_directions(shape) // max(1, positions)
        )

    def by_position(self) -> Categorical:
        """See `Likelihood.by_position`.

        Returns:
            The same with ``pool="sum"``.

        Raises:
            OptionError: If there are no positions, one alone counts, or rows are drawn.
        """
        if self.class_dim is None or self.pool == "last":
            return super().by_position()  # type: ignore[return-value]  # raises
        if self.samples is not None:
            raise OptionError(_draws_have_no_position(self.samples))
        return replace(self, pool="sum")

    def named(self) -> Categorical:
        """Return a likelihood with a row for each class, unless only some directions count."""
        return _ByClass(class_dim=self.class_dim, pool=self.pool) if self.closed else self

    def _pooled(self, by_position: Tensor, axis: int) -> Tensor:
        """Return what there is of the positions that count, along an axis."""
        return by_position.narrow(axis, -1, 1) if self.pool == "last" else by_position

    def _share(self, positions: int) -> float:
        """Return what part of each position's Fisher information counts."""
        return 1 / positions if self.pool == "mean" else 1.0

    def _at_output(self, by_position: Tensor, shape: Sequence[int]) -> Tensor:
        """Return ``(B, q, positions, C)`` as ``(B, q, d)``: what `logits` does, undone.

        Args:
            by_position: Of the positions that count; the others get zeros.
            shape: Of the output, ``(B, *shape)``.
        """
        axis = self.class_axis(len(shape))
        around = [size for place, size in enumerate(shape) if place not in (0, axis)]
        missing = math.prod(around) - by_position.shape[2]
        full = pad(by_position, (0, 0, missing, 0)) if missing else by_position
        spread = full.reshape(*full.shape[:2], *around, full.shape[3])
        return spread.movedim(-1, axis + 1).flatten(2)


class _ByClass(Categorical):
    """The same Fisher information in rows of classes: ``R = diag(sqrt q)(I - 1 q^T)``."""

    def _per_position(self, logits: Tensor) -> Tensor:
        log_q = logits.log_softmax(-1)
        root = (0.5 * log_q).exp()  # whose slope stays finite at q = 0
        return torch.diag_embed(root) - root[..., :, None] * log_q.exp()[..., None, :]

    def num_directions(self, shape: Sequence[int]) -> int:
        """Return positions x classes."""
        return self.num_positions(shape) * shape[self.class_axis(len(shape) + 1) - 1]


def _draws_have_no_position(samples: int, pool: str = "") -> str:
    return (
        f"expected rows of single positions, got {samples} draws over all of them at once; "
        f"type Categorical(class_dim=..., directions=1{pool})"
    )


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
    rows: Tensor = values.clamp_min(0).sqrt()[..., None] * vectors.mT
    return rows


def _drawn_rows(logits: Tensor, samples: int, seeds: Sequence[int], scale: float) -> Tensor:
    """Return ``scale (e_y - q)`` for classes ``y`` drawn at each position.

    The shares of a position's draws lie ``1 / samples`` apart from one that is drawn, in an
    order of its own: each is uniform by itself and independent of other positions, which is all
    that the expectation of ``R^T R`` takes. Together they vary less than independent ones at a
    position, and about as much across positions: in one order for all, products of two
    positions would be alike in every row, and no number of rows would average them out.

    Args:
        logits: ``(B, P, C)``.
        samples: Rows for each sample.
        seeds: One for each sample.
        scale: Of the rows.

    Returns:
        ``(B, samples, P, C)``, in the dtype of the logits, without a graph.
    """
    logits = logits.detach()
    batch, positions, classes = logits.shape
    rows = logits.new_empty(batch, samples, positions, classes)
    places = torch.arange(positions, device=logits.device)
    counter = torch.arange(positions * samples, device=logits.device).view(-1, samples)
    step = max(1, _AT_ONCE // classes)
    for i, seed in enumerate(seeds):
        first = shares(seed, 0, places).double() + shares(seed, 1, places) * 2.0**-23
        order = hashed(seed, 2, counter).argsort(dim=1, stable=True)
        each = (first[:, None] + order.double() / samples) % 1
        for start in range(0, positions, step):
            at = slice(start, start + step)
            # in float64: a vocabulary's sums have more terms than float32 has room for
            q = logits[i, at].double().softmax(-1).nan_to_num()
            sums = q.cumsum(-1)
            # of the last sum, so that it is never reached
            drawn = torch.searchsorted(sums, each[at] * sums[:, -1:], right=True)
            drawn = drawn.clamp_max(classes - 1)  # of what was not finite
            hit = scale * (1 - q.gather(-1, drawn))
            rows[i, :, at] = q.mul_(-scale)  # in place: a vocabulary's take long to write
            rows[i, :, at].scatter_(-1, drawn.mT[..., None], hit.mT[..., None].to(rows.dtype))
    return rows
