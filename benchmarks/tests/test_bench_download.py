"""Fetching from a real server that cuts, lies, changes its mind, and from a process killed."""

from __future__ import annotations

import gzip
import hashlib
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench_server import Remote, serving
from scodbench.data import DATASETS, Checksums, Dataset, File, Layout, fetch, get
from scodbench.data.errors import ChecksumError, DownloadError, NotFetchableError
from scodkit.errors import OptionError

CONTENT = random.Random(0).randbytes(300_000)
OTHER = random.Random(1).randbytes(300_000)


def sums(content: bytes) -> Checksums:
    return Checksums((hashlib.sha256(content).hexdigest(),))


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")


@pytest.fixture
def remote() -> Iterator[Remote]:
    with serving(Remote(CONTENT)) as served:
        yield served


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "folder" / "file.bin"


def quick(remote: Remote, path: Path, content: bytes = CONTENT, **options: float) -> Path:
    return fetch(
        remote.url, path, sums(content), **{"progress": False, "wait": 0.01, **options}
    )


def names(path: Path) -> list[str]:
    return sorted(p.name for p in path.parent.iterdir())


def test_a_file_is_fetched_once_and_leaves_no_litter(remote: Remote, path: Path) -> None:
    assert quick(remote, path) == path
    assert path.read_bytes() == CONTENT
    assert names(path) == ["file.bin"]
    quick(remote, path)
    assert remote.asked == [None]


