"""The ten minutes in Python and in a shell, typed as printed, print what they are said to."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from printed_pages import assert_alike

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
START = ROOT / "docs" / "start"


def blocks(page: str, language: str) -> list[tuple[str, str]]:
    """Return the blocks of a page with what each is said to print."""
    pattern = rf"```{language}\n(.*?)```(?:\n\n```text\n(.*?)```)?"
    return re.findall(pattern, (START / page).read_text(), re.DOTALL)


def test_ten_minutes_in_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    for source, told in blocks("python.md", "python"):
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(source, "python.md", "exec"), names)
        assert_alike(printed.getvalue(), told)
    first, second = (names["monitor"](asked) for asked in (names["three"], names["slips"]))
    # what the page says of the second patient
    assert second.output[1, 0] == pytest.approx(first.output[1, 0], abs=0.05)
    assert second.score[1] > 10 * first.score[1]
    assert second.p_value.min() == pytest.approx(1 / 131)


@pytest.mark.slow  # seven processes
def test_ten_minutes_in_a_shell(tmp_path: Path) -> None:
    folder, programs = tmp_path / "examples" / "own_model", tmp_path / "bin"
    own = shutil.ignore_patterns("*.scod", "*.safetensors", "train.csv", "heldout.csv", "__*")
    shutil.copytree(ROOT / "examples" / "own_model", folder, ignore=own)
    programs.mkdir()
    for name, words in {"python": "", "scod": "-m scodkit"}.items():
        (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {words} "$@"\n')
        (programs / name).chmod(0o755)
    env = {**os.environ, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}
    cwd = tmp_path
    for source, told in blocks("shell.md", "sh"):
        ran = subprocess.run(
            ["/bin/sh", "-ec", source], cwd=cwd, env=env, capture_output=True, text=True
        )
        assert ran.returncode == 0, ran.stderr
        cwd = folder  # where the first block leads
        if told:
            assert_alike(ran.stdout, told)
    assert (folder / "report.html").read_text().startswith("<!doctype html>")


def test_the_table_of_extras_is_complete() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    told = re.findall(r"^\| `([\w-]+)` \|", (START / "install.md").read_text(), re.MULTILINE)
    for_developers = {"hosts", "peers", "docs", "dev"}
    assert set(told) == project["optional-dependencies"].keys() - for_developers
