"""Real processes that fit together, and what they fit."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, distributed, nn
from torch.multiprocessing.spawn import ProcessExitedException, spawn

Work = Callable[[int, int, Path], None]


def digits(count: int = 61, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 1, 8, 8, generator=generator, dtype=dtype)


def network(dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Conv2d(1, 4, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3)
        ).to(dtype)


def run(count: int, work: Work, folder: Path, backend: str = "gloo") -> None:
    """Run a function in processes of one group; what one raises is raised here."""
    try:
        spawn(_process, (count, work, folder, backend), nprocs=count)
    except ProcessExitedException as error:
        said = [path.read_text() for path in sorted(folder.glob("failure.*"))]
        raise AssertionError("\n".join(said)) from error


def _process(rank: int, count: int, work: Work, folder: Path, backend: str) -> None:
    torch.set_num_threads(1)
    meeting = folder / "meeting"
    distributed.init_process_group(
        backend, init_method=f"file://{meeting}", rank=rank, world_size=count
    )
    try:
        work(rank, count, folder)
    except BaseException:
        (folder / f"failure.{rank}").write_text(traceback.format_exc())
        os._exit(1)
    distributed.destroy_process_group()
    os._exit(0)  # torch's threads abort now and then while the interpreter ends