def test_a_wrong_file_under_the_name_is_replaced(remote: Remote, path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(b"something else")
    quick(remote, path)
    assert path.read_bytes() == CONTENT


def test_a_cut_connection_is_continued_where_it_broke(remote: Remote, path: Path) -> None:
    remote.cuts = [100_000, 50_000]
    quick(remote, path)
    assert path.read_bytes() == CONTENT
    assert remote.asked == [None, "bytes=100000-", "bytes=150000-"]
    assert remote.conditions == [None, '"first"', '"first"']
    assert remote.sent == len(CONTENT)


def test_a_server_without_ranges_sends_all_again(remote: Remote, path: Path) -> None:
    remote.ranges, remote.cuts = False, [100_000]
    quick(remote, path)
    assert path.read_bytes() == CONTENT
    assert remote.sent == 100_000 + len(CONTENT)


@pytest.mark.parametrize("ranges", [True, False])
def test_a_connection_always_cut_is_given_up_and_continued_later(
    remote: Remote, path: Path, ranges: bool
) -> None:
    remote.never_past, remote.ranges = 200_000, ranges
    with pytest.raises(DownloadError, match=r"200000 bytes and no more in 2 retries.*same"):
        quick(remote, path, retries=2)
    assert len(remote.asked) == 3
    assert names(path) == ["file.bin.part", "file.bin.part.json"]
    before = remote.sent
    remote.never_past, remote.ranges = None, True
    quick(remote, path)
    assert path.read_bytes() == CONTENT
    assert remote.sent - before == 100_000


def test_progress_gives_new_patience(remote: Remote, path: Path) -> None:
    remote.cuts = [30_000] * 8
    quick(remote, path, retries=1)
    assert path.read_bytes() == CONTENT
    assert remote.sent == len(CONTENT)


def test_waits_grow(remote: Remote, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    remote.answers = [503] * 9
    with pytest.raises(DownloadError, match="503"):
        quick(remote, path, wait=1.0, retries=3)
    assert waits == [1.0, 2.0, 4.0]


def test_wrong_bytes_are_refused_and_removed(remote: Remote, path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(b"old")
    expected, found = (hashlib.sha256(c).hexdigest() for c in (OTHER, CONTENT))
    with pytest.raises(ChecksumError, match=rf"expected sha256 {expected}, got {found}.*again"):
        quick(remote, path, OTHER)
    assert names(path) == ["file.bin"]
    assert path.read_bytes() == b"old"


@pytest.mark.parametrize("heeds", [True, False], ids=["if-range", "no if-range"])
def test_a_file_that_changed_is_begun_anew(remote: Remote, path: Path, heeds: bool) -> None:
    remote.never_past, remote.heeds_if_range = 100_000, heeds
    with pytest.raises(DownloadError):
        quick(remote, path, retries=0)
    remote.content, remote.etag, remote.never_past = OTHER, '"second"', None
    quick(remote, path, OTHER)
    assert path.read_bytes() == OTHER
    assert names(path) == ["file.bin"]


def test_a_file_that_grew_under_the_same_tag_is_begun_anew(remote: Remote, path: Path) -> None:
    remote.cuts = [100_000]
    with pytest.raises(DownloadError):
        quick(remote, path, retries=0)
    remote.content = OTHER + b"more"
    quick(remote, path, remote.content)
    assert path.read_bytes() == remote.content


def test_another_piece_than_the_one_asked_for_is_not_used(remote: Remote, path: Path) -> None:
    remote.cuts, remote.shifts = [100_000], [-10]
    quick(remote, path)
    assert path.read_bytes() == CONTENT
    assert remote.asked == [None, "bytes=100000-", None]


def test_a_part_past_the_end_is_begun_anew(remote: Remote, path: Path) -> None:
    remote.cuts = [100_000]
    with pytest.raises(DownloadError):
        quick(remote, path, retries=0)
    remote.content = CONTENT[:50_000]
    quick(remote, path, remote.content)
    assert path.read_bytes() == remote.content
    assert remote.asked == [None, "bytes=100000-", None]


@pytest.mark.parametrize(
    ("etag", "modified", "condition"),
    [
        ('W/"weak"', "Wed, 01 Jan 2020 00:00:00 GMT", "Wed, 01 Jan 2020 00:00:00 GMT"),
        ("", "Wed, 01 Jan 2020 00:00:00 GMT", "Wed, 01 Jan 2020 00:00:00 GMT"),
        ("", "", None),
    ],
)
def test_only_a_version_with_a_name_is_continued(
    remote: Remote, path: Path, etag: str, modified: str, condition: str | None
) -> None:
    remote.etag, remote.modified, remote.cuts = etag, modified, [100_000]
    quick(remote, path)
    assert path.read_bytes() == CONTENT
    assert remote.conditions == [None, condition]
    assert remote.asked == [None, "bytes=100000-" if condition else None]


def test_the_part_of_another_url_is_not_continued(remote: Remote, path: Path) -> None:
    remote.cuts = [100_000]
    with pytest.raises(DownloadError):
        quick(remote, path, retries=0)
    remote.redirect = remote.url
    other = remote.url.replace("/file", "/elsewhere")
    fetch(other, path, sums(CONTENT), progress=False)
    assert remote.asked == [None, None]
    assert path.read_bytes() == CONTENT


def test_damaged_notes_are_as_good_as_none(remote: Remote, path: Path) -> None:
    path.parent.mkdir()
    Path(f"{path}.part").write_bytes(CONTENT[:7])
    for notes in ("", "{", "[]", '{"url": 3}'):
        Path(f"{path}.part.json").write_text(notes)
        quick(remote, path)
        assert path.read_bytes() == CONTENT
        path.unlink()
    assert set(remote.asked) == {None}


def test_a_whole_part_needs_no_server(remote: Remote, path: Path) -> None:
    remote.never_past = len(CONTENT) - 1
    with pytest.raises(DownloadError):
        quick(remote, path, retries=0)
    with Path(f"{path}.part").open("ab") as part:
        part.write(CONTENT[-1:])
    quick(remote, path)
    assert path.read_bytes() == CONTENT
    assert len(remote.asked) == 1


def test_a_missing_page_is_said_at_once(remote: Remote, path: Path) -> None:
    remote.answers = [404]
    with pytest.raises(DownloadError, match=r"/file to be there, got the answer 404 Not Found"):
        quick(remote, path)
    assert remote.asked == [None]
    assert names(path) == []


def test_a_busy_server_is_asked_again(remote: Remote, path: Path) -> None:
    remote.answers = [503, 429]
    quick(remote, path)
    assert path.read_bytes() == CONTENT
    assert len(remote.asked) == 3


def test_a_silent_server_counts_as_cut(remote: Remote, path: Path) -> None:
    remote.hold, remote.cuts = threading.Event(), [100_000]
    quick(remote, path, timeout=0.3)
    assert path.read_bytes() == CONTENT
    assert remote.asked == [None, "bytes=100000-"]


def test_no_server_at_all(path: Path) -> None:
    with serving(Remote(CONTENT)) as gone:
        pass
    with pytest.raises(DownloadError, match=r"got 0 bytes and no more in 1 retries.*refused"):
        quick(gone, path, retries=1)


def test_redirections_are_followed_but_not_out_of_http(remote: Remote, path: Path) -> None:
    remote.redirect = remote.url
    page = remote.url.replace("/file", "/page")
    remote.cuts = [100_000]
    fetch(page, path, sums(CONTENT), progress=False, wait=0.01)
    assert path.read_bytes() == CONTENT
    assert remote.sent == len(CONTENT)
    path.unlink()
    for elsewhere in (f"file://{Path(__file__)}", "ftp://127.0.0.1/file"):
        remote.redirect = elsewhere
        with pytest.raises(DownloadError):
            fetch(page, path, sums(CONTENT), progress=False, retries=0)
    assert names(path) == []


@pytest.mark.parametrize("url", ["ftp://host/a", "file:///etc/hosts", "a", ""])
def test_only_http_is_fetched(path: Path, url: str) -> None:
    with pytest.raises(OptionError, match="http or https"):
        fetch(url, path, sums(CONTENT))
    assert not path.parent.exists()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a disk that is always full")
def test_a_full_disk_leaves_nothing_under_the_name(remote: Remote, path: Path) -> None:
    path.parent.mkdir()
    Path(f"{path}.part").symlink_to("/dev/full")
    with pytest.raises(DownloadError, match=r"No space left.*make room.*same command"):
        quick(remote, path)
    assert not path.exists()
    assert len(remote.asked) == 1  # no retries: the connection was fine
    Path(f"{path}.part").unlink()
    quick(remote, path)
    assert path.read_bytes() == CONTENT


def test_a_folder_that_cannot_be_made(remote: Remote, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(DownloadError, match="choose another folder"):
        quick(remote, tmp_path / "taken" / "file.bin")


def test_a_bar_is_shown_if_wanted(
    remote: Remote, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    remote.cuts = [100_000]
    fetch(remote.url, path, sums(CONTENT), wait=0.01)
    shown = capsys.readouterr().err
    assert "file.bin: 100%" in shown
    assert "300k/300k" in shown
    path.unlink()
    quick(remote, path)
    assert capsys.readouterr().err == ""


def test_a_killed_process_is_continued_by_the_next(remote: Remote, path: Path) -> None:
    program = """
        import sys
        from scodbench.data import Checksums, fetch
        fetch(sys.argv[1], sys.argv[2], Checksums((sys.argv[3],)), progress=False)
    """
    checksum = sums(CONTENT).files[0]
    arguments = [sys.executable, "-c", textwrap.dedent(program), remote.url, path, checksum]
    remote.hold, remote.cuts = threading.Event(), [180_000]
    process = subprocess.Popen(arguments)
    part = Path(f"{path}.part")
    deadline = time.monotonic() + 60
    while not (part.exists() and part.stat().st_size == 180_000):
        assert process.poll() is None, "ended by itself"
        assert time.monotonic() < deadline, "nothing came"
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not path.exists()
    quick(remote, path)
    assert path.read_bytes() == CONTENT
    assert remote.asked == [None, "bytes=180000-"]
    assert remote.sent == len(CONTENT)
    assert names(path) == ["file.bin"]


def test_get_fetches_every_published_file_that_is_not_there(
    remote: Remote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # compressed again, so another file than the one that was published
    remote.content = gzip.compress(CONTENT, 1)
    inside = hashlib.sha256(CONTENT).hexdigest()
    files = tuple(
        File(f"toy/{name}.gz", 1, Checksums(("0" * 64,), inside), remote.url) for name in "ab"
    )
    prepared = File("toy/c.npz", 1, Checksums(("1" * 64,)))
    toy = Dataset("toy", "", "", (Layout("published", files), Layout("prepared", (prepared,))))
    monkeypatch.setitem(DATASETS, "toy", toy)
    expected = [tmp_path / "toy" / "a.gz", tmp_path / "toy" / "b.gz"]
    assert get("toy", tmp_path, progress=False) == expected
    assert gzip.decompress(expected[1].read_bytes()) == CONTENT
    expected[0].unlink()
    get("toy", tmp_path, progress=False)
    assert len(remote.asked) == 3


def test_get_says_what_cannot_be_fetched(tmp_path: Path) -> None:
    for name in ("taxinet", "densenet"):
        with pytest.raises(NotFetchableError, match=r"no public place: copy .* SCODKIT_DATA"):
            get(name, tmp_path)
    with pytest.raises(OptionError, match=r"wine, mnist, .*densenet; got minst"):
        get("minst", tmp_path)
