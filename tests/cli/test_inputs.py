"""Samples from files: what is read from them, and in what dtype."""

from __future__ import annotations

import io
import os
import re
import signal
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader

from scodkit.cli.files import Form, Samples, read_samples
from scodkit.cli.loading import batches_of, shard_of
from scodkit.cli.output import note, show_facts, show_table
from scodkit.cli.tables import Columns
from scodkit.errors import BatchError, FileError, NonFiniteError

FLOAT = Form(torch.float32)
FITTED = Form(torch.float32, (2,))


def table(folder: Path, text: str) -> Samples:
    (folder / "t.csv").write_text(text, encoding="utf-8")
    return read_samples(folder / "t.csv")


def values(samples: Samples) -> np.ndarray:
    return samples.source(range(len(samples)))


@pytest.mark.parametrize("separator", [",", ";", "\t"])
@pytest.mark.parametrize("head", ["", "{0}a b{0}\u00e9{1}", "\ufeff a b {0}'\u00e9'{1}"])
def test_tables(separator: str, head: str, tmp_path: Path) -> None:
    names = head.format(separator, "\n") if head else ""
    names = names.removeprefix(separator)
    found = table(tmp_path, f"{names}\n 1{separator}-2e3 \n\n{separator}nan\n")
    assert np.array_equal(values(found), [[1, -2000], [np.nan, np.nan]], equal_nan=True)
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
    assert np.array_equal(values(found), rows, equal_nan=True)


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
    assert np.array_equal(values(found), [[1, 2], [np.nan, np.nan], [3, 4]], equal_nan=True)


def test_the_form_of_a_fit_survives_as_notes() -> None:
    model = nn.Linear(2, 1).double()
    like = {"columns": ("a", "b"), "form": Form.of_fit({}, model)}
    form = Samples.of_array(np.zeros((5, 2), np.float32), "x", **like).first_form()
    assert form == Form(torch.float64, (2,), ("a", "b"))
    assert Form.of_fit({"inputs": form.note()}, model) == form
    assert Form.of_fit({}, model) == Form(torch.float64)


@settings(deadline=None)
@given(st.integers(1, 20), st.integers(1, 25))
def test_batches_are_all_samples_in_order(count: int, size: int) -> None:
    samples = Samples.of_array(np.arange(2.0 * count).reshape(count, 2), "x", form=FLOAT)
    batches = DataLoader(samples, size)
    read = list(batches)
    assert len(read) == len(batches)
    assert all(len(batch) == size for batch in read[:-1])
    assert torch.equal(torch.cat(read), torch.arange(2.0 * count).reshape(count, 2))


def test_shards_are_all_samples_and_keep_their_names(tmp_path: Path) -> None:
    rows = np.arange(14.0).reshape(7, 2)
    path = tmp_path / "x.npy"
    np.save(path, rows)
    batches = batches_of(str(path), 2, FLOAT)
    shards = [torch.cat(list(shard_of(batches, index, 3))) for index in range(3)]
    assert torch.equal(torch.cat(shards), torch.from_numpy(rows).float())
    rows[5] = np.nan
    np.save(path, rows)
    with pytest.raises(NonFiniteError, match=r"in sample 5 \(samples are counted from 0\)"):
        list(shard_of(batches_of(str(path), 2, FLOAT), 2, 3))


def test_grey_images_and_images_of_two_sizes(tmp_path: Path) -> None:
    pixels = np.array([[0, 51], [102, 255]], np.uint8)
    Image.fromarray(pixels).save(tmp_path / "b.png")
    Image.fromarray(pixels.T).save(tmp_path / "a.PNG")
    found = read_samples(tmp_path)
    assert np.allclose(found.source(range(2))[1], pixels[None] / 255)
    assert [found.name(row) for row in range(2)] == ["a.PNG", "b.png"]
    Image.fromarray(np.zeros((3, 2), np.uint8)).save(tmp_path / "c.png")
    with pytest.raises(BatchError, match=r"expected images of one size, \(1, 2, 2\)"):
        read_samples(tmp_path).source([2])


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


