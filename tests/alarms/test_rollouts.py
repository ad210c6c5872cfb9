"""The rollout alarm: one statistic per rollout, one conformal threshold over rollouts."""

from __future__ import annotations

import math
import pickle
import warnings

import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from scodkit.alarms import RolloutAlarm
from scodkit.calibration import Calibration
from scodkit.errors import CalibrationError, CalibrationWarning, OptionError

MODEST = settings(max_examples=100, deadline=None)
ROLLOUT = st.lists(st.integers(0, 30).map(lambda k: k / 4), min_size=1, max_size=12)


def largest_mean(scores: list[float], window: int) -> float:
    """The statistic by its definition: missing frames at the start count as 0."""
    padded = [0.0] * (window - 1) + scores
    return max(math.fsum(padded[end : end + window]) / window for end in range(len(scores)))


def walks(count: int, seed: int, lengths: tuple[int, int] = (30, 60)) -> list[Tensor]:
    """Scores of good rollouts: squares of an AR(1) process with a level of its own."""
    rng = torch.Generator().manual_seed(seed)
    noise = torch.randn(count, lengths[1], generator=rng, dtype=torch.float64)
    level = torch.randn(count, generator=rng, dtype=torch.float64)
    steps = [noise[:, 0]]
    for column in noise.T[1:]:
        steps.append(0.95 * steps[-1] + math.sqrt(1 - 0.95**2) * column)
    scores = (torch.stack(steps, 1) + level[:, None]) ** 2
    long = torch.randint(lengths[0], lengths[1] + 1, (count,), generator=rng).tolist()
    return [row[:length] for row, length in zip(scores, long, strict=True)]


class TestStatistic:
    @given(
        rollouts=st.lists(ROLLOUT, min_size=9, max_size=15),
        new=ROLLOUT,
        window=st.integers(1, 6),
    )
    @MODEST
    def test_by_definition(self, rollouts, new, window):
        held_out = [largest_mean(scores, window) for scores in rollouts]
        alarm = RolloutAlarm([torch.tensor(r) for r in rollouts], 0.1, window)
        calibration = Calibration(torch.tensor(held_out, dtype=torch.float64))
        assert alarm.threshold == pytest.approx(calibration.threshold(0.1), rel=1e-12)
        longest = max(map(len, rollouts))
        for frames in range(1, min(len(new), longest) + 1):
            so_far = largest_mean(new[:frames], window)
            found = alarm.push(new[frames - 1])
            assert alarm.num_frames == frames
            assert alarm.statistic == pytest.approx(so_far, rel=1e-12)
            assert found == (alarm.statistic > alarm.threshold)
            p_value = (1 + sum(h >= alarm.statistic for h in alarm._calibration.scores)) / (
                len(rollouts) + 1
            )
            assert alarm.p_value() == pytest.approx(p_value)
            assert found == (alarm.p_value() <= 0.1)
            assert alarm.judge(torch.tensor(new[:frames])) == found

    def test_before_the_first_frame(self):
        alarm = RolloutAlarm(walks(19, 0))
        assert (alarm.statistic, alarm.p_value(), alarm.num_frames) == (-math.inf, 1.0, 0)

    def test_the_start_is_neither_noisy_nor_blind(self):
        good = torch.ones(20)
        good[0] = 5.0  # noise in one frame
        alarm = RolloutAlarm([good] * 19, window=5)
        assert alarm.threshold == pytest.approx(9 / 5)
        assert alarm.push(10.0)  # but an enormous score is seen at once
        assert alarm.p_value() == 1 / 20

    def test_sure_thresholds_are_those_of_the_calibration(self):
        rollouts = walks(150, 0)
        alarm = RolloutAlarm(rollouts, 0.05, 3, confidence=0.95)
        maxima = torch.tensor([largest_mean(r.tolist(), 3) for r in rollouts])
        wanted = Calibration(maxima).threshold(0.05, confidence=0.95)
        assert alarm.threshold == pytest.approx(wanted)
        assert alarm.threshold > RolloutAlarm(rollouts, 0.05, 3).threshold
        with pytest.raises(CalibrationError, match=r"expected at least 59 held-out samples"):
            RolloutAlarm(rollouts[:58], 0.05, confidence=0.95)


