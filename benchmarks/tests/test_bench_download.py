"""Fetching from a real server that cuts, lies and falls silent, and from a process killed."""

from __future__ import annotations

import gzip
import hashlib
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench_server import Remote, serving
from scodbench.data import DATASETS, Dataset, File, Layout, get
from scodbench.data.errors import ChecksumError, DownloadError, NotFetchableError
from scodkit.errors import OptionError

CONTENT = random.Random(0).randbytes(300_000)


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")


@pytest.fixture
def remote(monkeypatch: pytest.MonkeyPatch) -> Iterator[Remote]:
    """A server of the one file of a data set called toy."""
    with serving(Remote(CONTENT)) as served:
        file = File("toy/file.bin", 1, (sha256(CONTENT),), url=served.url)
        toy = Dataset("toy", "", "", (Layout("published", (file,)),))
        monkeypatch.setitem(DATASETS, "toy", toy)
        yield served


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where the file is to come to."""
    return tmp_path / "toy" / "file.bin"


def fetch(path: Path, **options: Any) -> None:
    options = {"progress": False, "retries": 0, **options}
    assert get("toy", path.parent.parent, **options) == [path]
    assert path.read_bytes() == CONTENT
    assert [p.name for p in path.parent.iterdir()] == ["file.bin"]


def test_a_file_is_fetched_once_for_all_to_read(remote: Remote, path: Path) -> None:
    fetch(path)
    assert path.stat().st_mode & 0o777 == 0o644
    fetch(path)
    assert remote.asked == 1


def test_a_wrong_file_under_the_name_is_replaced(remote: Remote, path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(b"something else")
    fetch(path)


@pytest.mark.parametrize(
    "trouble",
    [{"cuts": [100_000]}, {"answers": [503]}, {"cuts": [100_000], "hold": threading.Event()}],
    ids=["cut", "busy", "silent"],
)
def test_what_goes_wrong_once_is_tried_again(
    remote: Remote, path: Path, trouble: dict[str, Any]
) -> None:
    vars(remote).update(trouble)
    fetch(path, retries=1, timeout=0.3)
    assert remote.asked == 2


@pytest.mark.parametrize(
    ("trouble", "said"),
    [({"cuts": [100_000]}, "200000 more expected"), ({"answers": [404]}, "404.*Not Found")],
)
def test_what_goes_on_is_said_with_what_to_type(
    remote: Remote, path: Path, trouble: dict[str, Any], said: str
) -> None:
    vars(remote).update(trouble)
    again = f"type: scodbench data get toy --data {path.parent.parent}"
    with pytest.raises(DownloadError, match=rf"all of {remote.url} .*{said}.*{again}"):
        fetch(path)
    assert list(path.parent.iterdir()) == []


def test_wrong_bytes_are_refused_and_removed(remote: Remote, path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(b"old")
    remote.content = b"other"
    sums = f"expected sha256:{sha256(CONTENT)} but got {sha256(b'other')}"
    with pytest.raises(ChecksumError, match=rf"{sums}.*ype: scodbench data get toy"):
        fetch(path)
    assert [p.name for p in path.parent.iterdir()] == ["file.bin"]
    assert path.read_bytes() == b"old"


def test_a_folder_that_cannot_be_made(remote: Remote, path: Path) -> None:
    path.parent.write_text("a file")
    with pytest.raises(DownloadError, match="make room"):
        fetch(path)


def test_a_bar_is_shown_if_wanted(
    remote: Remote, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fetch(path, progress=True)
    assert "300k/300k" in capsys.readouterr().err
    path.unlink()
    fetch(path)
    assert "300k" not in capsys.readouterr().err


def test_a_killed_process_leaves_nothing_under_the_name(remote: Remote, path: Path) -> None:
    program = """
        import sys
        from scodbench.data import DATASETS, Dataset, File, Layout, get
        file = File("toy/file.bin", 1, (sys.argv[3],), url=sys.argv[1])
        DATASETS["toy"] = Dataset("toy", "", "", (Layout("published", (file,)),))
        get("toy", sys.argv[2], progress=False)
    """
    arguments = [remote.url, str(path.parent.parent), sha256(CONTENT)]
    remote.hold, remote.cuts = threading.Event(), [180_000]
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(program), *arguments])
    deadline = time.monotonic() + 60
    while not remote.asked:
        assert process.poll() is None, "ended by itself"
        assert time.monotonic() < deadline, "nothing was asked for"
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not path.exists()
    assert get("toy", path.parent.parent, progress=False) == [path]
    assert path.read_bytes() == CONTENT


def test_a_file_compressed_by_another_program_is_not_fetched_again(
    remote: Remote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("toy/a.gz", "toy/b.gz")
    remote.content = gzip.compress(CONTENT, 6)
    published = tuple(
        File(name, 1, (sha256(remote.content),), sha256(CONTENT), remote.url) for name in names
    )
    prepared = File("toy/c.npz", 1, ("1" * 64,))
    layouts = (Layout("published", published), Layout("prepared", (prepared,)))
    monkeypatch.setitem(DATASETS, "toy", Dataset("toy", "", "", layouts))
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy" / "a.gz").write_bytes(gzip.compress(CONTENT, 1))
    assert get("toy", tmp_path, progress=False) == [tmp_path / name for name in names]
    assert (tmp_path / "toy" / "b.gz").read_bytes() == remote.content
    assert remote.asked == 1


def test_get_says_what_cannot_be_fetched(tmp_path: Path) -> None:
    for name in ("taxinet", "densenet"):
        with pytest.raises(NotFetchableError, match=r"no public place: copy .* SCODKIT_DATA"):
            get(name, tmp_path)
    with pytest.raises(OptionError, match=r"wine, mnist, .*densenet; got minst"):
        get("minst", tmp_path)