@pytest.mark.parametrize(
    "cell",
    [
        "1_000",
        "\uff11\uff12",
        "\u0661",
        "1\u202f000",
        "0x10",
        "1,5",
        "1e",
        ".",
        "1e5.0",
        "\u0131nf",
    ],
)
def test_numbers_only_python_would_read_are_refused(cell: str, tmp_path: Path) -> None:
    for rows in (f"a;b\n1;2\n3;{cell}\n", f"1;2\n3;{cell}\n"):
        with pytest.raises(BatchError, match=r"expected a number in line .*column (b|2)"):
            table(tmp_path, rows)


@pytest.mark.parametrize("cell", ["1_000", "\uff11\uff12"])
def test_such_numbers_are_not_mistaken_for_names(cell: str, tmp_path: Path) -> None:
    with pytest.raises(BatchError, match="expected a number in line 1, column 2"):
        table(tmp_path, f"1,{cell}\n3,4\n")


@pytest.mark.parametrize("cell", ["1", "-1.", "+.5", "1E-3", "NaN", "-inf", "Infinity"])
def test_numbers_as_tables_write_them(cell: str, tmp_path: Path) -> None:
    found = values(table(tmp_path, f"a,b\n0,{cell}\n"))
    assert np.array_equal(found, [[0, float(cell)]], equal_nan=True)


def test_columns_that_share_a_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BatchError, match=r"different names .*t\.csv, got x more than once"):
        table(tmp_path, "x, x ,y\n1,2,3\n")
    (tmp_path / "t.csv").write_text("x,y\n1,2\n")
    with pytest.raises(BatchError, match=r"in those to take.*, got y more than once"):
        read_samples(tmp_path / "t.csv", Columns(("y", "x", "y")))


def saved(folder: Path, image: Image.Image, name: str = "a.png") -> np.ndarray:
    image.save(folder / name)
    return read_samples(folder).source([0])[0]


DEEP = np.array([[0, 1000], [30000, 65535]], np.uint16)


@pytest.mark.parametrize("name", ["a.png", "a.tif", "a.pgm"])
def test_grey_in_16_bits_is_scaled_by_16_bits(name: str, tmp_path: Path) -> None:
    found = saved(tmp_path, Image.fromarray(DEEP), name)
    assert found.dtype == np.float32
    assert np.allclose(found, DEEP[None] / 65535, atol=1e-6)


def test_grey_in_16_bits_of_the_other_byte_order(tmp_path: Path) -> None:
    image = Image.frombytes("I;16B", (2, 2), DEEP.astype(">u2").tobytes())
    assert np.allclose(saved(tmp_path, image, "a.tif"), DEEP[None] / 65535, atol=1e-6)


@pytest.mark.parametrize(
    ("image", "name"),
    [
        (Image.fromarray(DEEP.astype(np.int32) * 9), "a.tif"),
        (Image.fromarray(DEEP.astype(np.float32) / 65535), "a.tif"),
        (Image.new("CMYK", (2, 2)), "a.jpg"),
        (Image.new("LAB", (2, 2)), "a.tif"),
    ],
    ids=["int32", "float", "cmyk", "lab"],
)
def test_pixels_of_unknown_meaning_are_refused(image, name: str, tmp_path: Path) -> None:
    with pytest.raises(
        BatchError, match=rf"^expected an image of grey.* pillow calls {image.mode} at"
    ):
        saved(tmp_path, image, name)


def keyed(mode: str, colour: int | tuple[int, ...]) -> Image.Image:
    """Return an image of which one colour means nothing is there."""
    image = Image.new(mode, (2, 2), 0 if mode != "RGB" else (0, 0, 0))
    image.info["transparency"] = colour
    return image


@pytest.mark.parametrize(
    "image",
    [
        Image.new("RGBA", (2, 2), (9, 9, 9, 0)),
        Image.new("RGBA", (2, 2), (9, 9, 9, 254)),
        Image.new("LA", (2, 2), (9, 128)),
        keyed("RGB", (0, 0, 0)),
        keyed("L", 0),
        keyed("P", 0),
    ],
    ids=["clear", "nearly opaque", "grey", "key", "grey key", "palette"],
)
def test_transparent_pixels_are_refused(image: Image.Image, tmp_path: Path) -> None:
    image.save(tmp_path / "a.png", **image.info)
    with pytest.raises(BatchError, match=r"^expected an image that is opaque"):
        read_samples(tmp_path).source([0])


