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
