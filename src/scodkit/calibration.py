"""Held-out scores turned into p-values and thresholds with a stated false-alarm rate."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from scodkit.errors import CalibrationError


@dataclass(frozen=True)
class Calibration:
    """Scores of held-out, in-distribution samples (split conformal).

    Args:
        scores: ``(n,)``, finite, in any order; kept sorted.

    Examples:
        >>> calibration = Calibration(torch.arange(99.0))
        >>> calibration.p_value(torch.tensor([1000.0]))
        tensor([0.0100], dtype=torch.float64)
    """

    scores: Tensor

    def __post_init__(self) -> None:
        scores = self.scores.detach().flatten().cpu().double()
        if scores.numel() == 0:
            raise CalibrationError(
                "expected at least one held-out sample to calibrate with, got none; "
                "pass a loader that is not empty to monitor.calibrate"
            )
        if not bool(scores.isfinite().all()):
            bad = int((~scores.isfinite()).sum())
            raise CalibrationError(
                f"expected finite held-out scores, got {bad} of {scores.numel()} that are "
                "not; remove those samples from the calibration set"
            )
        object.__setattr__(self, "scores", scores.sort().values)

    @property
    def num_data(self) -> int:
        """``n``, the number of held-out samples."""
        return self.scores.numel()

    def p_value(self, scores: Tensor) -> Tensor:
        """Return conformal p-values ``(B,)``: ``(1 + #{held out >= score}) / (n + 1)``.

        Args:
            scores: ``(B,)``; larger = more atypical.

        Returns:
            Float64 on the scores' device. For new samples of the same kind as the held-out
            ones, a value is at most ``a`` with probability at most ``a``.
        """
        flat = scores.detach().cpu().double()
        below = torch.searchsorted(self.scores, flat, right=False)
        return ((1 + self.num_data - below).double() / (self.num_data + 1)).to(scores.device)

    def threshold(self, false_alarm: float) -> float:
        """Return the score above which a sample is flagged at this false-alarm rate.

        Args:
            false_alarm: Accepted share of false alarms, at least ``1 / (n + 1)``.

        Returns:
            A score: flag what is strictly above it. Flagging so is the same as flagging
            p-values of at most ``false_alarm``.

        Raises:
            CalibrationError: If the rate is not in (0, 1), or too small for ``n`` samples.
        """
        if not 0 < false_alarm < 1:
            raise CalibrationError(f"expected 0 < false_alarm < 1, got {false_alarm}")
        # 1e-9: rates such as 3/101 do not survive a round trip through binary fractions
        allowed = math.floor(false_alarm * (self.num_data + 1) + 1e-9) - 1
        allowed = min(allowed, self.num_data - 1)
        if allowed < 0:
            needed = math.ceil(1 / false_alarm - 1e-9) - 1
            raise CalibrationError(
                f"expected a false-alarm rate of at least 1/(n+1) = "
                f"{1 / (self.num_data + 1):.3g} for n = {self.num_data} held-out samples, got "
                f"{false_alarm:.3g}; calibrate with at least {needed} samples"
            )
        return float(self.scores[self.num_data - 1 - allowed])
