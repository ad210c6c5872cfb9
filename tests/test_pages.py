"""Pages in Markdown read well anywhere: tables filled in, no syntax of the site's own."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [
    *(ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"),
    *sorted((ROOT / "docs").rglob("*.md")),
]


def test_every_page_is_listed_on_the_first() -> None:
    docs = ROOT / "docs"
    listed = set(
        re.findall(r"^- \[.+?\]\((.+?)\): ", (docs / "index.md").read_text(), re.MULTILINE)
    )
    pages = {page.relative_to(docs).as_posix() for page in docs.rglob("*.md")}
    # the site makes a list for each section out of these lines
    indexes = {page for page in pages if page.endswith("index.md")}
    assert pages - indexes <= listed <= pages


def run(program: str, *words: str) -> subprocess.CompletedProcess[str]:
    path = ROOT / "docs" / "_site" / program
    return subprocess.run([sys.executable, str(path), *words], capture_output=True, text=True)


def test_tables_are_those_of_their_files() -> None:
    ran = run("fill_tables.py", "--check")
    assert ran.returncode == 0, ran.stderr


def test_links_lead_somewhere() -> None:
    ran = run("links.py")
    assert ran.returncode == 0, ran.stderr
    assert "https://" in ran.stdout


@pytest.mark.parametrize(
    ("link", "message"),
    [
        ("results/index.md", ""),
        ("reference/index.md#likelihoods", ""),
        ("nowhere.md", "no file nowhere.md"),
        ("../../", "../../ is outside"),
        (
            "reference/index.md#Likelihoods",
            "no heading #Likelihoods in docs/reference/index.md",
        ),
    ],
)
def test_dead_links_are_found(link: str, message: str) -> None:
    links = runpy.run_path(str(ROOT / "docs" / "_site" / "links.py"))
    assert links["dead"](ROOT / "docs" / "index.md", link) == message


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_are_plain_markdown(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert not re.findall(r"^\s*(?:--8<--|:{3,}|`{3}\\{).*", text, re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_formulas_are_the_same_to_every_renderer(page: Path) -> None:
    """Markdown takes ``\\,`` for a comma and ``|`` for a cell; KaTeX and MathJax do not."""
    text = page.read_text(encoding="utf-8")
    text = re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)
    blocks = re.findall(r"\$\$(.*?)\$\$", text, re.DOTALL)
    text = re.sub(r"\$\$.*?\$\$", "", text, flags=re.DOTALL)
    for formula in [*blocks, *re.findall(r"\$(.*?)\$", text, re.DOTALL)]:
        assert "\n" not in formula
        assert formula == formula.strip()
        assert not re.search(r"\\[^a-zA-Z]|\||<|>", formula), formula
        assert formula.count("{") == formula.count("}")
    assert page.name != "method.md" or len(blocks) >= 5
