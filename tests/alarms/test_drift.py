"""The drift alarm: a fair game while all is well, won quickly when it is not."""

from __future__ import annotations

import math
import pickle
from unittest import mock

import numpy as np
import pytest
import scipy.integrate
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draws import normal
from scodkit.alarms import DriftAlarm, drift
from scodkit.calibration import Calibration
from scodkit.errors import CalibrationError, OptionError

MODEST = settings(max_examples=60, deadline=None)
TIED = st.integers(0, 5).map(float)
STREAM = st.lists(TIED | st.floats(-1e3, 1e3) | st.just(math.inf), max_size=50)


def ranked(held_out: list[float], stream: list[float], seed: int) -> list[float]:
    """Smoothed ranks of a stream among all that came before, by counting."""
    draws, before, p_values = np.random.default_rng(seed), list(held_out), []
    for score in stream:
        above = sum(other > score for other in before)
        equal = sum(other == score for other in before) + 1  # and itself
        p_values.append((above + (1 - draws.random()) * equal) / (len(before) + 1))
        before.append(score)
    return p_values


def gambled(p_values: list[float]) -> list[float]:
    """Wealth after each p-value, as sums of money in each pocket: cash, then three bets."""
    money, history = [1.0, 0.0, 0.0, 0.0], []
    for step, p in enumerate(p_values, 1):
        shares = [1 - (1 + math.log(step)) / (1 + math.log(step + 1)), 0.001, 0.001, 0.001]
        pot = sum(share * held for share, held in zip(shares, money, strict=True))
        money = [
            held - share * held + pot / 4 for share, held in zip(shares, money, strict=True)
        ]
        pays = [1, 0.25 * p**-0.75, 0.5 * p**-0.5, 0.75 * p**-0.25]
        money = [held * pay for held, pay in zip(money, pays, strict=True)]
        history.append(sum(money))
    return history


class TestGame:
    @given(
        held_out=st.lists(TIED, min_size=1, max_size=20), stream=STREAM, seed=st.integers(0, 9)
    )
    @MODEST
    def test_by_definition(self, held_out, stream, seed):
        alarm = DriftAlarm(Calibration(torch.tensor(held_out)), 0.05, seed)
        wanted = gambled(ranked(held_out, stream, seed))
        risen = None
        with mock.patch.object(drift, "_WAITING", 7):  # so that scores are merged in between
            for step, (score, wealth) in enumerate(zip(stream, wanted, strict=True), 1):
                found = alarm.push(score)
                assert alarm.wealth == pytest.approx(wealth, rel=1e-9)
                assert alarm.log_wealth == pytest.approx(math.log(wealth), rel=1e-9, abs=1e-9)
                risen = step if risen is None and wealth >= 20 else risen
                assert (found, alarm.alarmed_at) == (risen is not None, risen)
        assert alarm.num_seen == len(stream)

    def test_each_bet_is_fair(self):
        count = len(drift._payoffs(0.5))
        assert count == 3
        for bet in range(count):
            # p = x^8 takes the spike at 0 away
            found, error = scipy.integrate.quad(
                lambda x, bet=bet: drift._payoffs(x**8)[bet] * 8 * x**7, 0, 1
            )
            assert found == pytest.approx(1, abs=1e-9 + 10 * error)
            # and it pays for small p-values
            assert drift._payoffs(0.01)[bet] > 1 > drift._payoffs(0.9)[bet]

    @pytest.mark.parametrize("levels", [None, 3], ids=["no ties", "many ties"])
    def test_p_values_are_uniform_and_independent(self, levels):
        scores = normal(6050, 0)
        if levels is not None:
            scores = (scores * levels / 3).round()
        alarm = DriftAlarm(Calibration(scores[:50]), seed=0)
        p_values = [alarm._p_value(score) for score in scores[50:].tolist()]
        assert scipy.stats.kstest(p_values, "uniform").pvalue > 1e-3
        assert scipy.stats.spearmanr(p_values[1:], p_values[:-1]).pvalue > 1e-3
        assert 0 < min(p_values) <= max(p_values) <= 1

    @given(stream=STREAM)
    @MODEST
    def test_cash_is_a_floor(self, stream):
        alarm = DriftAlarm(Calibration(torch.tensor([2.0])))
        for step, score in enumerate(stream, 1):
            alarm.push(score)
            assert alarm.wealth >= 1 / (1 + math.log(step + 1)) * (1 - 1e-12)

    def test_the_longest_quiet_stream_costs_little(self):
        alarm = DriftAlarm(Calibration(torch.arange(10.0)))
        # ever more typical: no bet ever pays
        assert not alarm.push_many(-torch.arange(20_000.0)).any()
        assert alarm.wealth > 0.09


