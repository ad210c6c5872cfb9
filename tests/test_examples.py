"""The ten jobs of ``examples/jobs`` run as they are printed, and what they find is so.

Warnings are errors, as in all tests: a user who does nothing wrong is told nothing.
"""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest
import torch

from scodkit import Monitor

ROOT = Path(__file__).parents[1]
JOBS = ROOT / "examples" / "jobs"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Return a function that runs a job in an empty folder and returns its names."""
    monkeypatch.syspath_prepend(str(JOBS))
    monkeypatch.delitem(sys.modules, "given", raising=False)  # which seeds the job
    monkeypatch.chdir(tmp_path)
    mpl.use("Agg")
    return lambda job: runpy.run_path(str(JOBS / job))


def rate(names: dict[str, Any], name: str) -> float:
    return float(names[name])


def test_there_are_ten() -> None:
    numbers = [path.name[:2] for path in sorted(JOBS.iterdir()) if path.name[0].isdigit()]
    assert numbers == [f"{number:02}" for number in range(1, 11)]


def test_quick_start(run: Any, tmp_path: Path) -> None:
    names = run("01_quick_start.py")
    assert rate(names, "false_alarms") < 0.11  # 5 % asked for; 200 held out, 201 scored
    assert rate(names, "caught") > 0.6
    assert (tmp_path / "layers.png").read_bytes().startswith(b"\x89PNG")
    x = names["unknown"]
    assert torch.equal(names["again"].score(x), names["monitor"].score(x))


def test_images(run: Any) -> None:
    names = run("02_images.py")
    assert rate(names, "false_alarms") < 0.15  # 100 held out, 100 scored
    assert rate(names, "caught") > 0.9


def test_transformer(run: Any) -> None:
    names = run("03_transformer.py")
    assert set(names["caught"]) == {"Monitor", "Fused"}
    for known, new in names["caught"].values():
        assert known < 0.11
        assert new > known  # a weak case: the words are new, the sentences are not
    assert names["caught"]["Fused"][1] > 0.25


def test_regression(run: Any) -> None:
    names = run("04_regression.py")
    assert names["monitor"].fitted.engine.startswith("HookEngine")
    for kind, least in {"with_variance": 0.6, "controller": 0.9, "recurrent": 0.9}.items():
        known, far = names[kind]
        assert known < 0.12
        assert far > least


@pytest.mark.slow  # compiles
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's compiler
def test_control_loop(run: Any) -> None:
    names = run("05_control_loop.py")
    assert 200 <= names["drift"].alarmed_at < 300
    assert names["alarms"][0.0] <= 4
    assert names["alarms"][0.5] >= 15


def test_numpy(run: Any) -> None:
    names = run("06_numpy.py")
    assert isinstance(names["scores"], np.ndarray)
    assert rate(names, "auroc") > 0.9


def commands(script: Path) -> list[str]:
    """Return the lines that begin with scod, without what follows the variable of weights."""
    return [line for line in script.read_text().splitlines() if line.startswith("scod ")]


@pytest.mark.slow  # eight processes
def test_command_line(tmp_path: Path) -> None:
    folder, programs = tmp_path / "own_model", tmp_path / "bin"
    own = shutil.ignore_patterns("*.scod", "*.safetensors", "train.csv", "heldout.csv", "__*")
    shutil.copytree(ROOT / "examples" / "own_model", folder, ignore=own)
    programs.mkdir()
    for name, words in {"python": "", "scod": "-m scodkit"}.items():
        (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {words} "$@"\n')
        (programs / name).chmod(0o755)
    env = {**os.environ, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}
    script = JOBS / "07_command_line.sh"
    ran = subprocess.run(
        ["/bin/sh", str(script)], cwd=folder, env=env, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    assert len(commands(script)) == 6
    assert ran.stdout.count("ALARM") == 3
    assert (folder / "why.png").read_bytes().startswith(b"\x89PNG")
    assert (folder / "report.html").read_text().startswith("<!doctype html>")


def test_baselines(run: Any) -> None:
    separations = run("08_baselines.py")["found"].separations
    assert len(separations) == 8
    for method, apart in separations.items():  # none is at chance by its defaults
        assert apart["digits 5-9"].auroc > 0.75, method


def test_mistakes(run: Any) -> None:
    names = run("09_mistakes.py")
    told = names["told"]
    assert len(told) == len(names["MISTAKES"]) == 21
    for mistake, message in told.items():
        assert message, mistake
        assert message.partition(": ")[0].endswith(("Error", "Warning")), message
        assert "ModelCallError" not in message or "type " in message, message
    assert isinstance(names["calibrated"](), Monitor)


def test_where_to_look(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    pages = run("10_where_to_look.py")["PAGES"]
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 * len(pages)
    index = (ROOT / "docs" / "index.md").read_text()
    for page, _ in pages.values():
        assert f"]({page})" in index
