"""Calibration: p-values by counting, thresholds by the same rule, rates that hold."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
import scipy.stats
import torch
from crepes import ConformalClassifier
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from draws import normal
from scodkit.calibration import Calibration
from scodkit.errors import CalibrationError, CalibrationWarning, OptionError

MODEST = settings(max_examples=100, deadline=None)
# few distinct values, so that ties are common
TIED = st.lists(st.integers(-3, 8).map(float), min_size=1, max_size=30)
FREE = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30)


def counted(held_out: list[float], score: float) -> float:
    """The conformal p-value, by its definition."""
    return (1 + sum(other >= score for other in held_out)) / (len(held_out) + 1)


GROUPS = st.integers(-2, 3)
ASKED = st.lists(
    st.tuples(st.integers(0, 6).map(float) | st.just(math.inf), GROUPS), min_size=1, max_size=30
)
GROUPED = st.lists(st.tuples(st.integers(0, 6).map(float), GROUPS), min_size=1, max_size=30)


def apart(pairs: list[tuple[float, int]]) -> tuple[Tensor, Tensor]:
    """Scores and groups of pairs."""
    scores, groups = zip(*pairs, strict=True)
    return torch.tensor(scores), torch.tensor(groups)


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
        assume(1 / (calibration.num_data + 1) <= rate)
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

    def test_the_number_it_takes_for_whole_fractions(self):
        for parts in range(3, 250):  # 1 / (1 / 49) is not 49 in floats
            with pytest.raises(CalibrationError, match=rf"(?m)at least {parts - 1} samples$"):
                Calibration(torch.zeros(parts - 2)).threshold(1 / parts)

    @pytest.mark.parametrize("rate", [0.0, 1.0, -0.1, 1.5, float("nan"), float("inf")])
    def test_not_a_rate(self, rate):
        with pytest.raises(OptionError, match="expected 0 < false_alarm < 1, got"):
            Calibration(normal(10, 0)).threshold(rate)


class TestRefuses:
    def test_no_scores(self):
        with pytest.raises(CalibrationError, match=r"at least one held-out sample .*got none"):
            Calibration(torch.zeros(0))

    @pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
    def test_scores_that_are_not_finite(self, bad):
        with pytest.raises(CalibrationError, match="got 2 of 3 that are not"):
            Calibration(torch.tensor([bad, 1.0, bad]))


class TestNotFinite:
    def test_infinity_gets_the_smallest_p_value_and_is_flagged(self):
        calibration = Calibration(normal(19, 0))
        asked = torch.tensor([math.inf, -math.inf])
        assert calibration.p_value(asked).tolist() == [1 / 20, 1.0]
        assert calibration.flag(asked, 0.05).tolist() == [True, False]

    def test_nan_is_refused(self):
        calibration = Calibration(normal(19, 0))
        for ask in (calibration.p_value, calibration.flag):
            with pytest.raises(CalibrationError, match=r"got 2 NaN of 3; .*masked_fill"):
                ask(torch.tensor([math.nan, 1.0, math.nan]))


class TestGroups:
    @pytest.mark.filterwarnings("ignore::scodkit.errors.CalibrationWarning")
    @given(held_out=GROUPED, asked=ASKED)
    @MODEST
    def test_counts_within_the_group_or_among_all(self, held_out, asked):
        found = Calibration(*apart(held_out)).p_value(*apart(asked))
        own = [[h for h, g in held_out if g == group] for _, group in asked]
        wanted = [
            counted(same if same and s < math.inf else [h for h, _ in held_out], s)
            for (s, _), same in zip(asked, own, strict=True)
        ]
        assert found.tolist() == pytest.approx(wanted, rel=1e-15)

    @given(held_out=GROUPED)
    @MODEST
    def test_is_kept_sorted_and_can_be_made_again(self, held_out):
        calibration = Calibration(*apart(held_out))
        assert calibration.groups is not None
        kept = list(zip(calibration.scores.tolist(), calibration.groups.tolist(), strict=True))
        assert kept == sorted(held_out, key=lambda pair: (pair[1], pair[0]))
        again = Calibration(calibration.scores, calibration.groups)
        assert torch.equal(again.scores, calibration.scores)
        assert torch.equal(again.groups, calibration.groups)

    @pytest.mark.filterwarnings("ignore::scodkit.errors.CalibrationWarning")
    @given(held_out=GROUPED, asked=ASKED, rate=st.floats(0.02, 0.99))
    @example([(1.0, 0), (2.0, 0), (3.0, 0)], [(3.0, 0), (4.0, 0), (4.0, 7)], 0.25)
    @MODEST
    def test_flags_are_p_values_up_to_the_rate(self, held_out, asked, rate):
        calibration = Calibration(*apart(held_out))
        scores, groups = apart(asked)
        own = [sum(g == group for _, g in held_out) for _, group in asked]
        lacking = torch.tensor([1 / (size + 1) > rate for size in own])
        if lacking.any() and 1 / (len(held_out) + 1) > rate:
            with pytest.raises(CalibrationError, match=r"held-out samples, got .*calibrate"):
                calibration.flag(scores, rate, groups=groups)
            return
        among_all = Calibration(apart(held_out)[0]).p_value(scores)
        p_values = torch.where(lacking, among_all, calibration.p_value(scores, groups))
        found = calibration.flag(scores, rate, groups=groups)
        assert torch.equal(found, p_values <= rate)
        assert found[scores == math.inf].all()

    @pytest.mark.parametrize("confidence", [None, 0.9])
    def test_a_group_with_too_few_is_judged_against_all_and_named_once(self, confidence):
        # 100 of group 0, 3 of group 1 that score higher, none of group 7
        scores = torch.cat([torch.arange(100.0), torch.tensor([200.0, 300.0, 400.0])])
        calibration = Calibration(scores, torch.tensor([0] * 100 + [1] * 3))
        limit = Calibration(scores).threshold(0.05, confidence=confidence)
        own = calibration.threshold(0.05, confidence=confidence, group=0)
        asked = torch.tensor([own + 1, own, limit + 1, limit, limit + 1, limit])
        groups = torch.tensor([0, 0, 1, 1, 7, 7])

        def flags() -> list[bool]:
            rule = {"groups": groups, "confidence": confidence}
            return calibration.flag(asked, 0.05, **rule).tolist()

        with pytest.warns(
            CalibrationWarning, match=r"got 3 of group 1, 0 of group 7: "
        ) as told:
            assert flags() == [True, False] * 3
        assert len(told) == 1
        assert flags() == [True, False] * 3  # without a word
        with pytest.warns(CalibrationWarning, match=r"got 0 of group 8: "):
            calibration.p_value(torch.zeros(3), torch.tensor([0, 7, 8]))

    def test_too_few_in_all_are_refused(self):
        calibration = Calibration(normal(18, 0), torch.arange(18) % 2)
        with pytest.raises(
            CalibrationError, match=r"(?m)n = 18 held-out.*at least 19 samples$"
        ):
            calibration.flag(normal(3, 1), groups=torch.tensor([0, 1, 2]))

    def test_infinity_is_flagged_whatever_its_group_and_names_none(self):
        calibration = Calibration(normal(43, 0), torch.tensor([0] * 40 + [1] * 3))
        asked, groups = torch.full((3,), math.inf), torch.tensor([0, 1, 7])
        assert calibration.p_value(asked, groups).tolist() == [1 / 44] * 3
        assert calibration.flag(asked, groups=groups).all()

    def test_many_unknown_groups_are_one_warning(self):
        calibration = Calibration(normal(40, 0), torch.zeros(40, dtype=torch.long))
        with pytest.warns(
            CalibrationWarning, match=r"0 of group 10 and too few of 20 o"
        ) as told:
            calibration.p_value(normal(30, 1), torch.arange(1, 31))
        assert len(told) == 1

    def test_thresholds_are_those_of_the_group_alone(self):
        scores, groups = normal(300, 0), torch.arange(300) % 2
        calibration = Calibration(scores, groups)
        for group in (0, 1):
            alone = Calibration(scores[groups == group])
            for confidence in (None, 0.9):
                found = calibration.threshold(0.1, confidence=confidence, group=group)
                assert found == alone.threshold(0.1, confidence=confidence)
            assert calibration.false_alarm_bound(0.1, group=group) == alone.false_alarm_bound(
                0.1
            )

    def test_groups_must_match_the_calibration(self):
        plain, grouped = Calibration(normal(3, 0)), Calibration(normal(3, 0), torch.arange(3))
        groups = torch.zeros(3, dtype=torch.long)
        for ask in (plain.p_value, lambda s, g: plain.flag(s, groups=g)):
            with pytest.raises(CalibrationError, match=r"no groups.*Calibration\(scores, gr"):
                ask(normal(3, 1), groups)
        for ask in (grouped.p_value, grouped.flag):
            with pytest.raises(CalibrationError, match=r"has 3 groups, got none; type groups="):
                ask(normal(3, 1))
        for ask in (grouped.threshold, grouped.false_alarm_bound):
            with pytest.raises(CalibrationError, match=r"\(0, 1, 2\), got None; type group=0"):
                ask(0.5)
            with pytest.raises(CalibrationError, match=r"\(0, 1, 2\), got 7; type group=0"):
                ask(0.5, group=7)
        with pytest.raises(CalibrationError, match=r"expected no group, .*got 0; leave it out"):
            plain.threshold(0.5, group=0)

    @pytest.mark.parametrize("bad", [torch.zeros(3), torch.arange(2), torch.arange(3)[None]])
    def test_groups_of_another_form(self, bad):
        with pytest.raises(CalibrationError, match=r"shape \(3,\), got .*type groups.long"):
            Calibration(normal(3, 0), bad)
        with pytest.raises(CalibrationError, match=r"shape \(3,\), got .*type groups.long"):
            Calibration(normal(3, 0), torch.arange(3)).p_value(normal(3, 1), bad)


class TestAgainstCrepes:
    @given(held_out=GROUPED, asked=GROUPED)
    @MODEST
    def test_p_values(self, held_out, asked):
        (scores, groups), (new, new_groups) = apart(held_out), apart(asked)
        theirs = ConformalClassifier().fit(scores.numpy())
        wanted = theirs.predict_p(new[:, None].numpy(), smoothing=False)[:, 0]
        assert Calibration(scores).p_value(new).tolist() == pytest.approx(wanted, rel=1e-15)
        theirs = ConformalClassifier().fit(scores.numpy(), bins=groups.numpy())
        wanted = theirs.predict_p(
            new[:, None].numpy(), bins=new_groups.numpy(), smoothing=False
        )[:, 0]
        known = torch.isin(new_groups, groups)  # of the others crepes says 1
        found = Calibration(scores, groups).p_value(new[known], new_groups[known])
        assert found.tolist() == pytest.approx(wanted[known.numpy()], rel=1e-15)


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

    @pytest.mark.parametrize("rate", [0.02, 0.1])
    def test_within_the_band_of_99_percent(self, rate):
        num_data, new, repeats = 199, 1000, 200
        steps = math.floor(rate * (num_data + 1) + 1e-9)
        band = scipy.stats.betabinom(new, steps, num_data + 1 - steps)
        outside, total = 0, 0
        for seed in range(repeats):
            flagged = int(
                Calibration(normal(num_data, seed)).flag(normal(new, -seed - 1), rate).sum()
            )
            total += flagged
            outside += not band.ppf(0.005) <= flagged <= band.ppf(0.995)
        assert outside <= scipy.stats.binom(repeats, 0.01).ppf(1 - 1e-4)
        # and the mean over draws is the rate itself
        spread = 4 * band.std() / math.sqrt(repeats)
        assert abs(total / repeats - rate * new) < spread


def test_arrays_and_lists_are_taken_and_come_back_as_arrays() -> None:
    held = np.random.default_rng(0).random(50)
    scores = np.append(held[::-2], 2.0)  # whose steps are backwards
    ours, theirs = Calibration(held), Calibration(torch.from_numpy(held))
    assert torch.equal(ours.scores, theirs.scores)
    assert torch.equal(Calibration(held.tolist()).scores, theirs.scores)
    for name, options in (("p_value", {}), ("flag", {"false_alarm": 0.1})):
        found = getattr(ours, name)(scores, **options)
        assert isinstance(found, np.ndarray), name
        expected = getattr(theirs, name)(
            torch.tensor(scores.tolist(), dtype=torch.float64), **options
        )
        assert isinstance(expected, Tensor), name
        np.testing.assert_array_equal(found, expected)
    assert torch.equal(ours.slid(scores, seed=0).scores, theirs.slid(scores, seed=0).scores)
    groups = np.arange(50) % 2
    by_group = Calibration(held, groups)
    assert isinstance(by_group.p_value(held, groups=groups), np.ndarray)


def test_what_is_no_scores_is_refused_in_words() -> None:
    for wrong in ("scores", None, [torch.zeros(2)]):
        with pytest.raises(
            CalibrationError, match=r"type Calibration\(method.score\(heldout_x"
        ):
            Calibration(wrong)  # type: ignore[arg-type]


def test_a_calibration_is_shown_in_a_few_words() -> None:
    shown = repr(Calibration(torch.arange(500.0)))
    assert shown == "Calibration(500 scores from 0 to 499)"
    grouped = Calibration(torch.arange(9.0), torch.arange(9) % 3)
    assert repr(grouped) == "Calibration(9 scores from 0 to 8, 3 groups)"
