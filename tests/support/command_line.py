"""``scod`` for the tests: in this process, without the seconds it takes to import torch.

Each run has a folder, standard files and limits of its own, and leaves nothing behind. What is
about a process itself, such as Ctrl-C or a reader that goes away, is tested on a real one.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import io
import json
import os
import re
import resource
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from own_process import interruptible
from scodkit import errors
from scodkit.cli import loading, main

SECTIONS = {
    errors.more_about(kind)
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, Exception)
}

PLAIN = {"OMP_NUM_THREADS": "1", "NO_COLOR": "1", "COLUMNS": "200"}

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


def scod(*words: object, cwd: Path, stdin: str = "", largest_file: int | None = None) -> Run:
    """Run ``scod`` in a folder; optionally where files cannot be large."""
    out, err = io.StringIO(), io.StringIO()
    code: object = 0
    with (
        _forgotten_afterwards(cwd),
        pytest.MonkeyPatch.context() as patch,
        _no_file_above(largest_file),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        patch.chdir(cwd)
        patch.setattr(sys, "argv", ["scod", *map(str, words)])
        patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        patch.setattr(sys, "path", list(sys.path))
        # or modules that are imported while files cannot be large would be kept cut off
        patch.setattr(sys, "dont_write_bytecode", True)
        for name, value in PLAIN.items():
            patch.setenv(name, value)
        try:
            main()
        except SystemExit as end:
            code = end.code or 0
    assert isinstance(code, int)
    return Run(code, out.getvalue(), err.getvalue())


def start(*words: object, cwd: Path, **files: Any) -> subprocess.Popen[str]:
    """Start ``scod`` in a process of its own, which Ctrl-C ends."""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with interruptible():
        return subprocess.Popen(
            [sys.executable, "-m", "scodkit", *map(str, words)],
            cwd=cwd,
            env={**os.environ, **PLAIN},
            **{"text": True, **pipes, **files},
        )


def ended(run: subprocess.Popen[str]) -> Run:
    """Wait for a process to end."""
    out, err = run.communicate(timeout=60)
    return Run(run.returncode, out or "", err or "")


@contextlib.contextmanager
def _forgotten_afterwards(folder: Path) -> Iterator[None]:
    """Warn as Python itself does; afterwards forget a folder's modules and torch's settings."""
    modules, threads = set(sys.modules), torch.get_num_threads()
    importlib.invalidate_caches()
    try:
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
            warnings.resetwarnings()  # pytest's turn them into errors
            for silent in (DeprecationWarning, ResourceWarning):
                warnings.simplefilter("ignore", silent)
            yield
    finally:
        torch.set_num_threads(threads)
        loading._from_file.cache_clear()
        for name in set(sys.modules) - modules:
            file = getattr(sys.modules[name], "__file__", None)
            if file is not None and Path(file).is_relative_to(folder.resolve()):
                del sys.modules[name]


@contextlib.contextmanager
def _no_file_above(size: int | None) -> Iterator[None]:
    """Let files grow to some bytes only, as where the disk is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft if size is None else size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


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


def said_in_three_lines(err: str) -> str:
    """Return an error on one line; it must have three, and nothing to type in Python.

    A fourth says where to read on, in the section of a class of errors.
    """
    expected, found, advice, *more = err.replace("made by hand\n", "").splitlines()
    assert len(more) <= 1
    for line in more:
        assert line.startswith("      more     ")
        assert line[15:] in SECTIONS
    assert expected.startswith("scod: expected ")
    assert found.startswith("      found    ")
    assert advice.startswith("      try      ")
    assert not re.search(r"\w\(|\w\[|lambda|astype", advice)
    return f"{expected}, got {found[15:]}; {advice[15:]}"


def contents(folder: Path) -> dict[str, str]:
    """Return a digest of every file but what Python itself leaves behind."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }
