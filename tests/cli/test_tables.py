"""Columns of tables by what they are for: inputs, target, id, nothing."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
import torch

from command_line import Run, own_folder, said_in_three_lines, scod
from scodkit import Monitor
from scodkit.cli.loading import load_model
from scodkit.cli.tables import Columns, read_table
from scodkit.errors import BatchError

FIT = "fit model.py:net full.csv -o m.scod --likelihood categorical"
SCORE = "score m.scod model.py:net new_full.csv"
HEAD = ["patient", "a", "note", "b", "risk, in %", "c"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Tables with a name, a target and a column of words beside the three inputs."""
    place = own_folder(tmp_path_factory.mktemp("own"))
    for name in ("train", "new"):
        values = np.load(place / f"{name}.npy")
        with (place / (f"{name}_full.csv" if name == "new" else "full.csv")).open("w") as file:
            rows = csv.writer(file)
            rows.writerow(HEAD)
            for place_of, (a, b, c) in enumerate(values):
                rows.writerow([f"P-{place_of:03}", a, "=fine", b, -place_of, c])
    assert fit(place, "--target", "risk, in %", "--id", "patient", "--drop", "note").code == 0
    assert scod("calibrate", "m.scod", "model.py:net", "heldout.csv", cwd=place).code == 0
    return place


def fit(folder: Path, *words: str) -> Run:
    return scod(*FIT.split(), *words, cwd=folder)


def test_the_fit_is_that_of_the_inputs_alone(folder: Path) -> None:
    plain = FIT.replace("full.csv", "train.csv").replace("m.scod", "plain.scod")
    assert scod(*plain.split(), cwd=folder).code == 0
    model = load_model(str(folder / "model.py:net"), None, "cpu")
    ours, theirs = (Monitor.load(folder / f"{name}.scod", model) for name in ("m", "plain"))
    assert torch.equal(ours.basis.vectors, theirs.basis.vectors)
    assert ours.notes["inputs"]["columns"] == ["a", "b", "c"]
    assert ours.notes["inputs"]["target"] == "risk, in %"
    assert ours.notes["inputs"]["id"] == "patient"


def test_scores_have_ids_and_targets_without_being_told_again(folder: Path) -> None:
    found = scod(*SCORE.split(), "--json", cwd=folder)
    assert [one["input"] for one in found.documents] == [f"P-{i:03}" for i in range(6)]
    assert [one["target"] for one in found.documents] == [str(-i) for i in range(6)]
    plain = scod(*SCORE.replace("_full", "").split(), "--json", cwd=folder)
    assert [d["score"] for d in found.documents] == [d["score"] for d in plain.documents]
    assert [one["input"] for one in plain.documents] == list(range(6))
    assert "target" not in plain.documents[0]
    assert "columns left out of new_full.csv: note" in found.err
    table = scod(*SCORE.split(), cwd=folder).out.splitlines()
    assert table[0].split() == ["input", "prediction", "target", "score", "p-value", "alarm"]
    assert table[2].split()[0] == "P-001"


def test_ids_and_targets_are_in_files_and_safe_in_a_spreadsheet(folder: Path) -> None:
    words = (*SCORE.split(), "-o", "s.csv", "--target", "note", "--id", "risk, in %")
    for _ in range(2):  # the second replaces the first: it is known as an earlier result
        assert scod(*words, cwd=folder).code == 0
    rows = list(csv.DictReader((folder / "s.csv").read_text().splitlines()))
    assert [row["input"] for row in rows] == ["0", "-1", "-2", "-3", "-4", "-5"]
    assert {row["target"] for row in rows} == {"'=fine"}
    for _ in range(2):
        assert scod(*SCORE.split(), "-o", "s.jsonl", cwd=folder).code == 0


def test_explanations_name_the_samples(folder: Path) -> None:
    words = ("explain", "m.scod", "model.py:net", "new_full.csv", "--sample", "3", "--json")
    assert scod(*words, cwd=folder).document["input"] == "P-003"


