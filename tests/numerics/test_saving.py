"""Where files are written to and read from: links, pipes, left-overs, full disks, no rights."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from own_process import printed_by
from scodkit import Categorical, Monitor
from scodkit.alarms import OnlineDiscoveries
from scodkit.errors import FileError, MissingFileError, ScodError
from scodkit.numerics import artifact
from scodkit.numerics.files import regular_file, replacing
from small_monitors import data, fitted, network

NOBODY = 65534


def wide_network() -> nn.Module:
    """A network whose files take a while to write."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 2000), nn.Linear(2000, 4))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@contextlib.contextmanager
def without_rights() -> Iterator[None]:
    """Run as somebody whom rights bind, where the tests are run as root."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


# --- reading ---


def listening(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as own:
        own.bind(path.name)  # relative: such names must be short


KINDS: dict[str, Callable[[Path], None]] = {
    "a pipe": os.mkfifo,
    "a folder": Path.mkdir,
    "a socket": listening,
    "a device": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_only_ordinary_files_are_read(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = Path("m.scod")
    KINDS[kind](path)
    # a pipe without a writer keeps its readers waiting: let it have one, so that those who
    # open it show at once
    writer = os.open(path, os.O_RDWR) if kind == "a pipe" else None
    for read in (
        lambda: Monitor.load(path, network()),
        lambda: OnlineDiscoveries.load(path),
        lambda: fitted().fit([data()], checkpoint=path, progress=False),
        lambda: regular_file(path),
    ):
        with pytest.raises(ScodError, match=f"got {kind}"):
            read()
    if writer is not None:
        os.close(writer)
    assert artifact.header_of(path) == {}


def test_a_link_to_a_file_is_read(tmp_path: Path) -> None:
    monitor = fitted()
    monitor.save(tmp_path / "m.scod")
    (tmp_path / "link").symlink_to("m.scod")
    assert regular_file(tmp_path / "link") == tmp_path / "link"
    loaded = Monitor.load(tmp_path / "link", network())
    assert torch.equal(loaded.score(data(4)), monitor.score(data(4)))


def test_a_file_nobody_may_read_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("m.scod").touch(mode=0o200)
    tmp_path.chmod(0o755)
    with without_rights(), pytest.raises(FileError, match="Permission denied"):
        OnlineDiscoveries.load("m.scod")


# --- names ---

LOOP, LONG, TOO_LONG = "loop", "x" * 240, "x" * 300


@pytest.mark.parametrize("name", [LOOP, LONG, TOO_LONG, "a\0b", "a\ud800"])
def test_names_that_cannot_be_are_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / LOOP).symlink_to(LOOP)
    monitor, path = fitted(), tmp_path / name
    for act in (
        lambda: monitor.save(path),
        lambda: Monitor.load(path, network()),
        lambda: monitor.offload(path),
        lambda: fitted().fit([data()], checkpoint=path, progress=False),
        lambda: OnlineDiscoveries().save(path),
        lambda: OnlineDiscoveries.load(path),
    ):
        with pytest.raises(ScodError, match="expected"):
            act()
    assert names(tmp_path) == [LOOP]


# --- links ---


def test_saving_through_a_link_keeps_the_link(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    target, link = tmp_path / "runs" / "third.scod", tmp_path / "latest.scod"
    target.write_text("old")
    link.symlink_to(Path("runs") / "third.scod")
    monitor = fitted()
    monitor.save(link)
    assert link.is_symlink()
    assert torch.equal(Monitor.load(target, network()).score(data(4)), monitor.score(data(4)))
    assert names(tmp_path) == ["latest.scod", "runs"]
    assert names(tmp_path / "runs") == ["third.scod"]


def test_a_link_that_leads_nowhere_is_refused_before_work_is_done(tmp_path: Path) -> None:
    link = tmp_path / "latest.scod"
    link.symlink_to("nowhere.scod")
    with pytest.raises(FileError, match=r"a link that leads nowhere .* delete it"):
        fitted().save(link)
    with pytest.raises(FileError, match="leads nowhere"):
        Monitor(network(), Categorical(), rank=5).fit([], checkpoint=link, progress=False)
    with pytest.raises(MissingFileError):
        Monitor.load(link, network())
    assert names(tmp_path) == ["latest.scod"]


# --- disks ---

FULL = """
    import resource, sys, torch
    from pathlib import Path
    from scodkit import Categorical, Monitor
    from scodkit.errors import ScodError
    path = Path(sys.argv[1])
    monitor = Monitor(torch.nn.Linear(3, 9), Categorical(), rank=5)
    monitor.fit([torch.randn(30, 3)], progress=False).save(path / "m.scod")
    before = (path / "m.scod").read_bytes()
    resource.setrlimit(resource.RLIMIT_FSIZE, (600, 600))
    for act in (
        lambda: monitor.save(path / "m.scod"),
        lambda: monitor.offload(path / "basis"),
        lambda: monitor.fit([torch.randn(30, 3)], checkpoint=path / "c", progress=False),
    ):
        try:
            act()
        except ScodError as error:
            print(type(error).__name__, error.errno, error)
    assert (path / "m.scod").read_bytes() == before
    print([file.name for file in path.iterdir()])
