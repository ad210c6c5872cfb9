"""Python blocks of the README and of the overview run as printed, and print what they show."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import readme_blocks
from scodkit import Fused, Monitor

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
HERO = (ROOT / "examples" / "hero.py").read_text(encoding="utf-8")
# what the example prints: metres, nats, alarm
LINE = re.compile(r"^ *(\d+) m   score +(\S+) nats   (fine|ALARM)$", re.MULTILINE)


def test_the_readme_prints_what_it_shows(capsys: pytest.CaptureFixture[str]) -> None:
    readme_blocks.run(ROOT / "README.md")
    printed = LINE.findall(capsys.readouterr().out)
    shown = LINE.findall(README)
    assert [alarm for *_, alarm in shown] == ["fine", "fine", "ALARM", "ALARM"]
    assert [alarm for *_, alarm in printed] == [alarm for *_, alarm in shown]
    for (metres, nats, _), (shown_metres, shown_nats, _) in zip(printed, shown, strict=True):
        # processors round in their own ways while they train
        assert float(metres) == pytest.approx(float(shown_metres), rel=0.1)
        assert float(nats) == pytest.approx(float(shown_nats), rel=0.9)


def test_the_picture_is_of_the_network_of_the_readme() -> None:
    (block,) = readme_blocks.blocks(README)
    drawn = "".join(HERO.split())
    for line in block.splitlines():
        code = "".join(line.partition("#")[0].split())
        if code.startswith(("net=", "optimizer", "nn.functional", "monitor=", "speed=")):
            assert code.replace("net=", "", 1) in drawn, line
    assert "28*speed+55*speed**2" in drawn
    assert "3*torch.randn(600,1)" in drawn


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    image = pytest.importorskip("PIL.Image")
    program = [sys.executable, str(ROOT / "examples" / "hero.py"), str(tmp_path / "hero.png")]
    subprocess.run(program, check=True, cwd=tmp_path)
    committed = ROOT / "docs" / "images" / "hero.png"
    with image.open(tmp_path / "hero.png") as drawn, image.open(committed) as shown:
        assert drawn.size == shown.size
        assert drawn.width <= 2.2 * 390  # so that its letters can be read on a phone


def test_the_truth_and_the_shortfall_are_those_of_the_formula() -> None:
    true = [28 * v + 55 * v**2 for v in (1.1, 1.6)]
    assert f"the truth is {true[0]:.0f} and {true[1]:.0f} m" in README
    *_, (metres, _, _) = LINE.findall(README)
    assert f"answers {true[1] - float(metres):.0f} m short at 160 km/h" in README


def test_the_readme_is_short() -> None:
    assert len(README.encode()) <= 7000


def test_the_overview_runs_as_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    page = ROOT / "docs" / "guides" / "overview.md"
    names = readme_blocks.run(page)
    assert len(readme_blocks.blocks(page.read_text(encoding="utf-8"))) >= 3
    monitor, scored = names["monitor"], names["scored"]
    assert isinstance(monitor, Monitor)
    assert (tmp_path / "monitor.scod").exists()  # which it was loaded from
    assert torch.equal(monitor.score(names["x"]), scored.score)
    assert scored.p_value.shape == (3,)
    assert isinstance(names["fused"], Fused)
    assert names["alarm"].tolist() == [False, False, True]
    assert capsys.readouterr().out  # which part accuses
