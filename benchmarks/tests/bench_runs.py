"""Small runs for tests of the bench: wine that nobody made, programs that are started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np


def write_wine(folder: Path) -> Path:
    """Write wine that nobody made, in the published files' format, and return the folder."""
    (folder / "wine").mkdir(parents=True)
    generator = np.random.default_rng(0)
    for colour, count, shift in (("red", 1599, 0.0), ("white", 500, 1.0)):
        table = generator.normal(shift, 1.0, (count, 11))
        quality = np.clip(np.round(5 + table[:, 0]), 3, 8)
        lines = [
            ";".join([*map("{:.3f}".format, row), str(int(q))])
            for row, q in zip(table, quality, strict=True)
        ]
        names = [f'"feature {i}"' for i in range(11)]
        head = ";".join([*names, '"quality"'])
        path = folder / "wine" / f"winequality-{colour}.csv"
        path.write_text("\n".join([head, *lines]) + "\n")
    return folder


def start_toy(
    home: Path, methods: Sequence[str], processes: int, seeds: int = 1
) -> subprocess.Popen[str]:
    """Start a run of `toy_bench` that writes to a folder."""
    command = [str(Path(__file__).with_name("toy_bench.py")), "run", "--domain", "toy"]
    command += ["--seeds", str(seeds), "--rows", str(home / "rows.jsonl")]
    command += ["--processes", str(processes)]
    return start([*command, *(w for m in methods for w in ("--method", m))], home)


def start(command: list[str], cache: Path) -> subprocess.Popen[str]:
    """Start a Python program with a cache folder of its own, and a file there that holds it."""
    own = {"XDG_CACHE_HOME": str(cache), "TOY_HOLD": str(cache / "hold")}
    return subprocess.Popen(
        [sys.executable, *command],
        env={**os.environ, **own, "OMP_NUM_THREADS": "1"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        # or a job of a shell, which ignores Ctrl-C, would pass that on
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


def wait_for(condition: Callable[[], object], seconds: float = 100.0) -> bool:
    """Wait until something holds, and return whether it came to hold in time."""
    limit = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > limit:
            return False
        time.sleep(0.02)
    return True


def runs(pid: int) -> bool:
    """Return whether a process is there, and not only its name."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"
