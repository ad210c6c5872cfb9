"""Options from a TOML file, what of them is kept, and what ``scod inspect`` says."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from command_line import own_folder, scod
from scodkit import Gaussian, Monitor
from scodkit.numerics import artifact

TOML = """
model = "model.py:net"
batch-size = 16
weights = "w.pt"

[fit]
data = "train.csv"
output = "m.scod"
likelihood = "gaussian"
variance = [0.5, 2.0]
rank = 9
parameters = "2.*"
check-deterministic = false

[calibrate]
monitor = "m.scod"
data = "heldout.csv"

[score]
false_alarm = 0.2
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    own_folder(tmp_path)
    (tmp_path / "scod.toml").write_text(TOML)
    torch.save(net().state_dict(), tmp_path / "w.pt")
    return tmp_path


def net() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))


def test_a_file_stands_for_flags(folder: Path) -> None:
    assert scod("fit", "--config", "scod.toml", cwd=folder).code == 0
    assert scod("calibrate", "--config", "scod.toml", cwd=folder).code == 0
    loaded = Monitor.load(folder / "m.scod", net())
    assert loaded.rank == 9
    assert loaded.likelihood == Gaussian((0.5, 2.0))
    assert loaded.basis.vectors.shape[0] == 8 * 2 + 2
    assert loaded.calibration.num_data == 60


def test_flags_win(folder: Path) -> None:
    words = ("--rank", 4, "--variance", 3, "-o", "other.scod", "--batch-size", 8)
    assert scod("fit", "--config", "scod.toml", *words, cwd=folder).code == 0
    assert not (folder / "m.scod").exists()
    loaded = Monitor.load(folder / "other.scod", net())
    assert loaded.rank == 4
    assert loaded.likelihood == Gaussian(3.0)
    kept = loaded.notes["fit"]
    assert kept["rank"] == 4
    assert kept["variance"] == [3.0]
    assert kept["batch_size"] == 8
    assert kept["parameters"] == ["2.*"]
    assert kept["check_deterministic"] is False


def test_inspect_shows_everything_without_the_model(folder: Path) -> None:
    for verb in ("fit", "calibrate"):
        assert scod(verb, "--config", "scod.toml", cwd=folder).code == 0
    (folder / "model.py").unlink()
    found = scod("inspect", "m.scod", "--json", cwd=folder).document
    loaded = Monitor.load(folder / "m.scod", net())
    header, _ = artifact.read(folder / "m.scod", "monitor")
    assert found["captured_curvature"] == pytest.approx(loaded.basis.captured)
    assert found["eigenvalues"] == pytest.approx(loaded.basis.values.tolist())
    assert found["likelihood"] == {"type": "Gaussian", "variance": [0.5, 2.0]}
    assert found["sketch"]["type"] == "Nystrom"
    assert found["samples"] == 96
    assert found["calibration"]["held_out"] == 60
    limit = loaded.calibration.threshold(0.05)
    assert found["calibration"]["thresholds"]["0.05"] == pytest.approx(limit)
    assert "0.01" not in found["calibration"]["thresholds"]  # 60 samples cannot promise it
    assert found["fingerprints"] == header["fingerprints"]
    assert found["scodkit_version"] == header["scodkit_version"]
    assert found["notes"]["inputs"]["columns"] == ["a", "b", "c"]
    assert found["notes"]["calibrate"]["data"] == "heldout.csv"
    words = scod("inspect", "m.scod", cwd=folder).out
    for said in (
        "Gaussian(variance=[0.5, 2.0])",
        "60 held-out samples",
        f"{loaded.basis.captured:.1%}",
        header["fingerprints"]["model"],
        header["torch_version"],
        "2.weight, 2.bias",
    ):
        assert said in words
    lines = [line.split() for line in words.splitlines()]
    assert ["fit:", "rank", "9"] in lines
    assert ["fit:", "weights", "w.pt"] in lines


def test_monitors_made_in_python_are_shown_and_used(folder: Path) -> None:
    x = torch.from_numpy(np.load(folder / "train.npy"))
    monitor = Monitor(net(), Gaussian(), rank=3).fit([x], progress=False)
    monitor.notes["why"] = {"who": "me"}
    monitor.save(folder / "mine.scod", sketch=False)
    words = scod("inspect", "mine.scod", cwd=folder).out
    assert "not in the file: no updates or merges" in words
    assert "none; scod calibrate makes one" in words
    assert ["why:", "who", "me"] in [line.split() for line in words.splitlines()]
    scored = scod(
        *("score", "mine.scod", "model.py:net", "new.csv", "--weights", "w.pt", "--json"),
        cwd=folder,
    )
    expected = monitor.score(torch.from_numpy(np.load(folder / "new.npy")))
    assert [d["score"] for d in scored.documents] == pytest.approx(expected.tolist())
    assert {d["alarm"] for d in scored.documents} == {None}


def test_files_from_before_notes_can_still_be_read(folder: Path) -> None:
    x = torch.from_numpy(np.load(folder / "train.npy"))
    Monitor(net(), Gaussian(), rank=3).fit([x], progress=False).save(folder / "new.scod")
    header, tensors = artifact.read(folder / "new.scod", "monitor")
    del header["notes"]
    own = {name: header[name] for name in header if name not in ("format", "kind")}
    artifact.write(folder / "old.scod", "monitor", own, tensors)
    assert Monitor.load(folder / "old.scod", net()).notes == {}
    assert scod("inspect", "old.scod", cwd=folder).code == 0


def test_columns_are_found_by_name(folder: Path) -> None:
    values = np.loadtxt(folder / "new.csv", delimiter=",", skiprows=1)
    extra = np.column_stack([np.arange(6), values[:, [2, 0, 1]]])
    np.savetxt(folder / "mixed.csv", extra, delimiter=";", header="id;c;a;b", comments="")
    assert scod("fit", "--config", "scod.toml", cwd=folder).code == 0
    words = ("--weights", "w.pt", "--json")
    plain = scod("score", "m.scod", "model.py:net", "new.csv", *words, cwd=folder)
    mixed = scod("score", "m.scod", "model.py:net", "mixed.csv", *words, cwd=folder)
    assert mixed.out == plain.out
    assert "columns left out of mixed.csv: id" in mixed.err
    picked = ("fit", "--config", "scod.toml", "model.py:net", "mixed.csv", "--columns", "a,b,c")
    assert scod(*picked, cwd=folder).code == 0
    notes = Monitor.load(folder / "m.scod", net()).notes
    assert notes["inputs"] == {"dtype": "float32", "shape": [3], "columns": ["a", "b", "c"]}


@pytest.mark.parametrize("verb", ["fit", "calibrate", "score", "explain", "merge", "inspect"])
def test_help_has_an_example_on_a_line_of_its_own(verb: str, folder: Path) -> None:
    found = scod(verb, "--help", cwd=folder)
    assert found.code == 0
    lines = [line.strip() for line in found.out.splitlines()]
    assert any(line.startswith(f"scod {verb} ") for line in lines)
    assert "--json" in found.out


def test_help_says_the_exit_codes(folder: Path) -> None:
    text = " ".join(scod("--help", cwd=folder).out.split())
    assert "Exit codes: 0 done, 1 an error nobody foresaw, 2 bad input, 3 an alarm" in text
    assert "--install-completion" in text


def test_json_is_one_document(folder: Path) -> None:
    for verb in ("fit", "calibrate"):
        found = scod(verb, "--config", "scod.toml", "--json", cwd=folder)
        assert json.loads(found.out)["monitor"] == "m.scod"
        assert found.out.count("\n") == 1
