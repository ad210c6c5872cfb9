"""Reports of less than everything, of other inputs, and of what is wrong."""

from __future__ import annotations

import base64
import copy
import io
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from report_pages import ReadPage, columns_of
from scodkit import Gaussian, Monitor, MonteCarlo, predicted_class
from scodkit.errors import BatchError, CalibrationError, MissingPeerError, OptionError
from scodkit.report import MethodLine, Report, ScoredSet, WatchedStream, gallery
from scodkit.report.findings import class_name


def vectors(n=100, seed=0):
    return torch.randn(n, 5, generator=torch.Generator().manual_seed(seed))


def regressor(likelihood=None):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2))
    return Monitor(net, likelihood or Gaussian(), 6).fit([vectors()], progress=False)


def sections(page):
    return [e.attributes["id"] for e in page.elements if e.tag == "section"]


def test_what_there_is_nothing_of_is_left_out():
    page = ReadPage(Report(regressor()).html())
    assert sections(page) == ["checks", "fit", "configuration"]
    assert set(page.facts) == {"captured curvature"}
    verdicts = [row[0].split()[-1] for row in page.checks]
    assert verdicts == ["checked", "checked", "checked", "checked", "passed"]
    assert [plot["target_id"] for plot in page.plots] == ["spectrum", "captured"]


def test_without_a_calibration_there_are_no_alarms():
    monitor = regressor()
    known = ScoredSet.of(monitor, "a", vectors(30, 1), known=True)
    page = ReadPage(Report(monitor, [known]).html())
    assert "separation" not in sections(page)
    assert "alarms" not in page.table("Scores of the sets")[0]
    titles = page.table("Inputs of each set")[0]
    assert titles == [
        *("set", "prediction", "score, nats", "sample"),
        "farthest from the training mean",
    ]
    assert not [label for label in page.facts if "alarm" in label]


@pytest.mark.parametrize(
    ("targets", "got"),
    [
        (torch.eye(3)[:2], r"torch.float32 of shape \(2, 3\)"),
        (torch.tensor([0.0, torch.nan]), r"torch.float32 of shape \(2,\)"),
        (["cat", "dog"], "a list"),
    ],
)
def test_targets_that_are_no_classes_are_refused(case, targets, got):
    scores, outputs = torch.tensor([0.5, 1.0]), torch.eye(3)[:2]
    known = ScoredSet("a", scores, known=True, outputs=outputs, targets=targets)
    with pytest.raises(BatchError, match=rf"classes counted from 0, got {got}; .*argmax\(1\)"):
        Report(case.monitor, [known]).html()


def test_a_class_before_the_first_has_no_name(case):
    monitor = copy.copy(case.monitor)
    monitor.notes = {"classes": ["cat", "dog", "cow"]}
    assert [class_name(monitor, n) for n in (-1, 2, 3)] == ["class -1", "cow", "class 3"]


def test_scores_alone_are_enough(case):
    sets = [
        ScoredSet("a", torch.tensor([0.5, 1.0, 2.0]), known=True),
        ScoredSet("b", torch.tensor([3.0, float("inf"), 0.0]), known=False),
    ]
    page = ReadPage(Report(case.monitor, sets).html())
    assert sections(page) == [
        "checks",
        "scores",
        "promise-kept",
        "separation",
        "inputs",
        "fit",
        "configuration",
    ]
    assert "1 infinite scores lie beyond" in page.words
    rows = page.table("Inputs of each set")
    assert rows[-1][1] == "∞"
    (orders,) = [o for name, o in page.orders.items() if name.startswith("Inputs")]
    assert orders[-1][1] == "Infinity"
    drawn = [c for c in columns_of(page.plots, "histogram") if "share" in c][1]
    assert sum(drawn["share"]) == pytest.approx(200 / 3)
    assert drawn["left"][0] == 0.0  # a score of 0 has no logarithm


