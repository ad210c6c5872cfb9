"""The figures of the pages can be read on a phone, and none is kept that no page shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from PIL import Image

ROOT = Path(__file__).parents[1]
PHONE = 358  # pixels that a page has for a figure on a phone that is 390 wide
SHOWN = {
    (page.parent / link).resolve().relative_to(ROOT).as_posix()
    for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"))
    for link in re.findall(r"""(?:\]\(|src=")([^)"\s]+\.png)[)"]""", page.read_text("utf-8"))
}
SCREENSHOTS = {"docs/images/report_desktop.png", "docs/images/report_phone.png"}


@pytest.mark.parametrize("path", sorted(SHOWN - SCREENSHOTS))
def test_letters_have_eight_pixels_on_a_phone(path: str) -> None:
    """Every program that draws for a page notes the size of the smallest letters."""
    with Image.open(ROOT / path) as picture:
        letters = float(picture.text["Letters"].split()[0])
        assert letters * min(1, PHONE / picture.width) >= 8


def test_every_picture_is_shown() -> None:
    folders = ("docs/images", "docs/tutorials/images", "results/figures", "benchmarks/results")
    kept = {
        path.relative_to(ROOT).as_posix()
        for folder in folders
        for path in (ROOT / folder).glob("*.png")
    }
    assert kept == SHOWN
