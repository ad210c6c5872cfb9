"""The uncertainty score and its bounds, as pure functions of factors and a basis.

With ``c = 1 / (2 M eps^2)``, ``eps`` the prior scale, the score of an input with Fisher factor
``L`` is ``eps^2 (|L|_F^2 - |diag(sqrt(values / (values + c))) U^T L|_F^2)``: the expected
change of the prediction, in nats, under the Laplace posterior of the weights. It is a
squared quantity, never negative, and larger means more atypical.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from scodkit.errors import UncertifiedError
from scodkit.factors import Factors, FactorSource, Whole
from scodkit.model.network import Inputs
from scodkit.sketch.eigenbasis import Eigenbasis


@dataclass(frozen=True)
class Energies:
    """What a score is made of: the squared lengths of ``L`` in and out of the basis.

    Args:
        total: ``|L|_F^2``, ``(b,)`` in float64.
        along: ``|u_j^T L|^2`` for each basis vector, ``(b, k)`` in float64.
    """

    total: Tensor
    along: Tensor

    @staticmethod
    def none(basis: Eigenbasis) -> Energies:
        """Return the energies of no samples at all."""
        nothing = basis.values.new_empty(0, basis.rank, dtype=torch.float64)
        return Energies(nothing.sum(1), nothing)

    def __add__(self, other: Energies) -> Energies:
        """Return the energies of two sets of directions of the same samples."""
        return Energies(self.total + other.total, self.along + other.along)


@dataclass(frozen=True)
class Scored:
    """A batch of predictions, each with how far to trust it.

    Args:
        output: What the model returned, ``(B, *shape)``.
        score: ``(B,)``, nats (squared units), >= 0, larger = more atypical; infinite for
            samples with a NaN or an infinity.
        p_value: ``(B,)`` in (0, 1], smaller = more atypical; None until calibrated.
    """

    output: Tensor
    score: Tensor
    p_value: Tensor | None


@dataclass(frozen=True)
class Certificate:
    """An interval that holds the exact score, were all of ``F`` kept, for certified sketches.

    All of shape ``(B,)``, squared units, larger = more atypical; ``lower <= exact <= upper``.

    Args:
        score: What `Monitor.score` returns. It over-estimates the exact score up to rounding.
        lower: Lower bound: the score, less what the sketch can have lost.
        upper: Upper bound: the score, widened by what rounding may have cost (in the usual
            model of rounding as independent noise).
        paper_gap: The SCOD paper's bound on ``score - exact``, with the eigenvalues it cannot
            know replaced by the worst their known sum allows. Always the looser one.
    """

    score: Tensor
    lower: Tensor
    upper: Tensor
    paper_gap: Tensor


@dataclass(frozen=True)
class SelfTest:
    """Scores of a batch, beside those of each sample alone by plain autograd.

    Args:
        engine: Who computed the scores, by name.
        score: ``(B,)``, as `Monitor.score` returns them.
        alone: ``(B,)``, as they must be.
    """

    engine: str
    score: Tensor
    alone: Tensor

    @property
    def distance(self) -> float:
        """How far they are apart at most, relative to the score alone."""
        known = self.alone.isfinite()
        if not torch.equal(self.score.isfinite(), known):
            return float("inf")
        off, size = (self.score - self.alone)[known].abs(), self.alone[known].abs()
        least = 1e-6 * size.max() if len(size) else 0.0  # a score of nearly nothing is rounding
        return float((off / size.clamp_min(least)).nan_to_num(0.0).max()) if len(size) else 0.0

    @property
    def ok(self) -> bool:
        """Whether that is no more than rounding."""
        return self.distance <= {torch.float64: 1e-6, torch.float32: 1e-2}.get(
            self.score.dtype, 2e-1
        )

    def __str__(self) -> str:
        verdict = "right" if self.ok else "WRONG"
        return (
            f"{verdict}: {len(self.score)} scores by {self.engine}, at most "
            f"{self.distance:.1e} from those of each sample alone by plain autograd"
        )


def energies(factors: Factors, basis: Eigenbasis) -> Energies:
    """Return the squared lengths a score is made of."""
    total, along = factors.project(basis.vectors)
    return Energies(total, along.square().sum(1))


def score_batch(
    source: FactorSource, call: Inputs, basis: Eigenbasis
) -> tuple[Tensor, Energies]:
    """Return a batch's output ``(B, *shape)`` and what its scores are made of.

    Samples with a NaN or an infinity, in or out, have infinite energies.

    Args:
        source: Turns batches into Fisher factors.
        call: The batch; not empty.
        basis: The eigenbasis, on the model's device.
    """
    whole = source.whole(call)
    found = None
    if whole is not None:
        found = _score_whole(source, whole, call, basis)
    elif source.ends_in_head:
        found = _score_head(source, call, basis)
    if found is not None:
        return found
    outputs: dict[int, Tensor] = {}
    parts: dict[int, Energies] = {}
    finite: dict[int, Tensor] = {}
    for piece in source.pieces(call):
        start = piece.samples.start
        own = energies(piece.factors, basis)
        parts[start] = parts[start] + own if start in parts else own
        outputs[start], finite[start] = piece.output, piece.finite
    return _joined(list(outputs.values())), _finite_ones(
        list(parts.values()), _joined(list(finite.values()))
    )


def _score_whole(
    source: FactorSource, whole: Whole, call: Inputs, basis: Eigenbasis
) -> tuple[Tensor, Energies] | None:
    """Return the same in one piece; None where a CPU finds numbers that are not finite."""
    copies = whole.copies
    linear = whole.engine.linearize(call.repeated(copies) if copies > 1 else call)
    output = linear.output[::copies] if copies > 1 else linear.output
    finite = None
    if output.is_cuda:  # whose numbers are not waited for
        finite, rows = source.rows(output, call)
    elif not _all_finite((*call.tensors(), output)):
        return None
    else:
        rows = source.likelihood.factor(output)
    count = rows.shape[:2]
    factors = linear.pull_back(rows.flatten(0, 1)[:, None] if copies > 1 else rows)
    total, along = factors.project(basis.vectors)
    if copies > 1:
        total, along = total.view(count).sum(1), along.view(*count, -1)
    parts = Energies(total, along.square().sum(1))
    if finite is not None:
        return output, _finite_ones([parts], finite)
    return (output, parts) if _all_finite((parts.total, parts.along)) else None


def _all_finite(tensors: Sequence[Tensor]) -> bool:
    """Return whether all numbers are finite; sums are infinite or NaN where one is."""
    sums = [float(t.sum()) for t in tensors if t.is_floating_point()]
    return math.isfinite(sum(sums))


def _score_head(
    source: FactorSource, call: Inputs, basis: Eigenbasis
) -> tuple[Tensor, Energies] | None:
    """Return the same in closed form; None if the chosen layer is not the network's end."""
    outputs, parts, finite = [], [], []
    for piece in source.heads(call, basis.rank):
        about = (piece.clean, source.likelihood, basis.vectors)
        parts.append(Energies(*piece.head.energies(*about)))
        outputs.append(piece.output)
        finite.append(piece.finite)
    if sum(map(len, outputs)) < call.batch_size:
        return None
    return _joined(outputs), _finite_ones(parts, _joined(finite))


