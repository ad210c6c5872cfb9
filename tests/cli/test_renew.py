"""``scod renew``: a saved monitor, fitted and calibrated anew on changed weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from command_line import Run, own_folder, said_in_three_lines, scod
from scodkit import Categorical, LastLayers, Monitor

FIT = ("fit", "model.py:net", "train.csv", "-o", "m.scod", "--likelihood", "categorical")
OPTIONS = ("--rank", "6", "--prior-scale", "0.5", "--last-layers", "1", "--columns", "c,a,b")
RENEW = ("renew", "m.scod", "model.py:other", "train.csv")


def other() -> nn.Sequential:
    torch.manual_seed(8)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))


def array(folder: Path, name: str) -> torch.Tensor:
    return torch.from_numpy(np.load(folder / f"{name}.npy"))[:, [2, 0, 1]]


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A folder with a monitor of the model as it was before."""
    place = own_folder(tmp_path_factory.mktemp("made"))
    assert scod(*FIT, *OPTIONS, cwd=place).code == 0
    assert scod("calibrate", "m.scod", "model.py:net", "heldout.csv", cwd=place).code == 0
    return place


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    place = own_folder(tmp_path / "own")
    (place / "m.scod").write_bytes((made / "m.scod").read_bytes())
    return place


def scored(folder: Path) -> Run:
    return scod("score", "m.scod", "model.py:other", "new.csv", "--json", cwd=folder)


def test_it_is_the_monitor_that_a_new_fit_would_give(folder: Path) -> None:
    assert "chosen weights differ" in scored(folder).err
    run = scod(*RENEW, "--heldout", "heldout.csv", cwd=folder)
    assert run.code == 0, run.err
    assert "scod score m.scod" in run.err
    assert "captured curvature" in run.out
    oracle = Monitor(other(), Categorical(), 6, parameters=LastLayers(count=1), prior_scale=0.5)
    oracle.fit(array(folder, "train").split(64), progress=False)
    oracle.calibrate(array(folder, "heldout").split(64), progress=False)
    expected = oracle(array(folder, "new"))
    found = scored(folder).documents
    assert [d["score"] for d in found] == pytest.approx(expected.score.tolist(), rel=1e-4)
    assert [d["p_value"] for d in found] == pytest.approx(expected.p_value.tolist())
    loaded = Monitor.load(folder / "m.scod", other())
    assert loaded.notes["fit"]["rank"] == 6
    assert loaded.notes["renew"]["heldout"] == "heldout.csv"
    assert "calibrate" not in loaded.notes


def test_projections_are_learnt_anew_and_columns_keep_their_names(folder: Path) -> None:
    words = (*FIT[:4], "p.scod", *FIT[5:], "--project", "1")
    assert scod(*words, cwd=folder).code == 0
    for name in ("p.scod", "again.scod"):
        renewed = ("renew", name, *RENEW[2:], "-o", "again.scod", "--heldout", "heldout.csv")
        assert scod(*renewed, "--force", cwd=folder).code == 0
        found = Monitor.load(folder / "again.scod", other())
        assert found.projections.options.rank == 1
        assert found.fitted.column_names == {"0": ["a", "b", "c"]}
        assert found.calibration is not None


def test_without_held_out_data_it_says_so(folder: Path) -> None:
    before = (folder / "m.scod").read_bytes()
    run = scod(*RENEW, "-o", "new.scod", "--json", cwd=folder)
    assert run.code == 0
    assert run.document["monitor"] == "new.scod"
    assert "not calibrated any more" in run.err
    assert (folder / "m.scod").read_bytes() == before
    assert Monitor.load(folder / "new.scod", other()).calibration is None


def test_a_monitor_made_with_functions_is_renewed_in_python(folder: Path) -> None:
    monitor = Monitor(other(), Categorical(), 4, outputs=lambda out: out)
    monitor.fit([array(folder, "train")], progress=False).save(folder / "m.scod")
    run = scod(*RENEW, cwd=folder)
    assert run.code == 2
    assert "outputs; renew it in Python, where they are" in said_in_three_lines(run.err)


def test_data_that_fails_leaves_the_file_as_it_was(folder: Path) -> None:
    before = (folder / "m.scod").read_bytes()
    (folder / "bad.csv").write_text("a,b,c\n1,2,nan\n")
    for words in ((*RENEW[:3], "bad.csv"), (*RENEW, "--heldout", "bad.csv")):
        run = scod(*words, cwd=folder)
        assert run.code == 2
        assert "NaN" in run.err
    assert (folder / "m.scod").read_bytes() == before
