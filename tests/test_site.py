"""The site in a real browser: every page, wide and narrow, light and dark; and its search.

Needs playwright's Python package and a Chromium: Debian's, or playwright's own.
"""

from __future__ import annotations

import functools
import html.parser
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

pytestmark = pytest.mark.slow

pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
axe = pytest.importorskip(
    "axe_playwright_python.sync_playwright", reason="axe is not installed"
)
pytest.importorskip("sphinx", reason="what builds the site is not installed")

ROOT = Path(__file__).parents[1]
INDEX = (ROOT / "docs" / "reference" / "index.md").read_text(encoding="utf-8")
NAMES = re.findall(r"^\| \[`([\w.]+)`\]", INDEX, re.MULTILINE)
# widths, each with the colour schemes of a page, the first of which axe sees; and its rules
# there but for colours, in the second all that depend on the width
STATES: dict[tuple, dict] = {
    (1440, "light", "dark"): {"rules": {"color-contrast": {"enabled": False}}},
    (390, "dark", "light"): {"runOnly": ["scrollable-region-focusable", "target-size"]},
}
# of long tables and lists of methods the first have the colours of all; they take axe long
REPEATED = [["tbody > tr:nth-child(n + 6)"], ["dd > dl.py ~ dl.py ~ dl.py"]]
NO_FORMULA = ".katex-error, .math:not(:has(.katex))"
# formulas that are not in the middle; long ones must not be cut off at their beginning
ASIDE = """() => [...document.querySelectorAll('div.math')].filter(box => {
    const bases = [...box.querySelectorAll('.katex-html > .base')];
    const parts = bases.map(base => base.getBoundingClientRect());
    const around = box.getBoundingClientRect();
    const left = Math.min(...parts.map(p => p.left)) - around.left;
    const right = around.right - Math.max(...parts.map(p => p.right));
    return left < -1 || (right >= 0 && Math.abs(left - right) > 2);
}).map(box => box.textContent.slice(0, 40))"""
# source code as Sphinx shows it, and the list of all names: looked at, but not by axe
BY_SPHINX = ("_modules", "genindex", "search")
FOLLOWS = "scheme => document.documentElement.dataset.theme === scheme"
WIDER = "() => document.documentElement.scrollWidth - innerWidth"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pages, made by whichever process of the tests comes first."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "site"
    errors, writing = folder.with_suffix(".errors"), folder.with_suffix(".writing")
    try:
        folder.mkdir()
    except FileExistsError:
        ends = time.monotonic() + 900
        while not errors.exists() and time.monotonic() < ends:
            time.sleep(0.1)
    else:
        command = ["-m", "sphinx", "-q", "-W", "--keep-going", "-c", "docs/_site", "docs"]
        ran = subprocess.run(
            [sys.executable, *command, str(folder)], cwd=ROOT, capture_output=True, text=True
        )
        writing.write_text(ran.stderr if ran.returncode else "")
        writing.replace(errors)
    assert not errors.read_text()
    return folder


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    handler = functools.partial(Quiet, directory=str(site))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None: ...


def files(site: Path) -> list[Path]:
    """Return all pages; not what the theme leaves among its files."""
    return [
        path for path in sorted(site.resolve().rglob("*.html")) if "_static" not in path.parts
    ]


def pages(site: Path) -> list[str]:
    """Return all pages but those of source code."""
    found = (path.relative_to(site.resolve()).as_posix() for path in files(site))
    return [page for page in found if not page.startswith(BY_SPHINX)]


