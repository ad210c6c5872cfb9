"""Rows: appended whole, read back, whatever was cut off."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scodkit.bench import rows
from scodkit.errors import OptionError


def test_rows_come_back_in_order(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "rows.jsonl"
    rows.append(path, [{"a": 1}, {"a": 2}])
    rows.append(path, [{"a": 3, "text": "line\nend and ±"}])
    assert rows.read(path) == [{"a": 1}, {"a": 2}, {"a": 3, "text": "line\nend and ±"}]


def test_no_file_has_no_rows(tmp_path: Path) -> None:
    assert rows.read(tmp_path / "none") == []


@settings(max_examples=25, deadline=None)
@given(cut=st.integers(0, 40))
def test_a_cut_file_loses_the_last_row_only(tmp_path_factory, cut: int) -> None:
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    whole = [{"number": i, "name": "é" * i} for i in range(4)]
    rows.append(path, whole)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) - cut])
    kept = content[: len(content) - cut].count(b"\n")
    assert rows.read(path) == whole[:kept]
    rows.append(path, [{"number": "new"}])
    assert rows.read(path) == [*whole[:kept], {"number": "new"}]


def test_a_broken_line_in_the_middle_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n{"a": \n{"a": 3}\n')
    with pytest.raises(OptionError, match="line 2"):
        rows.read(path)


def test_a_killed_writer_loses_nothing_it_had_written(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    program = (
        "import sys, pathlib\n"
        "from scodkit.bench import rows\n"
        "for i in range(10**6):\n"
        "    rows.append(pathlib.Path(sys.argv[1]), [{'i': i, 'long': 'x' * 5000}])\n"
        "    print(i, flush=True)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if int(line) >= 5:
                break
        time.sleep(0.02)
        os.kill(process.pid, signal.SIGKILL)
        said = [int(line) for line in process.stdout]
    written = [row["i"] for row in rows.read(path)]
    assert written == list(range(len(written)))
    assert len(written) >= (said[-1] if said else 5) + 1
    rows.append(path, [{"i": "next"}])
    assert [row["i"] for row in rows.read(path)][-1] == "next"


def test_select_takes_values_and_sets_of_them() -> None:
    some = [{"m": "a", "s": 0}, {"m": "b", "s": 0}, {"m": "a", "s": 1}]
    assert list(rows.select(some, m="a")) == [some[0], some[2]]
    assert list(rows.select(some, m={"a", "b"}, s=0)) == some[:2]
    assert list(rows.select(some, other=None)) == some


def test_rewriting_leaves_one_file_or_the_other(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows.append(path, [{"a": 1}, {"a": 2}])
    rows.rewrite(path, [{"a": 2}])
    assert rows.read(path) == [{"a": 2}]
    with pytest.raises(TypeError):
        rows.rewrite(path, [{"a": object()}])
    assert rows.read(path) == [{"a": 2}]
    assert [other.name for other in tmp_path.iterdir()] == ["rows.jsonl"]
