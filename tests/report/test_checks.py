"""Verdicts: where all is well they are rarely bad, and where it is not they say so."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

from scodkit import Calibration, Categorical, Gaussian, Monitor, predicted_class
from scodkit.errors import CalibrationWarning
from scodkit.report import Report, ScoredSet, rates
from scodkit.report.checks import FAILED, LOOK, NOT_CHECKED, PASSED, checks_of, true_rate
from scodkit.report.findings import Findings

ALARMS, APART, ALIKE = (
    "False alarms on known inputs",
    "Training, held-out and known inputs are different",
    "Known inputs score like the held-out ones",
)
CLASSES, ENOUGH, CURVATURE = (
    "False alarms, class by class",
    "Enough held-out inputs for the rate",
    "Captured curvature",
)


@pytest.fixture(scope="module")
def classifier():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    return Monitor(net, Categorical(), 20).fit([torch.randn(100, 4)], progress=False)


@pytest.fixture
def quick(monkeypatch):
    """Intervals by scipy, which test_rates.py compares ours with: there are thousands here."""
    monkeypatch.setattr(rates, "beta_quantile", stats.beta.ppf)


def checked(monitor, sets, rate=0.05):
    found = checks_of(Findings.of(Report(monitor, sets, false_alarm=rate)))
    return {check.name: check for check in found}


def verdicts(found):
    return {name: check.verdict for name, check in found.items()}


def scores(rng, count, ties):
    drawn = torch.from_numpy(rng.exponential(size=count))
    return (8 * drawn).floor() if ties else drawn


@pytest.mark.parametrize(
    ("held_out", "new", "rate", "ties"),
    [
        (200, 201, 0.05, False),
        (99, 40, 0.1, False),
        (150, 300, 0.05, True),
        (400, 440, 0.01, False),
    ],
)
def test_a_monitor_that_keeps_its_promise_rarely_fails(
    quick, classifier, held_out, new, rate, ties
):
    rng, bad = np.random.default_rng(0), {LOOK: 0, FAILED: 0}
    draws = 800
    for _ in range(draws):
        classifier.calibration = Calibration(scores(rng, held_out, ties))
        logits = torch.from_numpy(rng.normal(size=(new, 3)))
        known = ScoredSet("known", scores(rng, new, ties), known=True, outputs=logits)
        found = verdicts(checked(classifier, [known], rate))
        worst = {found[name] for name in (ALARMS, ALIKE, CLASSES)}
        bad[FAILED] += FAILED in worst
        bad[LOOK] += bool(worst & {FAILED, LOOK})
    assert bad[FAILED] <= stats.binom.ppf(0.9999, draws, 0.01)
    assert bad[LOOK] <= stats.binom.ppf(0.9999, draws, 0.05)


def test_groups_that_keep_their_promise_rarely_fail(quick, classifier):
    rng, bad = np.random.default_rng(1), {LOOK: 0, FAILED: 0}
    draws = 500
    classifier._by = predicted_class
    for _ in range(draws):
        groups = torch.from_numpy(rng.integers(0, 3, 240))
        calibration = Calibration(scores(rng, 240, False) * (1 + groups), groups)
        classifier.calibration = calibration
        logits = torch.from_numpy(rng.normal(size=(210, 3)))
        own = predicted_class(logits)
        drawn = scores(rng, 210, False) * (1 + own)
        p_values = calibration.p_value(drawn, own)
        known = ScoredSet("known", drawn, known=True, outputs=logits, p_values=p_values)
        found = verdicts(checked(classifier, [known], 0.1))
        worst = {found[name] for name in (ALARMS, ALIKE, CLASSES)}
        bad[FAILED] += FAILED in worst
        bad[LOOK] += bool(worst & {FAILED, LOOK})
    classifier._by = None
    assert bad[FAILED] <= stats.binom.ppf(0.9999, draws, 0.01)
    assert bad[LOOK] <= stats.binom.ppf(0.9999, draws, 0.05)


def test_a_promise_that_is_broken_fails_with_its_numbers(classifier):
    rng = np.random.default_rng(0)
    classifier.calibration = Calibration(scores(rng, 200, False))
    known = ScoredSet("known", 2.5 * scores(rng, 200, False), known=True)
    found = checked(classifier, [known])
    assert found[ALARMS].verdict == found[ALIKE].verdict == FAILED
    raised = int((classifier.calibration.p_value(known.scores) <= 0.05).sum())
    assert f"({raised} of 200, " in found[ALARMS].finding
    assert "calibrate with inputs of the kind" in found[ALARMS].advice
    lower = ScoredSet("known", 0.2 * scores(rng, 200, False), known=True)
    found = checked(classifier, [lower])
    assert found[ALARMS].verdict == PASSED
    assert found[ALARMS].advice == ""
    assert found[ALIKE].verdict == LOOK  # rarer than asked for breaks no promise
    assert "Were they trained on?" in found[ALIKE].advice


def test_a_class_with_all_the_false_alarms_is_to_be_looked_at(classifier):
    rng = np.random.default_rng(0)
    classifier.calibration = Calibration(scores(rng, 400, False))
    drawn = scores(rng, 400, False)
    logits = torch.zeros(400, 3)
    logits[torch.arange(400), torch.where(drawn > drawn.quantile(0.95), 2, 0)] = 1.0
    found = checked(classifier, [ScoredSet("known", drawn, known=True, outputs=logits)])
    assert found[CLASSES].verdict == LOOK
    assert "class 2" in found[CLASSES].finding
    assert "by=predicted_class" in found[CLASSES].advice


def test_what_cannot_be_checked_says_why(classifier):
    classifier.calibration = None
    known = ScoredSet("known", torch.rand(30), known=True)
    found = checked(classifier, [known])
    assert found[ALARMS].verdict == found[ALIKE].verdict == found[ENOUGH].verdict == NOT_CHECKED
    assert "scod calibrate" in found[ALARMS].advice
    classifier.calibration = Calibration(torch.rand(50))
    found = checked(classifier, [replace(known, known=False)])
    assert found[ALARMS].verdict == NOT_CHECKED
    assert "--known" in found[ALARMS].advice
    assert found["known score higher than known inputs"].verdict == NOT_CHECKED
    assert found[ENOUGH].verdict == LOOK


def test_known_inputs_that_were_held_out_or_fitted_are_told():
    torch.manual_seed(0)
    x = torch.randn(300, 4)
    monitor = Monitor(nn.Linear(4, 1), Gaussian(), 5).fit([x[:100]], progress=False)
    monitor.calibrate([x[100:200]], progress=False)

    def verdict(part):
        known = ScoredSet.of(monitor, "known", part, known=True, batch_size=7)
        return checked(monitor, [known])[APART]

    assert verdict(x[200:]).verdict == PASSED
    again = verdict(x[100:200])
    assert again.verdict == LOOK
    known = ScoredSet.of(monitor, "known", x[100:200], known=True)
    assert checked(monitor, [known])[ALARMS].verdict == NOT_CHECKED
    assert "100\xa0% of the known scores are those of held-out inputs" in again.finding
    fitted = verdict(x[:100])
    assert fitted.verdict == FAILED
    assert "100 of 100 known inputs were fitted" in fitted.finding
    with pytest.warns(CalibrationWarning):
        monitor.calibrate([x[:100]], progress=False)
    wrong = verdict(x[200:])
    assert wrong.verdict == FAILED
    assert "100 of 100 held-out inputs were fitted" in wrong.finding
    monitor.calibrate([x[100:200]], progress=False)
    assert verdict(x[200:]).verdict == PASSED


def test_few_held_out_inputs_are_not_enough_and_how_many_are(classifier):
    classifier.calibration = Calibration(torch.rand(50))
    found = checked(classifier, [])[ENOUGH]
    assert found.verdict == LOOK
    low, high = stats.beta.ppf([0.025, 0.975], 2, 49)
    assert f"between {100 * low:.1f} and {100 * high:.1f}\xa0%" in found.finding
    needed = int("".join(filter(str.isdigit, found.advice)))
    assert true_rate(0.05, needed)[1] <= 0.1 < true_rate(0.05, needed // 2)[1]
    classifier.calibration = Calibration(torch.rand(needed))
    assert checked(classifier, [])[ENOUGH].verdict == PASSED


def counted(classifier, held_out, known, rate=0.05):
    """Return the checks of so many inputs, the known ones just like the held-out ones."""

    def even(count):
        return (torch.arange(count, dtype=torch.float64) + 0.5) / count

    classifier.calibration = Calibration(even(held_out) + 2e-5)  # not the same scores
    logits = torch.eye(3).repeat(known, 1)[:known]
    one = ScoredSet("known", even(known), known=True, outputs=logits)
    return checked(classifier, [one], rate)


@pytest.mark.parametrize(("held_out", "rate"), [(130, 0.05), (99, 0.1), (400, 0.01)])
def test_few_known_inputs_do_not_pass_the_rate(classifier, held_out, rate):
    level, sizes = 0.05 / 3, [*range(1, 61), 90, 200, 440, 700]
    for known in sizes:
        check = counted(classifier, held_out, known, rate)[ALARMS]
        chances = rates.alarms_by_chance(rate, [(held_out, known)])
        # so many alarms would not be noticed
        most = max(n for n in range(known + 1) if chances[n:].sum() >= level)
        assert f"up to {most} of {known} are within chance" in check.finding
        if most == known:
            assert check.verdict == NOT_CHECKED
        if check.verdict == PASSED:
            assert most <= 3 * rate * known + 0.5  # numbers of alarms are whole
            continue
        assert most + 1 > 3 * rate * known
        needed = int("".join(filter(str.isdigit, check.advice)))
        assert known < needed
        assert counted(classifier, held_out, needed, rate)[ALARMS].verdict == PASSED
    assert check.verdict == PASSED


def test_one_known_input_passes_nothing_that_chance_decides(classifier):
    found = counted(classifier, 200, 1)
    assert {found[name].verdict for name in (ALARMS, ALIKE, CLASSES)} == {NOT_CHECKED}
    assert found[ALARMS].advice == "Give about 54 known inputs."
    assert found[ALIKE].advice == "Give about 11 known inputs."
    assert found[CLASSES].advice == "Give more known inputs."
    # an alarm is less likely than the level of the check, and still one input tells nothing
    found = counted(classifier, 400, 1, 0.01)
    assert "up to 0 of 1" in found[ALARMS].finding
    assert found[ALARMS].verdict == LOOK


def test_a_difference_that_chance_explains_is_at_most_a_half(classifier):
    for known in [*range(1, 30), 100]:
        check = counted(classifier, 130, known)[ALIKE]
        most = float(check.finding.split("up to ")[1].split()[0])
        assert most <= 1
        expected = NOT_CHECKED if most == 1 else LOOK if most > 0.5 else PASSED
        assert check.verdict == expected
        assert check.advice == ("" if expected == PASSED else "Give about 12 known inputs.")
    assert counted(classifier, 8, 10_000, 0.3)[ALIKE].verdict == LOOK
    assert counted(classifier, 8, 10_000, 0.3)[ALIKE].advice.startswith("Calibrate with more")


def test_classes_are_compared_where_alarms_could_tell_them_apart(classifier):
    verdicts = [counted(classifier, 200, known)[CLASSES].verdict for known in range(1, 200, 9)]
    assert set(verdicts) == {PASSED, NOT_CHECKED}
    first = verdicts.index(PASSED)
    assert verdicts[:first] == [NOT_CHECKED] * first
    assert verdicts[first:] == [PASSED] * (len(verdicts) - first)


def test_small_groups_are_told(classifier):
    rng = np.random.default_rng(0)
    groups = torch.arange(600) % 3
    classifier._by = predicted_class
    calibration = Calibration(scores(rng, 600, False), groups)
    classifier.calibration = calibration
    own = torch.tensor([0] * 100 + [1] * 100 + [2] * 3)
    drawn = calibration.scores[groups == 0].median().expand(203)
    p_values = calibration.p_value(drawn, own)
    logits = nn.functional.one_hot(own).double()
    one = ScoredSet("known", drawn, known=True, outputs=logits, p_values=p_values)
    found = checked(classifier, [one])[CLASSES]
    classifier._by = None
    assert found.verdict == LOOK
    assert "Too few inputs to tell: 1 of 3 groups." in found.finding
    assert found.advice.startswith("Group 2: Give about ")


def test_few_unknown_inputs_that_score_higher_are_to_be_looked_at(classifier):
    classifier.calibration = Calibration(torch.rand(50))
    for known, unknown, verdict in ((1, 1, LOOK), (1, 20, LOOK), (20, 1, LOOK), (9, 9, PASSED)):
        sets = [
            ScoredSet("known", torch.arange(float(known)), known=True),
            ScoredSet("far", 99 + torch.arange(float(unknown)), known=False),
        ]
        found = checked(classifier, sets)["far score higher than known inputs"]
        assert "AUROC 1.000 (" in found.finding
        assert found.verdict == verdict


def test_unknown_inputs_that_score_lower_are_inverted(classifier):
    rng = np.random.default_rng(0)
    classifier.calibration = Calibration(scores(rng, 200, False))
    known = ScoredSet("known", scores(rng, 100, False), known=True)
    found = checked(
        classifier,
        [
            known,
            ScoredSet("far", 9 + known.scores, known=False),
            ScoredSet("same", scores(rng, 100, False), known=False),
            ScoredSet("low", 0.05 * known.scores, known=False),
            ScoredSet("few", torch.tensor([0.2, 3.0]), known=False),
        ],
    )
    of = {name.split()[0]: check for name, check in found.items() if "score higher" in name}
    assert {name: check.verdict for name, check in of.items()} == {
        **{"far": PASSED, "same": LOOK},
        **{"low": FAILED, "few": LOOK},
    }
    assert "inverted" in of["low"].finding
    assert "inverted" not in of["same"].finding
    assert "1.000 (" in of["far"].finding


def test_little_curvature_is_to_be_looked_at():
    torch.manual_seed(0)
    monitor = Monitor(nn.Linear(30, 20), Gaussian(), 2).fit(
        [torch.randn(400, 30)], progress=False
    )
    found = checked(monitor, [])[CURVATURE]
    assert found.verdict == LOOK
    assert "--rank 4" in found.advice
