"""The page of a report: what it says is true, and it needs nothing from anywhere."""

from __future__ import annotations

import base64
import hashlib
import itertools
import re

import pytest
import torch
from scipy.stats import binomtest

from report_pages import NASTY, ReadPage, columns_of
from scodkit.alarms import DriftAlarm
from scodkit.report.page import _whole


@pytest.fixture(scope="module")
def page(case):
    return ReadPage(case.report().html())


def shown(value):
    return f"{value:.3g}"


def test_alarms_are_those_the_monitor_raises(case, page):
    names = {"false alarms": "known ones", "caught": f"others {NASTY}"}
    for x, (what, name) in zip((case.known, case.unknown), names.items(), strict=True):
        count = int(case.monitor.flag(x, 0.05).sum())
        low, high = binomtest(count, len(x)).proportion_ci(method="exact")
        share = f"{100 * count / len(x):.1f}\xa0%"
        counted = f"{count} of {len(x)}, {100 * low:.1f} to {100 * high:.1f}\xa0%"
        assert page.facts[f"{what}, {name}"] == f"{share}: {counted}"
        row = next(row for row in page.table("Scores of the sets")[1:] if row[0] == name)
        scores = case.monitor.score(x)
        assert row[2] == str(len(x))
        assert row[4] == shown(float(scores.double().quantile(0.5, interpolation="lower")))
        assert row[6] == f"{share} ({counted})"


def test_the_area_is_counted_pair_by_pair(case, page):
    known, unknown = case.monitor.score(case.known), case.monitor.score(case.unknown)
    pairs = [(u > k) + 0.5 * (u == k) for k in known.tolist() for u in unknown.tolist()]
    area = sum(pairs) / len(pairs)
    assert page.facts[f"AUROC, others {NASTY}"].startswith(f"{area:.3f}: ")
    assert f"area {area:.3f} (" in page.words


def test_bars_are_counted_one_by_one(case, page):
    drawn = [c for c in columns_of(page.plots, "histogram") if "share" in c]
    assert len(drawn) == 2
    for columns, x in zip(drawn, (case.known, case.unknown), strict=True):
        scores = case.monitor.score(x).double().tolist()
        assert sum(columns["share"]) == pytest.approx(100)
        ends = list(zip(columns["left"], columns["right"], strict=True))
        for (left, right), share in zip(ends, columns["share"], strict=True):
            last = right == columns["right"][-1]
            held = sum(left <= s < right or (last and s == right) for s in scores)
            assert share == pytest.approx(100 * held / len(scores))


def test_the_threshold_is_drawn_where_the_alarm_is(case, page):
    threshold = case.monitor.calibration.threshold(0.05)
    lines = [c["x"] for c in columns_of(page.plots, "histogram") if "x" in c]
    assert lines == [[threshold, threshold]]
    assert page.facts["alarm above"].startswith(f"{threshold:.3g} nats")


def test_samples_have_their_own_prediction_score_and_p_value(case, page):
    rows = page.table("Inputs of each set")
    assert rows[0] == ["set", "is", "prediction", "score, nats", "p-value", "alarm", "sample"]
    assert len(rows) == 1 + 100 + 60
    first = [
        e for e in page.elements if e.tag == "tr" and e.attributes.get("data-extra") == "0"
    ]
    assert len(first) == 2 * 12
    for name, label, prediction, score, p_value, alarm, place in rows[1:]:
        x = (case.known if name == "known ones" else case.unknown)[int(place)]
        found = case.monitor(x[None])
        best = int(found.output[0].argmax())
        share = float(found.output[0].double().softmax(0)[best])
        wrong = name == "known ones" and best != int(case.sets[0].targets[int(place)])
        assert prediction == f"class {best} ({100 * share:.0f}\xa0%)" + " - a mistake" * wrong
        assert float(score) == pytest.approx(float(found.score), rel=6e-3)
        assert p_value == shown(float(found.p_value))
        assert alarm == ("alarm" if float(found.p_value) <= 0.05 else "no")
        assert label == ("" if name == "known ones" else f"{NASTY} {place}")


def test_shares_of_layers_are_those_of_all_samples_looked_at(case, page):
    rows = page.table("Shares of the layers")
    chosen = case.sets[1].spread(60)
    layers = case.monitor.explain(case.unknown[torch.tensor(chosen)]).layers
    for name, _, share in rows[1:]:
        own = layers.values[:, layers.names.index(name)].sum() / layers.values.sum()
        assert share == f"{100 * float(own):.1f}\xa0%"
    assert [row[0] for row in rows[1:]] == list(layers.names)


def test_the_stream_tells_when_the_alarm_rose(case, page):
    alarm = DriftAlarm(case.monitor.calibration, seed=0)
    scores = case.monitor.score(torch.cat([case.known, case.unknown]))
    raised = [alarm.push(score) for score in scores]
    at = raised.index(True) + 1
    assert page.facts["stream alarm at sample"] == f"{at}: of 160"
    assert f"alarm rose at sample {at}, {at - 100} samples later." in page.words
    drawn = next(c for c in columns_of(page.plots, "stream") if len(c["x"]) > 2)
    assert drawn["y"] == pytest.approx(scores.double().tolist())
    wealth = next(c for c in columns_of(page.plots, "evidence") if len(c["x"]) > 2)
    assert wealth["y"][-1] == pytest.approx(alarm.log_wealth / 2.302585, abs=1e-4)


