"""``scod compare`` as its users run it, against the library itself."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import scodkit
from command_line import contents, own_folder, scod
from scodkit import Categorical, Fused, Monitor
from scodkit.baselines import KNN, Energy


def net() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))


def array(folder: Path, name: str) -> torch.Tensor:
    return torch.from_numpy(np.load(folder / f"{name}.npy"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A user's folder with a saved monitor, a Fused and a baseline."""
    own = own_folder(tmp_path_factory.mktemp("user") / "own")
    fit = "fit model.py:net train.npy -o m.scod --likelihood categorical --rank 10"
    assert scod(*fit.split(), cwd=own).code == 0
    train, held = array(own, "train"), array(own, "heldout")
    fused = Fused(net(), Categorical()).fit(train, progress=False)
    fused.calibrate(held, progress=False).save(own / "fused.scod")
    KNN(net(), Categorical()).fit(train, progress=False).save(own / "knn.scod")
    np.save(own / "far.npy", 2 * np.load(own / "heldout.npy")[:50] + 0.5)
    np.save(own / "nan.npy", np.full((4, 3), np.nan, np.float32))
    return own


GOOD = "compare model.py:net m.scod --known heldout.npy --unknown far.npy"


def test_figures_are_those_of_the_library(folder: Path) -> None:
    words = "compare model.py:net SCOD=m.scod fused.scod near=knn.scod Energy KNN"
    words += " --train train.npy --known heldout.csv --unknown far.npy --unknown more=new.csv"
    run = scod(*words.split(), "--json", cwd=folder)
    assert run.code == 0, run.err
    train = array(folder, "train")
    methods = {
        "SCOD": Monitor(net(), Categorical(), 10).fit(train, progress=False),
        "fused": Fused.load(folder / "fused.scod", net()),
        "near": KNN(net(), Categorical()).fit(train, progress=False),
        "Energy": Energy(net(), Categorical()),
        "KNN": KNN(net(), Categorical()).fit(train, progress=False),
    }
    expected = scodkit.compare(
        methods,
        known=array(folder, "heldout"),
        unknown={"far": array(folder, "far"), "more": array(folder, "new")},
        progress=False,
    )
    figures = {"auroc", "auroc_low", "aupr_high", "fpr95"}
    for ours, theirs in zip(run.document["rows"], expected.rows, strict=True):
        names = {"method", "unknown", "kept_bytes", "batch"}
        assert {n: ours[n] for n in names} == {n: theirs[n] for n in names}
        assert {n: ours[n] for n in figures} == pytest.approx(
            {n: theirs[n] for n in figures}, abs=2e-3
        )
        assert ours["forward_passes"] > 0
    assert run.document["notes"] == list(expected.notes)
    assert "(more 6)" in run.err
    assert "made by hand" not in run.out


def test_the_table_and_the_picture(folder: Path) -> None:
    run = scod(*GOOD.split(), "Energy", "--plot", "c.png", cwd=folder)
    assert run.code == 0, run.err
    head, *rows = run.out.splitlines()
    assert head.split() == ["method", "unknown", "AUROC", "AUPR", "FPR95", "time", "memory"]
    assert [row.split()[:2] for row in rows] == [["m", "far"], ["Energy", "far"]]
    assert "Time: of a score at batch 60, in forward passes" in run.err
    assert (folder / "c.png").read_bytes().startswith(b"\x89PNG")
    assert scod(*GOOD.split(), "--plot", "c.png", cwd=folder).code == 0  # an earlier one


def test_the_users_own_code_may_return_batches_that_are_read_once(folder: Path) -> None:
    words = GOOD.replace("heldout.npy", "model.py:slowly").split()
    run = scod(*words, "Energy", "--json", cwd=folder)
    assert run.code == 0, run.err
    assert [row["batch"] for row in run.document["rows"]] == [8, 8]


BAD = [
    ("m.scod=absent.scod", "found no absent.scod"),
    ("m.scod=m.scod Knn", "KNN, Energy, GradNorm"),
    ("m.scod=Energy", "expected a saved method, whose likelihood Energy takes"),
    ("m.scod=m.scod KNN", "try --train DATA"),
    ("m.scod=m.scod m=knn.scod", "a name of its own for each method found 'm' twice"),
    ("m.scod=train.npy", "train.npy"),
    (
        "model.py:net=model.py:other",
        "try --weights with the file of the fit, if it was left",
    ),
    ("far.npy=far.npy --unknown far=new.npy", "for each unknown set found 'far' twice"),
    ("far.npy=pooled=far.npy --unknown new.npy", "'pooled' not among them"),
    ("far.npy=nan.npy", "in sample 0"),
    ("far.npy=model.py:wide", "expected inputs that the model can be run on"),
    ("far.npy=far.npy --plot c.txt", "ends in .png, .svg, .pdf"),
    ("far.npy=far.npy --plot far.npy", "ends in .png, .svg, .pdf"),
]


@pytest.mark.parametrize(("change", "says"), BAD)
def test_bad_input_is_one_message_and_changes_nothing(folder, change, says) -> None:
    before = contents(folder)
    run = scod(*GOOD.replace(*change.split("=", 1)).split(), cwd=folder)
    assert run.code == 2
    assert says in " ".join(run.err.split())
    assert "Traceback" not in run.err
    assert run.out == ""
    assert contents(folder) == before


def test_an_unfitted_method_is_named(folder: Path) -> None:
    Fused(net(), Categorical()).fit(array(folder, "train"), progress=False).save(
        folder / "raw.scod"
    )
    run = scod(*GOOD.split(), "raw.scod", cwd=folder)
    assert run.code == 2
    assert "'raw' on 'known': expected a calibrated Fused" in run.err


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("Knn", "KNN"),
        ("Enrgy", "Energy"),
        ("b=m.scodd", "b=m.scod"),
        ("near=Enrgy", "near=Energy"),
    ],
)
def test_names_of_methods_are_put_right(folder: Path, wrong: str, right: str) -> None:
    run = scod(*GOOD.split(), wrong, cwd=folder)
    assert run.code == 2
    assert f"try      scod {GOOD} {right}\n" in run.err


def test_data_is_asked_for_as_data(folder: Path) -> None:
    run = scod("compare", cwd=folder)
    assert "scod compare MODEL METHODS... --known DATA --unknown DATA" in run.err
