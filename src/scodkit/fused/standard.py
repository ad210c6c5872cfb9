"""How parts of a score are standardised, weighted and explained.

Each part is standardised on held-out data, ``z = (part - median) / (1.4826 MAD)``, clipped
below at -2, weighted and summed. Evidence against an input is unbounded, evidence for it is
bounded: an image 255 times too bright has an excellent energy, and features far from all
others.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# lower bound of a standardised part, in robust standard deviations from the median
_LOWEST = -2.0

# standard deviations per median absolute deviation (MAD) of a normal distribution
_PER_MAD = 1.4826

# added to the variances of correlated parts, so that weights stay moderate
_RIDGE = 0.05

# the meaning of a large value of each part
_MEANING = {
    "standardised logit": "the logits are uncertain themselves: other weights change them much",
    "energy": "the logits are lower than those of known inputs",
    "neighbours": "no training sample has features like these",
    "class distance": "its features are far from those of every class",
    "scod": "other weights that fit the training data predict something else here",
    "unexplained share": "the prediction rests on weights that the training data leaves open",
}


@dataclass(frozen=True)
class Standard:
    """How parts are standardised and weighted, from held-out data.

    Args:
        median: Of each part, ``(P,)``.
        spread: 1.4826 times the median absolute deviation of each part, ``(P,)``, > 0.
        weight: Of each part in the sum, ``(P,)``, >= 0.
        num_data: Number of held-out samples they are estimated from.
    """

    median: Tensor
    spread: Tensor
    weight: Tensor
    num_data: int

    @staticmethod
    def of(parts: Tensor, *, correlated: bool) -> Standard:
        """Return the standardisation estimated from parts ``(n, P)`` in float64, all finite.

        Args:
            parts: Of held-out samples.
            correlated: Weight parts by the inverse of their covariance, so that two strongly
                correlated ones count as little more than one; else equally.
        """
        median = parts.median(0).values
        spread = _PER_MAD * (parts - median).abs().median(0).values
        # a MAD of 0 (half of the samples are equal) is replaced by the standard deviation
        spread = torch.where(spread > 0, spread, (parts - median).square().mean(0).sqrt())
        weight = (spread > 0).double()  # a constant part has no information
        spread = torch.where(spread > 0, spread, 1.0)
        if correlated:
            z = ((parts - median) / spread).clamp_min(_LOWEST)
            covariance = (z - z.mean(0)).T @ (z - z.mean(0)) / max(1, len(z) - 1)
            ridge = _RIDGE * torch.eye(len(weight), dtype=torch.float64)
            weight = weight * torch.linalg.solve(covariance + ridge, weight).clamp_min(0)
        return Standard(median, spread, weight, len(parts))

    def contributions(self, parts: Tensor) -> Tensor:
        """Return the contribution of each part to the score, ``(B, P)`` in float64.

        Args:
            parts: ``(B, P)``; an infinite one contributes infinity, whatever its weight.
        """
        z = (parts - self.median.to(parts)) / self.spread.to(parts)
        weighted = self.weight.to(parts) * z.clamp_min(_LOWEST)
        return torch.where(parts == torch.inf, torch.inf, weighted)


@dataclass(frozen=True)
class FusedExplanation:
    """The contribution of each part to a score.

    Args:
        names: Of the parts.
        parts: Their values, ``(B, P)``, larger = more atypical.
        contributions: Their contributions to the score, ``(B, P)``: robust standard deviations
            above the median of held-out data, times the weight.
        score: Their sum, ``(B,)``.
        p_value: ``(B,)`` in (0, 1].
    """

    names: tuple[str, ...]
    parts: Tensor
    contributions: Tensor
    score: Tensor
    p_value: Tensor

    def words(self, sample: int = 0) -> str:
        """Return the explanation of one sample in words.

        Args:
            sample: Which one of the batch.
        """
        if not bool(self.score[sample].isfinite()):
            return "score inf: a NaN or an infinity in its inputs or outputs"
        added = self.contributions[sample]
        lines = [f"score {self.score[sample]:.2f}, p-value {self.p_value[sample]:.3g}"]
        for i in added.argsort(descending=True).tolist():
            verdict = _MEANING[self.names[i]] if added[i] > 1 else "as in held-out data"
            if added[i] < 0:
                verdict = "less atypical than most held-out data"
            lines.append(f"  {self.names[i]} {added[i]:+.2f}: {verdict}")
        return "\n".join(lines)

    def __str__(self) -> str:
        lines = [f"sample {i}: {self.words(i)}" for i in range(len(self.score))]
        return "\n".join(lines)
