"""Free memory, as the machine and a container tell it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from scodkit.errors import InsufficientMemoryError
from scodkit.fit.memory import (
    Plan,
    _free_in_container,
    _free_on_machine,
    available_bytes,
    readable,
)


def test_free_memory_of_a_machine(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 100 kB\nMemAvailable:   60 kB\n")
    assert _free_on_machine(meminfo) == 60 * 1024
    # without it the system's own count of free pages
    assert (_free_on_machine(tmp_path / "none") or 0) > 0


def test_free_memory_of_a_container(tmp_path: Path) -> None:
    assert _free_in_container(tmp_path) is None
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 400\ninactive_file 300\n")
    assert _free_in_container(tmp_path) == 600  # cache can be given up
    (tmp_path / "memory.max").write_text("max\n")
    assert _free_in_container(tmp_path) is None


def test_unknown_devices_have_unknown_memory() -> None:
    assert available_bytes(torch.device("meta")) is None
    assert (available_bytes(torch.device("cpu")) or 0) > 2**20


def plan(available: int | None, working: int = 10) -> Plan:
    sizes = (20 * 400, 10 * 400, 0, 0, 20 * 400)
    return Plan(100, 2, 20, 10, *sizes, 0, working, working, available)


def test_unknown_memory_is_trusted() -> None:
    plan(None).check()
    assert "free unknown" in str(plan(None))


@pytest.mark.parametrize("available", [19_999, 12_345, 5_000])
def test_the_advice_fits(available: int) -> None:
    with pytest.raises(InsufficientMemoryError, match=r"sketch of (\d+) columns") as caught:
        plan(available).check()
    words = str(caught.value).split("the largest that fits is a sketch of ")[1].split()
    columns, rank = int(words[0]), int(words[3].removeprefix("rank=").rstrip(";"))
    vector = 400
    assert (2 * columns + rank) * vector <= available
    assert (2 * (columns + 2) + rank + 1) * vector > available - 10


def test_when_nothing_fits_it_says_so() -> None:
    with pytest.raises(InsufficientMemoryError, match="not even rank 1 fits"):
        plan(100).check()


@pytest.mark.parametrize(
    ("size", "words"),
    [(10, "10 B"), (2048, "2.0 KiB"), (2**31, "2.0 GiB"), (2**45, "32.0 TiB")],
)
def test_sizes_read_well(size: int, words: str) -> None:
    assert readable(size) == words
