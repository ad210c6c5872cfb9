"""Samples from files: what is read from them, and in what dtype."""

from __future__ import annotations

import io
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import nn

from scodkit.cli.files import ArraySamples, read_samples
from scodkit.cli.inputs import Batches, Form, batches_of
from scodkit.cli.output import show_facts, show_table
from scodkit.errors import BatchError

FLOAT = Form(torch.float32)
FITTED = Form(torch.float32, (2,))


def table(folder: Path, text: str) -> ArraySamples:
    (folder / "t.csv").write_text(text, encoding="utf-8")
    return read_samples(folder / "t.csv")


@pytest.mark.parametrize("separator", [",", ";", "\t"])
@pytest.mark.parametrize("head", ["", "{0}a b{0}\u00e9{1}", "\ufeff a b {0}'\u00e9'{1}"])
def test_tables(separator: str, head: str, tmp_path: Path) -> None:
    names = head.format(separator, "\n") if head else ""
    names = names.removeprefix(separator)
    found = table(tmp_path, f"{names}\n 1{separator}-2e3 \n\n{separator}nan\n")
    assert np.array_equal(found.values, [[1, -2000], [np.nan, np.nan]], equal_nan=True)
    assert (found.columns is None) == (not head)
    assert found.columns is None or found.columns[0] == "a b"


@settings(deadline=None)
@given(st.lists(st.tuples(*[st.floats(width=64)] * 3), min_size=1, max_size=9))
def test_tables_keep_every_digit(rows: list[tuple[float, ...]]) -> None:
    written = io.StringIO()
    for row in rows:
        written.write(",".join(map(repr, row)) + "\n")
    with tempfile.TemporaryDirectory() as folder:
        found = table(Path(folder), written.getvalue())
    assert np.array_equal(found.values, rows, equal_nan=True)


@pytest.mark.parametrize("dtype", ["<f4", ">f4", ">f8", "f2", "g"])
def test_floats_become_those_of_the_model(dtype: str, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.array([[0.5, -2.0]], dtype))
    (batch,) = batches_of(str(tmp_path / "x.npy"), 4, FITTED)
    assert torch.equal(batch, torch.tensor([[0.5, -2.0]]))


@pytest.mark.parametrize("dtype", ["u1", ">u2", "u4", "i4", ">i8"])
def test_integers_stay_integers_for_models_that_take_them(dtype: str, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.array([[3, 200]], dtype))
    path = str(tmp_path / "x.npy")
    (batch,) = batches_of(path, 4, Form(torch.int64, (2,)))
    assert batch.dtype == torch.int64
    assert batch.tolist() == [[3, 200]]
    (unknown,) = batches_of(path, 4, FLOAT)
    assert not unknown.is_floating_point()
    with pytest.raises(BatchError, match=r"expected numbers in float32.*got u?int"):
        next(iter(batches_of(path, 4, FITTED)))


def test_a_line_of_empty_cells_is_a_sample(tmp_path: Path) -> None:
    found = table(tmp_path, "a,b\n1,2\n,\n\n3,4\n")
    assert np.array_equal(found.values, [[1, 2], [np.nan, np.nan], [3, 4]], equal_nan=True)


def test_the_form_of_a_fit_survives_as_notes() -> None:
    model = nn.Linear(2, 1).double()
    samples = ArraySamples(np.zeros((5, 2), np.float32), columns=("a", "b"))
    form = Batches(samples, 2, Form.before_fit(model), finite=True).form()
    assert form == Form(torch.float64, (2,), ("a", "b"))
    assert Form.of_fit({"inputs": form.note()}, model) == form
    assert Form.of_fit({}, model) == Form(torch.float64)


@settings(deadline=None)
@given(st.integers(1, 20), st.integers(1, 25))
def test_batches_are_all_samples_in_order(count: int, size: int) -> None:
    samples = ArraySamples(np.arange(2.0 * count).reshape(count, 2))
    batches = Batches(samples, size, FLOAT, finite=True)
    read = list(batches)
    assert len(read) == len(batches)
    assert all(len(batch) == size for batch in read[:-1])
    assert torch.equal(torch.cat(read), torch.arange(2.0 * count).reshape(count, 2))


def test_grey_images_and_images_of_two_sizes(tmp_path: Path) -> None:
    pixels = np.array([[0, 51], [102, 255]], np.uint8)
    Image.fromarray(pixels).save(tmp_path / "b.png")
    Image.fromarray(pixels.T).save(tmp_path / "a.PNG")
    found = read_samples(tmp_path)
    assert np.allclose(found.read(slice(0, 2))[1], pixels[None] / 255)
    assert [found.name(row) for row in range(2)] == ["a.PNG", "b.png"]
    Image.fromarray(np.zeros((3, 2), np.uint8)).save(tmp_path / "c.png")
    with pytest.raises(BatchError, match=r"expected images of one size, \(1, 2, 2\)"):
        read_samples(tmp_path).read(slice(2, 3))


def test_plain_tables_are_aligned(capsys) -> None:
    show_table(("input", "score"), [["a [x]", "1"], ["b", "22.5"]], [False, True])
    show_facts({"one": "[bold]1[/bold]", "second": "2"})
    assert capsys.readouterr().out.splitlines() == [
        "input  score",
        "a [x]  1",
        "b      22.5",
        "one     [bold]1[/bold]",
        "second  2",
    ]