@pytest.mark.filterwarnings("ignore::scodkit.errors.SuspiciousInputWarning")
def test_groups_have_their_own_p_values_and_no_common_threshold(case):
    monitor = Monitor(case.monitor.model, case.monitor.likelihood, 12)
    monitor.fit([torch.rand(100, 1, 6, 6)], progress=False)
    monitor.calibrate([torch.rand(600, 1, 6, 6)[:99]], by=predicted_class, progress=False)
    one = ScoredSet.of(monitor, "a", case.unknown, known=False)
    page = ReadPage(Report(monitor, [one], false_alarm=0.3).html())
    assert "alarm above" not in page.facts
    rate = float((monitor(case.unknown).p_value <= 0.3).double().mean())
    assert page.facts["caught, a"].startswith(f"{100 * rate:.1f}\xa0%: ")
    bare = ScoredSet("a", one.scores, known=False)
    assert "caught, a" not in ReadPage(Report(monitor, [bare]).html()).facts


def test_columns_of_a_table_are_shown_from_the_farthest_on():
    monitor = regressor()
    monitor.notes["columns"] = ["age", "sex", "bmi", "bp", "s1"]
    one = ScoredSet.of(monitor, "a", 3 * vectors(40, 2), known=False)
    page = ReadPage(Report(monitor, [one]).html())
    place = int(one.scores.argmax())
    explanation = monitor.explain(one.inputs, saliency=True)
    columns = explanation.columns
    assert columns.sentences(place)[0] in page.words
    away = columns.distance[place]
    head, *rows = page.table(f"a, sample {place}: columns, the farthest first")
    assert head == ["column", "value", "spreads", "slope"]
    order = away.abs().argsort(descending=True).tolist()
    assert [row[0] for row in rows] == [columns.names[i] for i in order]
    assert [float(row[1]) for row in rows] == pytest.approx(
        [float(columns.values[place, i]) for i in order], rel=1e-4
    )
    assert [float(row[2]) for row in rows] == pytest.approx(
        [float(away[i]) for i in order], rel=6e-3
    )
    slopes = explanation.saliency.shown(place)
    assert [float(row[3]) for row in rows] == pytest.approx(
        [float(slopes[i]) for i in order], rel=6e-2
    )


def test_vectors_without_columns_are_shown_as_bars():
    torch.manual_seed(0)
    wide = torch.randn(60, 80)
    monitor = Monitor(nn.Linear(80, 1), Gaussian(), 4).fit([wide[:40]], progress=False)
    one = ScoredSet.of(monitor, "a", wide[40:], known=False)
    page = ReadPage(Report(monitor, [one]).html())
    strips = [e.attributes for e in page.elements if e.tag == "svg"]
    assert len(strips) == 2 * 20  # all of them, and their slopes
    assert "slopes" in strips[1]["class"]
    top = wide[40 + int(one.scores.argmax())]
    first = [e.attributes for e in page.elements if e.tag == "rect"][:80]
    assert [float(bar["height"]) for bar in first] == pytest.approx(
        (top.abs() / top.abs().max()).tolist(), abs=1e-3
    )
    assert [bar.get("class") == "negative" for bar in first] == (top < 0).tolist()


def test_long_vectors_keep_their_peaks():
    values = torch.zeros(1000)
    values[437] = -3.0
    heights = gallery.bars(values)
    assert len(heights) == 96
    assert min(heights) == -1.0
    assert heights.index(-1.0) == pytest.approx(437 / 1000 * len(heights), abs=3)


def pixels(uri):
    assert uri.startswith("data:image/png;base64,")
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2]))))


