"""The runner, as a user runs it: a process of its own, killed and started again."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from scodkit.bench import rows as result_rows
from scodkit.bench import runner

METHODS = ("scod", "naive", "mahalanobis", "energy")
KEYS = {"domain", "ood", "method", "seed", "auroc", "aupr", "fpr95", "auroc_low", "auroc_high"}
KEYS |= {"ms_b1", "ms_b64", "forward_ms_b1", "forward_ms_b64", "fit_s", "device", "id", "bytes"}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """A folder with wine that nobody made, in the published files' format."""
    folder = tmp_path_factory.mktemp("data") / "wine"
    folder.mkdir()
    generator = np.random.default_rng(0)
    for colour, count, shift in (("red", 1599, 0.0), ("white", 4898, 1.0)):
        table = generator.normal(shift, 1.0, (count, 11))
        quality = np.clip(np.round(5 + table[:, 0]), 3, 8)
        lines = [
            ";".join([*map("{:.3f}".format, row), str(int(q))])
            for row, q in zip(table, quality, strict=True)
        ]
        names = [f'"feature {i}"' for i in range(11)]
        head = ";".join([*names, '"quality"'])
        (folder / f"winequality-{colour}.csv").write_text("\n".join([head, *lines]) + "\n")
    return folder.parent


def start(
    data: Path, home: Path, *more: str, cache: Path | None = None
) -> subprocess.Popen[str]:
    """Start a run in ``home``; networks that are in ``cache`` need not be trained."""
    command = [sys.executable, "-m", "scodkit.cli.main", "bench", "run", "--domain", "wine"]
    command += ["--seeds", "1", "--rows", str(home / "rows.jsonl"), "--data", str(data)]
    for method in METHODS:
        command += ["--method", method]
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache or home), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*command, *more],
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory) -> tuple[Path, str]:
    """The rows of a run that nothing disturbed, and what it printed."""
    home = tmp_path_factory.mktemp("whole")
    process = start(data, home)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return home, out


def figures(path: Path) -> dict[str, float | None]:
    return {row["id"]: row["auroc"] for row in result_rows.read(path)}


def test_every_row_says_what_it_is(whole: tuple[Path, str]) -> None:
    rows = result_rows.read(whole[0] / "rows.jsonl")
    judged = [row for row in rows if row["auroc"] is not None]
    assert {row["method"] for row in judged} == {"scod", "naive", "mahalanobis"}
    for row in judged:
        assert set(row) >= KEYS
        assert row["id"] == f"wine/{row['ood']}/{row['method']}/0"
        assert 0 <= row["auroc_low"] <= row["auroc"] <= row["auroc_high"] <= 1
    assert {row["ood"] for row in judged} == {"white_wine", "noise", "pooled"}
    assert len({row["id"] for row in rows}) == len(rows)


def test_a_constant_score_tells_nothing_apart(whole: tuple[Path, str]) -> None:
    for row in result_rows.select(result_rows.read(whole[0] / "rows.jsonl"), method="naive"):
        assert (row["auroc"], row["fpr95"]) == (0.5, 1.0)


def test_pooled_figures_are_those_of_both_sets(whole: tuple[Path, str]) -> None:
    """With sets of one size the pooled AUROC is the mean."""
    rows = result_rows.read(whole[0] / "rows.jsonl")
    for method in ("scod", "mahalanobis"):
        own = {r["ood"]: r["auroc"] for r in result_rows.select(rows, method=method)}
        mean = (own["white_wine"] + own["noise"]) / 2
        assert own["pooled"] == pytest.approx(mean, abs=1e-9)


def test_a_method_that_is_not_for_it_says_why_once(whole: tuple[Path, str]) -> None:
    rows = result_rows.read(whole[0] / "rows.jsonl")
    (row,) = result_rows.select(rows, method="energy")
    assert row["auroc"] is None
    assert "expected Categorical()" in row["why"]