def test_the_fit_and_its_fingerprints_are_told(case, page, path):
    basis = case.monitor.basis
    captured = f"{100 * basis.captured:.1f}\xa0%: 12 directions"
    assert page.facts["captured curvature"] == captured
    drawn = next(c for c in columns_of(page.plots, "captured") if "sum" in c)
    assert drawn["sum"][-1] == pytest.approx(basis.captured)
    assert drawn["sum"][2] == pytest.approx(float(basis.values[:3].sum()) / basis.trace)
    spectrum = columns_of(page.plots, "spectrum")[0]
    assert spectrum["y"] == pytest.approx(basis.values.double().tolist())
    case.monitor.save(path)
    saved = path.read_bytes().decode("latin1")
    settings = {row[0]: row[1] for row in page.table("What made this page")}
    for name in ("fingerprint of the chosen weights", "fingerprint of the model"):
        assert len(settings[name]) >= 32
        assert settings[name] in saved
    weights = sum(float(row[3]) for row in page.table("Weights the scores are about")[1:])
    assert weights == sum(p.numel() for p in case.monitor.model.parameters())


def test_the_page_is_small_and_asks_for_nothing(case, tmp_path):
    path = case.report().save(tmp_path / "page.html")
    assert path.stat().st_size < 5_000_000
    assert sorted(p.name for p in tmp_path.iterdir()) == ["page.html", "page.json"]
    text = path.read_text(encoding="utf-8")
    page = ReadPage(text)
    for element in page.elements:
        for name in ("src", "href", "data", "action", "srcset", "poster", "background"):
            value = element.attributes.get(name)
            assert value is None or value.startswith(("data:image/png;base64,", "#")), value
        assert element.tag not in ("link", "iframe", "object", "embed", "base", "form")
        assert not [name for name in element.attributes if name.startswith("on")]
    style = re.search(r"<style>(.*?)</style>", text, re.DOTALL)
    assert style is not None
    assert not re.search(r"url\(|@import", style[1])


def test_only_the_pages_own_scripts_may_run(page):
    policy = next(
        e.attributes["content"]
        for e in page.elements
        if e.attributes.get("http-equiv") == "Content-Security-Policy"
    )
    _, bokeh, script = page.scripts
    for text in (bokeh, script):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    script_rule = policy.split(";")[1]
    assert "unsafe" not in script_rule
    assert "http" not in policy


def test_words_from_outside_stay_words(case, page):
    assert f"T {NASTY}" in page.words
    assert not [e for e in page.elements if e.attributes.get("src") == "x"]
    assert sum(e.tag == "script" for e in page.elements) == 3
    assert f"worst {NASTY}" in [row[0] for row in page.table("Methods, with")]


def test_the_page_can_be_read_without_eyes_or_mouse(page):
    assert page.elements[0].tag == "html"
    assert page.elements[0].attributes["lang"] == "en"
    levels = page.headings()
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(b - a <= 1 for a, b in itertools.pairwise(levels))
    assert len(page.ids()) == len(set(page.ids()))
    charts = [e.attributes for e in page.elements if e.attributes.get("class") == "chart"]
    assert [chart["id"] for chart in charts] == [plot["target_id"] for plot in page.plots]
    for chart in charts:
        assert chart["tabindex"] == "0"
        assert chart["aria-label"]
        for described in chart["aria-describedby"].split():
            assert described in page.ids()
    figures = sum(e.tag == "figure" for e in page.elements)
    assert figures == len(charts) == sum(e.tag == "figcaption" for e in page.elements) == 9
    for element in page.elements:
        if element.tag in ("img", "svg"):
            named = element.attributes.get("alt") or element.attributes.get("aria-label")
            assert named
    skip = next(e for e in page.elements if e.tag == "a")
    assert skip.attributes["href"] == "#main"


def luminance(colour):
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_colours_stand_out_in_light_and_in_dark(case, page):
    text = page.text
    themes = re.findall(r":root \{(.*?)\}", text, re.DOTALL)
    assert len(themes) == 2
    for theme in themes:
        colours = dict(re.findall(r"--([a-z]+): (#[0-9a-f]{6})", theme))

        def contrast(a, b, colours=colours):
            low, high = sorted(luminance(colours[name]) for name in (a, b))
            return (high + 0.05) / (low + 0.05)

        for words in ("ink", "soft", "link"):
            for ground in ("paper", "card"):
                assert contrast(words, ground) >= 4.5
        assert contrast("ink", "warn") >= 4.5
        for verdict in ("good", "look", "bad"):
            assert contrast(verdict, "paper") >= 4.5
        for mark in ("blue", "red", "green", "purple", "ink"):
            assert contrast(mark, "paper") >= 3


def test_short_names_do_not_break_after_a_hyphen():
    assert _whole("digits 5-9 <b>") == 'digits <span class="whole">5-9</span> &lt;b&gt;'
    for text in ("-0.5 to 3", "a" * 9 + "-b", "well-" + "a" * 9, "10->32"):
        assert "<span" not in _whole(text)
