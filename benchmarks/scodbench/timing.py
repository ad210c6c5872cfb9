"""Times predictions with and without a score, in turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

# each is timed so often and for so many seconds at least; slow ones less often
_RUNS, _SECONDS = 30, 0.2
_SLOW_RUNS, _SLOW_SECONDS = 3, 1.5
_WARM_UP = 3


def prediction_times(
    score: Callable[[Tensor], object], model: nn.Module, x: Tensor
) -> dict[str, float]:
    """Return milliseconds a sample of a scored prediction and, beside it, of a bare one.

    Args:
        score: Predicts and scores a batch.
        model: Predicts.
        x: The batch, ``(n, ...)``.

    Returns:
        ``ms_b<n>`` and ``forward_ms_b<n>``.
    """

    def forward() -> object:
        with torch.no_grad():
            return model(x)

    seconds = in_turns({"ms": lambda: score(x), "forward_ms": forward}, x.device)
    return {f"{name}_b{len(x)}": s * 1e3 / len(x) for name, s in seconds.items()}


def in_turns(
    runs: Mapping[str, Callable[[], object]], device: torch.device
) -> dict[str, float]:
    """Return the median seconds of each run; they take turns, to share a slow moment."""
    for run in runs.values():
        _warm_up(run, device)
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    while not all(map(_enough, seconds.values())):
        for name, run in runs.items():
            if not _enough(seconds[name]):
                seconds[name].append(_timed(run, device))
    return {name: statistics.median(found) for name, found in seconds.items()}


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
    return often or (len(seconds) >= _SLOW_RUNS and sum(seconds) >= _SLOW_SECONDS)


def wait_for(device: torch.device) -> None:
    """Wait until all that was started on a device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
