"""Scores of the positions of a sample: the tokens of a sequence, the pixels of a map.

A position's score is ``tr(L_t^T Sigma L_t)``, with ``L_t`` the columns of the sample's Fisher
factor that belong to it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from scodkit.calibration import Calibration
from scodkit.factors.pieces import FactorSource
from scodkit.model.inputs import Inputs
from scodkit.scoring.boxes import p_values
from scodkit.scoring.energies import group_energies
from scodkit.scoring.score import score
from scodkit.sketch.eigenbasis import Eigenbasis


@dataclass(frozen=True)
class PositionScores:
    """The positions of a batch of samples, with their scores and p-values.

    Args:
        output: What the model returned, ``(B, *shape)``.
        score: ``(B, positions)`` in float64, nats (squared units), >= 0, larger = more
            atypical, in the order of the output; infinite in samples with a NaN or an
            infinity. They add up to the sample's score with ``pool="sum"``, their mean is that
            with ``"mean"``, and their largest that with ``"max"``.
        p_value: ``(B, positions)`` in (0, 1], smaller = more atypical. Compared with the
            largest score of a position in each held-out sample: of samples like these, at most
            a share ``a`` has any position with a p-value up to ``a``. None until calibrated,
            and without ``pool="max"``.
    """

    output: Tensor
    score: Tensor
    p_value: Tensor | None = None

    @property
    def worst(self) -> Tensor:
        """Where the largest score of each sample is, ``(B,)``."""
        return self.score.argmax(1)

    def judged(self, calibration: Calibration | None, groups: Tensor | None) -> PositionScores:
        """Return the same with p-values, if there is a calibration.

        Args:
            calibration: Of the largest score in each held-out sample.
            groups: Of the samples, ``(B,)``, if the calibration has groups.
        """
        return replace(self, p_value=p_values(self.score, calibration, groups))


def position_scores(
    call: Inputs, source: FactorSource, basis: Eigenbasis, prior_scale: float
) -> PositionScores:
    """Return the scores of a batch's positions, without p-values.

    Args:
        call: The batch; not empty.
        source: Computes the Fisher factors of batches.
        basis: The eigenbasis, on the model's device.
        prior_scale: ``eps``, the standard deviation of the prior of a weight.
    """
    each = replace(source, likelihood=source.likelihood.by_position())
    output, parts, finite = group_energies(each, call, basis)
    found = score(parts, basis, prior_scale)
    good = finite & found.isfinite().all(1)
    return PositionScores(output, found.masked_fill(~good[:, None], float("inf")))
