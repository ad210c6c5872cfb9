"""No command replaces what it reads, nor what is not an earlier result, unless told to."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from command_line import contents, own_folder, said_in_three_lines, scod
from scodkit import Monitor
from scodkit.alarms import DriftAlarm

FIT = "fit model.py:net train.npy --likelihood categorical --weights w.pt --config own.toml"
SCORE = "score m.scod model.py:net new.csv --weights w.pt"
VERBS = {
    "fit": f"{FIT} -o",
    "checkpoint": f"{FIT} -o out.scod --checkpoint",
    "calibrate": "calibrate m.scod model.py:net heldout.npy --weights w.pt -o",
    "renew": "renew m.scod model.py:net train.npy --heldout heldout.npy --weights w.pt -o",
    "score": f"{SCORE} -o",
    "report": "report m.scod model.py:net --weights w.pt --known near=new.csv "
    "--unknown heldout.npy --stream train.npy -o",
    "explain": "explain m.scod model.py:pictures photos --references more --plot",
    "merge": "merge model.py:net m.scod n.scod --weights w.pt -o",
    "compare": "compare model.py:pictures m.scod --known photos --unknown more=more --plot",
}
# whatever a command reads, by itself or under another name
INPUTS = {
    "fit": ("train.npy", "model.py", "w.pt", "own.toml", "soft.npy", "hard.npy", "./train.npy"),
    "checkpoint": ("train.npy", "model.py", "w.pt", "own.toml"),
    "calibrate": ("heldout.npy", "model.py", "w.pt"),
    "renew": ("train.npy", "heldout.npy", "model.py", "w.pt"),
    "score": ("new.csv", "model.py", "w.pt", "m.scod", "soft.scod"),
    "report": ("new.csv", "heldout.npy", "train.npy", "model.py", "w.pt", "m.scod"),
    "explain": ("photos/in/a.png", "photos/in/../in/a.png", "soft.png", "more/b.png"),
    "merge": ("m.scod", "n.scod", "soft.scod", "model.py", "w.pt"),
    "compare": ("photos/in/a.png", "soft.png", "more/b.png"),
}
CASES = [(verb, name) for verb, names in INPUTS.items() for name in names]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    place = own_folder(tmp_path_factory.mktemp("own"))
    torch.manual_seed(7)
    net = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    torch.save(net.state_dict(), place / "w.pt")
    (place / "own.toml").write_text("[fit]\nrank = 5\n")
    for name, data in {"m": "train.npy", "n": "heldout.npy"}.items():
        words = f"{FIT} -o {name}.scod".replace("train.npy", data)
        assert scod(*words.split(), cwd=place).code == 0
    words = "calibrate m.scod model.py:net heldout.npy --weights w.pt"
    assert scod(*words.split(), cwd=place).code == 0
    (place / "photos" / "in").mkdir(parents=True)
    (place / "more").mkdir()
    for name in ("photos/in/a.png", "more/b.png"):
        Image.new("RGB", (5, 4)).save(place / name)
    for link, target in {
        "npy": "train.npy",
        "scod": "m.scod",
        "png": "photos/in/a.png",
    }.items():
        (place / f"soft.{link}").symlink_to(target)
    os.link(place / "train.npy", place / "hard.npy")
    return place


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize(("verb", "name"), CASES)
def test_inputs_are_never_replaced(verb: str, name: str, force: bool, folder: Path) -> None:
    before = contents(folder)
    found = scod(*VERBS[verb].split(), name, *["--force"] * force, cwd=folder)
    assert found.code == 2
    said = said_in_three_lines(found.err)
    assert "expected another file to write to than one that is read" in said
    assert contents(folder) == before


def test_code_named_as_a_module_is_an_input(folder: Path) -> None:
    words = f"{FIT} -o model.py --force".replace("model.py:net", "model:net")
    found = scod(*words.split(), cwd=folder)
    assert found.code == 2
    assert "got model.py, which is read as model.py" in said_in_three_lines(found.err)


@pytest.mark.parametrize(
    "verb", [verb for verb in VERBS if verb not in ("checkpoint", "explain", "compare")]
)
def test_other_files_are_replaced_only_by_force(verb: str, folder: Path) -> None:
    taken = folder / "thesis.txt"
    taken.write_text("years of work")
    found = scod(*VERBS[verb].split(), taken.name, cwd=folder)
    assert found.code == 2
    said = said_in_three_lines(found.err)
    assert (
        "got thesis.txt, which is something else; another name, or --force to replace" in said
    )
    assert taken.read_text() == "years of work"
    assert scod(*VERBS[verb].split(), taken.name, "--force", cwd=folder).code == 0
    assert b"years of work" not in taken.read_bytes()
    taken.unlink()


def test_a_picture_of_somebody_else_stays(folder: Path) -> None:
    Image.new("RGB", (5, 4)).save(folder / "holiday.png")
    words = f"{SCORE} --plot holiday.png".replace("score", "explain", 1)
    assert "which is something else" in scod(*words.split(), cwd=folder).err
    with Image.open(folder / "holiday.png") as image:
        assert image.size == (5, 4)
    assert scod(*words.split(), "--force", cwd=folder).code == 0


def test_the_demo_asks_too(tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text("<html>mine</html>")
    found = scod("demo", "-o", "page.html", cwd=tmp_path)
    assert found.code == 2
    assert (tmp_path / "page.html").read_text() == "<html>mine</html>"


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (VERBS["fit"], "again.scod"),
        (VERBS["calibrate"], "again.scod"),
        (VERBS["merge"], "again.scod"),
        (VERBS["score"], "again.csv"),
        (VERBS["score"].replace(":net", ":ready"), "again.jsonl"),
        (f"{FIT} --likelihood gaussian -o g.scod", None),
        ("score g.scod model.py:net new.csv --weights w.pt -o", "columns.csv"),
        (VERBS["report"], "again.html"),
        (f"{SCORE} --plot".replace("score", "explain", 1), "again.png"),
        (f"{SCORE} --plot".replace("score", "explain", 1), "again.svg"),
        (f"{SCORE} --plot".replace("score", "explain", 1), "again.pdf"),
    ],
)
def test_earlier_results_are_replaced(command: str, name: str | None, folder: Path) -> None:
    words = [*command.split(), *([] if name is None else [name])]
    for _ in range(2):
        found = scod(*words, cwd=folder)
        assert found.code == 0, found.err


def test_a_result_of_another_kind_is_not_an_earlier_one(folder: Path) -> None:
    assert scod(*SCORE.split(), "-o", "kept.csv", cwd=folder).code == 0
    torch.manual_seed(7)
    net = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    alarm = DriftAlarm(Monitor.load(folder / "m.scod", net).calibration)
    alarm.save(folder / "alarm.scod")
    for command, name in {VERBS["fit"]: "kept.csv", VERBS["merge"]: "alarm.scod"}.items():
        found = scod(*command.split(), name, cwd=folder)
        assert found.code == 2
        assert "which is something else" in found.err


def test_a_calibration_goes_into_its_own_monitor(folder: Path) -> None:
    shutil.copy(folder / "n.scod", folder / "own.scod")
    (folder / "link.scod").symlink_to("own.scod")
    words = "calibrate own.scod model.py:net heldout.npy --weights w.pt"
    for place in ([], ["-o", "own.scod"]):
        assert scod(*words.split(), *place, cwd=folder).code == 0
    assert scod(*words.split(), "-o", "link.scod", cwd=folder).code == 0


def test_an_empty_file_is_free(folder: Path) -> None:
    (folder / "made.csv").touch()
    assert scod(*SCORE.split(), "-o", "made.csv", cwd=folder).code == 0


def test_what_may_be_replaced_is_asked_before_any_work(folder: Path) -> None:
    """A wrong name costs seconds: no code of the user's has run."""
    np.save(folder / "big.npy", np.zeros(3))
    found = scod(*VERBS["score"].split(), "big.npy", cwd=folder)
    assert "made by hand" not in found.err
    assert found.code == 2
