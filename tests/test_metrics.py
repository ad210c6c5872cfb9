"""Separation of scores, against scikit-learn, plain counting and known distributions."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm
from sklearn.metrics import average_precision_score, roc_auc_score, roc_curve

from own_process import printed_by
from scodkit.errors import OptionError
from scodkit.metrics import bootstrapped, separation

few_scores = st.lists(st.integers(0, 8).map(float), min_size=1, max_size=30)


@settings(max_examples=60, deadline=None)
@given(few_scores, few_scores)
def test_agrees_with_scikit_learn(known: list[float], unknown: list[float]) -> None:
    truth = [0] * len(known) + [1] * len(unknown)
    found = separation(torch.tensor(known), torch.tensor(unknown), resamples=2)
    assert found.auroc == pytest.approx(roc_auc_score(truth, known + unknown), abs=1e-12)
    # both sets weigh the same
    weights = [1 / len(known)] * len(known) + [1 / len(unknown)] * len(unknown)
    wanted = average_precision_score(truth, known + unknown, sample_weight=weights)
    assert found.aupr == pytest.approx(wanted, abs=1e-12)
    false, true, _ = roc_curve(truth, known + unknown, drop_intermediate=False)
    assert found.fpr95 == pytest.approx(false[np.argmax(true >= 0.95 - 1e-12)], abs=1e-12)


@settings(max_examples=30, deadline=None)
@given(few_scores, few_scores)
def test_auroc_is_the_share_of_ordered_pairs(known: list[float], unknown: list[float]) -> None:
    pairs = [(a < b) + 0.5 * (a == b) for a in known for b in unknown]
    found = separation(torch.tensor(known), torch.tensor(unknown), resamples=2)
    assert found.auroc == pytest.approx(sum(pairs) / len(pairs), abs=1e-12)


@settings(max_examples=40, deadline=None)
@given(few_scores, few_scores, st.integers(2, 5))
def test_no_figure_depends_on_how_many_there_are(
    known: list[float], unknown: list[float], times: int
) -> None:
    once = separation(torch.tensor(known), torch.tensor(unknown), resamples=2)
    more = separation(torch.tensor(known), torch.tensor(unknown * times), resamples=2)
    for figure in ("auroc", "aupr", "fpr95"):
        assert getattr(more, figure) == pytest.approx(getattr(once, figure), abs=1e-12)


def test_a_score_that_tells_nothing_has_half_of_everything() -> None:
    found = separation(torch.ones(90), torch.ones(10))
    assert (found.auroc, found.aupr, found.fpr95) == (0.5, 0.5, 1.0)


def test_the_threshold_catches_95_of_100() -> None:
    same = torch.arange(100.0)
    assert separation(same, same, resamples=2).fpr95 == 0.95
    assert separation(same - 0.5, same, resamples=2).fpr95 == 0.94


def normals(distance: float) -> dict[str, float]:
    """The figures of two normals a distance apart, by a sum over a fine grid."""
    x = np.linspace(-10, 14, 20_001)
    shares = norm.pdf(x - distance) * (x[1] - x[0])
    caught, alarms = norm.sf(x - distance), norm.sf(x)
    auroc = float((shares * (1 - alarms)).sum())
    aupr = float((shares * caught / (caught + alarms)).sum())
    return {"auroc": auroc, "aupr": aupr, "fpr95": float(norm.sf(distance + norm.ppf(0.05)))}


# 5 % are to miss; some standard deviations of a count, and the bootstrap's own bias
def few(trials: int) -> float:
    return 0.05 * trials + 5 * math.sqrt(trials * 0.05 * 0.95)


@pytest.mark.parametrize("distance", [1.0, 2.5])
def test_intervals_cover_as_often_as_they_say(distance: float) -> None:
    truth = normals(distance)
    assert truth["auroc"] == pytest.approx(0.5 * (1 + math.erf(distance / 2)), abs=1e-6)
    generator = torch.Generator().manual_seed(0)
    trials = 120
    missed = dict.fromkeys(truth, 0)
    for trial in range(trials):
        known = torch.randn(160, generator=generator)
        unknown = torch.randn(120, generator=generator) + distance
        found = separation(known, unknown, resamples=200, seed=trial)
        for figure, value in truth.items():
            low, high = (getattr(found, f"{figure}_{end}") for end in ("low", "high"))
            assert low <= getattr(found, figure) <= high
            missed[figure] += not low <= value <= high
    for count in missed.values():
        assert 1 <= count <= few(trials)


@pytest.mark.parametrize("known_above", [0.005, 0.02])
def test_sets_that_seem_apart_are_not_taken_for_apart(known_above: float) -> None:
    """A share of known inputs is above all unknown ones: often none of it is in a sample."""
    truth = {
        "auroc": 1 - known_above,
        "aupr": 1 - known_above * math.log1p(1 / known_above),
        "fpr95": known_above,
    }
    generator = torch.Generator().manual_seed(1)
    trials, apart, missed = 150, 0, dict.fromkeys(truth, 0)
    for trial in range(trials):
        known = torch.rand(80, generator=generator)
        known[torch.rand(80, generator=generator) < known_above] += 5
        unknown = torch.rand(100, generator=generator) + 2
        found = separation(known, unknown, resamples=100, seed=trial)
        apart += found.auroc == 1
        missed["auroc"] += found.auroc_low > truth["auroc"]
        missed["aupr"] += found.aupr_low > truth["aupr"]
        missed["fpr95"] += found.fpr95_high < truth["fpr95"]
    assert apart > 0
    for count in missed.values():
        assert count <= few(trials)


@pytest.mark.parametrize("distance", [4.0, 5.0])
def test_normals_far_apart_are_covered(distance: float) -> None:
    truth = normals(distance)
    generator = torch.Generator().manual_seed(2)
    trials, missed = 100, dict.fromkeys(truth, 0)
    for trial in range(trials):
        known = torch.randn(60, generator=generator)
        unknown = torch.randn(60, generator=generator) + distance
        found = separation(known, unknown, resamples=100, seed=trial)
        for figure, value in truth.items():
            low, high = (getattr(found, f"{figure}_{end}") for end in ("low", "high"))
            missed[figure] += not low <= value <= high
    for count in missed.values():
        assert count <= few(trials)


def test_few_samples_apart_say_little() -> None:
    found = separation(torch.zeros(10), torch.ones(1000))
    assert found.auroc_low == pytest.approx(0.05**0.1)  # all of ten pairs in order, 1 in 20
    assert (found.auroc, found.auroc_high) == (1.0, 1.0)


@settings(max_examples=40, deadline=None)
@given(few_scores, few_scores)
def test_the_curve_is_scikit_learns(known: list[float], unknown: list[float]) -> None:
    truth = [0] * len(known) + [1] * len(unknown)
    false, true, _ = roc_curve(truth, known + unknown, drop_intermediate=False)
    (found,) = bootstrapped(torch.tensor(known), torch.tensor(unknown), 0, 0)
    np.testing.assert_allclose(found.false, false, atol=1e-12)
    np.testing.assert_allclose(found.true, true, atol=1e-12)


def test_the_interval_narrows_with_the_root_of_the_number() -> None:
    generator = torch.Generator().manual_seed(0)
    widths = []
    for count in (100, 1600):
        known = torch.randn(count, generator=generator)
        found = separation(known, torch.randn(count, generator=generator) + 1, resamples=400)
        widths.append(found.auroc_high - found.auroc_low)
    assert widths[0] / widths[1] == pytest.approx(4, rel=0.35)


def test_the_same_seed_gives_the_same_interval() -> None:
    a, b = torch.rand(50), torch.rand(40)
    assert separation(a, b, seed=3) == separation(a, b, seed=3)
    assert separation(a, b, seed=3) != separation(a, b, seed=4)


def test_infinite_scores_are_the_highest() -> None:
    found = separation(torch.tensor([1.0, 2.0]), torch.tensor([torch.inf, torch.inf]))
    assert (found.auroc, found.aupr, found.fpr95) == (1.0, 1.0, 0.0)


@pytest.mark.parametrize("bad", [torch.tensor([]), torch.tensor([1.0, torch.nan])], ids=str)
def test_no_numbers_are_refused(bad: torch.Tensor) -> None:
    good = torch.tensor([1.0])
    for pair in ((bad, good), (good, bad)):
        with pytest.raises(OptionError, match="numbers"):
            separation(*pair)


def test_separation_needs_no_library_that_draws() -> None:
    program = """
        import sys
        from scodkit.metrics import separation
        print(sorted({"bokeh", "jinja2", "PIL", "matplotlib"} & set(sys.modules)))
    """
    assert printed_by(program) == "[]\n"