class Marks(html.parser.HTMLParser):
    """What a page links to, and where it can be linked to."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.anchors = {""}
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src") and value:
                self.links.add(value)
            elif name == "id" and value:
                self.anchors.add(value)


def test_no_link_is_dead(site: Path) -> None:
    marks = {path: Marks(path) for path in files(site)}
    wrong = []
    for path, mark in marks.items():
        for link in mark.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not target.is_file():
                wrong.append(f"{path.relative_to(site.resolve())}: no file {link}")
            elif target in marks and unquote(parts.fragment) not in marks[target].anchors:
                wrong.append(f"{path.relative_to(site.resolve())}: no anchor {link}")
    assert not wrong


def test_every_page_is_reached_from_the_first(site: Path) -> None:
    start = (site / "index.html").resolve()
    seen, left = {start}, [start]
    while left:
        path = left.pop()
        for link in Marks(path).links:
            target = (path.parent / unquote(urlsplit(link).path)).resolve()
            if target.suffix == ".html" and target.is_file() and target not in seen:
                seen.add(target)
                left.append(target)
    assert {site.resolve() / page for page in pages(site)} <= seen


def test_every_name_of_the_reference_has_an_anchor(site: Path) -> None:
    anchors = set[str]().union(*(Marks(path).anchors for path in site.glob("reference/*.html")))
    for name in NAMES:
        assert {f"scodkit.{name}", f"scodkit.errors.{name}"} & anchors, name
    # methods of ours, of a base class, and an attribute
    named = ("Monitor.fit", "Monitor.save", "Scored.p_value", "baselines.Baseline.score")
    assert {f"scodkit.{name}" for name in named} <= anchors
    assert "scodkit.baselines.KNN.fit" not in anchors  # told once


@pytest.mark.parametrize(
    ("page", "link"),
    [
        ("guides/alarms", "../reference/alarms.html#scodkit.RolloutAlarm"),
        ("guides/large", "../reference/monitor.html#scodkit.Monitor.certify"),
        ("reference/index", "baselines.html#scodkit.baselines.KNN"),
        ("reference/monitor", "likelihoods.html#scodkit.Likelihood"),  # a type
    ],
)
def test_names_are_links(page: str, link: str, site: Path) -> None:
    assert link in Marks(site / f"{page}.html").links


def test_types_of_python_are_not_taken_for_names_of_ours(site: Path) -> None:
    assert (
        "fused.html#scodkit.Budget.bytes" not in Marks(site / "reference/adapters.html").links
    )


def test_pages_in_a_browser(site: Path, address: str, browser) -> None:
    wrong: list[str] = []
    asked: list[str] = []
    page = browser.new_page(reduced_motion="reduce")  # colours change at once
    page.on(
        "console", lambda m: wrong.append(m.text) if m.type in ("error", "warning") else None
    )
    page.on("pageerror", lambda error: wrong.append(f"{page.url}: {error}"))
    page.on("requestfailed", lambda request: wrong.append(f"not loaded: {request.url}"))
    page.on("request", lambda request: asked.append(request.url))
    found = pages(site)
    assert len(found) > 30
    for name in found:
        for (width, *schemes), rules in STATES.items():
            page.set_viewport_size({"width": width, "height": 900})
            page.emulate_media(color_scheme=schemes[0])
            page.goto(f"{address}/{name}")
            page.wait_for_function(FOLLOWS, arg=schemes[0])
            told = violations(page, rules)
            told += [f"no formula: {f}" for f in page.locator(NO_FORMULA).all_inner_texts()]
            told += [f"aside: {f}" for f in page.evaluate(ASIDE)]
            for scheme in schemes:
                page.emulate_media(color_scheme=scheme)
                page.wait_for_function(FOLLOWS, arg=scheme)
                if (wider := page.evaluate(WIDER)) > 0:
                    told.append(f"{wider} px too wide, {scheme}")
            wrong += [f"{name}, {width} px: {line}" for line in told]
    page.close()
    wrong += [f"asks for {url}" for url in asked if not url.startswith((address, "data:"))]
    assert not wrong, "\n".join(wrong)


def test_code_is_copied_without_its_prompts(address: str, browser) -> None:
    context = browser.new_context(permissions=["clipboard-read", "clipboard-write"])
    page = context.new_page()
    page.goto(f"{address}/reference/baselines.html")
    block = page.locator("div.highlight:has-text('KNN(')").first
    block.hover()
    block.locator("button.copybtn").click()
    copied = page.evaluate("() => navigator.clipboard.readText()")
    context.close()
    assert "method = KNN(" in copied
    assert ">>>" not in copied


def violations(page, rules: dict[str, object]) -> list[str]:
    """Return what axe-core finds, each with the first places."""
    # it would fetch style sheets of its own accord, from wrong addresses
    options = {"preload": False, "resultTypes": ["violations"]}
    contrast = {**options, "runOnly": ["color-contrast"]}
    checker = axe.Axe()
    found = checker.run(page, options={**options, **rules}).response["violations"]
    found += checker.run(page, {"exclude": REPEATED}, contrast).response["violations"]
    return [
        f"{v['id']}: {node['html'][:200]} {node['failureSummary']}"
        for v in found
        for node in v["nodes"][:3]
    ]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("install", "/start/install.html"),
        ("tutorial", "/tutorials/index.html"),
        ("Hugging Face", "/guides/exports.html#hugging-face"),
        ("out-of-distribution", "/index.html"),
        ("DriftAlarm", "/reference/alarms.html#scodkit.DriftAlarm"),
    ],
)
def test_search_finds(words: str, expected: str, address: str, browser) -> None:
    page = browser.new_page()
    page.goto(f"{address}/index.html")
    page.keyboard.press("Control+k")
    page.keyboard.type(words)
    page.keyboard.press("Enter")
    page.wait_for_url("**/search.html?*")
    page.wait_for_selector("ul.search li a")
    results = page.locator("ul.search li > a").evaluate_all("found => found.map(a => a.href)")
    page.close()
    assert any(r.startswith(f"{address}{expected}") for r in results[:3]), results[:3]