class TestRates:
    @pytest.mark.parametrize(("num_data", "length"), [(20, 200), (100, 100)])
    def test_good_streams_raise_it_in_fewer_runs_than_accepted(self, num_data, length):
        runs, level = 1000, 0.05
        crossed = 0
        for seed in range(runs):
            scores = normal(num_data + length, seed)
            alarm = DriftAlarm(Calibration(scores[:num_data]), level, seed)
            crossed += bool(alarm.push_many(scores[num_data:]).any())
        assert 0 < crossed < level * runs

    def test_alarms_made_alike_do_not_share_their_luck(self):
        # nothing but ties: what happens is the luck of the draws that break them
        calibration, ties = Calibration(torch.zeros(20)), torch.zeros(300)
        alarms = [DriftAlarm(calibration), DriftAlarm(calibration)]
        alarms += [DriftAlarm(calibration, seed=0), DriftAlarm(calibration, seed=0)]
        fresh, other, seeded, same = ([a._p_value(0.0) for _ in ties] for a in alarms)
        assert fresh != other
        assert seeded == same
        # at a rate that the draws of seed 0 just meet, every stream would raise it
        rate = 1 / max(gambled(seeded)) + 1e-9
        raised = sum(
            bool(DriftAlarm(calibration, rate).push_many(ties).any()) for _ in range(200)
        )
        assert raised <= scipy.stats.binom(200, rate).ppf(1 - 1e-9) < 200

    def test_two_values_only(self):
        runs, level, raised = 250, 0.05, 0
        for seed in range(runs):
            scores = (normal(300, seed) > 0.3).double()
            alarm = DriftAlarm(Calibration(scores[:100]), level)
            raised += bool(alarm.push_many(scores[100:]).any())
        assert raised <= scipy.stats.binom(runs, level).ppf(1 - 1e-9)

    @pytest.mark.parametrize("quiet", [0, 500, 5000])
    def test_a_shift_is_found_within_100_samples(self, quiet):
        for seed in range(8):
            scores = normal(1000 + quiet + 100, seed)
            scores[1000 + quiet :] += 1
            alarm = DriftAlarm(Calibration(scores[:1000]), 0.01, seed)
            alarm.push_many(scores[1000:])
            assert alarm.alarmed_at is not None
            assert alarm.alarmed_at > quiet

    def test_a_long_quiet_stream_stays_quiet(self):
        scores = normal(30_200, 3)
        alarm = DriftAlarm(Calibration(scores[:200]), seed=0)
        assert not alarm.push_many(scores[200:]).any()

    def test_lower_scores_are_no_alarm(self):
        alarm = DriftAlarm(Calibration(normal(500, 0)), seed=0)
        assert not alarm.push_many(normal(500, 1) - 3).any()


