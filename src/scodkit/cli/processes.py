"""Processes that ``torchrun`` has started, each with a part of the work."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import distributed

from scodkit.errors import OptionError
from scodkit.fit.processes import Processes


@dataclass(frozen=True)
class Share:
    """What a process has to do of a fit.

    Args:
        processes: All of them, and which this is.
        device: Where this one computes.
    """

    processes: Processes
    device: str

    @property
    def first(self) -> bool:
        """Whether this is the one that writes and speaks."""
        return self.processes.rank == 0


@contextlib.contextmanager
def started(device: str) -> Iterator[Share]:
    """Join the others that ``torchrun`` has started, if it has.

    Args:
        device: As the user names it; of several GPUs each process takes its own.

    Yields:
        What this process has to do.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        yield Share(Processes(), device)
        return
    on_gpu = torch.device(device).type == "cuda"
    if on_gpu:
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
    distributed.init_process_group("nccl" if on_gpu else "gloo")
    try:
        yield Share(Processes.here(), device)
    finally:
        distributed.destroy_process_group()


def part_of(spec: str | None, processes: Processes) -> tuple[int, int]:
    """Return which part of the data a process takes, and of how many.

    Args:
        spec: ``INDEX/COUNT`` on the command line, from 1; None for all of the data.
        processes: Among which that is divided further.

    Raises:
        OptionError: If it is not of that form.

    Examples:
        >>> part_of("2/3", Processes()), part_of("2/3", Processes(rank=0, count=2))
        ((1, 3), (2, 6))
    """
    index, _, count = (spec or "1/1").partition("/")
    if not (index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count)):
        raise OptionError(
            f"expected a part of the data as INDEX/COUNT, from 1/8 to 8/8, got {spec!r}"
        )
    own = (int(index) - 1) * processes.count + processes.rank
    return own, int(count) * processes.count