def test_images_and_slopes_keep_their_places():
    sample = torch.zeros(1, 4, 6)
    sample[0, 1, 2] = 2.0
    assert pixels(gallery.image(sample)).tolist() == (sample[0] * 127.5).round().tolist()
    slopes = torch.zeros(2, 4, 6)
    slopes[0, 0, 5], slopes[1, 3, 0] = 1.0, -0.5
    drawn = pixels(gallery.slope_map(slopes))
    assert drawn[0, 5].tolist() == [213, 94, 0, 255]
    assert drawn[3, 0].tolist() == [0, 114, 178, 128]
    assert int((drawn[..., 3] > 0).sum()) == 2
    colours = torch.rand(3, 400, 300)
    assert pixels(gallery.image(colours)).shape == (160, 120, 3)


def test_a_likelihood_without_slopes_says_so():
    def family(output):
        return torch.distributions.Normal(output, 1.0)

    monitor = regressor(MonteCarlo(family, samples=2))
    one = ScoredSet.of(monitor, "a", vectors(20, 3), known=True)
    page = ReadPage(Report(monitor, [one]).html())
    assert "No slopes: " in page.words
    heads = [rows[0] for name, rows in page.tables.items() if name.startswith("a, sample")]
    assert heads == [["column", "value", "spreads"]] * 20


def test_a_long_stream_keeps_its_peaks(case):
    scores = torch.rand(20_000, generator=torch.Generator().manual_seed(0)) + 1
    scores[12_345] = 99.0
    stream = WatchedStream(scores.double(), torch.zeros(20_000).double(), 0.01)
    page = ReadPage(case.report(stream=stream).html())
    drawn = next(c for c in columns_of(page.plots, "stream") if len(c["x"]) > 2)
    assert len(drawn["x"]) <= 3002
    assert drawn["y"][drawn["x"].index(12_346)] == 99.0
    assert drawn["x"] == sorted(drawn["x"])
    assert "The alarm did not rise." in page.words
    assert len(page.text) < 5_000_000


def test_blank_columns_of_methods_are_left_out(case):
    lines = [MethodLine("a", auroc=0.5), MethodLine("b", auroc=0.7, caught=0.2)]
    page = ReadPage(case.report(methods=lines).html())
    rows = page.table("Methods, with")
    assert rows == [
        ["method", "AUROC", "caught"],
        ["a", "0.500", ""],
        ["b", "0.700", "20.0\xa0%"],
    ]


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: ScoredSet(" ", torch.ones(2), known=True), OptionError, "a name"),
        (lambda: ScoredSet("a", torch.ones(0), known=True), BatchError, "one score or more"),
        (lambda: ScoredSet("a", torch.tensor([float("nan")]), True), BatchError, "1 NaN"),
        (lambda: ScoredSet("a", torch.ones(2, 2), known=True), BatchError, "(2, 2)"),
        (
            lambda: ScoredSet("a", torch.ones(2), True, labels=["x"]),
            BatchError,
            "as many labels as scores in 'a', 2, got 1",
        ),
        (lambda: WatchedStream(torch.ones(2), torch.ones(3), 0.1), BatchError, "WatchedStream"),
    ],
)
def test_wrong_parts_are_refused(make, error, words):
    with pytest.raises(error) as caught:
        make()
    assert words in str(caught.value)


def test_wrong_reports_are_refused_and_change_nothing(case, tmp_path, monkeypatch):
    one = case.sets[0]
    with pytest.raises(OptionError, match="'known ones' twice"):
        Report(case.monitor, [one, one])
    path = tmp_path / "page.html"
    path.write_text("before")
    with pytest.raises(CalibrationError, match="at least 1/"):
        Report(case.monitor, [one], false_alarm=1e-6).save(path)
    with pytest.raises(FileNotFoundError, match="mkdir -p"):
        Report(case.monitor, [one]).save(tmp_path / "none" / "page.html")
    monkeypatch.setitem(sys.modules, "bokeh", None)  # as if it were not installed
    with pytest.raises(MissingPeerError, match=r"expected bokeh, .*\[report\]"):
        Report(case.monitor, [one]).save(path)
    assert path.read_text() == "before"
    assert [p.name for p in tmp_path.iterdir()] == ["page.html"]
