"""Files that are replaced whole: rights, leftovers, failures."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from scodkit.numerics.files import remove_leftovers, replacing


def write(path: Path) -> None:
    with replacing(path) as temporary:
        save_file({"x": torch.ones(3)}, temporary)  # which likes its files private


@pytest.mark.parametrize("mask", [0o022, 0o002, 0o077])
def test_a_new_file_has_the_rights_of_any_new_file(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        write(tmp_path / "new")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o666 & ~mask


def test_a_replaced_file_keeps_its_rights(tmp_path: Path) -> None:
    path = tmp_path / "old"
    path.write_text("old")
    path.chmod(0o640)
    write(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert [file.name for file in tmp_path.iterdir()] == ["old"]


def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "old"
    path.write_text("old")

    def fail() -> None:
        with replacing(path) as temporary:
            (temporary.parent / "theirs").write_text("half")
            raise RuntimeError("no more ink")

    with pytest.raises(RuntimeError, match="no more ink"):
        fail()
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["old"]


def test_leftovers_of_this_file_alone_are_removed(tmp_path: Path) -> None:
    path = tmp_path / "fit.ckpt"
    remove_leftovers(tmp_path / "nowhere" / "fit.ckpt")
    ours = tmp_path / ".fit.ckpt.0123456789abcdef"
    others = [".fit.ckpt.1-of-2.0123456789abcdef", ".fit.ckpt.short", ".other.0123456789abcdef"]
    for name in (ours.name, *others):
        (tmp_path / name).mkdir()
    (ours / "half").touch()
    path.touch()
    remove_leftovers(path)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([*others, path.name])
