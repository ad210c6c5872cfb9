"""The numbers beside a page: complete, finite, and compared without seeing noise as change."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from scipy import stats

from report_pages import NASTY, ReadPage
from scodkit.errors import OptionError
from scodkit.metrics import curves
from scodkit.report import Report, ScoredSet, read_numbers
from scodkit.report.numbers import compared
from scodkit.report.rates import Rate


@pytest.fixture(scope="module")
def numbers(case):
    return case.report().numbers()


def leaves(value):
    if isinstance(value, dict):
        return [leaf for part in value.values() for leaf in leaves(part)]
    if isinstance(value, list):
        return [leaf for part in value for leaf in leaves(part)]
    return [value]


def test_they_are_those_of_the_page_and_finite(case, numbers, tmp_path):
    path = case.report().save(tmp_path / "a.html")
    saved = read_numbers(tmp_path / "a.json")
    text = (tmp_path / "a.json").read_text()
    assert "NaN" not in text
    assert "Infinity" not in text
    assert all(math.isfinite(leaf) for leaf in leaves(saved) if isinstance(leaf, float))
    assert saved == {**json.loads(json.dumps(numbers)), "made": saved["made"]}
    page = ReadPage(path.read_text())
    known = saved["sets"]["known ones"]
    flags = case.monitor.flag(case.known)
    assert known["alarms"]["count"] == int(flags.sum())
    assert known["mistakes"]["count"] == 7
    assert known["inputs"] == 100
    assert saved["threshold"] == case.monitor.calibration.threshold(0.05)
    assert [check["verdict"] for check in saved["checks"]] == [
        row[0].split(maxsplit=1)[1] for row in page.checks
    ]
    assert [check["finding"] for check in saved["checks"]] == [row[2] for row in page.checks]
    at_five = next(row for row in saved["promise"] if row["asked"] == 0.05)
    assert at_five["found"] == pytest.approx(float(flags.double().mean()))
    roc = curves(case.monitor.score(case.known), case.monitor.score(case.unknown)).roc
    assert saved["sets"][f"others {NASTY}"]["auroc"]["value"] == pytest.approx(roc.area)
    assert saved["made"] in page.words or saved["made"][:10] in page.words


def test_the_error_of_inputs_kept_is_counted_one_by_one(case, numbers):
    scores = case.monitor.score(case.known).double()
    wrong = case.monitor(case.known).output.argmax(1) != case.sets[0].targets
    order = scores.argsort(stable=True)
    assert len(numbers["errors"]) == 100
    for row in numbers["errors"][::9]:
        kept = round(row["kept"] * 100)
        count = int(wrong[order[:kept]].sum())
        ends = stats.binomtest(count, kept).proportion_ci(method="exact")
        found = [row[key] for key in ("error", "low", "high")]
        assert found == pytest.approx([count / kept, ends.low, ends.high])


def test_an_infinite_score_is_null(case, tmp_path):
    sets = [
        ScoredSet("a", torch.tensor([0.5, 1.0, math.inf]), known=True),
        ScoredSet("b", torch.tensor([math.inf, math.inf]), known=False),
    ]
    path = Report(case.monitor, sets).save(tmp_path / "a.html")
    assert read_numbers(path.with_suffix(".json"))["sets"]["b"]["scores"]["50 %"] is None


def test_other_files_are_not_replaced_and_not_read(case, tmp_path):
    own = tmp_path / "page.json"
    own.write_text('{"my": "settings"}')
    with pytest.raises(OptionError, match="another name for the page"):
        Report(case.monitor).save(tmp_path / "page.html")
    assert own.read_text() == '{"my": "settings"}'
    assert not (tmp_path / "page.html").exists()
    with pytest.raises(OptionError, match="got something else"):
        read_numbers(own)
    with pytest.raises(OptionError, match=r"page\.html"):
        Report(case.monitor).save(own)
    other = case.report().numbers() | {"sets": {"a": {}}}
    with pytest.raises(OptionError, match="make the other report again"):
        case.report(earlier=other).html()


def test_two_reports_side_by_side(case, numbers):
    page = ReadPage(case.report(earlier=numbers).html())
    head, *rows = page.table("Numbers of both reports")
    assert head == ["number", "this report", "the other", "difference", "verdict"]
    assert {row[-1] for row in rows} == {"within noise", "the same"}
    other = json.loads(json.dumps(numbers))
    share = other["sets"]["known ones"]["mistakes"]
    low, high = Rate(60, 100).ends
    share |= {"count": 60, "value": 0.6, "low": low, "high": high}
    del other["sets"][f"others {NASTY}"]
    page = ReadPage(case.report(earlier=other).html())
    rows = {row[0]: row[1:] for row in page.table("Numbers of both reports")[1:]}
    assert rows["mistakes, known ones"][2:] == ["-53.0 points", "beyond noise"]
    assert rows["alarms, known ones"][-1] == "within noise"
    assert rows[f"AUROC, others {NASTY}"][-1] == "only in this one"


def of_rates(rng, probabilities, total=150):
    sets = {}
    for i, p in enumerate(probabilities):
        rate = Rate(int(rng.binomial(total, p)), total)
        low, high = rate.ends
        share = {"value": rate.share, "low": low, "high": high}
        rest = dict.fromkeys(("mistakes", "auroc", "aupr", "squared_error"))
        sets[f"set {i}"] = {"alarms": share, "inputs": total, **rest}
    fit = {"captured": 0.9, "inputs": 100}
    one = {"sets": sets, "fit": fit, "false_alarm": 0.05, "threshold": 1.0}
    return one | {"held_out": 100, "stream": None}


def test_reports_of_equal_terms_rarely_differ_beyond_noise():
    rng, draws, marked = np.random.default_rng(0), 400, 0
    probabilities = (0.03, 0.1, 0.5, 0.95)
    for _ in range(draws):
        now, other = of_rates(rng, probabilities), of_rates(rng, probabilities)
        marked += any(row[-1].text == "beyond noise" for row in compared(now, other).rows)
    assert marked <= stats.binom.ppf(0.9999, draws, 0.05)
    far = compared(of_rates(rng, (0.1,)), of_rates(rng, (0.5,)))
    assert far.rows[0][-1].text == "beyond noise"
