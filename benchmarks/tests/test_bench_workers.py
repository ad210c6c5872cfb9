"""Workers: real processes, real signals."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from bench_runs import runs, start, start_toy, wait_for
from scodbench import jobs, runner, workers
from scodbench import rows as result_rows
from scodbench.jobs import Where
from scodbench.workers import Workers
from scodkit.errors import MissingPeerError
from toy_bench import TOY

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


def do(job: tuple[str, object]) -> object:
    what, value = job
    if what == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "slow":
        time.sleep(1)
    if what == "fail":
        raise MissingPeerError("expected a library")
    if what == "touch and sleep":
        Path(str(value)).write_text(str(os.getpid()))
        time.sleep(1000)
    return os.getpid() if what == "pid" else value


def serving() -> list[int | None]:
    """Return the workers of this process."""
    return [process.pid for process in multiprocessing.active_children()]


def test_one_process_is_this_one() -> None:
    with Workers(do, 1) as workers:
        found = list(workers.finished([("say", 1), ("pid", 0)]))
    assert found == [(("say", 1), 1), (("pid", 0), os.getpid())]


def test_a_killed_process_loses_its_job_and_no_other() -> None:
    jobs = [("die", 0), ("slow", 9), *(("say", i) for i in range(4))]
    with Workers(do, 2) as workers:
        found = list(workers.finished(jobs))
        assert sorted(found) == sorted((j, None if j[0] == "die" else j[1]) for j in jobs)
        idle = multiprocessing.active_children()
        for process in idle:
            process.kill()
            process.join()
        ((_, other),) = workers.finished([("pid", 0)])  # another takes their place
        assert other not in (None, os.getpid(), *(process.pid for process in idle))
    assert serving() == []


def test_errors_come_out_and_nothing_is_waited_for(tmp_path: Path) -> None:
    jobs = [("touch and sleep", tmp_path / "pid"), ("fail", 0), ("say", 1)]
    with pytest.raises(MissingPeerError, match="expected a library"), Workers(do, 2) as workers:
        list(workers.finished(jobs))
    assert serving() == []


PROGRAM = """
import sys
sys.path.insert(0, {tests!r})
from test_bench_workers import do
from scodbench.workers import Workers

if __name__ == "__main__":
    with Workers(do, 2) as workers:
        list(workers.finished([("touch and sleep", {pid!r})]))
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_workers_end_with_the_one_who_started_them(how: int, tmp_path: Path) -> None:
    script, said = tmp_path / "program.py", tmp_path / "pid"
    script.write_text(PROGRAM.format(tests=str(Path(__file__).parent), pid=str(said)))
    process = start([str(script)], tmp_path)
    assert wait_for(lambda: said.exists() and said.read_text())
    worker = int(said.read_text())
    assert runs(worker)
    os.kill(worker, signal.SIGINT)  # a terminal sends it to all; workers leave it to the one
    assert not wait_for(lambda: not runs(worker), seconds=0.5)
    os.kill(process.pid, how)
    _, err = process.communicate(timeout=100)
    assert wait_for(lambda: not runs(worker))
    assert err.count("Traceback") == (how == signal.SIGINT)  # that of the program alone


def test_a_run_loses_no_more_than_the_job_of_a_killed_worker(
    tmp_path: Path, monkeypatch
) -> None:
    """As the kernel kills the largest process when memory runs out."""
    process = start_toy(tmp_path, ("killed", "mahalanobis", "naive", "energy"), 2)
    out, err = process.communicate(timeout=200)
    assert process.returncode == 1, err  # something failed
    rows = result_rows.read(tmp_path / "rows.jsonl")
    (lost,) = result_rows.select(rows, method="killed")
    assert lost["failed"]
    assert f"toy, killed failed (seed 0): {lost['why']}" in out.splitlines()
    counts = Counter(row["method"] for row in rows)
    assert counts == {"killed": 1, "mahalanobis": 2, "naive": 2, "energy": 1}
    assert {row["processes"] for row in rows} == {2}
    assert "semaphore" not in err  # nothing is left behind
    monkeypatch.setitem(jobs.ALL_DOMAINS, "toy", TOY)
    here = Where(tmp_path / "here.jsonl", None, tmp_path / "scodkit" / "nets")
    for row in runner.run(["toy"], ["mahalanobis"], 1, here, progress=False):
        (same,) = result_rows.select(rows, id=row["id"])
        assert same["auroc"] == row["auroc"]


def test_ctrl_c_while_a_worker_is_started_is_not_lost() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), workers._deaf_to_interrupts():
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