def test_the_run_ends_with_the_tables(whole: tuple[Path, str]) -> None:
    assert "| Wine | pooled | scod | 1 |" in whole[1]
    assert "0.966" in whole[1]  # the paper's figure, beside ours


@pytest.mark.parametrize("after", ["training", "a row"])
def test_a_killed_run_goes_on_where_it_was(
    after: str, data: Path, whole: tuple[Path, str], tmp_path: Path
) -> None:
    path = tmp_path / "rows.jsonl"
    if after == "a row":
        shutil.copytree(whole[0] / "scodkit", tmp_path / "scodkit")
    process = start(data, tmp_path)
    limit = time.monotonic() + 200
    while process.poll() is None and time.monotonic() < limit:
        nets = list((tmp_path / "scodkit" / "nets").glob("*.safetensors"))
        there = bool(result_rows.read(path)) if after == "a row" else bool(nets)
        if there:
            break
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    nets = sorted((tmp_path / "scodkit" / "nets").glob("*.safetensors"))
    trained_at = [net.stat().st_mtime_ns for net in nets]
    before = path.read_bytes() if path.exists() else b""
    if after == "a row":
        assert before
        path.write_bytes(before[:-7])  # as if the kill had come while a line was written
    again = start(data, tmp_path)
    _, err = again.communicate(timeout=300)
    assert again.returncode == 0, err
    assert [net.stat().st_mtime_ns for net in nets] == trained_at  # not trained again
    assert figures(path) == figures(whole[0] / "rows.jsonl")


@pytest.mark.parametrize("kept", [0, 1, 2, 3, 4, 5])
def test_rows_of_an_unfinished_job_are_made_again(
    kept: int, data: Path, whole: tuple[Path, str], tmp_path: Path
) -> None:
    """As if a kill had come after any number of lines, in the process itself for speed."""
    rows = result_rows.read(whole[0] / "rows.jsonl")
    path = tmp_path / "rows.jsonl"
    result_rows.rewrite(path, rows[:kept])
    where = runner.Where(path, data, whole[0] / "scodkit" / "nets")
    runner.run(["wine"], ("naive", "energy"), 1, where, progress=False)
    finished = [row["method"] for row in rows[:kept] if row.get("last")]
    found = [row["id"] for row in result_rows.read(path)]
    wanted = [r["id"] for r in rows if r["method"] in {*finished, "naive", "energy"}]
    assert sorted(found) == sorted(wanted)


def test_what_is_there_is_not_done_again(data: Path, whole: tuple[Path, str]) -> None:
    path = whole[0] / "rows.jsonl"
    before = path.read_bytes()
    process = start(data, whole[0])
    assert process.communicate(timeout=200)[0] == whole[1]
    assert path.read_bytes() == before


def test_several_processes_find_the_same(
    data: Path, whole: tuple[Path, str], tmp_path: Path
) -> None:
    process = start(data, tmp_path, "--processes", "2", cache=whole[0])
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert figures(tmp_path / "rows.jsonl") == figures(whole[0] / "rows.jsonl")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["--domain", "beer"], "expected a domain among wine"),
        (["--method", "magic"], "expected a method among scod"),
        (["--device", "gpu"], "expected the device cpu"),
    ],
)
def test_unknown_names_are_refused(
    wrong: list[str], said: str, data: Path, tmp_path: Path
) -> None:
    process = start(data, tmp_path, *wrong)
    out, err = process.communicate(timeout=100)
    assert process.returncode == 2
    assert said in err
    assert "Traceback" not in err + out
    assert not (tmp_path / "rows.jsonl").exists()


def test_missing_data_says_how_to_get_it(tmp_path: Path) -> None:
    process = start(tmp_path / "nothing", tmp_path)
    _, err = process.communicate(timeout=100)
    assert process.returncode == 2
    assert "scod data get wine" in err
    assert "Traceback" not in err
