"""The verbs of ``scod`` against the library itself."""

from __future__ import annotations

import csv
import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import nn

from command_line import own_folder, scod, start
from scodkit import Categorical, Gaussian, LastLayers, Monitor, Projected
from scodkit.sketch import Exact, FrequentDirections, Nystrom, TwoSided

FIT = ("fit", "model.py:net", "train.npy", "-o", "m.scod", "--likelihood", "categorical")


def net(seed: int = 7) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with a fitted and calibrated monitor."""
    place = own_folder(tmp_path_factory.mktemp("own"))
    assert scod(*FIT, cwd=place).code == 0
    assert scod("calibrate", "m.scod", "model.py:net", "heldout.npy", cwd=place).code == 0
    return place


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Monitor:
    """The same monitor, made in Python."""
    monitor = Monitor(net(), Categorical())
    monitor.fit(array(folder, "train").split(64), progress=False)
    return monitor.calibrate(array(folder, "heldout").split(64), progress=False)


def array(folder: Path, name: str) -> torch.Tensor:
    return torch.from_numpy(np.load(folder / f"{name}.npy"))


def tensors(path: Path) -> dict[str, torch.Tensor]:
    return load_file(path)


def test_fit_and_calibrate_are_those_of_the_library(folder: Path, oracle: Monitor) -> None:
    loaded = Monitor.load(folder / "m.scod", net())
    assert torch.equal(loaded.basis.vectors, oracle.basis.vectors)
    assert torch.equal(loaded.calibration.scores, oracle.calibration.scores)


@pytest.mark.parametrize("form", ["new.npy", "new.npz", "new.csv"])
def test_scores_are_those_of_the_library(folder: Path, oracle: Monitor, form: str) -> None:
    found = scod("score", "m.scod", "model.py:net", form, "--json", cwd=folder)
    expected = oracle(array(folder, "new"))
    assert found.code == 0
    assert [d["input"] for d in found.documents] == list(range(6))
    assert [d["score"] for d in found.documents] == pytest.approx(expected.score.tolist())
    assert [d["p_value"] for d in found.documents] == expected.p_value.tolist()
    assert [d["prediction"] for d in found.documents] == expected.output.argmax(1).tolist()
    assert "made by hand" not in found.out
    assert "made by hand" in found.err


def test_lines_on_stdin_are_answered_one_by_one(folder: Path, oracle: Monitor) -> None:
    rows = array(folder, "new")
    scores = oracle.score(rows[:2]).tolist()
    words = ["score", "m.scod", "model.py:net", "-"]
    with start(*words, cwd=folder) as place:
        for line, expected in zip([rows[0], {"id": "b", "x": rows[1]}], scores, strict=True):
            # the answer must be there before the next line is sent
            text = repr(line.tolist()) if torch.is_tensor(line) else None
            text = text or f'{{"id": "b", "x": {rows[1].tolist()}}}'
            place.stdin.write(text + "\n")
            place.stdin.flush()
            assert f'"score": {expected}'[:14] in place.stdout.readline()
        place.stdin.write("[1, 2]\nnonsense\n{}\n[NaN, 0, 0]\n")
        out, err = place.communicate()
    assert place.returncode == 2
    lines = out.splitlines()
    assert ["error" in line for line in lines] == [True, True, True, False]
    assert '"score": null' in lines[3]
    assert '"alarm": true' in lines[3]
    assert "Traceback" not in err


def test_images_are_scored_by_name(tmp_path: Path) -> None:
    own_folder(tmp_path)
    draw = np.random.default_rng(1)
    pixels = draw.integers(0, 255, size=(40, 4, 5, 3), dtype=np.uint8)
    (tmp_path / "shots" / "late").mkdir(parents=True)
    for i, image in enumerate(pixels):
        Image.fromarray(image).save(tmp_path / "shots" / "late" / f"{i:02}.png")
    words = ("fit", "model.py:pictures", "shots", "-o", "m.scod", "--likelihood", "bernoulli")
    assert scod(*words, cwd=tmp_path).code == 0
    found = scod("score", "m.scod", "model.py:pictures", "shots", "--json", cwd=tmp_path)
    torch.manual_seed(7)
    model = nn.Sequential(nn.Flatten(), nn.Linear(60, 2))
    outputs = model(torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255)
    assert found.documents[3]["input"] == os.path.join("late", "03.png")
    assert found.documents[3]["alarm"] is None
    shown = [d["prediction"] for d in found.documents]
    assert torch.allclose(torch.tensor(shown), outputs, atol=1e-5)


def test_names_of_files_do_nothing_but_name(tmp_path: Path) -> None:
    """Neither to a terminal, nor to a spreadsheet, nor where they are no characters."""
    own_folder(tmp_path)
    names = ["\x1b]0;x\x07.png", "=cmd|'x'!A0.png", "@a.png", "-1.png", "\udcff.png", "b.png"]
    (tmp_path / "shots").mkdir()
    for i, name in enumerate(names):
        Image.new("RGB", (5, 4), (i, 2 * i, 9)).save(tmp_path / "shots" / name)
    words = ("fit", "model.py:pictures", "shots", "-o", "m.scod", "--likelihood", "gaussian")
    assert scod(*words, cwd=tmp_path).code == 0
    words = ("score", "m.scod", "model.py:pictures", "shots")
    table = scod(*words, cwd=tmp_path).out
    assert "\x1b" not in table
    assert {r"\x1b]0;x\x07.png", r"\udcff.png", "@a.png"} <= set(table.split())
    found = scod(*words, "--json", cwd=tmp_path).documents
    assert [document["input"] for document in found] == sorted(names)
    assert scod(*words, "-o", "scores.csv", cwd=tmp_path).code == 0
    rows = list(csv.DictReader((tmp_path / "scores.csv").read_text().splitlines()))
    expected = {f"'{name}" if name[0] in "=@-" else name for name in names[1:4]} | {"b.png"}
    assert expected < {row["input"] for row in rows}
    assert any(row["prediction_1"].startswith("-") for row in rows)  # numbers are as they are
    words = ("report", "m.scod", "model.py:pictures", "--known", "shots", "-o", "r.html")
    assert scod(*words, cwd=tmp_path).code == 0


def test_a_fit_without_weights_says_so(folder: Path) -> None:
    words = (*FIT[:4], "bare.scod", *FIT[5:])
    said = "scod: no --weights: the model as net() returns it\n"
    assert said in scod(*words, cwd=folder).err
    assert said in scod(*words, "--json", cwd=folder).err
    torch.save(net().state_dict(), folder / "own.pt")
    assert "no --weights" not in scod(*words, "--weights", "own.pt", cwd=folder).err


def test_table_of_scores(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "scores.csv"
    found = scod(
        *("score", "m.scod", "model.py:net", "new.csv", "-o", path, "--false-alarm", "0.2"),
        cwd=folder,
    )
    rows = list(csv.DictReader(path.read_text().splitlines()))
    assert found.out == ""
    assert len(rows) == 6
    assert rows[0].keys() == {"input", "prediction", "score", "p_value", "alarm"}
    alarms = [row["alarm"] == "1" for row in rows]
    assert alarms == [float(row["p_value"]) <= 0.2 for row in rows]
    assert f"{sum(alarms)} alarms among 6 inputs" in found.err
    assert [p.name for p in tmp_path.iterdir()] == ["scores.csv"]


def test_alarms_fail_only_when_asked(folder: Path) -> None:
    np.save(folder / "far.npy", np.full((1, 3), 50, np.float32))
    words = ("score", "m.scod", "model.py:net", "far.npy")
    assert scod(*words, cwd=folder).code == 0
    found = scod(*words, "--fail-on-alarm", cwd=folder)
    assert found.code == 3
    assert "ALARM" in found.out
    assert "warning: expected inputs like those of the fit" in found.err
    assert scod("score", "m.scod", "model.py:net", "-", "--fail-on-alarm", cwd=folder,
                stdin="[50, 50, 50]\n").code == 3  # fmt: skip
    calm = ("score", "m.scod", "model.py:net", "-", "--fail-on-alarm")
    assert scod(*calm, cwd=folder, stdin="[0, 0, 0]\n").code == 0


def test_confidence_is_that_of_the_library(folder: Path, oracle: Monitor) -> None:
    words = ("--false-alarm", "0.2", "--confidence", "0.9", "--json")
    found = scod("score", "m.scod", "model.py:net", "heldout.npy", *words, cwd=folder)
    expected = oracle.flag(array(folder, "heldout"), 0.2, confidence=0.9)
    assert [d["alarm"] for d in found.documents] == expected.tolist()
    assert 0 < int(expected.sum()) < int(oracle.flag(array(folder, "heldout"), 0.2).sum())


def test_explanations_are_those_of_the_library(folder: Path, oracle: Monitor) -> None:
    known = oracle.references([array(folder, "train")], progress=False)
    why = oracle.explain(array(folder, "new"), references=known, saliency=True)
    found = scod(
        *("explain", "m.scod", "model.py:net", "new.npy", "--references", "train.npy"),
        *("--saliency", "--plot", "why.png", "--json"),
        cwd=folder,
    )
    order = why.score.argsort(descending=True)[:3].tolist()
    assert [d["input"] for d in found.documents] == order
    for row, document in zip(order, found.documents, strict=True):
        assert document["score"] == pytest.approx(float(why.score[row]), rel=1e-5)
        assert sum(document["layers"].values()) == pytest.approx(document["score"])
        assert list(document["layers"]) == list(why.layers.names)
        assert document["prediction"] == why.predictions[row]
        assert document["p_value"] == pytest.approx(float(why.p_value[row]))
        assert {name: column["value"] for name, column in document["columns"].items()} == {
            f"column {i}": value for i, value in enumerate(array(folder, "new")[row].tolist())
        }
        assert list(document["directions"].values()) == pytest.approx(
            why.directions.values[row].tolist(), rel=1e-4
        )
        assert [n["sample"] for n in document["nearest"]] == why.nearest.index[row].tolist()
        assert document["slopes"] == pytest.approx(
            why.saliency.gradient[row].tolist(), rel=1e-3
        )
    with Image.open(folder / "why.png") as image:
        assert image.size[0] > 500
    one = scod("explain", "m.scod", "model.py:net", "new.npy", "--sample", 4, cwd=folder)
    assert one.out.splitlines()[0].split() == ["input", "4"]


def test_merged_parts_are_one_fit(folder: Path, oracle: Monitor) -> None:
    for part, rows in {"1": slice(0, 40), "2": slice(40, 96)}.items():
        np.save(folder / f"part-{part}.npy", array(folder, "train")[rows].numpy())
        words = (f"part-{part}.npy", "-o", f"part-{part}.scod", *FIT[5:])
        assert scod(*FIT[:2], *words, cwd=folder).code == 0
    found = scod(
        *("merge", "model.py:net", "part-1.scod", "part-2.scod", "-o", "whole.scod", "--json"),
        cwd=folder,
    )
    assert found.document["samples"] == 96
    loaded = Monitor.load(folder / "whole.scod", net())
    x = array(folder, "new")
    assert torch.allclose(loaded.score(x), oracle.score(x), rtol=1e-3)
    noted = [part["fit"]["data"] for part in loaded.notes["parts"]]
    assert noted == ["part-1.npy", "part-2.npy"]


def test_parts_of_projected_weights_merge_with_the_projections_of_the_first(
    folder: Path,
) -> None:
    data, ends = array(folder, "train"), ("model.py:net", "--likelihood", "categorical")
    np.save(folder / "one.npy", data[:40].numpy())
    np.save(folder / "two.npy", data[40:].numpy())
    one = ("fit", "one.npy", "-o", "one.scod", *ends[1:], "--project", "2")
    two = ("fit", "two.npy", "-o", "two.scod", *ends[1:])
    for words in (one, (*two, "--projections", "one.scod")):
        done = scod(words[0], ends[0], *words[1:], cwd=folder)
        assert done.code == 0, done.err
    merged = ("merge", "model.py:net", "one.scod", "two.scod", "-o", "both.scod")
    assert scod(*merged, cwd=folder).code == 0
    first = Monitor(net(), Categorical(), parameters=Projected(2)).fit(
        data[:40].split(40), progress=False
    )
    given = Projected(given=first.projections)
    second = Monitor(net(), Categorical(), parameters=given).fit([data[40:]], progress=False)
    expected = first.merge(second).score(array(folder, "new"))
    found = Monitor.load(folder / "both.scod", net()).score(array(folder, "new"))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=0)
    refused = scod("fit", ends[0], *two[1:], *one[-2:], "--projections", "one.scod", cwd=folder)
    assert refused.code == 2
    assert "leave one out" in refused.err


def test_weights_from_files(folder: Path) -> None:
    save_file(net(8).state_dict(), folder / "w.safetensors")
    torch.save(net(8).state_dict(), folder / "w.pt")
    expected = Monitor(net(8), Categorical()).fit(
        array(folder, "train").split(64), progress=False
    )
    for name in ("w.safetensors", "w.pt"):
        words = (*FIT[:4], "w.scod", *FIT[5:], "--weights", name)
        assert scod(*words, cwd=folder).code == 0
        loaded = Monitor.load(folder / "w.scod", net(8))
        assert torch.equal(loaded.basis.vectors, expected.basis.vectors)


OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("gaussian --variance 0.5 --sketch exact", {"sketch": Exact()}),
    ("gaussian --variance 0.5 --variance 2", {"likelihood": Gaussian((0.5, 2.0))}),
    (
        "gaussian --variance 0.5 --sketch two-sided --size 20 --seed 3 --rank 4",
        {"sketch": TwoSided(size=20, seed=3), "rank": 4},
    ),
    (
        "gaussian --variance 0.5 --sketch frequent-directions --size 60 --last-layers 1",
        {"sketch": FrequentDirections(size=60), "parameters": LastLayers(count=1)},
    ),
    (
        "gaussian --variance 0.5 --sketch nystrom --seed 3 --parameters 0.* --prior-scale 2",
        {"sketch": Nystrom(seed=3), "parameters": ["0.*"], "prior_scale": 2.0},
    ),
    ("gaussian --variance 0.5 --last-fraction 0.4", {"parameters": LastLayers(fraction=0.4)}),
    ("categorical --directions 1", {"likelihood": Categorical(directions=1)}),
    ("categorical --class-dim -1", {"likelihood": Categorical(class_dim=-1)}),
    (
        "categorical --class-dim -1 --samples 3 --pool mean",
        {"likelihood": Categorical(class_dim=-1, samples=3, pool="mean")},
    ),
    (
        "categorical --class-dim -1 --directions 1 --pool max",
        {"likelihood": Categorical(1, -1, pool="max")},
    ),
    ("gaussian --variance 0.5 --project 2", {"parameters": Projected(2)}),
    (
        "gaussian --variance 0.5 --project 2 --parameters 0.*",
        {"parameters": Projected(2, layers=["0.*"])},
    ),
]


@pytest.mark.parametrize(("words", "options"), OPTIONS)
def test_words_stand_for_objects(words: str, options: dict[str, Any], folder: Path) -> None:
    given = (*FIT[:4], "o.scod", "--likelihood", *words.split())
    assert scod(*given, cwd=folder).code == 0
    options = {"likelihood": Gaussian(0.5), **options}
    expected = Monitor(net(), **options).fit(array(folder, "train").split(64), progress=False)
    loaded = Monitor.load(folder / "o.scod", net())
    assert loaded.likelihood == expected.likelihood
    assert loaded.sketch == expected.sketch
    assert loaded.prior_scale == expected.prior_scale
    assert torch.equal(loaded.basis.vectors, expected.basis.vectors)


@pytest.mark.parametrize(("word", "certified"), [("--rows", True), ("--products", False)])
def test_how_outputs_are_fitted(word: str, certified: bool, folder: Path) -> None:
    given = (*FIT[:4], "o.scod", *FIT[5:], word, "--json")
    assert scod(*given, cwd=folder).document["certified"] is certified
    expected = Monitor(net(), Categorical()).fit(
        array(folder, "train").split(64), progress=False, products=not certified
    )
    loaded = Monitor.load(folder / "o.scod", net())
    assert torch.equal(loaded.basis.vectors, expected.basis.vectors)


@pytest.mark.parametrize("data", ["train", "items", "batches"])
def test_data_from_functions(data: str, folder: Path) -> None:
    words = (*FIT[:2], f"model.py:{data}", "-o", "f.scod", *FIT[5:], "--json")
    assert scod(*words, cwd=folder).document["samples"] == 96
    x = torch.randn(96, 3, generator=torch.Generator().manual_seed(1))
    expected = Monitor(net(), Categorical()).fit(x.split(32), progress=False)
    loaded = Monitor.load(folder / "f.scod", net())
    assert torch.allclose(loaded.score(x), expected.score(x), rtol=1e-4)


def test_on_a_terminal_there_are_tables_and_bars(folder: Path) -> None:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 100, 0, 0))
    words = [sys.executable, "-m", "scodkit", "score", "m.scod", "model.py:net"]
    env = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100"}
    env.pop("NO_COLOR", None)
    np.save(folder / "far.npy", np.full((50, 3), 50, np.float32))
    run = subprocess.Popen(
        [*words, "far.npy"], cwd=folder, env=env, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    text = b""
    while run.poll() is None or select.select([ours], [], [], 0)[0]:
        try:
            text += os.read(ours, 4096)
        except OSError:  # Linux's end of a terminal
            break
    run.wait()
    os.close(ours)
    assert b"scoring: 100%" in text
    assert b"\x1b[1;31m" in text  # alarms in red
    assert text.count(b"ALARM") == 40
    assert b"and 10 more" in text


@pytest.mark.parametrize(
    ("words", "now"),
    [
        (("bench", "run", "--domain", "wine", "--seeds", "1"), "scodbench --help"),
        (("bench",), "scodbench --help"),
        (("data", "get", "mnist", "--data", "x"), "scodbench data --help"),
    ],
)
def test_verbs_that_moved_say_where(words: tuple[str, ...], now: str, tmp_path: Path) -> None:
    run = scod(*words, cwd=tmp_path)
    assert run.code == 2
    advice = run.err.splitlines()[2]
    assert advice.endswith(f"try      pip install ./benchmarks && {now}")
