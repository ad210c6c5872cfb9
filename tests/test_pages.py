"""Pages in Markdown read well anywhere: tables filled in, no syntax of the site's own."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [
    *(ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"),
    *sorted((ROOT / "docs").rglob("*.md")),
]


def test_tables_are_those_of_their_files() -> None:
    fill = [sys.executable, str(ROOT / "docs" / "_site" / "fill_tables.py"), "--check"]
    ran = subprocess.run(fill, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_are_plain_markdown(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert not re.findall(r"^\s*(?:--8<--|:{3,}|`{3}\\{).*", text, re.MULTILINE)
