"""Tables of layers, rank and prior: those of their rows, and in the guide that shows them."""

from __future__ import annotations

from pathlib import Path

import pytest

from scodbench import rows as result_rows
from scodbench.tables.choices import layers_table, prior_table, rank_table
from scodbench.tables.paper import markdown

ROOT = Path(__file__).parents[2]
SWEEPS = result_rows.read(ROOT / "results" / "sweeps.jsonl")
TABLES = {"layers_table": layers_table, "rank_table": rank_table, "prior_table": prior_table}


@pytest.mark.parametrize("name", TABLES)
def test_committed_tables_are_those_of_the_rows(name: str) -> None:
    text = (ROOT / "results" / f"{name}.md").read_text(encoding="utf-8")
    assert text == markdown(TABLES[name](SWEEPS))
    guide = (ROOT / "docs" / "guides" / "layers_rank_prior.md").read_text(encoding="utf-8")
    assert text.strip() in guide


@pytest.mark.parametrize("name", TABLES)
def test_nothing_makes_nothing(name: str) -> None:
    assert markdown(TABLES[name]([])) == ""


def swept(sweep: str, auroc: float, **choice: object) -> dict[str, object]:
    about = {"domain": "wine", "seed": 0, "ood": "pooled", "device": "cpu", "captured": 0.5}
    figures = {"auroc": auroc, "auroc_low": auroc - 0.03, "auroc_high": auroc + 0.01}
    name = "/".join(map(str, (sweep, *choice.values())))
    return {**about, **figures, "id": name, "sweep": sweep, **choice}


def test_the_chosen_layers_are_those_of_the_domain() -> None:
    rows = [
        swept("layers", 0.1 * i, share=s, chosen=s == 0.5)
        for i, s in enumerate((0.0, 0.5, 1.0))
    ]
    (line,) = layers_table(rows).lines
    assert line["last linear layer"] == "0.000"
    assert line["last layers"] == "0.100 (last 50%)"
    assert line["all layers"] == "0.200"
    assert layers_table(rows[:1]).lines[0]["last layers"] == ""  # a sweep that was stopped


def test_the_rank_is_that_of_the_largest_sketch() -> None:
    rows = [swept("rank", 0.9, size=40, rank=4), swept("rank", 0.8, size=80, rank=4)]
    table = rank_table([*rows, swept("rank", 0.85, size=80, rank=80)])
    (line,) = table.lines
    assert (line["rank 4"], line["largest"]) == ("0.800,\xa050%", "0.850,\xa050% (80)")
    assert "± 0.020 at most" in table.caption
    assert line["rank 16"] == ""


def test_a_prior_that_was_not_tried_has_an_empty_cell() -> None:
    (line,) = prior_table([swept("prior", 0.9, prior_variance=1.0)]).lines
    assert (line["1"], line["1e-8"]) == ("0.900", "")


def pooled(sweep: str) -> list[dict[str, object]]:
    return [row for row in SWEEPS if row["sweep"] == sweep and row["ood"] == "pooled"]


def by_domain(rows: list[dict[str, object]], **wanted: object) -> dict[str, float]:
    return {
        row["domain"]: row["auroc"]
        for row in rows
        if all(row[key] == value for key, value in wanted.items())
    }


def test_what_the_guide_says_of_layers() -> None:
    rows = pooled("layers")
    last, whole = by_domain(rows, chosen=True), by_domain(rows, share=1.0)
    alone = by_domain(rows, share=0.0)
    assert all(last[domain] >= whole[domain] for domain in whole)
    lost = {domain: last[domain] - alone[domain] for domain in last}
    assert all(lost[domain] < 0.001 for domain in ("mnist", "binary_mnist", "cifar10"))
    weights = {row["domain"]: row["weights"] for row in rows if row["share"] == 0}
    for domain, count in {"rotated_mnist": 11, "taxinet_tiny": 66}.items():
        assert f"{lost[domain]:.2f}" == "0.12"
        assert weights[domain] == count


def test_what_the_guide_says_of_ranks() -> None:
    rows = pooled("rank")
    for domain in {row["domain"] for row in rows}:
        own = [row for row in rows if row["domain"] == domain]
        own = [row for row in own if row["size"] == max(row["size"] for row in own)]
        best = max(own, key=lambda row: row["rank"])["auroc"]
        apart = {row["rank"]: abs(best - row["auroc"]) for row in own}
        assert all(gap < 0.01 for rank, gap in apart.items() if rank >= 64)
        assert all(best - row["auroc"] < 0.04 for row in own if row["captured"] >= 0.9)
        if domain in {"wine", "binary_mnist"}:
            assert apart[1] < 0.006


def test_what_the_guide_says_of_priors() -> None:
    rows = pooled("prior")
    default = by_domain(rows, prior_variance=1.0)
    for row in rows:
        if row["prior_variance"] >= 0.01:
            assert abs(row["auroc"] - default[row["domain"]]) < 0.015


def guide(name: str) -> str:
    text = (ROOT / "docs" / "guides" / f"{name}.md").read_text(encoding="utf-8")
    return " ".join(text.split())


def test_the_guides_have_the_measured_false_alarms() -> None:
    table = (ROOT / "benchmarks" / "results" / "alarms.md").read_text(encoding="utf-8")
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
    found = {(line[0], line[1]): line for line in lines if len(line) > 3}
    plain, sure = found["one threshold", "0.05"], found["confidence=0.99", "0.05"]

    def percent(cell: str, digits: int) -> str:
        return " ± ".join(f"{100 * float(part):.{digits}f} %" for part in cell.split(" ± "))

    assert f"{percent(plain[2], 2)} without" in guide("held_out")
    assert f"{percent(sure[2], 2)} with 0.99" in guide("held_out")
    worst, by_class = (
        percent(line[3], 1).split(" ± ")[0]
        for line in (plain, found["by predicted class", "0.05"])
    )
    assert f"worst class has {worst} where" in guide("alarms")
    assert f"it has {by_class}" in guide("alarms")
