"""What the command says: three lines without Python, names put right, commands to paste."""

from __future__ import annotations

import ast
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import scodkit
from command_line import own_folder, said_in_three_lines, scod
from scodkit.cli import messages

SOURCE = Path(scodkit.__file__).parent
FIT = "fit model.py:net train.csv -o m.scod --likelihood categorical"


def texts() -> Iterator[str]:
    """Yield every message of the package, with a 7 wherever it has a value of the moment."""
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            words = [part.value if isinstance(part, ast.Constant) else "7" for part in parts]
            text = "".join(map(str, words))
            if text.startswith("expected "):
                yield f"{text}7" if text.endswith(" ") else text  # the rest is added


TEXTS = sorted(set(texts()))


def test_no_message_of_the_library_tells_a_shell_to_type_python() -> None:
    assert len(TEXTS) > 300
    for text in TEXTS:
        expected, found, advice = messages.in_parts(text)
        assert expected.startswith("expected")
        assert found, text
        assert advice
        if not advice.startswith("pip install "):
            assert not re.search(r"\w\(|\w\[|lambda|\w=(?!=)", advice), text
        assert not re.search(r"\btype \S*[(\[=]", found), text


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (
            "expected finite numbers, got a NaN in the inputs of sample 3 (batch 0, row 3); "
            "mend or remove it, or type fit(..., on_bad='skip') to leave such samples out",
            ("a NaN in the inputs of sample 3 (batch 0, row 3)",
             "mend or remove it; or --on-bad skip to leave such samples out"),
        ),
        (
            "expected a model that runs, but it raised ValueError (a; b, got c); fit again",
            ("it raised ValueError (a; b, got c)", "fit again"),
        ),
        (
            "expected logits for Bernoulli(), but all 9 numbers are in [0, 1]: are they "
            "probabilities? Remove the Sigmoid, or type Monitor(..., outputs=torch.logit)",
            ("all 9 numbers are in [0, 1]: are they probabilities?", "Remove the Sigmoid"),
        ),
        ("expected size >= rank, got size=3, rank=9; type Nystrom(size=18)",
         ("size=3, rank=9", "--size 18")),
        ("expected a bracket, got 1 (unmatched: '('); write two",
         ("1 (unmatched: '(')", "write two")),
    ],
)  # fmt: skip
def test_parts(text: str, parts: tuple[str, str]) -> None:
    assert messages.in_parts(text)[1:] == parts


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    place = own_folder(tmp_path_factory.mktemp("own folder"))
    torch.manual_seed(7)
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
    torch.save(net.state_dict(), place / "my weights.pt")
    assert scod(*FIT.split(), cwd=place).code == 0
    assert scod(*FIT.replace("m.scod", "n.scod").split(), cwd=place).code == 0
    assert scod("calibrate", "m.scod", "model.py:net", "heldout.csv", cwd=place).code == 0
    return place


# a command with a slip, and what to type
SLIPS = [
    (FIT.replace("train.csv", "trian.csv"), FIT),
    (FIT.replace("model.py", "modle.py"), FIT),
    (FIT.replace(":net", ":ent"), FIT),
    (FIT.replace("model.py", "modle"), FIT.replace(".py", "")),
    (FIT.replace("model.py:net", "model.py"), FIT),
    (FIT.replace("categorical", "categoricla"), FIT),
    (FIT.replace("--likelihood", "--liklihood"), FIT),
    (FIT.replace("--likelihood categorical", "--likelihood=categoricla"),
     FIT.replace("--likelihood ", "--likelihood=")),
    (f"{FIT} --sketch exakt", f"{FIT} --sketch exact"),
    (f"{FIT} --weights 'my weight.pt'", f"{FIT} --weights 'my weights.pt'"),
    (f"{FIT} --drop bb", f"{FIT} --drop b"),
    (f"{FIT} --columns a,bb,c", f"{FIT} --columns a,b,c"),
    (FIT.replace("fit", "fti"), FIT),
    ("score m.scdo model.py:net new.csv", "score m.scod model.py:net new.csv"),
    ("report m.scod model.py:net --known near=nwe.csv",
     "report m.scod model.py:net --known near=new.csv"),
]  # fmt: skip


