"""The runner, as a user runs it: a process of its own, stopped, killed and started again."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from bench_runs import start, start_toy, wait_for, write_wine
from scodbench import rows as result_rows
from scodbench.rows import Row

METHODS = ("scod", "naive", "mahalanobis", "energy")
KEYS = {"domain", "ood", "method", "seed", "auroc", "aupr", "fpr95", "auroc_low", "auroc_high"}
KEYS |= {"ms_b1", "ms_b64", "forward_ms_b1", "forward_ms_b64", "fit_s", "device", "id", "bytes"}
KEYS |= {"network", "settings", "processes", "processor"}


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> tuple[Path, str]:
    """The rows of a run that nothing disturbed, and what it printed."""
    home = tmp_path_factory.mktemp("whole")
    command = ["-m", "scodbench.cli", "run", "--domain", "wine", "--seeds", "1"]
    command += ["--rows", str(home / "rows.jsonl"), "--data", str(write_wine(home / "data"))]
    command += ["--processes", "1", *(word for m in METHODS for word in ("--method", m))]
    process = start(command, home)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return home, out


@pytest.fixture(scope="module")
def rows(whole: tuple[Path, str]) -> list[Row]:
    return result_rows.read(whole[0] / "rows.jsonl")


def test_every_row_says_what_it_is(rows: list[Row]) -> None:
    judged = [row for row in rows if row["auroc"] is not None]
    assert {row["method"] for row in judged} == {"scod", "naive", "mahalanobis"}
    for row in judged:
        assert set(row) >= KEYS
        assert row["id"] == f"wine/{row['ood']}/{row['method']}/0/cpu/{row['settings']}"
        assert re.fullmatch("[0-9a-f]{8}", row["settings"])
        assert 0 <= row["auroc_low"] <= row["auroc"] <= row["auroc_high"] <= 1
        assert row["processes"] == 1
    assert {row["ood"] for row in judged} == {"white_wine", "noise", "pooled"}
    assert len({row["id"] for row in rows}) == len(rows)
    assert len({row["network"] for row in judged}) == 1
    assert len({row["settings"] for row in rows}) == len(METHODS)


def test_a_constant_score_tells_nothing_apart(rows: list[Row]) -> None:
    for row in result_rows.select(rows, method="naive"):
        assert (row["auroc"], row["fpr95"]) == (0.5, 1.0)


def test_pooled_figures_are_those_of_both_sets(rows: list[Row]) -> None:
    """With sets of one size the pooled AUROC is the mean."""
    for method in ("scod", "mahalanobis"):
        own = {r["ood"]: r["auroc"] for r in result_rows.select(rows, method=method)}
        mean = (own["white_wine"] + own["noise"]) / 2
        assert own["pooled"] == pytest.approx(mean, abs=1e-9)


def test_a_method_that_is_not_for_it_says_why_once(
    rows: list[Row], whole: tuple[Path, str]
) -> None:
    (row,) = result_rows.select(rows, method="energy")
    assert row["auroc"] is None
    assert row["why"].startswith("UnsupportedLikelihoodError: expected Categorical()")
    assert f"wine, energy left out (seed 0): {row['why']}" in whole[1].splitlines()


def test_the_run_ends_with_the_tables(whole: tuple[Path, str]) -> None:
    assert "| Wine | all together | SCOD | 1 |" in whole[1]
    assert "0.966" in whole[1]  # the paper's figure, beside ours


@pytest.mark.parametrize(("how", "processes"), [(signal.SIGKILL, 1), (signal.SIGINT, 2)])
def test_a_run_that_was_ended_goes_on_where_it_was(
    how: int, processes: int, tmp_path: Path
) -> None:
    path, hold = tmp_path / "rows.jsonl", tmp_path / "hold"
    methods = ("energy", "naive", "held")
    hold.touch()
    process = start_toy(tmp_path, methods, processes)
    # the first is refused at once; the second may have to wait for the third, to be timed
    assert wait_for(lambda: len(result_rows.read(path)) >= (3 if processes == 1 else 1))
    os.killpg(process.pid, how)
    _, err = process.communicate(timeout=100)
    kept = path.read_bytes()
    if how == signal.SIGINT:
        assert process.returncode == 130
        count = len(result_rows.read(path))
        said = f"{count} rows are in {path}, and the same command goes on from there"
        assert said in " ".join(err.split())
        assert "Traceback" not in err
    nets = tmp_path / "scodkit" / "nets"
    trained_at = {net: net.stat().st_mtime_ns for net in nets.iterdir()}
    path.write_bytes(kept + b'{"id": "cut o')  # as if a line had been written just then
    hold.unlink()
    again = start_toy(tmp_path, methods, 1)
    _, err = again.communicate(timeout=300)
    assert again.returncode == 0, err
    assert path.read_bytes().startswith(kept)
    assert {net: net.stat().st_mtime_ns for net in nets.iterdir()} == trained_at
    names = [row["id"] for row in result_rows.read(path)]
    assert len(set(names)) == len(names) == 2 + 2 + 1
