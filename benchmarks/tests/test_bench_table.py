"""Tables: what rows say, and nothing else."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest
from scipy import stats

from scodbench.rows import Row
from scodbench.tables.checks import TARGETS, checks
from scodbench.tables.headline import winners
from scodbench.tables.paper import (
    Table,
    comma_separated,
    markdown,
    methods_table,
    paper_table,
)
from scodbench.tables.summaries import Mean, comparable, mean, over_seeds
from scodbench.tables.sweeps import fidelities, fidelity_table, sketch_table


def row(method: str, seed: int, auroc: float, ms: float = 1.0, **more: object) -> Row:
    figures = {"auroc": auroc, "aupr": 0.5, "fpr95": 0.25, "ms_b1": ms, "forward_ms_b1": 0.5}
    about = {"domain": "wine", "method": method, "seed": seed, "ood": "pooled", "device": "cpu"}
    return {**about, **figures, **more}


def failed(method: str, why: str, **more: object) -> Row:
    about = {"domain": "wine", "method": method, "seed": 0, "ood": "pooled", "device": "cpu"}
    return {**about, "auroc": None, "why": why, **more}


ROWS = [
    row("scod", 0, 0.90, 2.0),
    row("scod", 1, 0.94, 2.0),
    row("naive", 0, 0.5, 0.5, fpr95=1.0),
    row("deep_ensemble", 0, 0.88, 4.0, aupr=0.9, fpr95=0.2),
    row("knn", 0, 0.97, 0.6),
    row("scod", 0, 0.7, ood="noise"),
    failed("energy", "OptionError: expected Categorical(), got Gaussian(); type knn"),
    failed("energy", "OptionError: expected Categorical(), got Gaussian()", domain="mnist"),
]


@pytest.mark.parametrize("count", [2, 3, 5, 9, 30])
def test_the_interval_is_students(count: int) -> None:
    values = [0.9 + 0.01 * i * (-1) ** i for i in range(count)]
    found = mean(values)
    assert found is not None
    low, high = stats.t.interval(0.95, count - 1, found.value, stats.sem(values))
    assert found.spread == pytest.approx((high - low) / 2, rel=1e-9)


def test_one_value_has_no_interval() -> None:
    assert mean([0.5]) == Mean(0.5, None, 1)
    assert mean([]) is None


def test_rows_without_a_figure_do_not_count() -> None:
    assert over_seeds(ROWS, "auroc", domain="wine", method="energy", ood="pooled") is None
    found = over_seeds(ROWS, "auroc", domain="wine", method="scod", ood="pooled")
    assert found is not None
    assert (found.value, found.seeds) == (pytest.approx(0.92), 2)


def test_devices_are_not_mixed() -> None:
    gpu = [row("scod", seed, 0.5, device="H200") for seed in (0, 1)]
    cpu = [row("scod", seed, 0.9) for seed in (0, 1)]
    more = [row("scod", 2, 0.9)]
    assert comparable(gpu + cpu + more) == cpu + more  # the most
    assert comparable(more + cpu + gpu) == more + cpu
    assert comparable(gpu + cpu) == cpu  # of as many, the last
    assert comparable(cpu + gpu) == gpu
    # rows without figures have no say
    why = [failed(m, "", device="H200") for m in ("energy", "vim", "knn")]
    assert comparable(cpu + why) == cpu
    # each domain has its own, and each sweep
    other = [row("scod", 0, 0.9, domain="mnist", device="H200")]
    assert comparable(cpu + other) == cpu + other
    swept = [{"domain": "wine", "sweep": s, "seed": 0, "device": s, "id": s} for s in "ab"]
    assert comparable(swept) == swept


def test_only_the_newest_rows_count() -> None:
    old, new = row("scod", 0, 0.1, settings="a"), row("scod", 0, 0.9, settings="b")
    (line,) = paper_table([old, new]).lines
    assert (line["AUROC"], line["seeds"]) == ("**0.900**", "1")


def test_the_papers_table_has_its_figures_beside_ours() -> None:
    table = paper_table(ROWS)
    lines = {line["method"]: line for line in table.lines}
    assert list(lines) == ["SCOD", "Naive (entropy)", "Deep Ensemble, 5"]  # those with rows
    assert lines["SCOD"]["AUROC"].startswith("**0.920 ± ")
    assert not lines["Deep Ensemble, 5"]["AUROC"].startswith("**")
    assert lines["Deep Ensemble, 5"]["AUPR"] == "**0.900**"
    assert lines["Deep Ensemble, 5"]["FPR95"] == "**0.200**"  # the lowest
    assert (lines["SCOD"]["AUROC, paper"], lines["SCOD"]["AUPR, paper"]) == ("0.966", "0.962")
    assert (lines["SCOD"]["ms"], lines["SCOD"]["x forward"]) == ("2", "4.0")
    assert (lines["SCOD"]["seeds"], lines["SCOD"]["device"]) == ("2", "cpu")
    assert lines["SCOD"]["rows"] == "`wine/pooled/scod/0-1`"
    assert any("trapezoidal" in note for note in table.notes)
    assert "rows in results/rows.jsonl," in table.caption
    assert "rows in own/rows.jsonl," in paper_table(ROWS, Path("own/rows.jsonl")).caption


def test_cifars_figure_is_over_the_papers_set() -> None:
    rows = [row("scod", 0, 0.9, domain="cifar10", ood=o) for o in ("tinyimagenet", "pooled")]
    (line,) = paper_table(rows).lines
    assert line["rows"] == "`cifar10/tinyimagenet/scod/0`"


def test_the_methods_table_has_a_column_for_each_set() -> None:
    table = methods_table(ROWS)
    methods = [line["method"] for line in table.lines]
    assert methods == ["SCOD", "Naive (entropy)", "Deep Ensemble, 5", "KNN"]
    assert table.lines[0]["wine: noise"] == "**0.700** (1)"  # of one of two networks
    knn = {"method": "KNN", "wine: pooled": "**0.970** (1)", "wine: noise": ""}
    assert table.lines[3] == knn
    assert "`domain/set/method/seed`" in table.caption
    assert "wine on cpu" in table.caption
    (note,) = table.notes
    assert (
        note == "No figures for Energy on wine, mnist: expected Categorical(), got Gaussian()."
    )


def test_markdown_has_caption_table_and_notes_apart() -> None:
    text = markdown(Table([{"method": "a", "AUROC": "1"}], "Above.", ["One.", "Two."]))
    rule = "| method | AUROC |\n| --- | --: |\n| a | 1 |\n"
    assert text == f"Above.\n\n{rule}\nOne.\n\nTwo.\n"


def test_a_table_of_methods_has_a_section_for_each_domain() -> None:
    rows = [*ROWS, row("vim", 0, 0.8, domain="mnist", ood="fashion")]
    wine, mnist = markdown(methods_table(rows)).split("### ")[1:]
    assert wine.startswith("Wine (2)\n\n| method | all together | noise |")
    assert "ViM" not in wine
    assert mnist.startswith("MNIST (1)\n\n| method | Fashion-MNIST |")
    assert [line.split(" | ")[0] for line in mnist.splitlines()[4:5]] == ["| ViM"]


def test_winners_begin_with_the_largest_loss() -> None:
    rows = [
        *(row(m, s, a + s / 100) for m, a in (("knn", 0.9), ("vim", 0.8), ("scod_ll", 0.85))
          for s in (0, 1, 2)),
        row("energy", 0, 0.8, domain="mnist", auroc_low=0.78, auroc_high=0.83),
        row("scod", 0, 0.99, domain="mnist"),  # a variant, no other method
        row("energy", 0, 0.9, domain="cifar10"),
        row("naive", 0, 0.3, domain="cifar10"),
        row("vim", 0, 0.9001, domain="cifar10"),  # the same in three digits
        row("knn", 0, 0.5, domain="binary_mnist"),
        row("fused", 0, 0.9, domain="binary_mnist"),
    ]  # fmt: skip
    swept = [
        row("", 0, 0.6, domain=d, study="separation", name="fused")
        for d in ("cifar10", "mnist")
    ]
    lines = winners(rows, swept).lines
    assert [line["unknown inputs of"] for line in lines] == [
        "CIFAR-10, 1 network",
        "MNIST, 1 network",
        "Wine, 3 networks",
        "Binary MNIST, 1 network",
    ]
    cifar, mnist, wine, binary = lines
    assert (cifar["best other method"], cifar["Fused"]) == ("ViM and Energy **0.900**", "0.600")
    assert mnist["best other method"] == "Energy **0.800 (0.780\N{NON-BREAKING HYPHEN}0.830)**"
    assert wine["best other method"].startswith("KNN **0.910 ± ")
    assert wine["SCOD, last layers"].startswith("0.860 ± ")
    assert (binary["Fused"], binary["best other method"]) == ("**0.900**", "KNN 0.500")
    assert "SCOD" not in mnist["best other method"]
    assert winners([]).lines == []


def test_csv_reads_back_without_marks() -> None:
    lines = list(csv.DictReader(io.StringIO(comma_separated(paper_table(ROWS)))))
    assert lines[0]["AUROC"].startswith("0.920")
    assert (lines[0]["method"], lines[0]["rows"]) == ("SCOD", "wine/pooled/scod/0-1")


def test_domains_beyond_the_papers_are_in_the_other_tables() -> None:
    rows = [row("scod", 0, 0.9, domain=name) for name in ("taxinet_xplane", "taxinet_tiny")]
    assert not paper_table(rows).lines
    (line,) = methods_table(rows).lines
    assert list(line) == ["method", "taxinet_tiny: pooled", "taxinet_xplane: pooled"]


def test_nothing_makes_nothing() -> None:
    for table in (paper_table([]), methods_table([]), sketch_table([]), fidelity_table([])):
        assert comma_separated(table) == markdown(table) == ""


def swept(sweep: str, sketch: str, seed: int, auroc: float, **more: object) -> Row:
    about = {"domain": "wine", "sweep": sweep, "sketch": sketch, "seed": seed, "ood": "pooled"}
    name = "/".join(map(str, (sweep, sketch, seed, *more.values())))
    return {**about, "device": "cpu", "auroc": auroc, "captured": 0.8, "id": name, **more}


def test_sketches_stand_side_by_side_at_equal_memory() -> None:
    sweeps = [
        swept("sketch", "Nystrom", 0, 0.9, size=40),
        swept("sketch", "Nystrom", 1, 0.9, size=40, captured=0.6),
        swept("sketch", "TwoSided", 0, 0.8, size=40),
        swept("sketch", "TwoSided", 0, 0.95, size=20),
        swept("sketch", "TwoSided", 0, 0.1, size=20, ood="noise"),
        {"domain": "wine", "sweep": "sketch", "seed": 2, "ood": "pooled", "auroc": None},
    ]
    small, large = sketch_table(sweeps).lines
    assert (small["T"], small["TwoSided AUROC"], small["Nystrom AUROC"]) == (
        "20",
        "**0.950**",
        "",
    )
    assert large["Nystrom AUROC"] == "**0.900 ± 0.000**"
    assert large["TwoSided AUROC"] == "0.800"
    assert large["Nystrom captured"] == "70.0%"
    assert large["rows"] == "`sketch/wine/pooled/40/*/0-1`"


FIDELITY = [
    swept("fidelity", "Nystrom", 0, 0.9010, rank=10),
    swept("fidelity", "Exact", 0, 0.9000, rank=10),
    swept("fidelity", "Nystrom", 1, 0.9000, rank=10),
    swept("fidelity", "Exact", 1, 0.9030, rank=10),
    swept("fidelity", "Exact", 2, 0.5, rank=10),  # without its sketch
]


def test_fidelity_is_a_difference_on_the_same_network() -> None:
    found = fidelities(FIDELITY)["wine"]
    assert found.differences == pytest.approx({0: 0.001, 1: -0.003})
    (line,) = fidelity_table(FIDELITY).lines
    assert (line["mean difference"], line["largest"]) == ("-0.0010", "0.0030")
    assert (line["within 0.002"], line["k"]) == ("no", "10")
    assert line["AUROC, exact"].startswith("0.901")  # of the seeds that have both
    assert line["rows"] == "`fidelity/wine/pooled/*/10/0-1`"
    (near,) = fidelity_table(FIDELITY[:2]).lines
    assert near["within 0.002"] == "yes"


def met(rows: list[Row], sweeps: list[Row]) -> dict[str, tuple[str, str]]:
    return {line["claim"]: (line["figure"], line["met"]) for line in checks(rows, sweeps).lines}


def test_claims_without_rows_are_neither_met_nor_not() -> None:
    found = met([], [])
    assert len(found) == len(TARGETS) + 3
    assert set(found.values()) == {("", "no rows")}


def test_claims_are_of_the_better_of_both() -> None:
    claim = "Wine, all together: SCOD or SCOD, last layers"
    low = [row("scod", 0, 0.90), row("scod_ll", 0, 0.905)]
    assert met(low, [])[claim] == ("0.9050", "no")
    high = [*low, row("scod_ll", 1, 0.917)]  # 0.911 on average
    assert met(high, [])[claim] == ("0.9110", "yes")
    assert met([row("naive", 0, 0.99)], [])[claim] == ("", "no rows")
    (line,) = (li for li in checks(high, []).lines if li["claim"] == claim)
    assert (line["target"], line["rows"]) == (">= 0.91", "`wine/pooled/scod_ll/0-1`")


@pytest.mark.parametrize(("domain", "ood"), TARGETS)
def test_every_target_is_the_least(domain: str, ood: str) -> None:
    for auroc, answer in ((TARGETS[domain, ood], "yes"), (TARGETS[domain, ood] - 1e-4, "no")):
        found = met([row("scod", 0, auroc, domain=domain, ood=ood)], [])
        assert [a for _, a in found.values() if a != "no rows"] == [answer]


def test_cifars_last_layers_are_to_beat_entropy_and_all_layers() -> None:
    about = {"domain": "cifar10", "ood": "tinyimagenet"}
    rows = [row("scod_ll", 0, 0.92, **about), row("naive", 0, 0.90, **about)]
    rows += [row("scod", 0, 0.93, **about)]
    found = met(rows, [])
    assert found["CIFAR-10, TinyImageNet: SCOD, last layers minus Naive (entropy)"] == (
        "0.0200",
        "yes",
    )
    assert found["CIFAR-10, TinyImageNet: SCOD, last layers minus SCOD"] == ("-0.0100", "no")


def test_fidelity_is_checked_on_every_network() -> None:
    claim = "Wine: sketch and exact matrix differ, at most"
    assert met([], FIDELITY)[claim] == ("0.0030", "no")
    assert met([], FIDELITY[:2])[claim] == ("0.0010", "yes")
