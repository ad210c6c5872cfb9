"""Numbers in tables, in the README and on the pages of results are those of the committed rows.

That pages have the tables as they are in their files, tests/test_pages.py checks.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from pathlib import Path
from statistics import mean, median

import pytest

from scodbench import alarms, sketch_accuracy
from scodbench import rows as result_rows
from scodbench.figures.runtime import front, points
from scodbench.methods import TITLES
from scodbench.rows import FUSED_ROWS_FILE, FUSED_SWEEP_FILE, ROWS_FILE, SWEEPS_FILE, Row
from scodbench.speed.speed_table import cost_table
from scodbench.tables.checks import checks
from scodbench.tables.headline import headline, winners
from scodbench.tables.paper import Table, markdown, methods_table, paper_table
from scodbench.tables.summaries import comparable, domains_in, over_seeds

ROOT = Path(__file__).parents[2]
SPEED = ROOT / "benchmarks" / "results"
FILES = (ROWS_FILE, FUSED_ROWS_FILE)
ROWS = [row for file in FILES for row in result_rows.read(ROOT / file)]
SWEEPS = result_rows.read(ROOT / SWEEPS_FILE)
FUSED = result_rows.latest(result_rows.read(ROOT / FUSED_SWEEP_FILE))
PAGES = [ROOT / "docs" / "results" / f"{name}.md" for name in ("index", "tables", "how")]
# an AUROC in prose, and the rows it is the mean of: an id, or what their ids begin with
AUROC = re.compile(r"(?<![\d.])(0\.[5-9]\d\d|1\.000)\b")
CITED = re.compile(r"(\d\.\d{3})<!-- ([\w./]+) -->")


def prose(page: Path) -> str:
    """Return a page in one line without its tables and its blocks of code."""
    text = page.read_text(encoding="utf-8")
    text = re.sub(r"<!-- table: .*?<!-- end table -->", "", text, flags=re.DOTALL)
    text = re.sub(r"```.*?```|^\|.*?$", "", text, flags=re.DOTALL | re.MULTILINE)
    return " ".join(text.split())


def tables() -> dict[str, Table]:
    told = " and ".join(map(str, FILES))
    return {
        "winners": winners(ROWS, FUSED, told),
        "headline": headline(ROWS, told),
        "paper_table": paper_table(ROWS, told),
        "methods_table": methods_table(ROWS, told),
        "checks": checks(ROWS, SWEEPS),
    }


@pytest.mark.parametrize("name", tables())
def test_committed_tables_are_those_of_the_rows(name: str) -> None:
    text = (ROOT / "results" / f"{name}.md").read_text(encoding="utf-8")
    assert text == markdown(tables()[name])


def test_the_table_of_costs_is_that_of_the_speed_rows() -> None:
    written = (SPEED / "cost.md").read_text(encoding="utf-8")
    assert cost_table(SPEED).strip() == written.strip()


def test_missed_targets_are_all_that_are_missed() -> None:
    missed = (SPEED / "missed.md").read_text(encoding="utf-8")
    every = (SPEED / "speed.md").read_text(encoding="utf-8").splitlines()
    verdicts = [line for line in every if line.endswith(("| met |", "| missed |"))]
    shown = [line for line in missed.splitlines() if line.endswith("| missed |")]
    assert shown == [line for line in verdicts if line.endswith("| missed |")]
    assert missed.startswith(f"{len(shown)} of {len(verdicts)} targets were missed")


def cited_mean(start: str) -> float:
    """Return the mean AUROC of the rows whose ids begin so."""
    if start.count("/") == 2:
        domain, ood, method = start.split("/")
        found = over_seeds(comparable(ROWS), "auroc", domain=domain, ood=ood, method=method)
        assert found is not None, f"no rows {start}"
        return found.value
    for rows in (comparable(ROWS), comparable(SWEEPS), FUSED):
        own = [row["auroc"] for row in rows if row["id"].startswith(f"{start}/")]
        if own:
            return mean(own)
    raise AssertionError(f"no rows {start}")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_numbers_in_prose_are_means_of_the_rows_they_cite(page: Path) -> None:
    text = prose(page)
    cited = CITED.findall(text)
    assert cited
    for number, start in cited:
        assert f"{cited_mean(start):.3f}" == number, start
    assert len(AUROC.findall(text)) == len(cited), "an AUROC without rows"


def brute_force_fronts() -> dict[str, set[str]]:
    """Return the methods that none beats, by domain, from the files line by line."""
    newest: dict[tuple[str, str, int], Row] = {}
    for file in FILES:
        for line in (ROOT / file).read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            if row["ood"] == "pooled" and row.get("auroc") is not None:
                newest[row["domain"], row["method"], row["seed"]] = row
    values = defaultdict(lambda: defaultdict(list))
    for (domain, method, _), row in newest.items():
        values[domain][method].append((row["ms_b1"] / row["forward_ms_b1"], row["auroc"]))
    found = {}
    for domain, own in values.items():
        means = {
            m: tuple(mean(part) for part in zip(*pairs, strict=True))
            for m, pairs in own.items()
        }
        found[domain] = {
            m
            for m, (time, auroc) in means.items()
            if not any(
                t <= time and a >= auroc and (t, a) != (time, auroc) for t, a in means.values()
            )
        }
    return found


def test_the_front_is_that_of_all_rows() -> None:
    rows, expected = comparable(ROWS), brute_force_fronts()
    drawn = {d.name: set(front(points(rows, d.name))) for d in domains_in(rows)}
    assert drawn == expected
    assert len(drawn) == 8
    judged = {row["method"] for row in ROWS if row.get("auroc") is not None}
    assert judged == set(TITLES)  # none is left out
    assert f"{len(TITLES)} methods" in prose(PAGES[0])


def test_the_results_say_where_ours_are_on_the_front() -> None:
    rows, fronts = comparable(ROWS), brute_force_fronts()
    text = prose(PAGES[0])
    domains = domains_in(rows)
    for method, name in (("scod_ll", "SCOD's last layers are"), ("fused", "Fused is")):
        on = [domain.title for domain in domains if method in fronts[domain.name]]
        assert f"{name} on the front on {_listed(on)}." in text
    off = [d.title for d in domains if not fronts[d.name] & {"scod", "scod_ll", "fused"}]
    assert f"On {_listed(off)} neither is" in text


def _listed(titles: list[str]) -> str:
    return f"{', '.join(titles[:-1])} and {titles[-1]}"


@pytest.mark.parametrize("name", ["sketch_accuracy", "alarms"])
def test_tables_beside_the_domains_are_those_of_their_rows(name: str) -> None:
    lines = (SPEED / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    table = {"sketch_accuracy": sketch_accuracy.table, "alarms": alarms.table}[name]
    assert lines
    found = table([json.loads(line) for line in lines])
    assert found == (SPEED / f"{name}.md").read_text(encoding="utf-8")


def speed_rows(device: str) -> dict[tuple[str, int, str], float]:
    """Return milliseconds of scores, by network, batch and method."""
    lines = (SPEED / f"speed_{device}.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if row["task"] == "score"]
    return {(row["net"], row["batch"], row["method"]): row["ms"] for row in rows}


def test_the_readme_has_no_number_that_is_not_of_rows() -> None:
    lines = (SPEED / "alarms.jsonl").read_text(encoding="utf-8").splitlines()
    rates = defaultdict(list)
    for row in map(json.loads, lines):
        if row["task"] == "false alarms" and row["method"] == "one threshold":
            rates[row["level"]].append(100 * row["rate"])
    found = [
        f"{mean(rates[level]):.{digits}f}" for level, digits in ((0.01, 2), (0.05, 1), (0.1, 1))
    ]
    cpu, gpu = speed_rows("cpu"), speed_rows("cuda")
    passes = {
        net: cpu[net, 64, "scodkit, compiled"] / cpu[net, 64, "forward"]
        for net in ("wine", "rotated mnist", "binary mnist", "mnist 0-4")
    }
    wine = passes.pop("wine")
    frame = ("taxinet resnet-18", 1)
    text = prose(ROOT / "README.md")
    assert "gave {}, {} and {} %".format(*found) in text
    assert (
        f"takes {min(passes.values()):.1f} to {max(passes.values()):.1f} forward passes" in text
    )
    assert f"and {wine:.0f} on its tiny one for Wine" in text
    found += [f"{min(passes.values()):.1f}", f"{max(passes.values()):.1f}"]
    found += [
        f"{gpu[(*frame, m)]:.2f}" for m in ("scodkit, fused and captured", "forward, captured")
    ]
    # the entropy of regressors; a flagged share, measured by tests/test_documented_limits.py
    found += ["0.500", "0.5"]
    versions = {"0.1", "3.10", "2.6"}
    decimals = re.findall(r"(?<![\w.])\d+\.\d+(?![\w.]*\w)", re.sub(r"`[^`]*`", "", text))
    assert sorted(set(decimals) - versions) == sorted(set(found))
    naive = [
        m
        for d in domains_in(ROWS)
        if (
            m := over_seeds(
                comparable(ROWS), "auroc", domain=d.name, ood="pooled", method="naive"
            )
        )
        is not None
    ]
    assert min(m.value for m in naive) == pytest.approx(0.5)


def test_the_page_of_speed_has_the_numbers_of_the_rows() -> None:
    text, gpu = prose(ROOT / "docs" / "results" / "speed.md"), speed_rows("cuda")
    frame, digits = ("taxinet resnet-18", 1), ("mnist 0-4", 1024)
    for said, key, form in (
        ("ResNet-18 takes {} ms", (*frame, "scodkit, fused and captured"), ".2f"),
        ("captured forward pass takes {};", (*frame, "forward, captured"), ".2f"),
        ("takes {} ms for one image", ("mnist 0-4", 1, "scodkit, fused and captured"), ".2f"),
        ("it takes {} ms exactly", (*digits, "scodkit, captured"), ".1f"),
        ("exactly and {} ms", (*digits, "scodkit, directions=1, captured"), ".1f"),
        ("(forward pass {} ms)", (*digits, "forward, captured"), ".2f"),
    ):
        assert said.format(format(gpu[key], form)) in text
    cpu = speed_rows("cpu")
    nets = sorted({net for net, *_ in cpu})
    ratio = median(cpu[n, 1, "scodkit, compiled"] / cpu[n, 1, "scodkit"] for n in nets)
    assert 0.2 < ratio < 0.25
    assert "SCOD takes about a quarter of its time in eager mode" in prose(PAGES[0])
