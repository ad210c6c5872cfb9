"""Numbers in tables, in the README and on the page of results are those of the committed rows.

That pages have the tables as they are in their files, tests/test_pages.py checks.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import mean

import pytest

from scodbench import alarms, sketch_accuracy
from scodbench import rows as result_rows
from scodbench.figures.runtime import FAMILIES, front, points
from scodbench.figures.style import BLUE
from scodbench.speed.speed_table import cost_table
from scodbench.tables.headline import headline
from scodbench.tables.paper import markdown, methods_table, paper_table
from scodbench.tables.summaries import comparable, domains_in, over_seeds

ROOT = Path(__file__).parents[2]
ROWS = result_rows.read(ROOT / "results" / "rows.jsonl")
# a number, and the start of its rows' ids
CITED = re.compile(r"(\d\.\d{3}) \(`(\w+)/(\w+)/(\w+)`\)")
CITED_SWEEP = re.compile(r"(\d\.\d{3}) \(`(\w+/\w+/\w+/[\w.]+)`\)")


@pytest.mark.parametrize("name", ["headline", "paper_table", "methods_table"])
def test_committed_tables_are_those_of_the_rows(name: str) -> None:
    table = {"headline": headline, "paper_table": paper_table, "methods_table": methods_table}
    text = (ROOT / "results" / f"{name}.md").read_text(encoding="utf-8")
    assert text == markdown(table[name](ROWS))


def test_the_table_of_costs_is_that_of_the_speed_rows() -> None:
    folder = ROOT / "benchmarks" / "results"
    assert (
        cost_table(folder).strip() == (folder / "cost.md").read_text(encoding="utf-8").strip()
    )


def test_the_readme_says_where_scod_is_on_the_front_and_where_not() -> None:
    rows = comparable(ROWS)
    on, off = [], []
    for domain in domains_in(rows):
        unbeaten = set(front(points(rows, domain.name)))
        (on if unbeaten & set(FAMILIES[BLUE]) else off).append(domain.title)
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert f"SCOD's last layers are on that front on {_listed(on)}" in text
    assert f"On {_listed(off)} no monitor of ours is on it" in text


def _listed(titles: list[str]) -> str:
    return f"{', '.join(titles[:-1])} and {titles[-1]}"


def test_cited_numbers_are_means_of_their_rows() -> None:
    rows = comparable(ROWS)
    text = (ROOT / "docs/results/index.md").read_text(encoding="utf-8").replace("\n", " ")
    cited = CITED.findall(text)
    assert cited
    for number, domain, ood, method in cited:
        found = over_seeds(rows, "auroc", domain=domain, ood=ood, method=method)
        assert found is not None, f"no rows {domain}/{ood}/{method}"
        assert f"{found.value:.3f}" == number, f"{domain}/{ood}/{method}"


def test_cited_sweeps_are_means_of_their_rows() -> None:
    text = (ROOT / "docs/results/index.md").read_text(encoding="utf-8").replace("\n", " ")
    rows = comparable(result_rows.read(ROOT / "results" / "sweeps.jsonl"))
    cited = CITED_SWEEP.findall(text)
    assert cited
    for number, start in cited:
        found = [row["auroc"] for row in rows if row["id"].startswith(f"{start}/")]
        assert found, f"no rows {start}"
        assert f"{mean(found):.3f}" == number, start


@pytest.mark.parametrize("name", ["sketch_accuracy", "alarms"])
def test_tables_beside_the_domains_are_those_of_their_rows(name: str) -> None:
    folder = ROOT / "benchmarks" / "results"
    lines = (folder / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    table = {"sketch_accuracy": sketch_accuracy.table, "alarms": alarms.table}[name]
    assert lines
    found = table([json.loads(line) for line in lines])
    assert found == (folder / f"{name}.md").read_text(encoding="utf-8")
