"""Calibration: p-values by counting, thresholds by the same rule, rates that hold."""

from __future__ import annotations

import math
import re

import pytest
import scipy.stats
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from scodkit.calibration import Calibration
from scodkit.errors import CalibrationError

MODEST = settings(max_examples=100, deadline=None)
# few distinct values, so that ties are common
TIED = st.lists(st.integers(-3, 8).map(float), min_size=1, max_size=30)
FREE = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30)


def counted(held_out: list[float], score: float) -> float:
    """The conformal p-value, by its definition."""
    return (1 + sum(other >= score for other in held_out)) / (len(held_out) + 1)


def normal(count: int, seed: int) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed)).double()


class TestPValue:
    @given(held_out=TIED | FREE, scores=TIED | FREE)
    @MODEST
    def test_counts(self, held_out, scores):
        found = Calibration(torch.tensor(held_out)).p_value(torch.tensor(scores))
        # both went through float32 on the way in
        kept, asked = torch.tensor(held_out).tolist(), torch.tensor(scores).tolist()
        assert found.tolist() == pytest.approx([counted(kept, s) for s in asked], rel=1e-15)

    def test_a_tie_counts_as_at_least_as_high(self):
        calibration = Calibration(torch.tensor([1.0, 2.0, 2.0, 3.0]))
        found = calibration.p_value(torch.tensor([2.0, 2.5, 3.0]))
        assert found.tolist() == [4 / 5, 2 / 5, 2 / 5]

    def test_the_extremes(self):
        calibration = Calibration(normal(99, 0))
        found = calibration.p_value(torch.tensor([float("inf"), -float("inf"), 0.0]))
        assert found[0] == 1 / 100
        assert found[1] == 1.0
        assert found.dtype == torch.float64

    def test_the_order_of_the_held_out_does_not_matter(self):
        scores, asked = normal(50, 0), normal(20, 1)
        backwards = Calibration(scores.flip(0))
        assert torch.equal(Calibration(scores).p_value(asked), backwards.p_value(asked))
        assert backwards.num_data == 50

    def test_falls_as_the_score_grows(self):
        found = Calibration(normal(50, 0)).p_value(torch.linspace(-4, 4, 500))
        assert (found.diff() <= 0).all()

    def test_what_was_passed_in_is_left_alone(self):
        scores = torch.tensor([3.0, 1.0, 2.0])
        Calibration(scores)
        assert scores.tolist() == [3.0, 1.0, 2.0]


class TestThreshold:
    @given(held_out=TIED | FREE, scores=TIED | FREE, rate=st.floats(0.001, 0.999))
    @MODEST
    def test_is_the_rule_of_the_p_value(self, held_out, scores, rate):
        calibration = Calibration(torch.tensor(held_out))
        steps = rate * (calibration.num_data + 1)
        assume(steps >= 1)
        assume(abs(steps - round(steps)) > 1e-6)  # there the rounding of the rate decides
        asked = torch.tensor([*scores, *held_out])  # the held-out ones are ties
        flagged = asked.double() > calibration.threshold(rate)
        assert torch.equal(flagged, calibration.p_value(asked) <= rate)

    @given(num_data=st.integers(1, 300), data=st.data())
    @MODEST
    def test_a_rate_of_whole_steps_flags_so_many(self, num_data, data):
        steps = data.draw(st.integers(1, num_data))
        calibration = Calibration(torch.arange(num_data))
        threshold = calibration.threshold(steps / (num_data + 1))
        # strictly above it lie steps - 1 of the held out: the new one makes it steps
        assert int((calibration.scores > threshold).sum()) == steps - 1

    @given(num_data=st.integers(1, 50), rate=st.floats(0.5, 1, exclude_max=True))
    @MODEST
    def test_falls_as_the_rate_grows(self, num_data, rate):
        calibration = Calibration(torch.arange(num_data))
        for higher in ((1 + rate) / 2, 1 - 1e-12, math.nextafter(1.0, 0.0)):
            if rate <= higher < 1:
                assert calibration.threshold(higher) <= calibration.threshold(rate)

    @pytest.mark.parametrize("rate", [1 / 3, 0.1, 0.05, 0.03, 0.01, 0.007, 0.001])
    def test_too_small_a_rate_is_refused_with_the_number_it_takes(self, rate):
        fewest = math.ceil(1 / rate - 1e-9) - 1
        wanted = rf"expected .* got .*calibrate with at least {fewest} samples"
        with pytest.raises(CalibrationError, match=wanted):
            Calibration(torch.zeros(fewest - 1)).threshold(rate)
        assert Calibration(torch.zeros(fewest)).threshold(rate) == 0.0

    @given(rate=st.floats(1e-4, 0.49))
    @MODEST
    def test_the_number_it_takes_suffices_and_one_fewer_does_not(self, rate):
        with pytest.raises(CalibrationError) as caught:
            Calibration(torch.zeros(1)).threshold(rate)
        needed = int(re.findall(r"at least (\d+) samples", str(caught.value))[0])
        assert Calibration(torch.zeros(needed)).threshold(rate) == 0.0
        with pytest.raises(CalibrationError):
            Calibration(torch.zeros(needed - 1)).threshold(rate)

    @pytest.mark.parametrize("rate", [0.0, 1.0, -0.1, 1.5, float("nan"), float("inf")])
    def test_not_a_rate(self, rate):
        with pytest.raises(CalibrationError, match="expected 0 < false_alarm < 1, got"):
            Calibration(normal(10, 0)).threshold(rate)


class TestRefuses:
    def test_no_scores(self):
        with pytest.raises(CalibrationError, match=r"at least one held-out sample .*got none"):
            Calibration(torch.zeros(0))

    @pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
    def test_scores_that_are_not_finite(self, bad):
        with pytest.raises(CalibrationError, match="got 2 of 3 that are not"):
            Calibration(torch.tensor([bad, 1.0, bad]))


class TestRates:
    """Flags among new samples of the held-out kind: within the band theory gives them."""

    @pytest.mark.parametrize("rate", [0.01, 0.05, 0.2, 0.5])
    @pytest.mark.parametrize("num_data", [99, 250])
    def test_one_calibration_many_samples(self, num_data, rate):
        steps = math.floor(rate * (num_data + 1) + 1e-9)
        band = scipy.stats.betabinom(2000, steps, num_data + 1 - steps)
        for seed in range(20):
            calibration = Calibration(normal(num_data, seed))
            flagged = int((normal(2000, 1000 + seed) > calibration.threshold(rate)).sum())
            assert band.ppf(1e-5) <= flagged <= band.ppf(1 - 1e-5)

    @pytest.mark.parametrize("rate", [0.05, 0.3])
    def test_many_calibrations_one_sample_each(self, rate):
        num_data, repeats = 39, 4000
        flagged = 0
        for seed in range(repeats):
            *held_out, new = normal(num_data + 1, seed)
            p_value = Calibration(torch.stack(held_out)).p_value(new[None])
            flagged += bool(p_value <= rate)
        # both rates are whole steps of 1/40, so that they are met exactly
        band = scipy.stats.binom(repeats, rate)
        assert band.ppf(1e-5) <= flagged <= band.ppf(1 - 1e-5)
