"""``scod score -``: every line is answered, and none ends the stream."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from command_line import own_folder, scod, start

SCORE = ("score", "m.scod", "model.py:net", "-")
GOOD = b"[0.1, 0.2, 0.3]"

# lines, and what is said of them
BAD: dict[bytes, str] = {
    b"[\xff, 1, 2]": "'utf-8' codec can't decode byte 0xff",
    b"\xff\xfe[\x001\x00]\x00": "'utf-8' codec can't decode byte 0xff",
    b"[" * 100_000: "got lists in lists without end",
    b'{"x":' * 100_000: "got lists in lists without end",
    b'{"id": "\\ud800", "x": [1, 2, 3]}': "got half of one, '\\ud800'",
    b'{"id": [[[7]]], "x": [1, 2, 3]}': "expected a text or a number for an id, got a list",
    b'{"id": {"a": 7}, "x": [1, 2, 3]}': "expected a text or a number for an id, got a dict",
    b'{"id": ' + b"[" * 600 + b"]" * 600 + b', "x": [1, 2, 3]}': "a text or a number for an id",
    b'{"x": [1, 2, 3], "x": [3, 2, 1]}': "a key is there twice",
    b'{"x": null}': 'expected a list of numbers, or an object with such a list "x"',
    b'{"y": [1, 2, 3]}': 'expected a list of numbers, or an object with such a list "x"',
    b"{}": 'expected a list of numbers, or an object with such a list "x"',
    b"null": "expected a list of numbers",
    b"7": "expected a list of numbers",
    b'"[1, 2, 3]"': "expected a list of numbers",
    b"[1, 2": "expected JSON",
    b"[1, 2, 3] [1, 2, 3]": "expected JSON",
    b"[1, 2, 0x3]": "expected JSON",
    b'[1, 2, "3"]': "expected numbers alone, got '3'; write null for a missing one",
    b'[1, 2, {"a": 3}]': "expected numbers alone, got {'a': 3}",
    b"[1, [2], 3]": "got lists of several lengths",
    b"[[1, 2], [3]]": "got lists of several lengths",
    b"[" * 90 + b"1" + b"]" * 90: "expected numbers alone",
    b"[1, 2, 1" + b"0" * 400 + b"]": "int too large to convert to float",
    b"[1, 2, 1" + b"0" * 5000 + b"]": "got a line that is not (Exceeds the limit",
    b"[1, 2]": "it failed on these",
    b"[]": "it failed on these",
    b"[[1, 2, 3]]": "expected samples of shape (3,)",
}
# what is missing or beyond all numbers: an alarm
ATYPICAL = [b"[null, 0, 0]", b"[null, null, null]", b"[NaN, 0, 0]", b"[0, -Infinity, 0]",
            b"[0, 1e999, 0]", b'{"id": 1, "x": [0, null, 1]}']  # fmt: skip
# what is unusual, and has a score all the same
ODD = [b"[1, true, 0]", b"[18446744073709551616, 0, 0]", b"[9223372036854775808, 0, 0]",
       b'{"id": null, "x": [1, 2, 3], "more": []}', b"  [1,2,3]\r"]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    place = own_folder(tmp_path_factory.mktemp("own"))
    words = "fit model.py:net train.npy -o m.scod --likelihood categorical --rank 9"
    assert scod(*words.split(), cwd=place).code == 0
    assert scod("calibrate", "m.scod", "model.py:net", "heldout.npy", cwd=place).code == 0
    return place


@pytest.fixture(autouse=True)
def _strict(monkeypatch) -> None:
    """As in most locales: what is not UTF-8 is an error, in and out."""
    monkeypatch.setenv("PYTHONIOENCODING", "utf-8:strict")


def answers(lines: list[bytes], folder: Path) -> tuple[list[dict[str, Any]], int]:
    """Return what a real process says to lines in a pipe, and its exit code."""
    run = start(*SCORE, cwd=folder, text=False)
    out, err = run.communicate(b"\n".join(lines) + b"\n", timeout=60)
    assert b"Traceback" not in err
    assert b"nobody foresaw" not in err
    assert out.isascii()
    return [json.loads(line) for line in out.splitlines()], run.returncode


def test_every_bad_line_has_an_error_and_the_next_one_a_score(folder: Path) -> None:
    lines = [line for bad in BAD for line in (bad, b"", b" \t\r", GOOD)]
    found, code = answers(lines, folder)
    assert code == 2
    assert len(found) == 2 * len(BAD)
    for (line, said), error, good in zip(BAD.items(), found[::2], found[1::2], strict=True):
        assert said in error["error"], line[:60]
        assert good["score"] == found[1]["score"]
        assert "\n" not in error["error"]
    assert [one["input"] for one in found[1::2]] == list(range(1, 2 * len(BAD), 2))


def test_missing_numbers_are_alarms(folder: Path) -> None:
    run = scod(*SCORE, cwd=folder, stdin=b"\n".join(ATYPICAL).decode())
    assert run.code == 0
    said = [(one["score"], one["alarm"]) for one in run.documents]
    assert said == [(None, True)] * len(ATYPICAL)
    assert run.documents[-1]["input"] == 1


def test_unusual_lines_are_scored(folder: Path) -> None:
    lines = b"\n".join(ODD).decode() + '\n{"id": "\u65e5\u672c\u202e", "x": [1, 2, 3]}'
    run = scod(*SCORE, cwd=folder, stdin=lines)
    found = run.documents
    assert run.code == 0
    assert run.out.isascii()
    assert all("error" not in one for one in found)
    assert found[1]["score"] > found[0]["score"]
    assert found[2]["score"] > found[0]["score"]
    assert found[-1]["input"] == "\u65e5\u672c\u202e"


def test_any_bytes_are_answered(folder: Path) -> None:
    """As many answers as lines that are not empty, whatever is in them."""
    draw = random.Random(0)
    seeds = [GOOD, *(line for line in (*BAD, *ATYPICAL, *ODD) if len(line) < 1000)]
    lines = [draw.randbytes(draw.randrange(40)).replace(b"\n", b"") for _ in range(200)]
    for _ in range(300):  # and lines that are nearly good
        line = bytearray(draw.choice(seeds))
        for _ in range(draw.randrange(1, 4)):
            line[draw.randrange(len(line))] = draw.choice(
                b'[]{}":,\\0123456789eE-+.naNul\xff\x00'
            )
        lines.append(bytes(line))
    found, code = answers([*lines, GOOD], folder)
    assert len(found) == sum(bool(line.strip()) for line in [*lines, GOOD])
    assert code == 2
    assert found[-1]["alarm"] is False
    assert sum("error" in one for one in found) > 200


def test_whole_numbers_are_not_rounded_for_a_model_of_tokens(folder: Path) -> None:
    (folder / "tokens.py").write_text(
        "import torch\n"
        "from torch import nn\n"
        "def net():\n"
        "    torch.manual_seed(0)\n"
        "    return nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(12, 2))\n"
        "def train():\n"
        "    return torch.randint(9, (40, 3), generator=torch.Generator().manual_seed(0))\n"
    )
    words = "fit tokens.py:net tokens.py:train -o t.scod --likelihood categorical --rank 4"
    assert scod(*words.split(), cwd=folder).code == 0
    lines = "[1, 2, 3]\n[1, 2.5, 3]\n[1, null, 3]\n[1, null]\n"
    found = scod("score", "t.scod", "tokens.py:net", "-", cwd=folder, stdin=lines)
    assert found.code == 2
    good, fraction, gap, short = found.documents
    assert "error" not in good
    for one in (fraction, short):
        assert "expected whole numbers, as at the fit, got a fraction" in one["error"]
    # no calibration, no alarm; but a missing number is one for every model, and no error
    nothing = {"prediction": None, "score": None, "p_value": None, "alarm": None}
    assert gap == {"input": 2, **nothing}
    calibrate = ("calibrate", "t.scod", "tokens.py:net", "tokens.py:train")
    assert scod(*calibrate, cwd=folder).code == 0
    (gap,) = scod("score", "t.scod", "tokens.py:net", "-", cwd=folder, stdin="[1, null, 3]"
                  ).documents  # fmt: skip
    assert (gap["score"], gap["alarm"], gap["p_value"]) == (None, True, 1 / 41)
