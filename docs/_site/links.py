"""Links of the pages in Markdown, as GitHub shows them: ``make links``.

Prints addresses on the web, each with the pages that have it, and fetches none. Exits 1 with
relative links that lead to no file, or to no heading.
"""

from __future__ import annotations

import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
IN_HTML = re.compile(r"""\b(?:src|srcset|href)=["']([^"']+)["']""")
ANCHOR = re.compile(r"""\b(?:id|name)=["']([^"']+)["']""")


def tokens(page: Path) -> Iterator[Token]:
    """Yield what a page consists of, with the parts of its lines.

    Args:
        page: A file in Markdown.
    """
    text = page.read_text(encoding="utf-8")
    for token in MarkdownIt("commonmark").enable("table").parse(text):
        yield token
        yield from token.children or ()


def links(page: Path) -> set[str]:
    """Return where a page links to, pictures included."""
    found = set()
    for token in tokens(page):
        found |= {str(token.attrs[name]) for name in ("href", "src") if name in token.attrs}
        if token.type.startswith("html"):
            found |= set(IN_HTML.findall(token.content))
    return found


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page: of its headings as GitHub makes them, and its own."""
    found, times, heading = set(), Counter[str](), False
    for token in tokens(page):
        if token.type.startswith("html"):
            found |= set(ANCHOR.findall(token.content))
        elif heading and token.type == "inline":
            text = "".join(part.content for part in token.children or ())
            slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
            found.add(f"{slug}-{times[slug]}" if times[slug] else slug)
            times[slug] += 1
        heading = token.type == "heading_open"
    return found


def dead(page: Path, link: str) -> str:
    """Say what is wrong with a relative link, or return nothing.

    Args:
        page: Where it is.
        link: Its address.
    """
    name, _, anchor = unquote(link).partition("#")
    path = (page.parent / name).resolve() if name else page
    if not path.exists():
        return f"no file {name}"
    if not path.is_relative_to(ROOT):
        return f"{name} is outside"
    if anchor and path.suffix == ".md" and anchor not in anchors(path):
        return f"no heading #{anchor} in {path.relative_to(ROOT)}"
    return ""


def main() -> None:
    """Print what there is on the web, and exit with what there is not here."""
    web, wrong = defaultdict(set), []
    for page in PAGES:
        for link in links(page):
            if re.match(r"[a-z]+:", link):
                web[link].add(str(page.relative_to(ROOT)))
            elif message := dead(page, link):
                wrong.append(f"{page.relative_to(ROOT)}: {message}")
    for link, pages in sorted(web.items()):
        print(link, *sorted(pages))
    sys.exit("\n".join(sorted(wrong)) or 0)


if __name__ == "__main__":
    main()
