"""When a stream of samples is no longer like the held-out ones."""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from scodkit.alarms.alarm import (
    Calibrated,
    Numbers,
    Resumable,
    are_scores,
    calibration_of,
    many_scores,
    one_score,
)
from scodkit.calibration import Calibration, check_share
from scodkit.errors import OptionError
from scodkit.numerics.artifact import SHARE, each, fields, maybe, number, tensor, that, whole

# exponents e of the bets e p^(e-1), from bold to timid: each pays for small p-values
_EXPONENTS = (0.25, 0.5, 0.75)
# share of each bet that is dealt out anew at a step
_MOVED = 0.001
# new scores kept in a list before they are merged into the sorted array
_WAITING = 4096


def _are_sorted_scores(numbers: Tensor) -> bool:
    return are_scores(numbers) and bool((numbers[1:] >= numbers[:-1]).all())


class DriftAlarm(Resumable):
    """Watches a stream for scores that have grown, with false alarms bounded once and for all.

    A conformal test martingale (Vovk, Gammerman and Shafer 2005) that bets like a jumper (Vovk
    et al. 2021): a gambler with a wealth of 1 bets, sample after sample, that p-values are
    small. While the stream is like the held-out data no bet pays on average, and by Ville's
    inequality the wealth ever reaches ``1/false_alarm`` with probability at most
    ``false_alarm``, however long the stream is.

    The capital is split over bets ``e p^(e-1)``, with ``e`` of 1/4, 1/2 and 3/4, and cash.
    Before sample ``t``, 1/1000 of every bet and ``1 - (1 + log t)/(1 + log(t + 1))`` of the
    cash are collected and dealt out evenly. The bets find a drift whenever it begins; the cash
    keeps the wealth above ``1/(1 + log(t + 1))`` in the longest quiet stream.

    Only drifts to higher scores are noticed. Samples must be exchangeable while all is well:
    for frames that depend on their neighbours see `RolloutAlarm`. All scores seen are kept,
    8 bytes each.

    Args:
        calibration: Held-out scores, without groups; or the calibrated monitor that has them.
        false_alarm: Accepted probability of ever raising a false alarm, in (0, 1).
        seed: Of the random numbers that break ties, >= 0. By default they are fresh for every
            alarm, as the rate is one over their luck, too: alarms that share a seed share it.
            A saved alarm goes on with its own.

    Attributes:
        false_alarm: As given.
        log_wealth: Natural logarithm of the wealth; 0 at the start.
        alarmed_at: How many scores had been pushed when the alarm rose; None before.
        num_seen: How many scores have been pushed.

    Examples:
        >>> rng = torch.Generator().manual_seed(0)
        >>> alarm = DriftAlarm(Calibration(torch.rand(500, generator=rng)), seed=0)
        >>> bool(alarm.push_many(torch.rand(500, generator=rng)).any())
        False
        >>> bool(alarm.push_many(torch.rand(50, generator=rng) + 0.5).any())
        True
        >>> alarm.alarmed_at
        513
    """

    kind = "drift alarm"
    plain: ClassVar = {
        "false_alarm": SHARE,
        "num_seen": whole(),
        "alarmed_at": maybe(whole(1)),
        "log_wealth": number("a finite number", lambda value: True),
        "_steps": whole(),
        "_shares": each(number("a number in [0, 1]", lambda value: 0 <= value <= 1)),
    }
    others: ClassVar = {
        "random": fields(
            {
                "bit_generator": that("PCG64", lambda value: value == "PCG64"),
                "state": fields(dict.fromkeys(("state", "inc"), whole(0, 2**128 - 1))),
                "has_uint32": whole(0, 1),
                "uinteger": whole(0, 2**32 - 1),
            }
        )
    }
    tensors: ClassVar = {
        "scores": tensor((None,), (torch.float64,), _are_sorted_scores, "ascending scores")
    }

    def __init__(
        self,
        calibration: Calibration | Calibrated,
        false_alarm: float = 0.01,
        seed: int | None = None,
    ) -> None:
        check_share("false_alarm", false_alarm, 0.01)
        calibration = calibration_of(calibration)
        if calibration.groups is not None:
            raise OptionError(
                "expected a calibration without groups, got one with them; type "
                "DriftAlarm(Calibration(calibration.scores))"
            )
        if seed is not None and seed < 0:
            raise OptionError(f"expected a seed >= 0 or None, got {seed}; type seed=0")
        self.false_alarm = false_alarm
        self.num_seen = 0
        self._ranks = _Ranks(calibration.scores)
        self._random = np.random.Generator(np.random.PCG64(seed))  # None: the system's entropy
        self.reset()

    def reset(self) -> None:
        """Lower the alarm and start betting anew, with a wealth of 1.

        Scores seen so far stay in the ranking: that is what makes the bets to come
        independent of the past, so that the guarantee starts anew. A drift that goes on
        raises the alarm again. After retraining, make a new `DriftAlarm` instead.
        """
        self.log_wealth = 0.0
        self.alarmed_at: int | None = None
        self._steps = 0
        # shares of the wealth: cash first, then the bets
        self._shares = [1.0] + [0.0] * len(_EXPONENTS)

    @property
    def wealth(self) -> float:
        """What a wealth of 1 has become, > 0; infinity where no float is large enough."""
        return math.exp(self.log_wealth) if self.log_wealth < 709 else math.inf

    def push(self, score: Numbers) -> bool:
        """Return whether the stream has drifted, by now or earlier.

        Args:
            score: Of the next sample, or that sample scored: ``push(monitor(x))``; larger =
                more atypical, infinity the most.

        Returns:
            True from the first time the wealth reaches ``1/false_alarm``, until `reset`.

        Raises:
            CalibrationError: If it is not a number; nothing has changed then.
        """
        self._bet(self._p_value(one_score(score)))
        self.num_seen += 1
        if self.alarmed_at is None and self.log_wealth >= -math.log(self.false_alarm):
            self.alarmed_at = self.num_seen
        return self.alarmed_at is not None

    def push_many(self, scores: Numbers) -> Tensor:
        """Push scores one after the other.

        Args:
            scores: ``(T,)``, in the order of the stream; or a scored batch.

        Returns:
            ``(T,)`` booleans on the CPU: what `push` returned for each.

        Raises:
            CalibrationError: If one is not a number; nothing has changed then.
        """
        return torch.tensor([self.push(s) for s in many_scores(scores)], dtype=torch.bool)

    def __repr__(self) -> str:
        state = "quiet" if self.alarmed_at is None else f"alarmed at {self.alarmed_at}"
        return (
            f"DriftAlarm(false_alarm={self.false_alarm}, {self.num_seen} seen, wealth "
            f"{self.wealth:.3g}, {state})"
        )

    def _packed(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        random = {"random": self._random.bit_generator.state}
        return random, {"scores": self._ranks.scores()}

    def _unpack(self, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> bool:
        self._ranks = _Ranks(tensors["scores"])
        self._random = np.random.default_rng()
        self._random.bit_generator.state = header["random"]
        return (
            max(self._steps, self.alarmed_at or 0) <= self.num_seen < len(tensors["scores"])
            and len(self._shares) == 1 + len(_EXPONENTS)
            and math.isclose(sum(self._shares), 1)
        )

    def _p_value(self, score: float) -> float:
        """Return the smoothed rank of a score among all before it, in (0, 1], and keep it.

        Ranked so, the p-values of an exchangeable stream are independent and uniform. Ranked
        among the held-out scores alone they would all share the luck of that draw: given a
        draw they are uniform only roughly, and on a long stream a gambler grows rich on the
        difference, whatever it is.
        """
        above, equal, total = self._ranks.rank(score)
        self._ranks.add(score)
        ties = 1 - float(self._random.random())  # in (0, 1], as bets on 0 pay infinitely
        return (above + ties * (equal + 1)) / (total + 1)

    def _bet(self, p_value: float) -> None:
        self._steps += 1
        cash, *bets = self._shares
        leaves = math.log1p(1 / self._steps) / (1 + math.log(self._steps + 1))
        dealt = (leaves * cash + _MOVED * sum(bets)) / (1 + len(bets))
        cash = (1 - leaves) * cash + dealt
        paid = [
            ((1 - _MOVED) * bet + dealt) * pays
            for bet, pays in zip(bets, _payoffs(p_value), strict=True)
        ]
        growth = cash + sum(paid)
        self.log_wealth += math.log(growth)
        self._shares = [cash / growth] + [bet / growth for bet in paid]


def _payoffs(p_value: float) -> list[float]:
    """Return what a unit in each bet becomes; each averages 1 over uniform p-values."""
    return [e * p_value ** (e - 1) for e in _EXPONENTS]


class _Ranks:
    """Sorted scores that grow: a large sorted array, and a short list of late arrivals.

    Inserting into one large array would move half of it for each score.
    """

    def __init__(self, scores: Tensor) -> None:
        self._sorted: npt.NDArray[np.float64] = scores.numpy().copy()
        self._late: list[float] = []

    def rank(self, score: float) -> tuple[int, int, int]:
        """Return how many scores are above, how many equal, and how many there are."""
        total = len(self._sorted) + len(self._late)
        below = int(self._sorted.searchsorted(score, "left"))
        below += bisect.bisect_left(self._late, score)
        up_to = int(self._sorted.searchsorted(score, "right"))
        up_to += bisect.bisect_right(self._late, score)
        return total - up_to, up_to - below, total

    def add(self, score: float) -> None:
        bisect.insort(self._late, score)
        if len(self._late) == _WAITING:
            self._sorted = self.scores().numpy()
            self._late = []

    def scores(self) -> Tensor:
        """Return all scores, sorted, float64."""
        both = np.concatenate([self._sorted, np.asarray(self._late, dtype=np.float64)])
        return torch.from_numpy(np.sort(both, kind="stable"))