@pytest.mark.parametrize(("typed", "meant"), SLIPS)
def test_slips_are_put_right(typed: str, meant: str, folder: Path) -> None:
    found = scod(*shlex.split(typed), cwd=folder)
    assert found.code == 2
    assert said_in_three_lines(found.err).endswith(f"; scod {meant}")


def test_a_file_like_no_other_is_answered_with_those_that_are_there(folder: Path) -> None:
    found = scod(*FIT.replace("train.csv", "q.npz").split(), cwd=folder)
    assert "the name of a file that is there: heldout.csv, heldout.npy" in found.err


def test_all_that_is_missing_is_named_at_once(folder: Path) -> None:
    found = scod("fit", "model.py:net", "--rank", "3", cwd=folder)
    assert found.code == 2
    assert said_in_three_lines(found.err) == (
        "scod: expected DATA, --output, --likelihood, got nothing for any of them; scod fit "
        "model.py:net --rank 3 DATA --output FILE --likelihood NAME"
    )
    found = scod("inspect", cwd=folder)
    assert "expected MONITOR, got nothing for it" in said_in_three_lines(found.err)
    (folder / "half.toml").write_text('output = "half.scod"\n[fit]\nlikelihood = "gaussian"\n')
    found = scod("fit", "--config", "half.toml", cwd=folder)
    assert "expected MODEL, DATA, got nothing" in said_in_three_lines(found.err)


def test_half_a_command_is_answered(folder: Path) -> None:
    said = said_in_three_lines(
        scod("fit", "model.py:net", "train.csv", "--rank", cwd=folder).err
    )
    assert said == "scod: expected a value after --rank, got none; scod fit --help"
    nothing = scod(cwd=folder)
    assert nothing.code == 2
    assert "Usage: scod [OPTIONS] COMMAND" in nothing.err


def test_a_warning_has_its_advice_on_a_line_of_its_own(folder: Path) -> None:
    words = "calibrate n.scod model.py:net train.csv -o trained.scod"
    lines = scod(*words.split(), cwd=folder).err.splitlines()
    place = next(
        i for i, line in enumerate(lines) if line.startswith("scod: warning: 96 of 96")
    )
    assert lines[place + 1].startswith("      try      calibrate with data that was not used")


def pasted(command: str, folder: Path) -> tuple[str, str]:
    """Run a command as a shell splits it; return its verb and the command that is next."""
    words = shlex.split(command)
    assert words[0] == "scod"
    found = scod(*words[1:], cwd=folder)
    assert found.code == 0, found.err
    lines = found.err.splitlines()
    after = [place + 1 for place, line in enumerate(lines) if line.startswith("scod: next")]
    assert len(after) <= 1
    return words[1], lines[after[0]].strip() if after else ""


def test_next_lines_run_as_they_are(folder: Path) -> None:
    """From a fit to an explanation, each command as the one before it has printed it."""
    (folder / "held out.csv").write_text((folder / "heldout.csv").read_text())
    (folder / "heldout.csv").unlink()
    command = f"scod {FIT} --weights 'my weights.pt' --batch-size 32"
    command = command.replace("m.scod", "'own monitor.scod'")
    verbs = []
    while command:
        verb, command = pasted(command, folder)
        verbs.append(verb)
        if command:
            assert "--weights 'my weights.pt'" in command
            assert "--batch-size 32" in command
        if verb == "calibrate":  # inputs of the user's own in the place of held-out ones
            np.savetxt(folder / "far.csv", np.full((2, 3), 50), "%g", ",", header="a,b,c",
                       comments="")  # fmt: skip
            command = command.replace("'held out.csv'", "far.csv")
    assert verbs == ["fit", "calibrate", "score", "explain"]
    _, command = pasted("scod inspect n.scod", folder)
    assert command == "scod calibrate n.scod model.py:net 'held out.csv'"


def test_without_held_out_data_in_sight_a_placeholder_says_so(tmp_path: Path) -> None:
    own_folder(tmp_path)
    found = scod(*FIT.replace("train.csv", "model.py:train").split(), cwd=tmp_path)
    assert "scod: next, with data the fit has not seen there:\n" in found.err.replace(
        "in the place of HELD_OUT_DATA", "there"
    )
    assert "  scod calibrate m.scod model.py:net HELD_OUT_DATA\n" in found.err


def test_words_are_not_those_of_another_command(monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["scod", "fit", "a:b"])
    assert messages.corrected("train.csv", "new.csv") == "new.csv, if that was meant"
