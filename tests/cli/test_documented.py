"""The way of a new user with a model of their own, typed exactly as it is documented."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from command_line import scod

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "reference" / "cli.md").read_text()
OVERVIEW = (ROOT / "docs" / "guides" / "overview.md").read_text()


def commands(text: str) -> list[str]:
    blocks = re.findall(r"```sh\n(.*?)```", re.sub(r"\\\n +", "", text), re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


COMMANDS = commands(DOCUMENT)
TABLE = re.search(r"```text\n(.*?)```", DOCUMENT, re.DOTALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The example's folder, as it is in the repository."""
    place = tmp_path_factory.mktemp("new") / "own_model"
    own = shutil.ignore_patterns("*.scod", "*.safetensors", "train.csv", "heldout.csv", "__*")
    shutil.copytree(ROOT / "examples" / "own_model", place, ignore=own)
    return place


@pytest.fixture(scope="module")
def outputs(folder: Path, tmp_path_factory) -> dict[str, str]:
    """What the commands print, by their first two words."""
    programs = tmp_path_factory.mktemp("bin")
    for name, words in {"python": "", "scod": "-m scodkit"}.items():
        script = programs / name
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}" {words} "$@"\n')
        script.chmod(0o755)
    env = {**os.environ, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}
    found = {}
    # the overview begins in the folder above
    own = [command.replace("cd examples/own_model && ", "") for command in commands(OVERVIEW)]
    for command in dict.fromkeys([*own, *COMMANDS[1:]]):
        run = subprocess.run(
            ["/bin/sh", "-c", command], cwd=folder, env=env, capture_output=True, text=True
        )
        assert run.returncode == 0, f"{command}: {run.stderr}"
        found[" ".join(command.split()[:2])] = run.stdout
    return found


def test_all_verbs_of_the_path_are_there() -> None:
    assert [" ".join(command.split()[:2]) for command in COMMANDS] == [
        "python model.py",
        "scod fit",
        "scod calibrate",
        "scod score",
        "scod explain",
        "scod inspect",
    ]


def test_the_overview_has_the_same_path_and_ends_with_a_page(
    outputs: dict[str, str], folder: Path
) -> None:
    own = commands(OVERVIEW)
    assert own[0].startswith("cd examples/own_model && python model.py")
    assert [c for c in own if c in COMMANDS] == COMMANDS[1:4]
    assert outputs["scod report"].split() == ["report", str(folder / "report.html")]
    assert (folder / "report.html").read_text().startswith("<!doctype html>")


def test_the_slips_raise_alarms_and_patients_do_not(outputs: dict[str, str]) -> None:
    rows = [line.split() for line in outputs["scod score"].splitlines()[1:]]
    assert [row[-1] for row in rows] == ["no"] * 6 + ["ALARM"] * 3


def test_the_table_is_the_one_that_is_documented(outputs: dict[str, str]) -> None:
    assert TABLE is not None
    documented = [line.split() for line in TABLE.group(1).splitlines()]
    printed = [line.split() for line in outputs["scod score"].splitlines()]
    assert printed[0] == documented[0]
    for ours, theirs in zip(printed[1:], documented[1:], strict=True):
        assert (ours[0], ours[-1]) == (theirs[0], theirs[-1])
        for a, b in zip(ours[1:4], theirs[1:4], strict=True):
            assert float(a) == pytest.approx(float(b), rel=0.2)


def test_the_most_atypical_is_explained(outputs: dict[str, str], folder: Path) -> None:
    first, second, *_ = outputs["scod explain"].splitlines()
    assert first.split() == ["input", "8"]
    documented = re.search(r"^columns  (.*)$", DOCUMENT, re.MULTILINE)
    assert documented is not None
    assert second == documented.group(0)  # of the data alone
    assert (folder / "why.png").read_bytes().startswith(b"\x89PNG")
    assert "fit: variance" in outputs["scod inspect"]


def test_the_file_of_options_is_one(outputs: dict[str, str], folder: Path) -> None:
    block = re.search(r"```toml\n(.*?)```", DOCUMENT, re.DOTALL)
    assert block is not None
    (folder / "scod.toml").write_text(block.group(1))
    fitted = scod("fit", "--config", "scod.toml", "--json", cwd=folder).document
    assert fitted["rank"] == 30
    held = scod("calibrate", "--config", "scod.toml", "--json", cwd=folder).document
    assert held["held_out"] == 130
