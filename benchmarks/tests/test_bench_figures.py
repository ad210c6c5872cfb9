"""Figures: drawn from rows alone, each where there are rows for it."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from scodbench import figures
from scodbench.figures.draw import FIGURES
from scodbench.figures.examples import decoded
from scodbench.figures.histograms import density
from scodbench.figures.runtime import front, points
from scodbench.figures.style import COLOURS, FAMILIES, style
from scodbench.methods import METHODS, TITLES
from scodbench.rows import Row, select
from scodbench.speed import projected_table


def row(method: str, seed: int, auroc: float, ms: float = 1.0, **more: object) -> Row:
    figures_ = {"auroc": auroc, "aupr": 0.5, "fpr95": 0.25, "ms_b1": ms, "forward_ms_b1": 0.5}
    about = {"domain": "wine", "method": method, "seed": seed, "ood": "pooled", "device": "cpu"}
    return {**about, **figures_, **more}


def histogram(first: float, step: float) -> dict[str, list[float]]:
    edges = [first + step * i for i in range(5)]
    return {"edges": edges, "known": [0.4, 0.6, 0, 0], "unknown": [0, 0, 0.5, 0.5]}


ROWS = [
    row("scod", 0, 0.90, 2.0, histogram=histogram(0, 1)),
    row("scod", 1, 0.94, 2.0),
    row("naive", 0, 0.5, 0.5),
    row("deep_ensemble", 0, 0.88, 4.0),
    row("knn", 0, 0.97, 0.6),
    row("scod", 0, 0.7, ood="noise", histogram=histogram(0, 0.5)),
]


def swept(sweep: str, ood: str = "pooled", seed: int = 0, **more: object) -> Row:
    name = "/".join(map(str, (sweep, ood, *more.values(), seed)))
    about = {"sweep": sweep, "domain": "rotated_mnist", "ood": ood, "seed": seed, "id": name}
    return {**about, "device": "cpu", **more}


def picture(grey: int) -> str:
    file = io.BytesIO()
    Image.fromarray(np.full((28, 28), grey, np.uint8)).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


SETS = ("digit_5", "upside_down", "pooled")
CURVE = [[0, 0.2, 1], [0, 0.8, 1]]
SWEEPS = [
    *(swept("rank", o, s, size=t, rank=k, auroc=0.8 + 0.01 * k + 0.02 * s)
      for o in SETS for s in (0, 1) for t in (10, 20) for k in (1, 2, 4)),
    *(swept("prior", o, prior_variance=v, auroc=0.9) for o in SETS for v in (0.1, 1.0)),
    *(swept("layers", o, share=s, auroc=0.9 - 0.1 * s, chosen=s == 0.5)
      for o in SETS for s in (0.0, 0.5, 1.0)),
    *(swept("sketch", size=t, sketch=k, auroc=0.9, captured=0.7)
      for t in (10, 20) for k in ("Nystrom", "TwoSided")),
    *(swept("errors", "mixed", domain="taxinet", method=m, auroc=0.8, roc=CURVE,
            threshold_share=0.2) for m in ("scod", "naive")),
    *(swept("size", "none", weights=n, fit_s=n / 1000, fit_on=9, ms_b1=1.0, ms_b64=0.5,
            forward_ms_b1=0.2, forward_ms_b64=0.1) for n in (1000, 4000)),
    *(swept("examples", o, pictures=[picture(0), picture(200)]) for o in ("known", *SETS[:2])),
    # what failed has no figures
    *(swept(s, seed=5, auroc=None, why="") for s in ("rank", "layers", "size", "examples")),
]  # fmt: skip


@pytest.fixture
def plt() -> Iterator[Any]:
    with style() as found:
        yield found


def test_every_figure_is_drawn_from_rows_and_the_same_twice(tmp_path: Path) -> None:
    paths = figures.draw(ROWS, SWEEPS, tmp_path / "a")
    names = {f"{name}.{ending}" for name in FIGURES for ending in ("svg", "png")}
    assert {path.name for path in paths} == names
    assert {path.name for path in (tmp_path / "a").iterdir()} == names  # and nothing besides
    again = figures.draw(ROWS, SWEEPS, tmp_path / "b")
    for first, second in zip(paths, again, strict=True):
        assert first.read_bytes() == second.read_bytes()


def test_without_rows_there_is_no_figure(tmp_path: Path) -> None:
    assert figures.draw([], [], tmp_path) == []
    few = figures.draw([], list(select(SWEEPS, sweep="prior")), tmp_path)
    assert {path.stem for path in few} == {"auroc_against_prior"}


def lines_of(axis: Any) -> dict[str, Any]:
    return {line.get_label(): line for line in axis.get_lines()}


def bars_of(axis: Any) -> list[tuple[float, float, float]]:
    """Places and ends of vertical bars."""
    found = [c.get_segments()[0] for c in axis.collections if len(c.get_segments())]
    return [(x, low, high) for (x, low), (_, high) in (segment.tolist() for segment in found)]


def test_curves_are_means_over_seeds_of_all_sets(plt: Any) -> None:
    (axis,) = FIGURES["auroc_against_rank"](plt, [], SWEEPS).axes
    assert "all unknown sets, 2 networks" in {text.get_text() for text in axis.texts}
    # nothing is said of sizes that are no part of the domain's own
    small, large = (line for line in axis.get_lines() if len(line.get_xdata()) == 3)
    for line in (small, large):
        assert list(line.get_xdata()) == [1, 2, 4]
        assert list(line.get_ydata()) == pytest.approx([0.82, 0.83, 0.85])
        assert line.get_markerfacecolor() == "none"
    assert bars_of(axis) == []  # only the size of the tables has any
    assert [ln.get_xdata()[0] for ln in axis.get_lines() if ln.get_linestyle() == ":"] == [50]


def test_the_size_of_the_tables_is_joined_and_has_bars(plt: Any) -> None:
    about = {"size": 304, "rank": 4}
    one = swept("rank", auroc=0.9, auroc_low=0.88, auroc_high=0.91, **about)
    (axis,) = FIGURES["auroc_against_rank"](plt, [], [one]).axes
    assert bars_of(axis) == [(4, 0.88, pytest.approx(0.91))]  # over test inputs
    two = [swept("rank", seed=s, auroc=0.9 + s / 10, auroc_low=0.1, **about) for s in (0, 1)]
    (axis,) = FIGURES["auroc_against_rank"](plt, [], two).axes
    assert bars_of(axis) == [(4, 0.9, 1.0)]  # the two values
    three = [swept("rank", seed=s, auroc=0.9 + s / 50, **about) for s in (0, 1, 2)]
    (axis,) = FIGURES["auroc_against_rank"](plt, [], three).axes
    ((_, low, high),) = bars_of(axis)
    assert (low, high) == (pytest.approx(0.8703, abs=1e-4), pytest.approx(0.9697, abs=1e-4))


def test_lines_of_sets_have_no_pooled_one(plt: Any) -> None:
    (axis,) = FIGURES["auroc_against_prior"](plt, [], SWEEPS).axes
    assert set(lines_of(axis)) == {"digit 5", "upside down", "default"}


def test_what_hardly_changes_looks_so(plt: Any) -> None:
    sweeps = [
        swept("prior", "digit_5", prior_variance=v, auroc=0.999 + v / 1e3) for v in (0.1, 1)
    ]
    (axis,) = FIGURES["auroc_against_prior"](plt, [], sweeps).axes
    low, high = axis.get_ylim()
    assert high - low == pytest.approx(0.05)
    assert low < 0.999 < 1 < high < 1.003


def test_the_last_linear_layer_stands_alone(plt: Any) -> None:
    (axis,) = FIGURES["auroc_against_layers"](plt, [], SWEEPS).axes
    lines = lines_of(axis)
    assert list(lines["digit 5"].get_xdata()) == [0.5, 1.0]
    assert list(lines["as in the tables"].get_xdata()) == [0.5, 0.5]
    alone = [ln.get_xydata().tolist()[0] for ln in axis.get_lines() if len(ln.get_xdata()) == 1]
    assert [auroc for _, auroc in alone] == pytest.approx([0.9, 0.9])
    assert max(place for place, _ in alone) < -0.1  # off the axis of shares, which begins at 0
    assert axis.get_xticklabels()[0].get_text() == "linear"


def test_histograms_of_other_bins_are_made_alike(plt: Any) -> None:
    (axis,) = FIGURES["score_histograms"](plt, ROWS, []).axes
    known, noise = axis.patches
    assert (known.get_label(), noise.get_label()) == ("known", "noise")
    assert [known.get_data().baseline, noise.get_data().baseline] == [0, 1]  # a strip each
    for patch, (values, edges) in (
        (known, density(histogram(0, 1), "known")),
        (noise, density(histogram(0, 0.5), "unknown")),
    ):
        shown = patch.get_data()
        assert shown.edges.tolist() == edges.tolist()
        heights = shown.values - shown.baseline
        assert heights / heights.max() == pytest.approx(values / values.max())
    assert density(histogram(0, 0.5), "unknown")[0].tolist() == [0, 0, 1, 1]
    (dashed,) = axis.get_lines()
    assert dashed.get_xdata()[0] == pytest.approx(1 + 0.55 / 0.6)  # 5 % of known are above


def test_the_front_is_what_nothing_beats() -> None:
    rows = [*ROWS, row("energy", 0, 0.6, 0.5)]  # as fast as the entropy, and better
    found = points(rows, "wine")
    assert set(found) == {"scod", "naive", "deep_ensemble", "knn", "energy"}
    assert front(found) == ["energy", "knn"]
    for method, (ms, auroc) in found.items():
        others = [p for name, p in found.items() if name != method]
        beaten = any(o[0] <= ms and o[1].value >= auroc.value for o in others)
        assert beaten != (method in front(found))


def test_every_method_has_a_look_of_its_own_and_a_place(plt: Any) -> None:
    assert sorted(sum(FAMILIES.values(), ())) == sorted(METHODS)
    rows = [row(method, 0, 0.9 + i / 200, i + 1) for i, method in enumerate(METHODS)]
    figure = FIGURES["auroc_against_runtime"](plt, rows, [])
    (panel,) = figure.axes
    shown = [line for line in panel.get_lines() if len(line.get_xdata()) == 1]
    assert {line.get_label() for line in shown} == set(TITLES.values())
    looks = {(line.get_marker(), line.get_markeredgecolor()) for line in shown}
    assert len(looks) == len(METHODS)
    named = [text.get_text() for text in figure.legends[0].get_texts()]
    assert sorted(named) == sorted([*TITLES.values(), "front"])


def test_the_front_is_drawn_filled_and_named(plt: Any) -> None:
    rows = [*ROWS, row("knn", 1, 0.99, 0.6), row("naive", 1, 0.5, 0.5, ood="noise")]
    (panel,) = FIGURES["auroc_against_runtime"](plt, rows, []).axes
    filled = {
        line.get_label()
        for line in panel.get_lines()
        if line.get_markerfacecolor() != "none" and len(line.get_xdata()) == 1
    }
    assert filled == {TITLES["naive"], TITLES["knn"]}
    (steps,) = (line for line in panel.get_lines() if len(line.get_xdata()) > 1)
    assert steps.get_xydata().tolist() == [[1.0, 0.5], [1.2, 0.98]]
    (small,) = (text.get_text().splitlines() for text in panel.texts)
    assert small == ["unknown: noise", "1 to 2 networks", "Front: Naive (entropy); KNN"]
    assert bars_of(panel) == [(1.2, 0.97, 0.99)]  # of the front alone, where there are any


def test_what_is_nearly_perfect_is_not_pressed_together(plt: Any) -> None:
    rows = [*ROWS, row("vim", 0, 1.0, 3.0)]
    (panel,) = FIGURES["auroc_against_runtime"](plt, rows, []).axes
    ends = panel.get_ylim()
    assert ends[0] < 0.5
    assert 1 < ends[1] < 1.01
    place = panel.transAxes.inverted().transform
    low, high = (place(panel.transData.transform((1, auroc)))[1] for auroc in (0.97, 1.0))
    assert high - low > 0.2


def test_error_curves_of_two_networks_are_two(plt: Any) -> None:
    other = swept("errors", "mixed", 1, domain="taxinet", method="scod", auroc=0.6,
                  roc=[[0, 0.4, 1], [0, 0.6, 1]], threshold_share=0.4)  # fmt: skip
    (axis,) = FIGURES["error_roc"](plt, [], [*SWEEPS, other]).axes
    labelled = lines_of(axis)
    assert "SCOD: 0.800, 0.600" in labelled  # no interval of two
    first, second = (line for line in axis.get_lines() if line.get_color() == COLOURS["scod"])
    assert first.get_xydata().tolist() == np.transpose(CURVE).tolist()
    assert second.get_xydata().tolist() == [[0, 0], [0.4, 0.6], [1, 1]]
    (small,) = (text.get_text() for text in axis.texts)
    assert small == "2 networks; large errors: 20% and 40%"
    assert axis.get_legend().get_title().get_text() == "AUROC of each network"


def test_error_curves_of_more_networks_are_their_mean(plt: Any) -> None:
    more = [
        swept("errors", "mixed", s, domain="taxinet", method="scod", auroc=0.7 + s / 10,
              roc=[[0, 0.2 * s, 1], [0, 0.6 + 0.1 * s, 1]], threshold_share=0.1 * s)
        for s in (1, 2, 3)
    ]  # fmt: skip
    (axis,) = FIGURES["error_roc"](plt, [], more).axes
    (line,) = (line for line in axis.get_lines() if line.get_color() == COLOURS["scod"])
    assert line.get_xydata()[1].tolist() == pytest.approx([0.4, 0.8])
    assert line.get_label() == "SCOD: 0.900 ± 0.248"
    assert axis.get_legend().get_title().get_text().startswith("AUROC, mean of 3 networks")
    assert axis.texts[0].get_text() == "3 networks; large errors: 10% to 30%"


def test_costs_are_over_the_number_of_weights(plt: Any) -> None:
    scoring, fitting = FIGURES["runtime_against_size"](plt, [], SWEEPS).axes
    assert set(lines_of(scoring)) >= {"scored prediction, batch 1", "bare prediction, batch 64"}
    assert lines_of(fitting)["measured"].get_xydata().tolist() == [[1000, 1], [4000, 4]]
    assert fitting.get_ylabel() == "seconds, 9 samples"
    assert (scoring.get_xscale(), scoring.get_yscale()) == ("log", "log")


def test_slopes_leave_out_what_ran_sample_by_sample(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def net(weights: int, ms: float, engine: str, *, projected: bool) -> list[Row]:
        about = {"net": "encoder", "weights": weights, "projected": projected, "batch": 8}
        more = {"engine": f"{engine} on cuda", "ms": ms, "kept": weights}
        return [{**about, **more, "method": m} for m in ("fit", "score", "forward, backward")]

    drawn = []
    monkeypatch.setattr(projected_table, "save", lambda figure, *_: drawn.append(figure))
    ran = ((10, 1.0, "HookEngine"), (100, 90.0, "LoopEngine"), (1000, 10.0, "HookEngine"))
    nets = [net(*one, projected=projected) for one in ran for projected in (False, True)]
    projected_table.figure(nets, tmp_path)
    fit, _, kept = drawn[0].axes
    named = lines_of(fit)
    assert list(named["whole weights, slope 0.50 (2 points)"].get_xdata()) == [10, 1000]
    assert list(named["whole weights, run sample by sample: in no slope"].get_xdata()) == [100]
    assert "whole weights, slope 1.00 (3 points)" in lines_of(kept)  # memory is the same


def test_pictures_are_put_in_strips(plt: Any) -> None:
    (axis,) = FIGURES["example_inputs"](plt, [], SWEEPS).axes
    sheet = axis.images[0].get_array()
    names = [label.get_text() for label in axis.get_yticklabels()]
    assert names == ["known", "digit 5", "upside down"]
    assert sheet.shape == (3 * 28 + 2 * 2, 2 * 28 + 2, 3)
    assert (sheet[:28, :28] == 0).all()
    assert (sheet[30:58, 30:58] == 200).all()
    assert (sheet[28:30] == 255).all()
    assert decoded(picture(7)).shape == (28, 28, 3)
