"""``scodbench``: what it says, what it refuses, what it writes."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner, Result

from scodbench import cli
from scodbench import rows as result_rows
from scodbench.domains import DOMAINS, OPTIONAL_DOMAINS
from scodbench.methods import METHODS
from scodbench.sweeps import SWEEPS
from scodkit import __version__
from scodkit.errors import OptionError


def scodbench(*words: str) -> Result:
    wide = {"COLUMNS": "3000", "TERMINAL_WIDTH": "3000", "NO_COLOR": "1"}
    return CliRunner().invoke(cli.app, list(words), env=wide)


def row(method: str, auroc: float | None, **other: object) -> result_rows.Row:
    figures = {"aupr": 0.5, "fpr95": 0.25, "ms_b1": 1.0, "forward_ms_b1": 0.5}
    about = {"domain": "wine", "method": method, "seed": 0, "ood": "pooled", "device": "cpu"}
    return {**about, **figures, "auroc": auroc, "settings": "a", **other}


@pytest.fixture
def home(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("words", [(), ("data",)])
def test_without_a_verb_there_is_help(words: tuple[str, ...]) -> None:
    assert "Usage: " in scodbench(*words).output


def test_help_has_the_verbs_in_the_order_of_the_work() -> None:
    lines = scodbench("--help").output.splitlines()
    verbs = ["run", "sweep", "table", "figures", "fused", "projected"]
    verbs += ["data", "speed", "sketch", "alarms", "layers", "prior"]
    first = [words[1] for words in map(str.split, lines) if len(words) > 1]
    assert [word for word in first if word in verbs] == verbs
    assert set(verbs) == set(typer.main.get_command(cli.app).commands)


@pytest.mark.parametrize("debug", [[], ["--debug"]])
def test_debug_shows_tracebacks(debug: list[str], monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["scodbench", *debug, "run", "--domain", "beer"])
    with pytest.raises(SystemExit, match="2"):
        cli.main()
    said = capsys.readouterr().err
    assert ("Traceback" in said) is bool(debug)
    assert "scodbench: expected a domain among wine" in said


@pytest.mark.parametrize(
    ("verb", "names"),
    [
        ("run", [*DOMAINS, *OPTIONAL_DOMAINS, *METHODS]),
        ("sweep", [*DOMAINS, *OPTIONAL_DOMAINS, *SWEEPS]),
    ],
)
def test_help_lists_the_names(verb: str, names: list[str]) -> None:
    text = scodbench(verb, "--help").output
    words = set(text.replace(",", " ").replace(".", " ").replace(";", " ").split())
    assert set(names) <= words


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run", "--domain", "beer"], "expected a domain among wine"),
        (["run", "--method", "magic"], "expected a method among scod"),
        (["sweep", "--sweep", "chimney"], "expected a sweep among rank"),
        (["run", "--device", "gpu"], "expected the device cpu"),
        (["speed", "large-models"], "expected the device cuda for large-models, got cpu"),
        (["speed", "directions", "--device", "cuda"], "expected the device cpu for directions"),
        (
            ["sweep", "--domain", "wine", "--sweep", "errors"],
            "a sweep that is for wine, got",
        ),
        (
            ["run", "--domain", "cifar10", "--method", "deep_ensemble"],
            "expected a method that is for cifar10, got deep_ensemble; type another --domain",
        ),
        (["table"], r"expected rows in results/rows.jsonl, found none; type: scodbench run"),
        (["figures"], r"expected rows in results/rows.jsonl, found none; type: scodbench run"),
    ],
)
def test_errors_say_what_to_type(words: list[str], said: str, home: Path) -> None:
    found = scodbench(*words)
    assert isinstance(found.exception, OptionError)
    assert said in str(found.exception)
    assert list(home.iterdir()) == []


def test_figures_are_named_and_lacking_sweeps_told(home: Path) -> None:
    result_rows.append(home / "results" / "rows.jsonl", [row("scod", 0.9)])
    found = scodbench("figures")
    assert found.exit_code == 0
    assert "results/figures/auroc_against_runtime.svg" in found.output
    assert (home / "results" / "figures" / "auroc_against_runtime.png").exists()
    assert "type: scodbench sweep" in found.stderr


def test_rows_of_unknown_domains_make_no_figures(home: Path) -> None:
    result_rows.append(home / "rows.jsonl", [row("scod", 0.9, domain="beer")])
    found = scodbench("figures", "--rows", "rows.jsonl")
    assert isinstance(found.exception, OptionError)
    assert "found none to draw; type: scodbench run" in str(found.exception)


@pytest.mark.parametrize(("version", "failed"), [("0.0.1", False), (__version__, True)])
def test_what_was_kept_or_failed_is_said(version: str, failed: bool, capsys) -> None:
    rows = [row("knn", None, why="no luck", failed=failed, scodkit=version)]
    with pytest.raises(typer.Exit) if failed else contextlib.nullcontext():
        cli._say_what_is_missing(rows, cli.Where(Path("rows.jsonl")), domain=("wine",))
    said = capsys.readouterr()
    assert "no luck" in said.out
    assert ("rows of scodkit 0.0.1 were kept" in said.err) is not failed


def test_tables_are_printed_and_written_whole(home: Path) -> None:
    result_rows.append(home / "rows.jsonl", [row("scod", 0.9)])
    words = ("table", "--rows", "rows.jsonl", "--output", "out")
    found = scodbench(*words)
    assert found.exit_code == 0
    written = {path.name for path in (home / "out").iterdir()}  # and nothing half-written
    assert written >= {"paper_table.md", "paper_table.csv", "methods_table.md", "checks.md"}
    assert all(name.endswith((".md", ".csv")) for name in written)
    assert (home / "out" / "paper_table.md").read_text() in found.output
    before = (home / "out" / "paper_table.md").stat().st_ino
    scodbench(*words)
    assert (home / "out" / "paper_table.md").stat().st_ino != before  # replaced, not emptied


class TestDomains:
    """On a CPU large networks take hours."""

    def test_it_is_left_out_by_default(self, capsys) -> None:
        assert set(cli._domains(None, "cpu")) == set(DOMAINS) - {"taxinet", "cifar10"}
        assert "taxinet is left out" in capsys.readouterr().err

    def test_asked_for_by_name_it_is_done_with_a_warning(self, capsys) -> None:
        assert cli._domains(["taxinet"], "cpu") == ("taxinet",)
        said = capsys.readouterr().err
        assert "takes hours on a CPU" in said
        assert len(said.splitlines()) == 1

    @pytest.mark.parametrize("given", [None, ["taxinet"]])
    def test_with_a_gpu_it_is_like_any_other(self, given: list[str] | None, capsys) -> None:
        assert cli._domains(given, "cuda") == tuple(given or DOMAINS)
        assert capsys.readouterr().err == ""

    def test_others_need_no_warning(self, capsys) -> None:
        assert cli._domains(["wine"], "cpu") == ("wine",)
        assert capsys.readouterr().err == ""


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux")
def test_there_are_as_many_processes_as_cores_for_this_one() -> None:
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert cli._cores() == 1
    finally:
        os.sched_setaffinity(0, before)
    assert cli._cores() == len(before)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_is_taken() -> None:
    cli.check_device("cuda")