def test_a_fit_on_numbers_without_names_scores_a_table_with_more(folder: Path) -> None:
    words = FIT.replace("full.csv", "train.npy").replace("m.scod", "bare.scod")
    assert scod(*words.split(), cwd=folder).code == 0
    score = SCORE.replace("m.scod", "bare.scod").split()
    found = scod(*score, "--id", "patient", "--drop", 'note,"risk, in %"', "--json", cwd=folder)
    assert [one["input"] for one in found.documents] == [f"P-{i:03}" for i in range(6)]
    calibrate = ("calibrate", "bare.scod", "model.py:net", "new_full.csv")
    given = ("--id", "patient", "--target", "risk, in %", "--drop", "note")
    found = scod(*calibrate, *given, cwd=folder)
    assert found.code == 0
    again = "score bare.scod model.py:net new_full.csv --drop note --target 'risk, in %'"
    assert f"  scod {again} --id patient\n" in found.err


# options of a fit, and what is said of them
BAD = [
    ([], "column patient of full.csv, got 'P-000'; --drop patient,note, or --id and --target"),
    (
        ["--id", "patient"],
        "column note of full.csv, got '=fine'; --drop note, or --id and --target",
    ),
    (["--id", "pateint"], "of full.csv after --id, got pateint, which is none of its 6; scod"),
    (["--target", "q"], "after --target, got q, which is none of its 6; a name of those: pat"),
    (["--id", "patient", "--target", "patient"], "different names of columns in those to take"),
    (["--columns", "a,b,c", "--target", "c"], "different names of columns in those to take"),
    (["--drop", 'patient,a,note,b,"risk, in %",c'], "to be left as inputs, got none; fewer"),
    (
        ["--id", "patient", "--drop", "note"],
        "as --target c or --drop c: the inputs were the 4 columns a, b, risk",
    ),
]


@pytest.mark.parametrize(("words", "said"), BAD)
def test_bad_columns(words: list[str], said: str, folder: Path) -> None:
    found = fit(folder, "--output", "other.scod", *words)
    assert found.code == 2
    assert said in said_in_three_lines(found.err)
    assert not (folder / "other.scod").exists()


def test_an_input_of_the_fit_cannot_be_left_out_later(folder: Path) -> None:
    found = scod(*SCORE.split(), "--drop", "b", cwd=folder)
    assert "got b more than once" in said_in_three_lines(found.err)


def test_columns_that_were_typed_are_too_few(folder: Path) -> None:
    found = fit(folder, "--output", "other.scod", "--columns", "a,b")
    assert "try      name after --columns all that the model was trained with" in found.err


def test_a_slip_in_a_name_of_a_later_table_is_put_right(tmp_path: Path) -> None:
    (tmp_path / "slip.csv").write_text("age,bmmi\n1,2\n")
    with pytest.raises(BatchError, match="write bmi in place of bmmi in its first line"):
        read_table(tmp_path / "slip.csv", Columns(), Columns(("age", "bmi")))


def test_names_are_needed(folder: Path) -> None:
    (folder / "nameless.csv").write_text("1,2,3\n4,5,6\n")
    found = scod(*FIT.replace("full", "nameless").split(), "--target", "c", cwd=folder)
    said = said_in_three_lines(found.err)
    assert "expected names of columns in the first line of nameless.csv for --target" in said


def test_names_with_commas_are_quoted_as_in_a_table() -> None:
    assert Columns.of(columns='a, "b, c"').take == ("a", "b, c")
    assert Columns.of(columns="a,b").named() == [("--columns", "a"), ("--columns", "b")]


def test_a_fit_on_a_table_knows_the_columns_of_data_frames_by_name(folder: Path) -> None:
    pandas = pytest.importorskip("pandas")
    assert fit(folder, "--target", "risk, in %", "--id", "patient", "--drop", "note").code == 0
    network = load_model(str(folder / "model.py:net"), None, "cpu")
    monitor = Monitor.load(folder / "m.scod", network)
    frame = pandas.read_csv(folder / "new_full.csv")[["a", "b", "c"]]
    expected = monitor.score(frame.to_numpy())
    np.testing.assert_array_equal(monitor.score(frame[["c", "a", "b"]]), expected)
    with pytest.raises(BatchError, match="without c"):
        monitor.score(frame[["a", "b"]])