def _finite_ones(parts: list[Energies], finite: Tensor) -> Energies:
    """Return energies of all samples, infinite where a sample or its energies are not."""
    total = _joined([part.total for part in parts])
    along = _joined([part.along for part in parts])
    # the sum is infinite or NaN where one of its terms is
    good = finite & (total + along.sum(1) < torch.inf)
    return Energies(torch.where(good, total, torch.inf), torch.where(good[:, None], along, 0.0))


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def features(source: FactorSource, call: Inputs, basis: Eigenbasis) -> Tensor:
    """Return ``U^T L`` of a batch that is not empty, ``(B, p, k)``."""
    found: dict[int, list[Tensor]] = {}
    for piece in source.pieces(call):
        _, along = piece.factors.project(basis.vectors)
        found.setdefault(piece.samples.start, []).append(along.to(basis.values.dtype))
    return torch.cat([torch.cat(some, dim=1) for some in found.values()])


def score(parts: Energies, basis: Eigenbasis, prior_scale: float) -> Tensor:
    """Return the score ``(b,)`` in float64, squared units, larger = more atypical.

    Args:
        parts: From `energies`.
        basis: The same basis.
        prior_scale: ``eps``, the standard deviation of the prior of a weight.
    """
    return prior_scale**2 * _unexplained(parts, basis, _regulariser(basis, prior_scale))


def certificate(parts: Energies, basis: Eigenbasis, prior_scale: float) -> Certificate:
    """Return proven bounds on the exact score.

    With ``F_hat - slack <= F <= F_hat + rho`` and the inverse being operator antitone, the
    exact score lies between the scores at ``c + rho`` and ``c - slack``, rescaled.

    Args:
        parts: From `energies`.
        basis: The same basis.
        prior_scale: ``eps``.

    Returns:
        The bounds, in float64.

    Raises:
        UncertifiedError: If the sketch behind the basis gives no certificate.
    """
    if not basis.certified:
        raise UncertifiedError(
            "expected a basis from a sketch with F_hat <= F, got one without (TwoSided is "
            "indefinite, a fit in bfloat16 or a compressed basis is rounded, a fit by products "
            "has no exact trace); fit with sketch=Nystrom(), FrequentDirections() or Exact(), "
            "in the model's precision, with products=False, and certify before "
            "monitor.compress()"
        )
    c = _regulariser(basis, prior_scale)
    squared = prior_scale**2
    rho = basis.residual_norm + basis.slack
    lower = squared * c / (c + rho) * _unexplained(parts, basis, c + rho)
    upper = squared * parts.total
    if basis.slack < c:
        shifted = c - basis.slack
        upper = upper.minimum(squared * c / shifted * _unexplained(parts, basis, shifted))
    # sum of t/(t + c) over at most m eigenvalues with sum t: largest when they are equal
    tail, m = max(basis.residual_trace, rho), max(1, basis.residual_rank)
    paper_gap = squared * parts.total * (m * tail / (tail + m * c))
    return Certificate(score(parts, basis, prior_scale), lower, upper, paper_gap)


def determined(basis: Eigenbasis, prior_scale: float) -> Tensor:
    """Return how far the data determines the weights along each basis vector.

    Args:
        basis: The eigenbasis.
        prior_scale: ``eps``.

    Returns:
        ``values / (values + c)``, ``(k,)`` in float64, in [0, 1): 0 is the prior alone.
    """
    values = basis.values.double()
    return values / (values + _regulariser(basis, prior_scale))


def _regulariser(basis: Eigenbasis, prior_scale: float) -> float:
    return 1.0 / (2.0 * max(1, basis.num_data) * prior_scale**2)


def _unexplained(parts: Energies, basis: Eigenbasis, c: float) -> Tensor:
    """Return ``tr L^T c (F_hat + c)^-1 L`` as two sums, neither of which can be negative."""
    outside = (parts.total - parts.along.sum(1)).clamp_min(0)
    return outside + (parts.along * (c / (basis.values.double() + c))).sum(1)