def test_an_alpha_channel_that_hides_nothing_is_dropped(tmp_path: Path) -> None:
    colours = np.arange(12, dtype=np.uint8).reshape(2, 2, 3) * 20
    full = np.full((2, 2, 1), 255, np.uint8)
    found = saved(tmp_path, Image.fromarray(np.concatenate([colours, full], 2)))
    assert np.array_equal(found, saved(tmp_path, Image.fromarray(colours)))
    grey = Image.fromarray(np.concatenate([colours[..., :1], full], 2))
    assert np.allclose(saved(tmp_path, grey), colours[None, ..., 0] / 255)
    palette = Image.fromarray(colours).quantize(4)
    assert np.allclose(saved(tmp_path, palette), colours.transpose(2, 0, 1) / 255, atol=2e-2)


def claiming(shape: tuple[int, ...], dtype: str = "<f8") -> bytes:
    """Return an array's file with a hundred numbers that claims to have others."""
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        file, {"shape": shape, "fortran_order": False, "descr": dtype}
    )
    return file.getvalue() + bytes(800)


@pytest.mark.parametrize("suffix", ["npy", "npz"])
@pytest.mark.parametrize("shape", [(10**9, 1), (10**30, 10**30), (101, 1)])
def test_arrays_that_claim_more_than_there_is(
    shape: tuple[int, ...], suffix: str, tmp_path: Path
) -> None:
    path = tmp_path / f"x.{suffix}"
    if suffix == "npy":
        path.write_bytes(claiming(shape))
    else:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("x.npy", claiming(shape))
    bytes_claimed = f"{8 * shape[0] * shape[1]:.3g}"
    with pytest.raises(BatchError, match=rf"claims {re.escape(bytes_claimed)} bytes, of which"):
        read_samples(path)


def test_an_archive_that_unpacks_to_more_than_memory(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
        archive.writestr("x.npy", claiming((10**15, 1)))
        archive.getinfo("x.npy").file_size = 10**16  # so says the archive of itself
    with pytest.raises(
        BatchError, match=r"it claims 8e\+15 bytes, and .* are free; save it as .npy"
    ):
        read_samples(tmp_path / "x.npz")


def test_integers_beyond_those_of_torch_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.array([[1, 2**63]], np.uint64))
    with pytest.raises(BatchError, match="int64 can hold, got 9223372036854775808"):
        list(batches_of(str(tmp_path / "x.npy"), 4, Form(torch.int64, (2,))))


@pytest.fixture
def soon() -> Iterator[None]:
    """Fail, rather than wait for a writer that never comes."""

    def fail(*_: object) -> None:
        raise TimeoutError("it waits")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("name", ["x.csv", "x.npy", "x.npz", "photos/x.png"])
def test_pipes_are_not_waited_for(name: str, tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    os.mkfifo(tmp_path / name)
    with pytest.raises(
        FileError, match=r"^expected a (file or folder|readable image) at .*, got a pipe"
    ):
        read_samples(tmp_path / Path(name).parts[0]).source([0])


@pytest.mark.usefixtures("soon")
def test_devices_and_what_the_shell_writes_as_a_file_are_not_read() -> None:
    reader, writer = os.pipe()
    for path, what in (("/dev/zero", "device"), (f"/dev/fd/{reader}", "pipe")):
        with pytest.raises(FileError, match=f"at {path}, got a {what}"):
            read_samples(Path(path))
    os.close(reader)
    os.close(writer)


def test_names_cannot_steer_a_terminal(capsys) -> None:
    show_table(("input", "score"), [["\x1b]0;a\x07\u202eb\x9b\r\n\udcff.png", "1"]])
    shown = capsys.readouterr().out
    assert shown.splitlines()[1] == r"\x1b]0;a\x07\u202eb\x9b\r\n\udcff.png  1"
    note("columns left out: \x1b[2J")
    assert capsys.readouterr().err == "scod: columns left out: \\x1b[2J\n"
