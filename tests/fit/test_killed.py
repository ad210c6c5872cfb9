"""Fits that are killed, with SIGKILL at any moment, and started again."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, distributed
from torch.utils.data import DataLoader, Dataset

from scodkit import Categorical, Monitor
from scodkit.numerics import artifact
from scodkit.parts import Shard
from scodkit.sketch import Nystrom, Sketch, TwoSided
from together import digits, network

pytestmark = pytest.mark.slow

KILLS = 20
BATCH, COUNT = 4, 61
PAUSE = 0.01  # seconds a batch takes to read

# a process that has imported everything, and forks
processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["scodkit.monitor", "together"])


class SlowItems(Dataset[Tensor]):
    """Digits that take their time, and note which were read."""

    def __init__(self, notes: Path) -> None:
        self._x, self._notes = digits(COUNT, dtype=torch.float32), notes

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, place: int) -> Tensor:
        time.sleep(PAUSE / BATCH if place < COUNT // 2 else PAUSE)
        with self._notes.open("a") as file:
            file.write(f"{place}\n")
        return self._x[place]


def slow_stream() -> Iterator[Tensor]:
    for batch in digits(COUNT, dtype=torch.float32).split(BATCH):
        time.sleep(PAUSE)
        yield batch


def monitor(sketch: Sketch) -> Monitor:
    return Monitor(network(torch.float32), Categorical(), 10, sketch=sketch)


def fit(folder: Path, kind: str) -> None:
    """Fit with a checkpoint after every batch, and save: what is to be killed."""
    torch.set_num_threads(1)
    sketch: Sketch = TwoSided(size=31) if kind == "two_sided" else Nystrom(size=30)
    loader = (
        slow_stream() if kind == "stream" else DataLoader(SlowItems(folder / "read"), BATCH)
    )
    own = monitor(sketch)
    own.fit(
        loader,
        checkpoint=folder / "fit.ckpt",
        every=1,
        progress=False,
        check_deterministic=False,
    )
    own.save(folder / "monitor.scod")


def started(folder: Path, kind: str) -> multiprocessing.process.BaseProcess:
    process = processes.Process(target=fit, args=(folder, kind))
    process.start()
    return process


def finish(process: multiprocessing.process.BaseProcess) -> None:
    process.join(60)
    assert process.exitcode == 0


def sums(path: Path) -> dict[str, Tensor]:
    header, tensors = artifact.read(path, "monitor")
    assert header["state"]["num_data"] == COUNT
    return tensors


@pytest.mark.parametrize("kind", ["nystrom", "two_sided", "stream"])
def test_a_fit_killed_at_any_moment_ends_with_the_same_sketch(
    kind: str, tmp_path: Path
) -> None:
    whole = tmp_path / "whole"
    for folder in (tmp_path / "first", whole):  # the first one waits for imports
        folder.mkdir()
        began = time.monotonic()
        finish(started(folder, kind))
        lasted = time.monotonic() - began
    expected = sums(whole / "monitor.scod")
    chance, killed = random.Random(kind), 0
    for number in range(KILLS if kind == "nystrom" else KILLS // 4):
        folder = tmp_path / str(number)
        folder.mkdir()
        process = started(folder, kind)
        process.join(chance.uniform(0, lasted))
        assert process.pid is not None
        if process.is_alive():
            os.kill(process.pid, signal.SIGKILL)
            process.join()
            # 0: it had ended by itself between the look and the signal
            assert process.exitcode in (-signal.SIGKILL, 0)
            killed += process.exitcode != 0
        check_files(folder)
        finish(started(folder, kind))
        assert not list(folder.glob(".fit.ckpt.*"))  # of the one that was killed, either
        found = sums(folder / "monitor.scod")
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert killed > 0


def check_files(folder: Path) -> None:
    """Files with a name are whole; what else there is, hidden, nobody takes for one."""
    for path in folder.iterdir():
        if path.name in ("fit.ckpt", "monitor.scod"):
            artifact.read(path, "monitor" if path.suffix == ".scod" else "checkpoint")
        elif path.name != "read":
            assert path.is_dir()
            assert path.name.startswith((".fit.ckpt.", ".monitor.scod."))


def batches_done(checkpoint: Path) -> int:
    if not checkpoint.exists():
        return 0
    return len(artifact.read(checkpoint, "checkpoint")[1]["batches"])


def test_what_was_read_is_not_read_again(tmp_path: Path) -> None:
    process = started(tmp_path, "nystrom")
    while batches_done(tmp_path / "fit.ckpt") <= 3:
        assert process.is_alive()
        time.sleep(0.001)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    before = (tmp_path / "read").read_text().split()
    done = batches_done(tmp_path / "fit.ckpt")
    finish(started(tmp_path, "nystrom"))
    again = [int(place) for place in (tmp_path / "read").read_text().split()[len(before) :]]
    # besides, the first batch chooses the engine, and eight of those done tell the data
    rest = list(range(BATCH * done, COUNT))
    assert rest
    assert any(again[start:][: len(rest)] == rest for start in range(len(again)))
    assert len(again) <= len(rest) + (1 + 8) * BATCH


def fit_in_group(rank: int, count: int, folder: Path, name: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder / name}", rank=rank, world_size=count
    )
    own = monitor(TwoSided(size=31))
    shard = Shard(SlowItems(folder / f"read.{rank}"), rank, count)
    own.fit(
        DataLoader(shard, BATCH),
        checkpoint=folder / "fit.ckpt",
        every=1,
        progress=False,
        check_deterministic=False,
    )
    own.save(folder / f"monitor.{rank}")


def test_a_group_goes_on_after_one_of_it_was_killed(tmp_path: Path) -> None:
    def group(name: str) -> list[multiprocessing.process.BaseProcess]:
        found = [
            processes.Process(target=fit_in_group, args=(rank, 2, tmp_path, name))
            for rank in range(2)
        ]
        for process in found:
            process.start()
        return found

    first = group("first")
    while not (tmp_path / "fit.ckpt.1-of-2").exists():
        assert first[1].is_alive()
        time.sleep(0.001)
    pid = first[1].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    for process in first:
        process.join(60)
    assert [process.exitcode == 0 for process in first] == [False, False]  # none is left
    assert not list(tmp_path.glob("monitor.*"))
    second = group("second")
    for process in second:
        finish(process)
    alone = monitor(TwoSided(size=31))
    alone.fit(digits(COUNT, dtype=torch.float32).split(BATCH), progress=False)
    assert alone.fitted.state is not None
    for rank in range(2):
        found = Monitor.load(tmp_path / f"monitor.{rank}", alone.model).fitted.state
        assert found is not None
        assert found.num_data == COUNT
        for name, tensor in alone.fitted.state.tensors.items():
            assert float((found.tensors[name] - tensor).norm() / tensor.norm()) < 1e-6
