"""What the guide and the walk-through say of two reports, beside the reports."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from command_line import scod
from report_pages import ReadPage
from scodkit.report import read_numbers

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "guides" / "report.md"
COUNT = re.compile(r"(\d+) of (\d+)")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("demo")
    run = scod("demo", "-o", "demo.html", cwd=place)
    assert run.code == 0, run.err
    return place


def test_five_questions_are_answered_by_the_demo(folder):
    """Processors round in their own ways while they train: rates agree within 2.5 points."""
    numbers = read_numbers(folder / "demo.json")
    page = ReadPage((folder / "demo.html").read_text(encoding="utf-8"))
    table = GUIDE.read_text(encoding="utf-8").partition("## Five questions")[2]
    rows = [line.split("|")[1:-1] for line in table.partition("\n## ")[0].splitlines()]
    answers = [row[-1] for row in rows if len(row) == 3][2:]
    assert len(answers) == 5
    known, unknown = (numbers["sets"][f"digits {name}"] for name in ("0-4", "5-9"))
    checks, classes = numbers["checks"], unknown["classes"]

    def agree(answer, *expected):
        told = [tuple(map(int, pair)) for pair in COUNT.findall(answer)]
        assert [total for _, total in told] == [total for _, total in expected]
        for (count, total), (own, _) in zip(told, expected, strict=True):
            assert count / total == pytest.approx(own / total, abs=0.025)

    def counts(rate):
        return rate["count"], rate["of"]

    within = COUNT.findall(checks[0]["finding"])[-1]
    agree(answers[0], counts(known["alarms"]), tuple(map(int, within)))
    assert checks[0]["verdict"] == checks[1]["verdict"] == "passed"
    assert checks[1]["finding"].startswith("No known input was found among the fitted ones")
    least = min(classes.values(), key=lambda one: one["alarms"]["value"])["alarms"]
    assert classes["digit 9"]["alarms"] == least
    agree(answers[2], counts(unknown["alarms"]), counts(least))
    for answer, rate in ((answers[0], known["alarms"]), (answers[2], unknown["alarms"])):
        told = re.search(r"([\d.]+) % \(([\d.]+) to ([\d.]+) %\)", answer)
        assert told is not None
        ends = [100 * rate[key] for key in ("value", "low", "high")]
        assert [float(own) for own in told.groups()] == pytest.approx(ends, abs=2.5)
    methods = {one["name"]: one for one in numbers["methods"]}
    best = [methods["ViM"], methods["Fused"]]
    caught = [(round(one["caught"] * 896), 896) for one in best]
    agree(answers[3], *caught, (round(best[0]["false_alarms"] * 201), 201))
    areas = re.findall(r"(0\.\d+) \((0\.\d+) to (0\.\d+)\)", answers[3])
    for told, one in zip(areas, [*best, methods["SCOD"]], strict=True):
        assert [float(own) for own in told] == pytest.approx(
            [one["auroc"], *one["auroc_ends"]], abs=0.01
        )
    silent = unknown["inputs"] - unknown["alarms"]["count"]
    agree(answers[4], (silent, 896))
    assert known["mistakes"]["count"] == 1
    assert "1 mistake in 201" in answers[4]
    assert "Inputs without an alarm: 0.0\xa0%" in page.words


def test_the_parts_that_the_guide_names_are_there(folder):
    page = ReadPage((folder / "demo.html").read_text(encoding="utf-8"))
    guide = GUIDE.read_text(encoding="utf-8")
    for name in ("The promise", "Class by class", "Methods compared", "Mistakes", "Inputs"):
        assert f"*{name}*" in guide
        assert name in page.words


def test_the_walk_through_passes_all_checks(tmp_path):
    own = shutil.copytree(ROOT / "examples" / "own_model", tmp_path / "own_model")
    subprocess.run([sys.executable, "model.py"], cwd=own, check=True)
    weights = "--weights weights.safetensors"
    for words in (
        f"fit model.py:net train.csv -o m.scod {weights} --likelihood gaussian --variance 0.3",
        f"calibrate m.scod model.py:net heldout.csv {weights}",
        f"report m.scod model.py:net {weights} --known test.csv --unknown slips.csv",
    ):
        run = scod(*words.split(), cwd=own)
        assert run.code == 0, run.err
    numbers = read_numbers(own / "report.json")
    assert [check["verdict"] for check in numbers["checks"]] == ["passed"] * 6
    told = (ROOT / "docs" / "start" / "shell.md").read_text(encoding="utf-8")
    assert "All six checks pass: 1 of 62 patients raises a false alarm, and all 62" in told
    assert numbers["sets"]["test"]["alarms"]["count"] <= 3
    assert numbers["sets"]["slips"]["alarms"]["count"] == 62
