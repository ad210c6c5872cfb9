"""Timing that survives a noisy machine: contenders take turns, and medians are compared."""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from scodbench.identity import processor

Run = Callable[[], object]

# runs between two events of a GPU: of a single one, a third would be the host starting it
_BURST = 10


def interleaved(
    contenders: Mapping[str, Run], device: str, seconds: float = 2.0, rounds: int = 9
) -> dict[str, float]:
    """Return the median milliseconds of each contender.

    Each is warmed up, then they take turns for several rounds, so that a slow minute of the
    machine falls on all of them. A round's time is the median of as many runs as fit its share
    of the seconds.
    """
    counts, enough = {}, {}
    for name, run in contenders.items():
        run()
        once = max(1e-5, _milliseconds(run, device) / 1e3)
        counts[name] = max(1, min(200, int(seconds / rounds / once)))
        enough[name] = rounds if once < seconds / 3 else 2  # the very slow ones
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(rounds):
        for name, run in contenders.items():
            if turn >= enough[name]:
                continue
            run()  # the others have filled the caches
            times = [_milliseconds(run, device) for _ in range(counts[name])]
            found[name].append(statistics.median(times))
    return {name: statistics.median(times) for name, times in found.items()}


def _milliseconds(run: Run, device: str) -> float:
    if device == "cuda":
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(_BURST):
            run()
        stop.record()
        torch.cuda.synchronize()
        return float(start.elapsed_time(stop)) / _BURST
    began = time.perf_counter()
    run()
    return (time.perf_counter() - began) * 1e3


def settle(device: str) -> None:
    """Pin the process to one core and torch to one thread, for times of the CPU."""
    if device == "cpu":
        torch.set_num_threads(1)
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    else:
        torch.backends.cudnn.benchmark = True


def machine(device: str) -> dict[str, object]:
    """Return what a time depends on: processor, threads, versions."""
    name = torch.cuda.get_device_name() if device == "cuda" else processor()
    pinned = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    return {
        "machine": name,
        "threads": torch.get_num_threads(),
        "cores": len(pinned) if pinned else os.cpu_count(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


class Timed:
    """Batches that note how long each keeps its reader.

    Args:
        batches: Any.
        skip: How many of the first do not count. With some, a GPU is waited for after these
            and after the last alone, as it is in a fit, which runs ahead of it.

    Attributes:
        seconds: Of each batch.
    """

    def __init__(self, batches: Sequence[object], skip: int = 0) -> None:
        self._batches, self._skip = batches, skip
        self._waits = {skip, len(batches)} if skip else set(range(1, len(batches) + 1))
        self.seconds: list[float] = []

    def __iter__(self) -> Iterator[object]:
        """Yield the batches."""
        for number, batch in enumerate(self._batches, start=1):
            began = time.perf_counter()
            yield batch
            if torch.cuda.is_available() and number in self._waits:
                torch.cuda.synchronize()
            self.seconds.append(time.perf_counter() - began)

    @property
    def each(self) -> float:
        """Seconds of a batch that counts: the median on a CPU, the mean on a GPU."""
        middle = statistics.mean if torch.cuda.is_available() else statistics.median
        return middle(self.seconds[self._skip :])


def rows_file(output: Path, suite: str, device: str) -> Path:
    """Return where rows of a suite go, without those of an earlier run.

    Args:
        output: Folder.
        suite: Its name.
        device: Where it is measured; files of a GPU say so.
    """
    file = output / (f"{suite}.jsonl" if device == "cpu" else f"{suite}_{device}.jsonl")
    file.unlink(missing_ok=True)
    return file


def add_rows(
    file: Path, rows: Iterable[dict[str, Any]], unit: str, ms: float, device: str
) -> None:
    """Add rows to a file, with their times in another unit and what times depend on.

    Args:
        file: JSON lines.
        rows: With their ``ms``; changed.
        unit: Name of the other unit.
        ms: How long one of it takes.
        device: Where they were measured.
    """
    with file.open("a") as lines:
        for row in rows:
            row[unit] = row["ms"] / ms
            lines.write(json.dumps({**row, **machine(device)}) + "\n")
