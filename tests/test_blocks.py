"""Code blocks of README and of the pages run as they are printed; commands exist.

Pages of ``docs/start`` and ``docs/tutorials`` are made by scripts that have tests of their own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pytest
import typer
from torch import distributed

import page_blocks
from page_blocks import SHOWN, Block
from scodkit.cli.app import app

ROOT = Path(__file__).parents[1]
OTHERS = ("docs/start/", "docs/tutorials/")
PAGES = [
    page
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    if not (page := path.relative_to(ROOT).as_posix()).startswith(OTHERS)
]
BLOCKS = [
    (page, block)
    for page in [*PAGES, "benchmarks/README.md"]
    if (ROOT / page).exists()  # benchmarks are no part of an sdist
    for block in page_blocks.blocks((ROOT / page).read_text(encoding="utf-8"))
]
PROGRAMS = {"scod": typer.main.get_command(app)}
# of the system, or checked elsewhere
OTHER_PROGRAMS = {"cd", "pip"}
if find_spec("scodbench"):  # a package of its own
    PROGRAMS["scodbench"] = typer.main.get_command(import_module("scodbench.cli").app)
else:
    OTHER_PROGRAMS.add("scodbench")
TORCHRUN = ["-m", "scodkit"]


def run_by(page: str) -> bool:
    return any(
        name == page and block.language == "python" and not block.reason
        for name, block in BLOCKS
    )


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder, as the only process of a group that torchrun would start."""
    mpl.use("Agg")
    monkeypatch.chdir(tmp_path)
    group = {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0}
    for name, value in group.items():
        monkeypatch.setenv(name, str(value))
    yield tmp_path
    if distributed.is_initialized():
        distributed.destroy_process_group()


@pytest.mark.parametrize("page", [page for page in PAGES if run_by(page)])
def test_python_blocks_run(page: str, home: Path) -> None:
    assert page_blocks.run(ROOT / page, page_blocks.given(page))


def named(block: tuple[str, Block]) -> str:
    return f"{block[0]}:{block[1].line}"


@pytest.mark.parametrize(("page", "block"), BLOCKS, ids=[named(own) for own in BLOCKS])
def test_blocks_run_or_say_why_not(page: str, block: Block) -> None:
    assert block.language in {"python", "sh", "console"} | SHOWN, "a block of unknown language"
    if block.reason is not None:
        assert len(block.reason.split()) >= 3
        for path in re.findall(r"tests/[\w/]+\.py", block.reason):
            assert (ROOT / path).exists(), f"{path} does not exist"
    if block.language == "python" and not block.text.startswith(">>> "):
        compile(block.text, page, "exec")


def arguments(words: list[str]) -> list[str]:
    """Return a command without the variables that are set for it."""
    while "=" in words[0] and not words[0].startswith("-"):
        words = words[1:]
    return words


def program(words: list[str]) -> tuple[str, list[str]]:
    """Return which of our commands is typed, and what behind it."""
    if words[0] == "torchrun":
        at = words.index("-m")
        assert words[at : at + 2] == TORCHRUN
        return "scod", words[at + 2 :]
    return words[0], words[1:]


def make_targets() -> set[str]:
    return set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


SHELL = [(page, block) for page, block in BLOCKS if block.language in {"sh", "console"}]


@pytest.mark.parametrize(("page", "block"), SHELL, ids=[named(own) for own in SHELL])
def test_commands_exist_and_take_these_options(page: str, block: Block) -> None:
    folders = [ROOT, ROOT / "examples" / "own_model"]  # where the page says to go
    for command in page_blocks.commands(block):
        name, words = program(arguments(command))
        if name in PROGRAMS:
            page_blocks.parse(PROGRAMS[name], words)
        elif name == "make":
            assert set(words) <= make_targets()
        elif name == "python":
            assert any((folder / words[0]).exists() for folder in folders), words[0]
        else:
            assert name in OTHER_PROGRAMS


INLINE = re.compile(r"`(scod|scodbench) ([a-z][\w-]*)([^`]*)`")


@pytest.mark.parametrize("page", PAGES)
def test_commands_in_sentences_have_verbs_and_options_that_exist(page: str) -> None:
    for name, verb, rest in INLINE.findall((ROOT / page).read_text(encoding="utf-8")):
        if name not in PROGRAMS:
            continue
        command: Any = PROGRAMS[name].get_command(None, verb)
        assert command is not None, f"{name} {verb}"
        if not hasattr(command, "get_command"):
            known = {o for own in command.params for o in (*own.opts, *own.secondary_opts)}
            assert set(re.findall(r"(?<= )--[\w-]+", rest)) <= known | {"--help"}
