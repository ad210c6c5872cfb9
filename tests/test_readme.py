"""README's Python blocks run as they are printed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import readme_blocks
from scodkit import Fused, Monitor

ROOT = Path(__file__).parents[1]


def test_the_blocks_run_as_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names = readme_blocks.run(ROOT / "README.md")
    assert len(readme_blocks.blocks((ROOT / "README.md").read_text())) >= 3
    monitor, scored = names["monitor"], names["scored"]
    assert isinstance(monitor, Monitor)
    assert (tmp_path / "monitor.scod").exists()  # which it was loaded from
    assert torch.equal(monitor.score(names["x"]), scored.score)
    assert scored.p_value.shape == (3,)
    assert isinstance(names["fused"], Fused)
    assert names["alarm"].tolist() == [False, False, True]
    assert capsys.readouterr().out  # which part accuses
