"""A stream of scores, and what a drift alarm made of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from scodkit.alarms import DriftAlarm
from scodkit.errors import BatchError


@dataclass(frozen=True)
class WatchedStream:
    """A stream of scores, and what a drift alarm made of it.

    Args:
        scores: ``(T,)``, in the order of the stream; larger = more atypical.
        log_wealth: ``(T,)``, natural logarithm of the alarm's wealth after each score.
        false_alarm: The alarm's accepted probability of ever being wrong.
        alarmed_at: How many scores had come when the alarm rose; None if it did not.
        changed_at: How many scores had come when the stream changed, where that is known.

    Raises:
        BatchError: If there are no scores, or not as many of both.
    """

    scores: Tensor
    log_wealth: Tensor
    false_alarm: float
    alarmed_at: int | None = None
    changed_at: int | None = None

    def __post_init__(self) -> None:
        if not len(self.scores) or self.scores.shape != self.log_wealth.shape:
            raise BatchError(
                "expected scores (T,) and as many values of the wealth, got shapes "
                f"{tuple(self.scores.shape)} and {tuple(self.log_wealth.shape)}; type "
                "WatchedStream.of(alarm, scores)"
            )

    @classmethod
    def of(
        cls, alarm: DriftAlarm, scores: Tensor, *, changed_at: int | None = None
    ) -> WatchedStream:
        """Push a stream through a new alarm, and keep what it says.

        Args:
            alarm: Nothing has been pushed to it yet.
            scores: ``(T,)``, in the order of the stream.
            changed_at: How many scores come before the stream changes, where that is known.

        Returns:
            The stream, watched.

        Raises:
            BatchError: If scores have been pushed before.

        Examples:
            >>> from scodkit import Calibration
            >>> rng = torch.Generator().manual_seed(0)
            >>> alarm = DriftAlarm(Calibration(torch.rand(500, generator=rng)), seed=0)
            >>> scores = torch.rand(300, generator=rng) + (torch.arange(300) >= 200)
            >>> WatchedStream.of(alarm, scores, changed_at=200).alarmed_at
            205
        """
        if alarm.num_seen:
            raise BatchError(
                f"expected an alarm that has seen nothing, got one that has seen "
                f"{alarm.num_seen} scores; type DriftAlarm(monitor.calibration)"
            )
        wealth = []
        for score in scores.tolist():
            alarm.push(score)
            wealth.append(alarm.log_wealth)
        return cls(
            scores.detach().to("cpu", torch.float64),
            torch.tensor(wealth, dtype=torch.float64),
            alarm.false_alarm,
            alarm.alarmed_at,
            changed_at,
        )
