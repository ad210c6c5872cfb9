"""Times functions in turns, so that their ratios do not depend on a slow moment."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch

# each is timed so often and for so many seconds at least; slow ones less often, and functions
# of microseconds no more than so often
_RUNS, _SECONDS, _MOST_RUNS = 30, 0.2, 3000
_SLOW_RUNS, _SLOW_SECONDS = 3, 1.5
_WARM_UP = 3


def in_turns(
    runs: Mapping[str, Callable[[], object]],
    device: torch.device,
    summary: Callable[[Sequence[float]], float] = statistics.median,
) -> dict[str, float]:
    """Return the median seconds of each run; they take turns, to share a slow moment.

    Args:
        runs: Functions by name.
        device: Where they run; its work is waited for.
        summary: Of a function's seconds: ``min`` where other programs share the machine.
    """
    for run in runs.values():
        _warm_up(run, device)
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    while not all(map(_enough, seconds.values())):
        for name, run in runs.items():
            if not _enough(seconds[name]):
                seconds[name].append(_timed(run, device))
    return {name: summary(found) for name, found in seconds.items()}


def _warm_up(run: Callable[[], object], device: torch.device) -> None:
    began = time.perf_counter()
    for _ in range(_WARM_UP):
        _timed(run, device)
        if time.perf_counter() - began > _SLOW_SECONDS:
            return


def _timed(run: Callable[[], object], device: torch.device) -> float:
    wait_for(device)
    began = time.perf_counter()
    run()
    wait_for(device)
    return time.perf_counter() - began


def _enough(seconds: Sequence[float]) -> bool:
    """Return whether a run was timed often enough, from what its runs took."""
    often = len(seconds) >= _RUNS and sum(seconds) >= _SECONDS
    return (
        often
        or len(seconds) >= _MOST_RUNS
        or (len(seconds) >= _SLOW_RUNS and sum(seconds) >= _SLOW_SECONDS)
    )


def wait_for(device: torch.device) -> None:
    """Wait until all that was started on a device is done.

    Args:
        device: Any; only CUDA devices have to be waited for.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
