"""What a user waits for before anything is computed: version, help and completion."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer

import scodkit
from command_line import said_in_three_lines, scod
from own_process import printed_by
from scodkit.cli.app import app

HEAVY = {"torch", "numpy", "safetensors", "matplotlib", "bokeh", "scipy", "sklearn"}
VERBS = list(typer.main.get_command(app).commands)


def started(*words: str, **environment: str) -> tuple[str, set[str]]:
    """Run ``scod`` in a new process; return its stdout and the heavy packages it imported."""
    run = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "scodkit", *words],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )
    lines = [line for line in run.stderr.splitlines() if line.startswith("import time:")]
    return run.stdout, {line.rpartition("|")[2].strip() for line in lines} & HEAVY


def test_a_verb_that_runs_imports_torch() -> None:
    assert started("inspect", "nowhere.scod")[1] >= {"torch", "numpy", "safetensors"}


def test_version_and_help_import_nothing_heavy() -> None:
    assert started("--version") == (f"scodkit {scodkit.__version__}\n", set())
    out, heavy = started("--help", COLUMNS="80")
    assert not heavy
    assert max(map(len, out.splitlines())) <= 80
    assert "..." not in out.partition("Commands:")[2]  # no verb's line is cut
    assert all(f" {verb} " in out for verb in VERBS)


@pytest.mark.parametrize("verb", VERBS)
def test_help_of_a_verb_imports_nothing_heavy(verb: str) -> None:
    out, heavy = started(verb, "--help", COLUMNS="80")
    assert f"Usage: scod {verb} " in out
    assert max(map(len, out.splitlines())) <= 80
    assert not heavy


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("scod f", ["fit"]),
        ("scod fit --l", ["--likelihood", "--last-layers", "--last-fraction"]),
        ("scod fit --sketch two", ["two-sided"]),
    ],
)
def test_completion_imports_nothing_heavy(typed: str, completed: list[str]) -> None:
    place = str(len(typed.split()) - 1)
    asked = {"_SCOD_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": place}
    out, heavy = started(**asked)
    assert out.split() == completed
    assert not heavy


def test_a_verb_that_is_misspelt_is_recognised(tmp_path: Path) -> None:
    said = said_in_three_lines(scod("scroe", "m.scod", "it's.py:net", cwd=tmp_path).err)
    assert (
        said
        == "scod: expected a verb of scod, got scroe; scod score m.scod 'it'\"'\"'s.py:net'"
    )


def test_without_its_libraries_the_command_says_what_to_install() -> None:
    program = """
    import sys
    from scodkit.cli import main
    sys.modules["typer"] = None
    try:
        main()
    except SystemExit as end:
        print(end)
    """
    message = printed_by(program)
    assert message.startswith("scod: expected typer, which this needs, found none")
    assert message.endswith(
        'type: pip install "scodkit[cli]", or in a clone: pip install ".[cli]"\n'
    )


def test_the_library_imports_torch_for_the_first_name_that_needs_it() -> None:
    program = """
    import sys
    import scodkit
    print(set(scodkit.__all__) <= set(dir(scodkit)), scodkit.__version__)
    print("torch" in sys.modules)
    print(scodkit.alarms.DriftAlarm.__name__, hasattr(scodkit, "alarm"))
    print(hasattr(scodkit, "__main__"), "scodkit.__main__" in sys.modules)
    from scodkit import *
    print(Monitor is scodkit.monitor.Monitor, set(scodkit.__all__) <= set(globals()))
    """
    assert printed_by(program).splitlines() == [
        f"True {scodkit.__version__}",
        "False",
        "DriftAlarm False",
        "False False",
        "True True",
    ]
