"""Separation of scores, against scikit-learn and plain counting."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score, roc_auc_score, roc_curve

from scodkit.bench.metrics import separation
from scodkit.errors import OptionError

few_scores = st.lists(st.integers(0, 8).map(float), min_size=1, max_size=30)


@settings(max_examples=60, deadline=None)
@given(few_scores, few_scores)
def test_agrees_with_scikit_learn(known: list[float], unknown: list[float]) -> None:
    truth = [0] * len(known) + [1] * len(unknown)
    found = separation(torch.tensor(known), torch.tensor(unknown), resamples=2)
    assert found.auroc == pytest.approx(roc_auc_score(truth, known + unknown), abs=1e-12)
    wanted = average_precision_score(truth, known + unknown)
    assert found.aupr == pytest.approx(wanted, abs=1e-12)
    false, true, _ = roc_curve(truth, known + unknown, drop_intermediate=False)
    assert found.fpr95 == pytest.approx(false[np.argmax(true >= 0.95 - 1e-12)], abs=1e-12)


@settings(max_examples=30, deadline=None)
@given(few_scores, few_scores)
def test_auroc_is_the_share_of_ordered_pairs(known: list[float], unknown: list[float]) -> None:
    pairs = [(a < b) + 0.5 * (a == b) for a in known for b in unknown]
    found = separation(torch.tensor(known), torch.tensor(unknown), resamples=2)
    assert found.auroc == pytest.approx(sum(pairs) / len(pairs), abs=1e-12)


def test_the_interval_covers_as_often_as_it_says() -> None:
    """Two normals a distance apart: the true AUROC is known, and few intervals miss it."""
    truth = 0.5 * (1 + math.erf(1.0 / 2))  # of a distance of 1
    generator = torch.Generator().manual_seed(0)
    missed, trials = 0, 200
    for trial in range(trials):
        known = torch.randn(80, generator=generator)
        unknown = torch.randn(60, generator=generator) + 1
        found = separation(known, unknown, resamples=300, seed=trial)
        assert found.auroc_low <= found.auroc <= found.auroc_high
        missed += not found.auroc_low <= truth <= found.auroc_high
    # 5 % are to miss; six standard deviations of a count of 200, and the bootstrap's own bias
    assert 1 <= missed <= 10 + 6 * math.sqrt(200 * 0.05 * 0.95)


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
