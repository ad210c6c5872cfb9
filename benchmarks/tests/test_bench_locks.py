"""Turns: real processes that time while others wait."""

from __future__ import annotations

import itertools
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench_runs import start_toy

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="has no such locks")

# works, and asks to be alone as often as it is told to
PROGRAM = """
import sys, time
from pathlib import Path
from scodbench.locks import Turns
turns = Turns(Path(sys.argv[1]))
with turns.working():
    print("works", flush=True)
    sys.stdin.readline()
    for _ in range(int(sys.argv[2])):
        with turns.alone():
            began = time.monotonic()
            time.sleep(0.02)
            print(began, time.monotonic(), flush=True)
    sys.stdin.read()
"""


def begun(path: Path, times: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(path), str(times)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def go_on(process: subprocess.Popen[str]) -> None:
    """Let it ask to be alone; it ends at the end of its input."""
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def start(path: Path, times: int) -> subprocess.Popen[str]:
    process = begun(path, times)
    assert process.stdout is not None
    assert process.stdout.readline() == "works\n"
    return process


def finished(*processes: subprocess.Popen[str]) -> list[str]:
    """Let them end, and return what they have printed."""
    for process in processes:
        assert process.stdin is not None
        process.stdin.close()
        process.stdin = None
    return [process.communicate(timeout=100)[0] for process in processes]


def test_who_is_alone_has_waited_for_all_others(tmp_path: Path) -> None:
    with start(tmp_path / ".lock", 0) as other, start(tmp_path / ".lock", 1) as asking:
        go_on(asking)
        time.sleep(0.3)
        released = time.monotonic()
        finished(other)
        began, _ = map(float, finished(asking)[0].split())
        assert began > released


def test_several_who_ask_come_one_after_the_other(tmp_path: Path) -> None:
    with start(tmp_path / ".lock", 10) as first, start(tmp_path / ".lock", 10) as second:
        go_on(first)
        go_on(second)
        printed = "".join(finished(first, second)).splitlines()
    found = sorted(tuple(map(float, line.split())) for line in printed)
    assert len(found) == 20
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(found))


@pytest.mark.parametrize("times", [0, 10_000])
def test_a_killed_process_keeps_nobody_waiting(times: int, tmp_path: Path) -> None:
    with start(tmp_path / ".lock", times) as other, start(tmp_path / ".lock", 1) as asking:
        go_on(other)
        time.sleep(0.1)
        os.kill(other.pid, signal.SIGKILL)
        go_on(asking)
        assert len(finished(asking)[0].splitlines()) == 1


def test_who_asks_does_not_wait_for_those_who_begin_later(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    with start(path, 0) as other, start(path, 1) as asking, begun(path, 0) as late:
        go_on(asking)
        assert late.stdout is not None
        # a program that has imported all it needs is not to work now
        assert not select.select([late.stdout], [], [], 3.0)[0]
        finished(other)
        assert asking.stdout is not None
        assert len(asking.stdout.readline().split()) == 2
        assert late.stdout.readline() == "works\n"
        finished(asking, late)


def test_a_run_times_one_method_at_a_time_and_nothing_is_fitted_meanwhile(
    tmp_path: Path,
) -> None:
    process = start_toy(tmp_path, ["watched"], processes=2, seeds=4)
    _, errors = process.communicate(timeout=200)
    assert process.returncode == 0, errors
    timed, fitted = intervals(tmp_path / "watched")
    assert len(timed) == len(fitted) == 4
    assert len({pid for pid, *_ in timed}) == 2
    for (pid, *one), (other, *two) in itertools.product(timed, [*timed, *fitted]):
        assert pid == other or one[1] <= two[0] or two[1] <= one[0]


Interval = tuple[str, float, float]


def intervals(path: Path) -> tuple[list[Interval], list[Interval]]:
    """Return which processes timed, and which fitted something, from when to when."""
    timed: dict[tuple[str, int], Interval] = {}
    fitted: list[Interval] = []
    for pid, what, *times in (line.split() for line in path.read_text().splitlines()):
        began, ended = map(float, times)
        if what == "fit":
            fitted.append((pid, began, ended))
        else:
            job = pid, sum(own == pid for own, *_ in fitted)
            timed[job] = (pid, timed[job][1] if job in timed else began, ended)
    return list(timed.values()), fitted
