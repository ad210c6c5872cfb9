"""Tables and figures: what rows say, and nothing else."""

from __future__ import annotations

import csv
import io
import math
from pathlib import Path

import pytest
from scipy import stats

from scodkit.bench import figures
from scodkit.bench.figures.runtime import front, points
from scodkit.bench.rows import Row
from scodkit.bench.table import (
    Mean,
    comma_separated,
    markdown,
    mean,
    methods_table,
    over_seeds,
    paper_table,
)


def row(method: str, seed: int, auroc: float, ms: float = 1.0, ood: str = "pooled") -> Row:
    figures_ = {"auroc": auroc, "aupr": 0.5, "fpr95": 0.25, "ms_b1": ms, "forward_ms_b1": 0.5}
    return {"domain": "wine", "method": method, "seed": seed, "ood": ood, **figures_}


ROWS = [
    row("scod", 0, 0.90, 2.0),
    row("scod", 1, 0.94, 2.0),
    row("naive", 0, 0.5, 0.5),
    row("deep_ensemble", 0, 0.88, 4.0),
    row("knn", 0, 0.97, 0.6),
    row("scod", 0, 0.7, ood="noise"),
    {
        "domain": "wine",
        "method": "energy",
        "seed": 0,
        "ood": "pooled",
        "auroc": None,
        "why": "",
    },
]


@pytest.mark.parametrize("count", [2, 3, 5, 9, 10])
def test_the_interval_is_students(count: int) -> None:
    values = [0.9 + 0.01 * i * (-1) ** i for i in range(count)]
    found = mean(values)
    assert found is not None
    low, high = stats.t.interval(0.95, count - 1, found.value, stats.sem(values))
    assert found.spread == pytest.approx((high - low) / 2, rel=1e-3)


def test_one_value_has_no_interval() -> None:
    assert mean([0.5]) == Mean(0.5, None, 1)
    assert mean([]) is None


def test_rows_without_a_figure_do_not_count() -> None:
    assert over_seeds(ROWS, "auroc", domain="wine", method="energy", ood="pooled") is None
    found = over_seeds(ROWS, "auroc", domain="wine", method="scod", ood="pooled")
    assert found is not None
    assert (found.value, found.seeds) == (pytest.approx(0.92), 2)


def test_the_papers_table_has_its_figures_beside_ours() -> None:
    lines = {line["method"]: line for line in paper_table(ROWS)}
    assert list(lines) == ["scod", "naive", "deep_ensemble"]  # those with rows, in its order
    assert lines["scod"]["AUROC"].startswith("**0.920 ± ")
    assert not lines["deep_ensemble"]["AUROC"].startswith("**")
    assert lines["scod"]["AUROC, paper"] == "0.966"
    assert (lines["scod"]["ms"], lines["scod"]["x forward"]) == ("2", "4.0")
    assert lines["scod"]["seeds"] == "2"


def test_the_methods_table_has_a_column_for_each_set() -> None:
    lines = methods_table(ROWS)
    assert [line["method"] for line in lines] == ["scod", "naive", "deep_ensemble", "knn"]
    assert lines[0]["wine: noise"] == "0.700"
    assert lines[3] == {"method": "knn", "wine: pooled": "0.970", "wine: noise": ""}


def test_csv_reads_back_without_marks() -> None:
    lines = list(csv.DictReader(io.StringIO(comma_separated(paper_table(ROWS)))))
    assert lines[0]["AUROC"].startswith("0.920")
    assert lines[0]["method"] == "scod"
    assert comma_separated([]) == markdown([]) == ""


def test_the_front_is_what_nothing_beats() -> None:
    found = points(ROWS, "wine", "pooled")
    assert set(found) == {"scod", "naive", "deep_ensemble"}
    assert front(found) == ["naive", "scod"]
    for method in front(found):
        ms, auroc = found[method]
        others = [p for name, p in found.items() if name != method]
        assert not any(o[0] <= ms and o[1].value >= auroc.value for o in others)


def test_figures_are_drawn_from_rows_alone_and_the_same_twice(tmp_path: Path) -> None:
    sweeps = [
        {"sweep": "rank", "domain": "wine", "ood": "noise", "size": t, "rank": k, "auroc": 0.9}
        for t in (10, 20)
        for k in (1, 2, 4)
    ]
    edges = [float(i) for i in range(5)]
    shares = {"edges": edges, "known": [0.4, 0.6, 0, 0], "unknown": [0, 0, 0.5, 0.5]}
    drawn = [*ROWS, {**row("scod", 0, 0.7, ood="white_wine"), "histogram": shares}]
    paths = figures.draw(drawn, sweeps, tmp_path / "a")
    names = {path.name for path in paths}
    for name in ("auroc_against_runtime", "auroc_against_rank", "score_histograms"):
        assert {f"{name}.svg", f"{name}.png"} <= names
    assert not any("prior" in name for name in names)  # no rows, no figure
    again = figures.draw(drawn, sweeps, tmp_path / "b")
    for first, second in zip(paths, again, strict=True):
        assert first.read_bytes() == second.read_bytes()
        assert math.isfinite(first.stat().st_size)
    assert figures.draw([], [], tmp_path / "c") == []
