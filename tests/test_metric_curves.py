"""Curves and bands against slow counts, scikit-learn and the benchmark's own figures."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score, roc_auc_score

from scodkit.metrics import curves, separation


def scores(n=70, m=50, ties=False):
    rng = torch.Generator().manual_seed(n)
    known = torch.randn(n, generator=rng, dtype=torch.float64)
    unknown = 1 + torch.randn(m, generator=rng, dtype=torch.float64)
    return ((known * 2).round(), (unknown * 2).round()) if ties else (known, unknown)


@pytest.mark.parametrize("ties", [False, True])
def test_areas_are_those_of_scikit_learn(ties):
    known, unknown = scores(ties=ties)
    found = curves(known, unknown, resamples=2)
    truth = np.repeat([0, 1], [len(known), len(unknown)])
    both = torch.cat([known, unknown]).numpy()
    weights = np.repeat([1 / len(known), 1 / len(unknown)], [len(known), len(unknown)])
    assert found.roc.area == pytest.approx(roc_auc_score(truth, both))
    expected = average_precision_score(truth, both, sample_weight=weights)
    assert found.precision_recall.area == pytest.approx(expected)


@pytest.mark.parametrize("ties", [False, True])
def test_intervals_are_those_of_the_benchmark(ties):
    known, unknown = scores(ties=ties)
    found = curves(known, unknown, resamples=50, seed=3)
    theirs = separation(known, unknown, resamples=50, seed=3)
    ours = [found.roc.area_low, found.roc.area_high]
    ours += [found.precision_recall.area_low, found.precision_recall.area_high]
    expected = [theirs.auroc_low, theirs.auroc_high, theirs.aupr_low, theirs.aupr_high]
    assert ours == pytest.approx(expected)


def test_sets_that_do_not_overlap_still_have_an_interval():
    found = curves(torch.arange(20.0), 100 + torch.arange(20.0), resamples=20)
    theirs = separation(torch.arange(20.0), 100 + torch.arange(20.0), resamples=20)
    assert found.roc.area == 1.0
    assert found.roc.area_low == pytest.approx(theirs.auroc_low)
    assert found.precision_recall.area_low == pytest.approx(theirs.aupr_low)
    assert found.roc.area_low < 0.95


def test_heights_are_counted_one_by_one():
    known, unknown = scores(40, 40)
    found = curves(known, unknown, resamples=2)
    limits = torch.cat([known, unknown]).tolist()
    for x, y in zip(found.roc.x, found.roc.y, strict=True):
        allowed = [t for t in limits if float((known >= t).double().mean()) <= x + 1e-9]
        best = max((float((unknown >= t).double().mean()) for t in allowed), default=0.0)
        # between two shares of false alarms the curve is drawn straight
        assert best - 1e-9 <= y <= best + 1.0
        if abs(x * 40 - round(x * 40)) < 1e-9:
            assert y == pytest.approx(best)
    for x, y in zip(found.precision_recall.x, found.precision_recall.y, strict=True):
        shares = {t: float((unknown >= t).double().mean()) for t in unknown.tolist()}
        t = max(t for t, share in shares.items() if share > x - 1e-9)
        right, wrong = float((unknown >= t).double().sum()), float((known >= t).double().sum())
        assert y == pytest.approx(right / (right + wrong))


def test_bands_hold_the_curve_and_shrink_with_more_inputs():
    few, many = (curves(*scores(n, n), resamples=100) for n in (50, 2000))
    for curve in (few.roc, few.precision_recall, many.roc, many.precision_recall):
        inside = (curve.low <= curve.y + 1e-9) & (curve.y <= curve.high + 1e-9)
        assert inside.mean() > 0.9
        assert bool((np.diff(curve.x) > 0).all())
    assert (many.roc.high - many.roc.low).mean() < 0.4 * (few.roc.high - few.roc.low).mean()


def test_the_band_is_the_spread_over_other_draws():
    rng = torch.Generator().manual_seed(1)
    draws = []
    for _ in range(300):
        known = torch.randn(100, generator=rng, dtype=torch.float64)
        unknown = 1 + torch.randn(100, generator=rng, dtype=torch.float64)
        draws.append(curves(known, unknown, resamples=1).roc.at(0.2)[0])
    true_width = np.quantile(draws, 0.975) - np.quantile(draws, 0.025)
    _, low, high = curves(*scores(100, 100), resamples=300).roc.at(0.2)
    assert 0.6 < (high - low) / true_width < 1.6


def test_infinite_scores_are_above_all_others():
    known, unknown = torch.tensor([1.0, 2.0]), torch.tensor([float("inf"), 3.0])
    assert curves(known, unknown, resamples=2).roc.area == 1.0