class TestRates:
    @pytest.mark.parametrize("window", [1, 10])
    def test_good_rollouts_of_frames_that_depend_on_each_other(self, window):
        level, new = 0.1, 300
        band = scipy.stats.betabinom(new, 6, 54)  # 59 held out: the rate is met exactly
        total = 0
        for seed in range(15):
            both = walks(59 + new, seed)
            alarm = RolloutAlarm(both[:59], level, window)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", CalibrationWarning)
                alarms = sum(alarm.judge(scores) for scores in both[59:])
            assert band.ppf(1e-4) <= alarms <= band.ppf(1 - 1e-4)
            total += alarms
        assert abs(total / 15 - level * new) < 3 * band.std() / math.sqrt(15)

    def test_bad_rollouts(self):
        alarm = RolloutAlarm(walks(99, 0), 0.05, window=5)
        bad = [scores + 15 * (torch.arange(len(scores)) > 15) for scores in walks(50, 1)]
        assert sum(map(alarm.judge, bad)) > 40


class TestAlarm:
    def test_stays_until_the_next_rollout(self):
        alarm = RolloutAlarm(walks(19, 0), window=2)
        assert not alarm.push(0.0)
        assert alarm.push(math.inf)
        for _ in range(5):  # infinity has left the window
            assert alarm.push(0.0)
        assert alarm.statistic == math.inf
        assert alarm.p_value() == 1 / 20
        alarm.start()
        assert not alarm.push(0.0)
        assert (alarm.statistic, alarm.num_frames) == (0.0, 1)

    def test_judging_leaves_the_rollout_under_way_alone(self):
        alarm = RolloutAlarm(walks(19, 0), window=3)
        alarm.push(1.0)
        before = pickle.dumps(alarm)
        assert alarm.judge(torch.full((5,), 1e6))
        assert not alarm.judge(torch.zeros(0))
        assert pickle.dumps(alarm) == before

    def test_rollouts_longer_than_any_held_out_are_watched_with_a_warning(self):
        alarm = RolloutAlarm([torch.rand(n) for n in (3, 5, 4)] * 10, window=2)
        for _ in range(2):  # once in each rollout
            alarm.start()
            assert not any(alarm.push(0.0) for _ in range(5))
            with pytest.warns(CalibrationWarning, match=r"at most 5 frames, .*got 6: false a"):
                alarm.push(0.0)
            assert not alarm.push(0.0)
            assert alarm.push(1e6)
        with pytest.warns(CalibrationWarning, match=r"at most 5 frames, .*got 7: false a"):
            assert alarm.judge(torch.full((7,), 9.0))
        assert not alarm.judge(torch.zeros(5))

    @pytest.mark.parametrize("bad", [math.nan, -math.inf])
    def test_not_a_score_changes_nothing(self, bad):
        alarm = RolloutAlarm(walks(19, 0), window=3)
        alarm.push(1.0)
        before = pickle.dumps(alarm)
        with pytest.raises(CalibrationError, match=r"a number or infinity, got .*; to have"):
            alarm.push(bad)
        with pytest.raises(CalibrationError, match=r"got 1 of 2 that are not; to have"):
            alarm.judge(torch.tensor([1.0, bad]))
        assert pickle.dumps(alarm) == before

    @pytest.mark.parametrize(
        "bad", [torch.zeros(0), torch.ones(2, 2), torch.tensor([1.0, math.inf])]
    )
    def test_a_bad_held_out_rollout_is_named(self, bad):
        with pytest.raises(CalibrationError, match=r"finite scores of shape \(T,\).*number 1;"):
            RolloutAlarm([torch.ones(3), bad], 0.5)

    def test_options(self):
        with pytest.raises(CalibrationError, match=r"at least one held-out rollout, got none;"):
            RolloutAlarm([])
        with pytest.raises(OptionError, match=r"at least 1 frame, got 0; type window=1"):
            RolloutAlarm(walks(19, 0), window=0)
        with pytest.raises(CalibrationError, match=r"calibrate with at least 19 samples"):
            RolloutAlarm(walks(18, 0), 0.05)
        assert RolloutAlarm(walks(19, 0), 0.05).window == 1
