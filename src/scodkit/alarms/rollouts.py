"""Whether a whole rollout, a stream of frames that depend on each other, is like good ones."""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from scodkit.alarms.alarm import (
    Numbers,
    Resumable,
    are_scores,
    many_scores,
    one_score,
    scores_in,
)
from scodkit.calibration import Calibration
from scodkit.errors import CalibrationError, CalibrationWarning, OptionError, described
from scodkit.numerics.artifact import SCORES, SHARE, maybe, number, tensor, whole


class RolloutAlarm(Resumable):
    """Watches the frames of a rollout, with false alarms bounded per rollout.

    Frames of a robot or a video depend on their neighbours, so that rates per frame mean
    little; whole rollouts can be compared. The statistic of a rollout is the largest moving
    mean of its scores over the last ``window`` frames, so far. The threshold is the conformal
    one over the held-out rollouts' statistics: a new good rollout raises any alarm, at any
    frame, with probability at most ``false_alarm``, on average over held-out sets. The rate of
    one small set may be well above it; ``confidence`` makes it hold for this very set.

    The first ``window - 1`` means are over fewer frames; frames before the first count as 0,
    the most typical score. Means over the few frames there are would be the noisiest ones, and
    their luck would set the threshold; leaving them out would make the alarm blind at the
    start, and rollouts shorter than the window could not be judged at all.

    Rollouts must be alike in length, too: a longer one has more frames to raise an alarm with.
    Lengths that vary in the same way are fine. A rollout that outlasts the longest held-out
    one is still watched, as an exception in a control loop helps nobody, but a
    `CalibrationWarning` says that the rate no longer holds.

    Args:
        rollouts: Frame scores of held-out good rollouts, each ``(T,)``, or the frames scored,
            ``monitor(frames)``; larger = more atypical.
            For a rate of ``a`` it takes at least ``1/a - 1`` of them.
        false_alarm: Accepted share of good rollouts with an alarm, in (0, 1).
        window: Frames to average over; 1 for the scores themselves. Longer windows find weak
            but lasting trouble, shorter ones brief trouble.
        confidence: How surely the rate must hold for these very held-out rollouts, in (0, 1);
            None for on average. See `Calibration.threshold`.

    Attributes:
        threshold: The statistic above which a rollout is not like the good ones.
        num_frames: How many frames of this rollout have been pushed.
        statistic: The largest moving mean of this rollout so far; minus infinity before any
            frame.

    Examples:
        >>> rng = torch.Generator().manual_seed(0)
        >>> good = [torch.rand(50, generator=rng) for _ in range(19)]
        >>> alarm = RolloutAlarm(good, false_alarm=0.05, window=5)
        >>> [alarm.push(score) for score in (0.5, 0.4, 3.0, 4.0, 4.0)]
        [False, False, False, True, True]
        >>> alarm.p_value()
        0.05
        >>> alarm.start()
        >>> alarm.push(0.4)
        False
    """

    kind = "rollout alarm"
    plain: ClassVar = {
        "false_alarm": SHARE,
        "confidence": maybe(SHARE),
        "window": whole(1),
        "threshold": number("a finite number", lambda value: True),
        "num_frames": whole(),
        "_longest": whole(1),
    }
    tensors: ClassVar = {
        "held_out": SCORES,
        "last": tensor((None,), (torch.float64,), are_scores, "scores"),
        "statistic": tensor((), (torch.float64,), lambda value: not value.isnan(), "a score"),
    }

    def __init__(
        self,
        rollouts: Sequence[Numbers],
        false_alarm: float = 0.05,
        window: int = 1,
        *,
        confidence: float | None = None,
    ) -> None:
        if window < 1:
            raise OptionError(
                f"expected a window of at least 1 frame, got {window}; type window=1"
            )
        several = isinstance(rollouts, (Sequence, Tensor, np.ndarray))
        if not several or len(rollouts) == 0:
            got = "none" if several else described(rollouts)
            raise CalibrationError(
                f"expected the scores of at least one held-out rollout, got {got}; type "
                "RolloutAlarm([monitor(frames), ...]) with the frames of each"
            )
        held_out = [scores_in(rollout) for rollout in rollouts]
        for index, scores in enumerate(held_out):
            bad = int((~scores.isfinite()).sum())
            if scores.dim() != 1 or scores.numel() == 0 or bad:
                raise CalibrationError(
                    "expected finite scores of shape (T,) with T >= 1 for each held-out "
                    f"rollout, got {tuple(scores.shape)} with {bad} not finite for number "
                    f"{index}; leave it out, or type scores.flatten()"
                )
        statistics = [_statistic(scores, window) for scores in held_out]
        self._calibration = Calibration(torch.tensor(statistics, dtype=torch.float64))
        self.threshold = self._calibration.threshold(false_alarm, confidence=confidence)
        self.false_alarm = false_alarm
        self.confidence = confidence
        self.window = window
        self._longest = max(len(scores) for scores in held_out)
        self.start()

    def start(self) -> None:
        """Begin a new rollout: no frames, no alarm."""
        self.num_frames = 0
        self.statistic = -math.inf
        self._last: deque[float] = deque(maxlen=self.window)

    def push(self, score: Numbers) -> bool:
        """Return whether this rollout is unlike the good ones, by now or earlier.

        Args:
            score: Of the next frame, or that frame scored: ``push(monitor(x))``; larger = more
                atypical, infinity the most.

        Returns:
            True from the first time the statistic is above the threshold, until `start`.

        Raises:
            CalibrationError: If it is not a number; nothing has changed then.
        """
        self._last.append(one_score(score))
        self.statistic = max(self.statistic, _mean(self._last, self.window))
        self.num_frames += 1
        if self.num_frames == self._longest + 1:
            self._warn_too_long(self.num_frames)
        return self.statistic > self.threshold

    def p_value(self) -> float:
        """Return the conformal p-value of this rollout so far; it only falls, from 1.

        That it is ever at most ``a`` has probability at most ``a`` for a good rollout.
        """
        statistic = torch.tensor(self.statistic, dtype=torch.float64)
        return float(self._calibration.p_value(statistic))

    def judge(self, scores: Numbers) -> bool:
        """Return whether a whole rollout would raise an alarm; the one under way is left alone.

        Args:
            scores: ``(T,)``, of all its frames; or those frames scored.

        Raises:
            CalibrationError: If a score is not a number.
        """
        frames = scores_in(scores)
        statistic = _statistic(frames, self.window)
        if len(frames) > self._longest:
            self._warn_too_long(len(frames))
        return statistic > self.threshold

    def __repr__(self) -> str:
        state = "alarmed" if self.statistic > self.threshold else "quiet"
        return (
            f"RolloutAlarm(false_alarm={self.false_alarm}, window={self.window}, threshold "
            f"{self.threshold:.3g}, {self.num_frames} frames, {state})"
        )

    def _packed(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        tensors = {
            "held_out": self._calibration.scores,
            "last": torch.tensor(list(self._last), dtype=torch.float64),
            "statistic": torch.tensor(self.statistic, dtype=torch.float64),
        }
        return {}, tensors

    def _unpack(self, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> bool:
        self._calibration = Calibration(tensors["held_out"])
        self._last = deque(tensors["last"].tolist(), maxlen=self.window)
        self.statistic = float(tensors["statistic"])
        return (
            self.threshold in self._calibration.scores
            and len(tensors["last"]) == min(self.num_frames, self.window)
            and (self.statistic > -math.inf) == (self.num_frames > 0)
        )

    def _warn_too_long(self, num_frames: int) -> None:
        warnings.warn(
            f"expected rollouts of at most {self._longest} frames, as long as the longest "
            f"held-out one, got {num_frames}: false alarms may now be more frequent than "
            f"{self.false_alarm:.3g}; calibrate with rollouts as long as those to come",
            CalibrationWarning,
            stacklevel=3,
        )


def _statistic(scores: Tensor, window: int) -> float:
    """Return the largest moving mean of a whole rollout's scores ``(T,)``."""
    numbers = many_scores(scores)
    ends = range(1, len(numbers) + 1)
    means = (_mean(numbers[max(0, end - window) : end], window) for end in ends)
    return max(means, default=-math.inf)


def _mean(last: Iterable[float], window: int) -> float:
    """Return the mean of at most ``window`` scores; frames before the first count as 0."""
    # summed anew, as a running sum would gather rounding and never recover from infinity
    return math.fsum(score / window for score in last)