class TestAlarm:
    def test_stays_until_reset_and_rises_again(self):
        alarm = DriftAlarm(Calibration(normal(500, 0)), seed=0)
        stream = iter((normal(100, 1) + 3).tolist())
        while not alarm.push(next(stream)):
            assert alarm.alarmed_at is None
            assert alarm.wealth < 100
        at = alarm.alarmed_at
        assert alarm.wealth >= 100
        assert at == alarm.num_seen
        assert alarm.push(10.0)
        assert alarm.wealth >= 100
        for step in range(30):  # ever more typical
            assert alarm.push(-10.0 - step)
        assert alarm.wealth < 10  # the alarm outlives the wealth
        assert alarm.alarmed_at == at
        seen = alarm.num_seen
        alarm.reset()
        assert (alarm.alarmed_at, alarm.wealth, alarm.num_seen) == (None, 1.0, seen)
        assert not alarm.push(0.0)
        assert alarm.push_many(normal(100, 2) + 6).any()
        assert alarm.alarmed_at is not None
        assert alarm.alarmed_at > seen

    def test_after_a_reset_the_game_is_the_same_but_scores_are_remembered(self):
        stream = (3 * normal(40, 1)).round().tolist()
        alarm = DriftAlarm(Calibration(torch.arange(5.0)), seed=4)
        alarm.push_many(torch.tensor(stream[:25]))
        alarm.reset()
        alarm.push_many(torch.tensor(stream[25:]))
        p_values = ranked(list(range(5)), stream, 4)
        assert alarm.wealth == pytest.approx(gambled(p_values[25:])[-1], rel=1e-9)

    def test_many_are_pushed_like_one_after_the_other(self):
        scores = (5 * normal(300, 1)).round() + 3
        calibration = Calibration((5 * normal(100, 0)).round())
        one, many = DriftAlarm(calibration, seed=3), DriftAlarm(calibration, seed=3)
        assert many.push_many(scores).tolist() == [one.push(score) for score in scores]
        assert many.log_wealth == one.log_wealth
        assert many.push_many(scores[:0]).shape == (0,)
        other = DriftAlarm(calibration, seed=2)
        other.push_many(scores)
        assert other.log_wealth != one.log_wealth

    def test_infinity_is_the_most_atypical(self):
        calibration = Calibration(normal(99, 0))
        assert DriftAlarm(calibration)._p_value(math.inf) <= 1 / 100
        alarm = DriftAlarm(calibration, seed=0)
        assert alarm.push_many(torch.full((30,), math.inf)).any()
        # ties among infinities are broken like others
        assert 0 < alarm._p_value(math.inf) <= 31 / 130

    @pytest.mark.parametrize("bad", [math.nan, -math.inf])
    def test_not_a_score_changes_nothing(self, bad):
        alarm = DriftAlarm(Calibration(normal(20, 0)))
        alarm.push(1.0)
        before = pickle.dumps(alarm)
        with pytest.raises(CalibrationError, match=r"a number or infinity, got .*; to have"):
            alarm.push(bad)
        with pytest.raises(CalibrationError, match=r"got 1 of 3 that are not; to have"):
            alarm.push_many(torch.tensor([1.0, 2.0, bad]))
        with pytest.raises(CalibrationError, match=r"one number at a time.*\(2,\); type push"):
            alarm.push(torch.ones(2))
        with pytest.raises(CalibrationError, match=r"of shape \(T,\), got \(1, 2\); type"):
            alarm.push_many(torch.ones(1, 2))
        assert pickle.dumps(alarm) == before

    def test_a_wealth_no_float_can_hold(self):
        alarm = DriftAlarm(Calibration(normal(20, 0)))
        alarm.log_wealth = 1e4
        assert alarm.wealth == math.inf

    def test_options(self):
        calibration = Calibration(normal(20, 0))
        for rate in (0.0, 1.0, math.nan):
            with pytest.raises(OptionError, match=r"0 < false_alarm < 1, got .*; type"):
                DriftAlarm(calibration, rate)
        with pytest.raises(OptionError, match=r"a seed >= 0 or None, got -1; type"):
            DriftAlarm(calibration, seed=-1)
        grouped = Calibration(normal(20, 0), torch.arange(20) % 2)
        with pytest.raises(OptionError, match=r"without groups, .*type DriftAlarm\(Calib"):
            DriftAlarm(grouped)
