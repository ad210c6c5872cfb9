"""Scores of the boxes that a detector predicts, and of each head in them.

A box's score is ``tr(L_q^T Sigma L_q)``, with ``L_q`` the columns of the image's Fisher factor
that belong to the box. So scores of boxes, and of heads of the image, sum to the image's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from scodkit.calibration import Calibration
from scodkit.errors import OptionError
from scodkit.factors.pieces import FactorSource
from scodkit.likelihoods import Heads, Likelihood
from scodkit.model.inputs import Inputs
from scodkit.scoring.energies import group_energies
from scodkit.scoring.score import score
from scodkit.sketch.eigenbasis import Eigenbasis


@dataclass(frozen=True)
class BoxScores:
    """The boxes of a batch of images, with their scores and p-values.

    Args:
        output: The heads by name, those of boxes ``(B, Q, *shape)``.
        present: ``(B, Q)``, False at places without a box.
        score: ``(B, Q)`` in float64, nats (squared units), >= 0, larger = more atypical; 0
            where there is no box, and infinite in images with a NaN or an infinity.
        heads: What of that each head of boxes adds, by name, ``(B, Q)`` each.
        p_value: ``(B, Q)`` in (0, 1], smaller = more atypical, 1 where there is no box; None
            until calibrated. Compared with the largest score of a box in each held-out image:
            of images like these, at most a share ``a`` has any box with a p-value up to ``a``.
    """

    output: Mapping[str, Tensor]
    present: Tensor
    score: Tensor
    heads: Mapping[str, Tensor]
    p_value: Tensor | None = None

    @property
    def worst(self) -> Tensor:
        """The largest score of a box in each image, ``(B,)``; 0 where there are none."""
        if not self.score.shape[1]:
            return self.score.sum(1)
        return self.score.amax(1)

    def judged(self, calibration: Calibration | None, groups: Tensor | None) -> BoxScores:
        """Return the same with p-values, if there is a calibration.

        Args:
            calibration: Of the largest score in each held-out image.
            groups: Of the images, ``(B,)``, if the calibration has groups.
        """
        return replace(self, p_value=p_values(self.score, calibration, groups))

    def lists(self, values: Tensor | None = None) -> list[Tensor]:
        """Return values of the boxes there are, one tensor ``(boxes,)`` for each image.

        Args:
            values: ``(B, Q, ...)``, as `p_value` or a head of `output`; by default the scores.
        """
        values = self.score if values is None else values
        return [of[there] for of, there in zip(values, self.present, strict=True)]


def p_values(
    scores: Tensor, calibration: Calibration | None, groups: Tensor | None
) -> Tensor | None:
    """Return p-values of the parts of samples, if there is a calibration.

    Args:
        scores: ``(B, Q)``.
        calibration: Of the largest score in each held-out sample.
        groups: Of the samples, ``(B,)``, if the calibration has groups.
    """
    if calibration is None:
        return None
    if groups is not None:
        groups = groups[:, None].expand_as(scores).flatten()
    return calibration.p_value(scores.flatten(), groups).view_as(scores)


def has_boxes(likelihood: Likelihood) -> bool:
    """Return whether a likelihood is of heads with an output for each box."""
    return isinstance(likelihood, Heads) and bool(likelihood.boxes)


def box_scores(
    call: Inputs, source: FactorSource, basis: Eigenbasis, prior_scale: float
) -> BoxScores:
    """Return the scores of a batch's boxes, without p-values.

    Args:
        call: The batch; not empty.
        source: Computes the Fisher factors of batches.
        basis: The eigenbasis, on the model's device.
        prior_scale: ``eps``, the standard deviation of the prior of a weight.

    Raises:
        OptionError: If the likelihood is not of heads of boxes.
    """
    heads = source.likelihood
    if not isinstance(heads, Heads) or not heads.boxes:
        raise OptionError(
            f"expected a monitor of boxes, got one of {heads}; type Monitor(model, "
            'Heads({"class": Categorical(), "box": Gaussian(variance=0.1)}, '
            'boxes=("class", "box"))), or monitor.score(batch) for the scores of images'
        )
    output, parts, finite = group_energies(source, call, basis)
    each = score(parts, basis, prior_scale)
    count = heads.num_boxes(output.shape[1])
    good = finite & each.isfinite().all(1)
    by_head = {}
    for i, name in enumerate(heads.likelihoods):
        if name in heads.boxes:
            own = each[:, i * count : (i + 1) * count]
            by_head[name] = own.masked_fill(~good[:, None], torch.inf)
    return BoxScores(
        output=heads.shown(output),
        present=heads.mask(output),
        score=torch.stack(list(by_head.values())).sum(0),
        heads=by_head,
    )
