"""Fits by several processes or in several parts, from the command line."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, SubsetRandomSampler, TensorDataset

from command_line import own_folder, said_in_three_lines, scod
from scodkit.cli.loading import shard_of
from scodkit.errors import OptionError
from scodkit.numerics import artifact

pytestmark = pytest.mark.slow

FIT = ("model.py:net", "--likelihood", "categorical", "--rank", "8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return own_folder(tmp_path_factory.mktemp("own"))


def torchrun(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    return subprocess.run(
        [sys.executable, *launch, "-m", "scodkit", *words],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def same(one: Path, other: Path) -> None:
    """Check that two files hold the same sums, up to rounding."""
    (mine, own), (theirs, others) = (artifact.read(path, "monitor") for path in (one, other))
    assert mine["state"]["num_data"] == theirs["state"]["num_data"]
    assert mine["notes"].get("inputs") == theirs["notes"].get("inputs")
    away = (own["sketch.y"] - others["sketch.y"]).norm() / own["sketch.y"].norm()
    assert float(away) < 1e-6


@pytest.mark.parametrize("data", ["train.csv", "model.py:items", "model.py:batches"])
def test_processes_of_torchrun_fit_as_one(data: str, folder: Path, tmp_path: Path) -> None:
    words = ("fit", FIT[0], data, *FIT[1:], "--batch-size", "7")
    assert scod(*words, "-o", str(tmp_path / "alone.scod"), cwd=folder).code == 0
    found = torchrun(
        *words, "-o", str(tmp_path / "two.scod"),
        "--checkpoint", str(tmp_path / "fit.ckpt"), "--json", cwd=folder,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    (said,) = [line for line in found.stdout.splitlines() if line.startswith("{")]
    assert json.loads(said)["samples"] == 96
    same(tmp_path / "alone.scod", tmp_path / "two.scod")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["alone.scod", "two.scod"]


LEFT_OVER = """
from pathlib import Path
from torch import distributed
import scodkit.fit.processes
distributed.init_process_group("gloo")
import torch._dynamo  # as a fit does
distributed.all_gather_object([None], 1)
distributed.destroy_process_group()
print([path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")])
"""


def test_no_thread_of_the_group_outlives_it(tmp_path: Path) -> None:
    (tmp_path / "left.py").write_text(LEFT_OVER)
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", "left.py")
    found = subprocess.run(
        [sys.executable, *launch], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert "python" in found.stdout
    assert "gloo" not in found.stdout


def test_what_one_process_finds_ends_all(folder: Path, tmp_path: Path) -> None:
    words = ("fit", FIT[0], "model.py:nan_batches", *FIT[1:], "-o", str(tmp_path / "m.scod"))
    found = torchrun(*words, cwd=folder)
    assert found.returncode != 0
    assert "in the inputs or output of sample 0" in found.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("data", "count"), [("train.csv", 8), ("model.py:items", 8), ("model.py:batches", 3)]
)
def test_merged_shards_are_one_fit(data: str, count: int, folder: Path, tmp_path: Path) -> None:
    words = ("fit", FIT[0], data, *FIT[1:], "--batch-size", "7")
    assert scod(*words, "-o", tmp_path / "alone.scod", cwd=folder).code == 0
    parts = [tmp_path / f"part-{index}.scod" for index in range(1, count + 1)]
    for index, part in enumerate(parts, start=1):
        fitted = scod(*words, "--shard", f"{index}/{count}", "-o", part, cwd=folder)
        assert fitted.code == 0
        assert f"scod merge {FIT[0]} {part} OTHER_PARTS -o" in fitted.err
    whole = tmp_path / "whole.scod"
    assert scod("merge", FIT[0], *parts, "-o", whole, cwd=folder).code == 0
    same(tmp_path / "alone.scod", whole)
    again = scod("merge", FIT[0], whole, parts[2], "-o", tmp_path / "no", cwd=folder)
    assert again.code == 2
    assert "would count twice" in again.err
    empty = scod(*words, "--shard", "100/999", "-o", tmp_path / "no", cwd=folder)
    assert empty.code == 2
    assert "part 100/999 of the data, got none" in said_in_three_lines(empty.err)


def test_the_jobs_of_the_slurm_example_fit_as_one(tmp_path: Path) -> None:
    example = Path(__file__).parents[2] / "examples"
    program = tmp_path / "bin" / "scod"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m scodkit "$@"\n')
    program.chmod(0o755)
    path = f"{program.parent}{os.pathsep}{os.environ['PATH']}"
    own = tmp_path / "own_model"
    shutil.copytree(example / "own_model", own, ignore=shutil.ignore_patterns("*.scod"))
    subprocess.run([sys.executable, "model.py"], cwd=own, check=True)
    for job in ("1", "2", "0"):
        subprocess.run(
            ["bash", example / "many_machines" / "slurm_array.sh"],
            cwd=own,
            env={**os.environ, "PATH": path, "PARTS": "2", "SLURM_ARRAY_TASK_ID": job},
            check=True,
        )
    header, _ = artifact.read(own / "monitor.scod", "monitor")
    assert header["state"]["num_data"] == 250
    assert sorted(own.glob("*.ckpt")) == []


def test_a_loader_of_the_users_is_divided_by_items_or_refused() -> None:
    items = TensorDataset(torch.arange(22.0))

    def tenfold(batch: list[tuple[torch.Tensor]]) -> torch.Tensor:
        return 10 * torch.stack([x for (x,) in batch])

    for shuffle in (False, True):
        loader = DataLoader(items, batch_size=4, shuffle=shuffle, collate_fn=tenfold)
        shards = [list(shard_of(loader, index, 3)) for index in range(3)]
        found = torch.cat([batch for shard in shards for batch in shard])
        assert found.sort().values.tolist() == [10.0 * i for i in range(22)]
    for odd in (
        DataLoader(items, batch_sampler=BatchSampler(range(22), 4, False)),
        DataLoader(items, batch_size=4, drop_last=True),
        DataLoader(items, sampler=SubsetRandomSampler(range(22))),
    ):
        with pytest.raises(OptionError, match="return a Dataset that is read by position"):
            shard_of(odd, 0, 2)
        assert shard_of(odd, 0, 1) is odd
