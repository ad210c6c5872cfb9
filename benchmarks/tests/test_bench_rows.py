"""Rows: appended whole, read back, whatever was cut off or came later."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from filelock import FileLock
from hypothesis import given, settings
from hypothesis import strategies as st

from scodbench import rows
from scodkit.errors import OptionError


def bare(found: list[rows.Row]) -> list[rows.Row]:
    """Return rows without what the file says of their number."""
    return [{k: v for k, v in row.items() if k not in ("part", "of")} for row in found]


def test_rows_come_back_in_order(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "rows.jsonl"
    rows.append(path, [{"a": 1}, {"a": 2}])
    rows.append(path, [{"a": 3, "text": "line\nend and ±"}])
    rows.append(path, [])
    found = rows.read(path)
    assert bare(found) == [{"a": 1}, {"a": 2}, {"a": 3, "text": "line\nend and ±"}]
    assert [(row["part"], row["of"]) for row in found] == [(1, 2), (2, 2), (1, 1)]


def test_no_file_has_no_rows(tmp_path: Path) -> None:
    assert rows.read(tmp_path / "none") == []


@settings(max_examples=60, deadline=None)
@given(cut=st.integers(0, 400), sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_a_cut_file_loses_the_last_job_only(
    tmp_path_factory, cut: int, sizes: list[int]
) -> None:
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    jobs = [[{"job": i, "name": "é" * j} for j in range(size)] for i, size in enumerate(sizes)]
    ends = [0]
    for job in jobs:
        rows.append(path, job)
        ends.append(path.stat().st_size)
    left = max(0, ends[-1] - cut)
    path.write_bytes(path.read_bytes()[:left])
    kept = [row for job, end in zip(jobs, ends[1:], strict=True) if end <= left for row in job]
    assert bare(rows.read(path)) == kept
    rows.append(path, [{"job": "new"}])
    assert bare(rows.read(path)) == [*kept, {"job": "new"}]


def test_rows_without_numbers_count(tmp_path: Path) -> None:
    """As earlier versions wrote them, and as they are after somebody chose some."""
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n\n{"a": 2, "part": 1, "of": 1}\n{"a": 3, "part": 2, "of": 3}\n')
    assert bare(rows.read(path)) == [{"a": 1}, {"a": 2}]
    rows.append(path, [{"a": 4}])
    assert bare(rows.read(path)) == [{"a": 1}, {"a": 2}, {"a": 4}]


@pytest.mark.parametrize("line", ['{"a": ', "[1]", "3"])
def test_a_broken_line_is_named_and_nothing_is_added_or_lost(tmp_path: Path, line: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(f'{{"a": 1}}\n{line}\n{{"a": 3}}\n')
    before = path.read_bytes()
    for use in (rows.read, lambda path: rows.append(path, [{"a": 4}])):
        with pytest.raises(OptionError, match="line 2"):
            use(path)
    assert path.read_bytes() == before


WRITER = """
import sys, pathlib
from scodbench import rows
print('ready', flush=True)
for i in range(int(sys.argv[2])):
    rows.append(pathlib.Path(sys.argv[1]), [{'i': i, 'long': 'x' * 5000}] * 2)
    print(i, flush=True)
"""


def writer(path: Path, count: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WRITER, str(path), str(count)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_a_killed_writer_loses_nothing_it_had_written(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    with writer(path, 10**6) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        for line in process.stdout:
            if int(line) >= 5:
                break
        time.sleep(0.02)
        os.kill(process.pid, signal.SIGKILL)
        said = [int(line) for line in process.stdout]
    written = [row["i"] for row in rows.read(path)]
    assert written == [i for i in range(len(written) // 2) for _ in range(2)]
    assert len(written) // 2 >= (said[-1] if said else 5) + 1
    rows.append(path, [{"i": "next"}])
    assert [row["i"] for row in rows.read(path)][-1] == "next"


def test_a_writer_waits_for_another_one(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows.append(path, [{"i": "first"}])
    with writer(path, 1) as process:
        with FileLock(tmp_path / ".rows.jsonl.append.lock"):
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            time.sleep(0.3)
            assert len(rows.read(path)) == 1
            with path.open("ab") as other:
                other.write(b'{"i": "half of it is writ')
        assert process.wait(timeout=100) == 0
    assert [row["i"] for row in rows.read(path)] == ["first", 0, 0]


def test_a_claimed_file_is_refused_to_others_by_name_of_the_process(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    program = (
        "import sys, pathlib, time\n"
        "from scodbench import rows\n"
        "with rows.claimed(pathlib.Path(sys.argv[1])):\n"
        "    print('claimed', flush=True)\n"
        "    time.sleep(100)\n"
    )
    command = [sys.executable, "-c", program, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "claimed\n"
        said = pytest.raises(rows.RowsInUseError, match=f"process {process.pid} ")
        with said, rows.claimed(path):
            pass
        process.kill()
    with rows.claimed(path):  # what a killed process left behind keeps nobody away
        rows.append(path, [{"a": 1}])
    with rows.claimed(path):
        assert bare(rows.read(path)) == [{"a": 1}]


def job_row(auroc: float | None, **other: object) -> rows.Row:
    own = {"domain": "wine", "method": "scod", "seed": 0, "device": "cpu", "ood": "noise"}
    return {**own, "settings": "a", "auroc": auroc, **other}


class TestLatest:
    def aurocs(self, *given: rows.Row) -> list[float | None]:
        return [row["auroc"] for row in rows.latest(given)]

    def test_the_last_of_each_is_kept(self) -> None:
        assert self.aurocs(job_row(0.1), job_row(0.2)) == [0.2]
        assert self.aurocs(job_row(0.1), job_row(0.2, settings="b")) == [0.2]

    @pytest.mark.parametrize("key", ["domain", "method", "seed", "device", "ood"])
    def test_rows_of_something_else_stay(self, key: str) -> None:
        assert self.aurocs(job_row(0.1), job_row(0.2, **{key: "x"})) == [0.1, 0.2]

    def test_rows_of_other_settings_go_all_together(self) -> None:
        old = [job_row(0.1), job_row(0.2, ood="white"), job_row(0.3, ood="pooled")]
        assert self.aurocs(*old, job_row(None, ood="pooled", settings="b")) == [None]
        assert self.aurocs(*old, job_row(0.4, settings="b")) == [0.4]

    def test_rows_made_again_take_the_place_of_a_failure(self) -> None:
        failed = job_row(None, sweep="rank", id="rank/wine/pooled/0", part=1, of=1)
        again = [
            job_row(0.1 * n, sweep="rank", id=f"rank/wine/noise/{n}/0", part=n, of=2)
            for n in (1, 2)
        ]
        assert self.aurocs(failed, *again) == [0.1, 0.2]

    def test_rows_of_a_sweep_over_methods_give_way_together(self) -> None:
        failed = job_row(None, method="whole", sweep="errors", id="errors/0", part=1, of=1)
        again = [
            job_row(0.1, method=name, sweep="errors", id=f"errors/{name}/0", part=n, of=2)
            for n, name in enumerate(("scod", "naive"), start=1)
        ]
        assert rows.latest([failed, *again]) == again

    def test_points_of_a_sweep_are_told_apart(self) -> None:
        points = [job_row(0.1 * n, sweep="rank", id=f"rank/wine/{n}") for n in (1, 2)]
        assert self.aurocs(*points) == [0.1, 0.2]

    def test_rows_of_earlier_versions_give_way(self) -> None:
        old = {k: v for k, v in job_row(0.1, id="wine/noise/scod/0").items() if k != "settings"}
        assert self.aurocs(old) == [0.1]
        assert self.aurocs(old, job_row(0.2, id="wine/noise/scod/0/cpu/a")) == [0.2]
        assert rows.latest([{}]) == [{}]


def test_select_takes_values_and_sets_of_them() -> None:
    some = [{"m": "a", "s": 0}, {"m": "b", "s": 0}, {"m": "a", "s": 1}]
    assert list(rows.select(some, m="a")) == [some[0], some[2]]
    assert list(rows.select(some, m={"a", "b"}, s=0)) == some[:2]
    assert list(rows.select(some, other=None)) == some
