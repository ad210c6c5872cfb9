"""Intervals and chances of a report beside scipy's, and over many random draws."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from scodkit.report import rates


@pytest.mark.parametrize("total", [1, 2, 9, 201, 5000, 1_000_000])
def test_exact_intervals_are_scipys(total):
    counts = np.unique(np.linspace(0, total, min(total + 1, 23)).round()).astype(int)
    low, high = rates.exact_intervals(counts, total)
    for count, a, b in zip(counts.tolist(), low, high, strict=True):
        ends = stats.binomtest(count, total).proportion_ci(method="exact")
        assert (a, b) == pytest.approx((ends.low, ends.high), abs=1e-10)
        assert rates.Rate(count, total).ends == pytest.approx((ends.low, ends.high), abs=1e-10)


def test_the_beta_distribution_is_scipys():
    rng = np.random.default_rng(0)
    a, b = rng.uniform(0.5, 3000, (2, 400))
    x = stats.beta.ppf(rng.uniform(0.001, 0.999, 400), a, b)
    assert rates.beta_share(a, b, x) == pytest.approx(stats.beta.cdf(x, a, b), abs=1e-10)
    quantiles = rates.beta_quantile(0.3, a, b)
    assert quantiles == pytest.approx(stats.beta.ppf(0.3, a, b), rel=1e-9)


@pytest.mark.parametrize(
    ("rate", "held_out", "new"), [(0.05, 200, 201), (0.3, 99, 7), (0.9, 9, 40)]
)
def test_alarms_by_chance_are_beta_binomial(rate, held_out, new):
    chances = rates.alarms_by_chance(rate, [(held_out, new)])
    k = rates.places(rate, held_out)
    own = stats.betabinom(new, k, held_out + 1 - k)
    assert chances == pytest.approx(own.pmf(np.arange(new + 1)), abs=1e-12)
    assert rates.at_least(chances, 2) == pytest.approx(own.sf(1))
    assert rates.within(chances) == (own.ppf(0.025), own.ppf(0.975))
    most = rates.most_by_chance(chances, 0.01)
    assert own.sf(most - 1) >= 0.01 > own.sf(most)


def test_groups_with_too_few_held_out_inputs_raise_no_alarm():
    assert rates.alarms_by_chance(0.05, [(10, 3)]).tolist() == [1.0, 0.0, 0.0, 0.0]
    both = rates.alarms_by_chance(0.05, [(10, 3), (100, 5)])
    alone = rates.alarms_by_chance(0.05, [(100, 5)])
    assert both[:6] == pytest.approx(alone)
    assert not both[6:].any()


def test_large_groups_are_summed_as_small_ones_are(monkeypatch):
    sizes = [(200, 60), (150, 40), (90, 300)]
    direct = rates.alarms_by_chance(0.1, sizes)
    monkeypatch.setattr(rates, "_DIRECT", 0)
    assert rates.alarms_by_chance(0.1, sizes) == pytest.approx(direct, abs=1e-14)


@pytest.mark.parametrize("rate", [0.01, 0.05, 3 / 101, 0.1, 0.5])
@pytest.mark.parametrize("held_out", [10, 99, 100, 200])
def test_places_are_those_of_p_values(rate, held_out):
    p_values = np.arange(1, held_out + 2) / (held_out + 1)
    assert rates.places(rate, held_out) == (p_values <= rate).sum()


@pytest.mark.parametrize(
    ("n", "m", "levels"), [(200, 201, 0), (30, 7, 0), (5, 5, 0), (60, 60, 4)]
)
def test_samples_of_one_kind_are_rarely_called_different(n, m, levels):
    rng = np.random.default_rng(0)
    chances = []
    for draw in range(4000):
        held_out, new = rng.random(n), rng.random(m)
        if levels:  # ties
            held_out, new = np.floor(levels * held_out), np.floor(levels * new)
        gap, chance = rates.unlike(held_out, new)
        if draw < 50:
            own = stats.ks_2samp(held_out, new, method="asymp").statistic
            assert abs(gap) == pytest.approx(own)
        chances.append(chance)
    for level in (0.01, 0.05):
        most = stats.binom.ppf(0.9999, len(chances), level)
        assert (np.array(chances) < level).sum() <= most


def test_a_gap_that_chance_explains_is_the_limit_of_the_test():
    most = rates.unlike_by_chance(200, 100, 0.02)
    size = 200 * 100 / 300
    assert np.e * np.exp(-2 * most**2 * size) == pytest.approx(0.02)
    assert (
        rates.unlike(np.arange(200.0), np.arange(200.0) + 500)[0] == 1.0
    )  # new ones are higher


def test_alarms_of_classes_are_hypergeometric():
    alarms, sizes = np.array([0, 5, 8, 1]), np.array([37, 44, 45, 75])
    own = [stats.hypergeom.sf(a - 1, 201, 14, s) for a, s in zip(alarms, sizes, strict=True)]
    assert rates.most_of_one(alarms, sizes, 14) == pytest.approx(own)
    assert rates.most_of_one(np.array([3]), np.array([3]), 3) == pytest.approx([1.0])


@pytest.mark.parametrize(("n", "m"), [(10, 10), (12, 200), (200, 200)])
@pytest.mark.parametrize("wide", [1.0, 4.0])
def test_a_score_that_tells_nothing_is_rarely_called_inverted(n, m, wide):
    rng = np.random.default_rng(0)
    chances = np.array(
        [
            rates.lower_by_chance(rng.normal(size=n), wide * rng.normal(size=m))
            for _ in range(4000)
        ]
    )
    for level in (0.002, 0.01):
        assert (chances < level).sum() <= stats.binom.ppf(0.9999, len(chances), level)


def test_an_inverted_score_is_told():
    rng = np.random.default_rng(0)
    assert rates.lower_by_chance(rng.normal(2, 1, 60), rng.normal(0, 1, 60)) < 1e-6
    assert rates.lower_by_chance(np.arange(5.0) + 9, np.arange(5.0)) < 0.01
    assert rates.lower_by_chance(rng.normal(0, 1, 60), rng.normal(2, 1, 60)) > 0.99


@pytest.mark.parametrize(
    ("rate", "held_out"), [(0.05, 130), (0.05, 200), (0.1, 99), (0.01, 400)]
)
def test_the_fewest_inputs_to_judge_a_rate_are_the_first_of_all(rate, held_out):
    level, new = 0.05 / 3, 1
    while True:  # one more alarm than chance explains is at most three times the rate
        k = rates.places(rate, held_out)
        own = stats.betabinom(new, k, held_out + 1 - k)
        if own.isf(level) + 1 <= 3 * rate * new + 1e-9:
            break
        new += 1
    assert rates.fewest_to_judge(rate, [(held_out, 12)], level, 3) == new


def test_no_number_of_inputs_judges_a_rate_with_few_held_out_ones():
    assert rates.fewest_to_judge(0.05, [(130, 1)], 0.05 / 3, 3) == 47
    assert rates.fewest_to_judge(0.05, [(19, 1)], 0.05 / 3, 3) is None
    assert rates.fewest_to_tell(10, 0.05 / 3, 0.5) is None
    fewest = rates.fewest_to_tell(130, 0.05 / 3, 0.5)
    assert fewest is not None
    assert rates.unlike_by_chance(130, fewest, 0.05 / 3) <= 0.5
    assert rates.unlike_by_chance(130, fewest - 1, 0.05 / 3) > 0.5
