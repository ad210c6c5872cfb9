"""Real processes of ``scod`` for the tests, without the seconds it takes to import torch.

One process imports the command and then forks itself for every run: each has its own folder,
its own standard files and its own limits, and ends as the command ends.
"""

from __future__ import annotations

import atexit
import functools
import gc
import json
import os
import resource
import subprocess
import sys
import tempfile
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

MODEL = '''
"""A model and data as a user might have them."""
import sys, time
import torch
from torch import nn

print("made by hand")  # not to be mistaken for a result

def net():
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))

def other():
    torch.manual_seed(8)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))

ready = net()

def pictures():
    torch.manual_seed(7)
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 4 * 5, 2))

def needs(argument):
    return net()

def fails():
    raise ValueError("no such luck")

def number():
    return 7

def train():
    return torch.randn(96, 3, generator=torch.Generator().manual_seed(1))

def items():
    return torch.utils.data.TensorDataset(train(), torch.zeros(96))

def batches():
    return train().split(32)

def nan_batches():
    yield train()[:32]
    yield torch.full((32, 3), float("nan"))

def wide():
    return torch.randn(96, 5)

def slowly():
    for batch in train().split(8):
        yield batch
        time.sleep(0.2)
'''


@dataclass(frozen=True)
class Run:
    """How a command ended: its exit code and what it wrote."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        return json.loads(self.out)

    @property
    def documents(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.splitlines()]


def scod(
    *words: object,
    cwd: Path,
    stdin: str = "",
    stdout: str | None = None,
    largest_file: int | None = None,
) -> Run:
    """Run ``scod`` in a folder; optionally into a file, or where files cannot be large."""
    with tempfile.TemporaryDirectory() as place:
        names = {n: str(Path(place, n)) for n in ("stdin", "stdout", "stderr")}
        Path(names["stdin"]).write_text(stdin)
        if stdout is not None:
            names["stdout"] = stdout
        job = {
            "words": [str(w) for w in words],
            "cwd": str(cwd),
            "limit": largest_file,
            **names,
        }
        server = _server()
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(json.dumps(job) + "\n")
        server.stdin.flush()
        code = int(server.stdout.readline())
        out = "" if stdout is not None else Path(names["stdout"]).read_text()
        return Run(code, out, Path(names["stderr"]).read_text())


def own_folder(folder: Path) -> Path:
    """Fill a folder with a user's model and data."""
    folder.mkdir(exist_ok=True)
    (folder / "model.py").write_text(MODEL)
    draw = np.random.default_rng(0)
    for name, count in {"train": 96, "heldout": 60, "new": 6}.items():
        values = draw.normal(size=(count, 3)).astype(np.float32)
        np.save(folder / f"{name}.npy", values)
        np.savez(folder / f"{name}.npz", x=values, y=np.zeros(count))
        np.savetxt(
            folder / f"{name}.csv",
            values,
            fmt="%.9g",
            delimiter=",",
            header="a,b,c",
            comments="",
        )
    return folder


@functools.cache
def _server() -> subprocess.Popen[str]:
    plain = {"OMP_NUM_THREADS": "1", "NO_COLOR": "1", "COLUMNS": "200"}
    server = subprocess.Popen(
        [sys.executable, __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **plain},
    )

    def end() -> None:
        server.communicate()

    atexit.register(end)
    return server


def _serve() -> None:
    import matplotlib.figure  # noqa: F401 (these once, for all runs)
    import torch._dynamo  # noqa: F401
    import typer.rich_utils  # noqa: F401

    import scodkit.cli.app  # noqa: F401
    import scodkit.cli.choices  # noqa: F401
    import scodkit.cli.processes  # noqa: F401
    import scodkit.cli.sets  # noqa: F401

    gc.freeze()  # or every child would copy what is looked through for garbage
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            _run(json.loads(line))
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        sys.stdout.write(f"{status}\n")
        sys.stdout.flush()


def _run(job: dict[str, Any]) -> None:
    from scodkit.cli.main import main

    writing = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    for number, (name, flags) in enumerate(
        [("stdin", os.O_RDONLY), ("stdout", writing), ("stderr", writing)]
    ):
        os.dup2(os.open(job[name], flags), number)
    sys.stdin, sys.stdout = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.chdir(job["cwd"])
    if job["limit"] is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (job["limit"], job["limit"]))
    sys.argv = ["scod", *job["words"]]
    code: object = 0
    try:
        main()
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()
        code = 1
    try:
        sys.stdout.flush()
    except OSError:
        code = 120  # as of Python itself
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 1)


if __name__ == "__main__":
    _serve()
