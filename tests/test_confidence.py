"""Thresholds that hold for one held-out set: against exact arithmetic, and over many draws."""

from __future__ import annotations

import math
import re
import sys
from fractions import Fraction

import pytest
import scipy.stats
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from draws import normal, normal_cdf
from scodkit.calibration import Calibration
from scodkit.errors import CalibrationError, OptionError

MODEST = settings(max_examples=100, deadline=None)


def surely(num_data: int, rate: float, confidence: float) -> int:
    """The most scores above a threshold, in exact arithmetic; -1 if none is too many.

    The rate of a threshold with ``above`` scores above it exceeds ``rate`` just when at most
    ``above`` of ``num_data`` samples fall into the upper ``rate`` of the distribution.
    """
    p, chance, above = Fraction(rate), Fraction(0), -1
    while above + 1 < num_data:
        k = above + 1
        chance += math.comb(num_data, k) * p**k * (1 - p) ** (num_data - k)
        if 1 - chance < Fraction(confidence):
            break
        above = k
    return above


class TestSurely:
    @given(num_data=st.integers(1, 80), rate=st.floats(0.005, 0.6), sure=st.floats(0.05, 0.999))
    @MODEST
    def test_by_exact_arithmetic(self, num_data, rate, sure):
        # at an exact tie, such as 1/2 of 15 samples, rounding decides
        near = (surely(num_data, rate, sure * (1 + sign * 1e-12)) for sign in (-1, 1))
        assume(len(set(near)) == 1)
        calibration, above = Calibration(torch.arange(num_data)), surely(num_data, rate, sure)
        if above >= 0:
            assert calibration.threshold(rate, confidence=sure) == num_data - 1 - above
            return
        with pytest.raises(CalibrationError) as caught:
            calibration.threshold(rate, confidence=sure)
        needed = int(re.findall(r"at least (\d+) samples", str(caught.value))[0])
        assert surely(needed, rate, sure) == 0
        assert surely(needed - 1, rate, sure) == -1
        assert Calibration(torch.arange(needed)).threshold(rate, confidence=sure) == needed - 1

    @given(num_data=st.integers(1, 300), data=st.data(), sure=st.floats(0.05, 0.999))
    @MODEST
    def test_the_bound_is_the_quantile_of_the_rate(self, num_data, data, sure):
        steps = data.draw(st.integers(1, num_data))
        calibration = Calibration(torch.arange(num_data))
        found = calibration.false_alarm_bound(steps / (num_data + 1), sure)
        # steps - 1 held-out scores above
        wanted = scipy.stats.beta(steps, num_data + 1 - steps).ppf(sure)
        assert found == pytest.approx(wanted, rel=1e-9)

    def test_a_sure_threshold_is_as_high_or_higher_and_its_bound_below_the_rate(self):
        calibration = Calibration(torch.arange(1000))
        sure = calibration.threshold(0.05, confidence=0.99)
        assert sure > calibration.threshold(0.05)
        above = int((calibration.scores > sure).sum())
        assert calibration.false_alarm_bound((above + 1) / 1001) <= 0.05
        assert calibration.false_alarm_bound((above + 2) / 1001) > 0.05

    @pytest.mark.parametrize("tied", [False, True])
    @pytest.mark.parametrize("sure", [0.9, 0.5])
    def test_in_that_share_of_draws(self, sure, tied):
        rate, num_data, repeats = 0.1, 120, 2000
        kept = bounded = 0
        for seed in range(repeats):
            draw = normal_cdf(normal(num_data, seed))
            # at whole multiples of 1/32 the rates are still known
            calibration = Calibration((draw * 32).ceil() / 32 if tied else draw)
            kept += 1 - calibration.threshold(rate, confidence=sure) <= rate
            bound = calibration.false_alarm_bound(rate, sure)
            bounded += 1 - calibration.threshold(rate) <= bound
        above = surely(num_data, rate, sure)
        share = scipy.stats.beta(above + 1, num_data - above).cdf(rate)
        assert sure <= share
        for count, wanted in ((kept, share), (bounded, sure)):
            band = scipy.stats.binom(repeats, wanted)
            assert band.ppf(1e-4) <= count
            assert tied or count <= band.ppf(1 - 1e-4)

    def test_flags(self):
        calibration = Calibration(torch.arange(1000))
        asked = torch.arange(900, 1000)
        limit = calibration.threshold(0.05, confidence=0.99)
        assert torch.equal(calibration.flag(asked, confidence=0.99), asked > limit)
        assert calibration.flag(asked, confidence=0.99).sum() < calibration.flag(asked).sum()

    @pytest.mark.parametrize("sure", [0.0, 1.0, -1.0, math.nan])
    def test_not_a_confidence(self, sure):
        calibration = Calibration(normal(100, 0))
        for ask in (calibration.threshold, calibration.false_alarm_bound):
            with pytest.raises(OptionError, match="expected 0 < confidence < 1, got"):
                ask(0.1, confidence=sure)

    def test_without_scipy(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "scipy.special", None)
        calibration = Calibration(normal(100, 0))
        assert calibration.flag(normal(3, 1)).shape == (3,)
        with pytest.raises(ImportError, match=r'pip install "scodkit\[alarms\]"'):
            calibration.threshold(0.1, confidence=0.9)
