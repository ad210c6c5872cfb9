"""Bounds on the exact score, the one from all of the curvature.

With ``F_hat - slack <= F <= F_hat + rho`` and the inverse being operator antitone, the exact
score lies between the scores at ``c + rho`` and ``c - slack``, rescaled.

Of projected weights those are bounds on the score in the space of ``P``, under ``P^T F P``. The
exact score of ``x`` is, but for a factor, ``x^T (F + c)^-1 x = sup_y 2 x^T y - y^T (F + c) y``.
Among ``y = P z`` alone the supremum is the score of ``P^T x`` under ``P^T F P``: the lower
bound on that one holds for the exact one, too. The upper bound does not, as ``F`` may join what
is in that space with what is not; ``eps^2 |x|^2``, the score without any data, is one. If the
space has all weights, the bounds are those of whole weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from scodkit.errors import UncertifiedError
from scodkit.factors.pieces import FactorSource
from scodkit.model.inputs import Inputs
from scodkit.model.projected import ProjectedSet
from scodkit.scoring.energies import Energies
from scodkit.scoring.score import Scorer, regulariser, score, unexplained
from scodkit.sketch.eigenbasis import Eigenbasis


@dataclass(frozen=True)
class Certificate:
    """An interval around the exact score, the one from all of ``F``, for certified sketches.

    All of shape ``(B,)``, squared units, larger = more atypical; ``lower <= exact <= upper``.

    Args:
        score: As `Monitor.score` returns it. Over-estimates the exact score, up to rounding;
            of projected weights it may lie on either side.
        lower: Lower bound: the score, less the most that the sketch can have lost. Of projected
            weights: the score in their space alone, less the same.
        upper: Upper bound: the score, widened by the rounding error (in the usual model of
            rounding as independent noise). Of projected weights: ``eps^2 |L|_F^2``, the score
            without any data.
        paper_gap: The SCOD paper's bound on ``score - exact``, with the unknown eigenvalues
            replaced by the worst case for their known sum. Always the looser bound. Of
            projected weights: ``eps^2 |L|_F^2`` again.
    """

    score: Tensor
    lower: Tensor
    upper: Tensor
    paper_gap: Tensor


def certificate(
    parts: Energies, basis: Eigenbasis, prior_scale: float, inside: Tensor | None = None
) -> Certificate:
    """Return proven bounds on the exact score.

    Args:
        parts: From `energies`.
        basis: The same basis.
        prior_scale: ``eps``.
        inside: ``|P^T L|_F^2`` in the space of projected weights, ``(b,)``.

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
    if inside is None and basis.outside:
        raise UncertifiedError(
            "expected energies inside the space of projected weights, too, got totals alone; "
            "type monitor.certify(batch)"
        )
    c = regulariser(basis, prior_scale)
    squared = prior_scale**2
    rho = basis.residual_norm + basis.slack
    lower = unexplained(
        parts if inside is None else Energies(inside, parts.along),
        (c + rho) / (basis.values.double() + c + rho),
        squared * c / (c + rho),
    )
    upper = squared * parts.total
    if inside is not None:
        return Certificate(score(parts, basis, prior_scale), lower, upper, upper)
    if basis.slack < c:
        shifted = c - basis.slack
        left_over = shifted / (basis.values.double() + shifted)
        upper = upper.minimum(unexplained(parts, left_over, squared * c / shifted))
    # sum of t/(t + c) over at most m eigenvalues with sum t: largest when they are equal
    tail, m = max(basis.residual_trace, rho), max(1, basis.residual_rank)
    paper_gap = squared * parts.total * (m * tail / (tail + m * c))
    return Certificate(score(parts, basis, prior_scale), lower, upper, paper_gap)


def certified(
    scorer: Scorer, batch: object, budget: int | None, prior_scale: float
) -> Certificate:
    """Return bounds on the exact scores of a batch.

    Args:
        scorer: Of a fit.
        batch: As the loader yields it.
        budget: As in scoring.
        prior_scale: ``eps``.

    Raises:
        UncertifiedError: If scores are rounded, or the sketch gives no certificate.
    """
    if scorer.likelihood.worst:
        raise UncertifiedError(
            "expected a score that is a sum over rows, got pool='max', the largest of several, "
            'of which there is no tight bound; type Categorical(..., pool="sum"), and fit again'
        )
    precision = scorer.fitted.precision
    if precision is not None:
        raise UncertifiedError(
            "expected scores in the model's own precision, got scores in "
            f"{precision}, which are rounded; type monitor.precision = None"
        )
    parts, inside = scorer(batch, budget, parts=True).parts, None
    assert parts is not None
    parameters = scorer.fitted.parameters
    if isinstance(parameters, ProjectedSet) and not parameters.complete:
        inside = parts.total
        if len(inside):
            with scorer.prepared(batch, budget, "a certificate") as (call, source, _):
                inside = (inside - _outside(source, call)).clamp_min(0)
    return certificate(parts, scorer.basis(), prior_scale, inside)


def _outside(source: FactorSource, call: Inputs) -> Tensor:
    """Return the part of ``|L|_F^2`` outside of the space of projected weights, ``(B,)``."""
    parts: dict[int, Tensor] = {}
    for piece in source.pieces(call, hold=True):
        assert piece.factors.outside is not None
        own = piece.factors.outside.sum((1, 2))
        own = torch.where(piece.finite, own, 0.0)
        start = piece.samples.start
        parts[start] = parts[start] + own if start in parts else own
    return torch.cat(list(parts.values()))