"""


def test_a_full_disk_is_an_error_of_ours_and_changes_nothing(tmp_path: Path) -> None:
    lines = printed_by(FULL, tmp_path).splitlines()
    assert lines[-1] == "['m.scod']"
    assert len(lines) == 4
    for line in lines[:3]:
        assert line.startswith("FileError 27 expected a file that can be written")
        assert "could not be written: File too large (" in line
        assert "); nothing was changed: free some space" in line


def test_a_folder_that_cannot_be_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monitor = fitted()
    monitor.save("m.scod")
    before = Path("m.scod").read_bytes()
    tmp_path.chmod(0o555)
    try:
        with without_rights():
            for act in (
                lambda: monitor.save("m.scod"),
                lambda: monitor.offload("basis"),
                lambda: OnlineDiscoveries().save("alarm"),
                # before a pass over the data
                lambda: monitor.fit(None, checkpoint="c", progress=False),  # type: ignore[arg-type]
            ):
                with pytest.raises(FileError, match=r"Permission denied.*a place you may use"):
                    act()
    finally:
        tmp_path.chmod(0o755)
    assert Path("m.scod").read_bytes() == before
    assert names(tmp_path) == ["m.scod"]


# --- siblings ---


def test_files_of_others_stay_whatever_their_names(tmp_path: Path) -> None:
    monitor, path = fitted(), tmp_path / "m.scod"
    notes, alarm, own = (tmp_path / f"m.scod.{i}-of-3" for i in range(3))
    notes.write_text("of mine")
    OnlineDiscoveries().save(alarm)
    monitor.save(own)  # a whole monitor under such a name
    before = [file.read_bytes() for file in (notes, alarm, own)]
    monitor.save(path)
    assert [file.read_bytes() for file in (notes, alarm, own)] == before
    loaded = Monitor.load(path, network())
    assert torch.equal(loaded.score(data(4)), monitor.score(data(4)))


# --- left-overs ---


def leftover(path: Path) -> Path:
    folder = path.with_name(f".{path.name}.0123456789abcdef")
    folder.mkdir()
    (folder / path.name).write_text("half")
    return folder


def test_left_overs_go_with_the_next_save_and_no_sooner(tmp_path: Path) -> None:
    path = tmp_path / "m.scod"
    ours, other = leftover(path), leftover(tmp_path / "other.scod")
    (tmp_path / ".m.scod.0123456789abcdee").write_text("a file, not a folder")
    with pytest.raises(RuntimeError), replacing(path):
        raise RuntimeError("no more ink")
    assert ours.exists()
    fitted().save(path)
    assert names(tmp_path) == [".m.scod.0123456789abcdee", other.name, "m.scod"]


def test_a_living_writer_keeps_its_folder(tmp_path: Path) -> None:
    path = tmp_path / "note"
    with replacing(path) as slow:
        with replacing(path) as quick:
            quick.write_text("quick")
        assert path.read_text() == "quick"
        assert slow.parent.is_dir()
        slow.write_text("slow")
    assert path.read_text() == "slow"
    assert names(tmp_path) == ["note"]


def test_many_writers_of_one_file_leave_one_whole_file(tmp_path: Path) -> None:
    path, failures = tmp_path / "note", []

    def write(number: int) -> None:
        try:
            for _ in range(40):
                with replacing(path) as temporary:
                    temporary.write_text(str(number) * 1000)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert path.read_text() in {str(number) * 1000 for number in range(6)}
    assert names(tmp_path) == ["note"]


KILLS = 100
processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["scodkit.monitor", "cases"])


def save_for_ever(source: Path, path: Path) -> None:
    torch.set_num_threads(1)
    monitor = Monitor.load(source, wide_network())
    while True:
        monitor.save(path)


def inode(path: Path) -> int:
    return path.stat().st_ino if path.exists() else 0


@pytest.mark.slow
def test_killed_at_any_moment_of_a_save(tmp_path: Path) -> None:
    source, folder = tmp_path / "source", tmp_path / "saved"
    folder.mkdir()
    path = folder / "m.scod"
    monitor = Monitor(wide_network(), Categorical(), rank=20).fit([data()], progress=False)
    monitor.save(source)
    chance, left, most = random.Random(0), 0, 0
    for number in range(KILLS):
        process = processes.Process(target=save_for_ever, args=(source, path))
        before = inode(path)
        process.start()
        for _ in range(2):  # a whole save, which clears up after the last process
            while inode(path) == before:
                assert process.is_alive()
                time.sleep(0.001)
            before = inode(path)
        time.sleep(chance.uniform(0, 0.1))
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        assert process.exitcode == -signal.SIGKILL
        artifact.read(path, "monitor")  # whole
        here = len(names(folder)) - 1
        left, most = left + bool(here), max(most, here)
        if number % 10 == 9:
            monitor.save(path)
            assert names(folder) == ["m.scod"]
    assert left > 0
    assert most == 1
