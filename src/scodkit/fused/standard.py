"""How parts of a score are standardised, weighed and explained.

Each part is standardised on held-out data, ``z = (part - median) / (1.4826 MAD)``, clipped
below at -2, and added up. A part may accuse an input without limit, and vouch for it only so
far: an image 255 times too bright has an excellent energy, and features far from all others.
The last part, how far an input is outside the range of training inputs, is 0 for almost all
held-out data, and in standard deviations already: it is added as it is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from scodkit.explain.columns import Columns

# how far below the median a part can vouch for an input, in robust standard deviations
_LOWEST = -2.0

# robust standard deviations of a normal distribution, for one of median absolute deviation
_PER_MAD = 1.4826

# rounding errors within which a part is the same for all
_ROUNDINGS = 8

# what a large value of each part says of an input
_MEANING = {
    "standardised logit": "the logits are uncertain themselves: other weights change them much",
    "energy": "the logits are lower than those of known inputs",
    "neighbours": "no training sample has features like these",
    "class distance": "its features are far from those of every class",
    "scod": "other weights that fit the training data predict something else here",
    "unexplained share": "the prediction rests on weights that the training data leaves open",
    "input range": "its values are outside the range of all training inputs",
}


@dataclass(frozen=True)
class Standard:
    """How parts are standardised and weighed, from held-out data.

    Args:
        median: Of each part, ``(P,)``.
        spread: 1.4826 times the median absolute deviation of each part, ``(P,)``, > 0.
        weight: Of each part in the sum, ``(P,)``: 1, or 0 for one that is the same for all.
        num_data: Held-out samples that these are of.
    """

    median: Tensor
    spread: Tensor
    weight: Tensor
    num_data: int

    @staticmethod
    def of(parts: Tensor, rounding: float = 0.0) -> Standard:
        """Return how to standardise parts ``(n, P)`` in float64, all finite; the last as it is.

        Args:
            parts: Of held-out samples.
            rounding: Relative, of the numbers that parts are made of.
        """
        median = parts.median(0).values
        least = _ROUNDINGS * rounding * median.abs().clamp_min(1)
        spread = _PER_MAD * (parts - median).abs().median(0).values
        # half of the samples are alike: what is left is how far the others are
        spread = torch.where(spread > least, spread, (parts - median).square().mean(0).sqrt())
        weight = (spread > least).double()  # a part that is the same for all says nothing
        spread = torch.where(spread > least, spread, 1.0)
        median[-1], spread[-1], weight[-1] = 0.0, 1.0, 1.0
        return Standard(median, spread, weight, len(parts))

    @property
    def says_nothing(self) -> bool:
        """Whether every part that is standardised is the same for all."""
        return not bool(self.weight[:-1].any())

    def contributions(self, parts: Tensor) -> Tensor:
        """Return what each part adds to the score, ``(B, P)`` in float64.

        Args:
            parts: ``(B, P)``; one that is infinite counts, whatever its weight.
        """
        z = (parts - self.median.to(parts)) / self.spread.to(parts)
        weighed = self.weight.to(parts) * z.clamp_min(_LOWEST)
        return torch.where(parts == torch.inf, torch.inf, weighed)


@dataclass(frozen=True)
class FusedExplanation:
    """Which part accuses an input, and how strongly.

    Args:
        names: Of the parts.
        parts: Their values, ``(B, P)``, larger = more atypical.
        contributions: What each adds to the score, ``(B, P)``: robust standard deviations above
            the median of held-out data, times its weight.
        score: Their sum, ``(B,)``; an array if the batch came as one.
        p_value: ``(B,)`` in (0, 1], likewise.
        columns: The columns of a table beside those of the training data; None for other
            inputs.
    """

    names: tuple[str, ...]
    parts: Tensor
    contributions: Tensor
    score: Tensor
    p_value: Tensor
    columns: Columns | None = None

    def words(self, sample: int = 0) -> str:
        """Return the explanation of one sample in words, the most striking first.

        Args:
            sample: Which one of the batch.
        """
        lines = [] if self.columns is None else self.columns.sentences(sample)
        if not math.isfinite(self.score[sample]):
            return "\n".join(
                [*lines, "score inf: a NaN or an infinity in its inputs or outputs"]
            )
        own = self.contributions[sample]
        lines += [f"score {self.score[sample]:.2f}, p-value {self.p_value[sample]:.3g}"]
        for i in own.argsort(descending=True).tolist():
            verdict = _MEANING[self.names[i]] if own[i] > 1 else "as in held-out data"
            if own[i] < 0:
                verdict = "less atypical than most held-out data"
            lines.append(f"  {self.names[i]} {own[i]:+.2f}: {verdict}")
        return "\n".join(lines)

    def __str__(self) -> str:
        each = [f"sample {i}: {self.words(i)}" for i in range(len(self.score))]
        return "\n".join(each)
