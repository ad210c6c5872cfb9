"""The tree of pages, from the folders of docs/ and the lists in docs/index.md.

A folder is a section. Its pages come in the order in which docs/index.md lists them, under the
names that they have there; pages that it does not list come last. A section without a page of
its own is given one, with the lines of docs/index.md.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx

DOCS = Path(__file__).parents[1]
SECTIONS = {
    "start": "Start",
    "tutorials": "Tutorials",
    "guides": "Guides",
    "ideas": "Ideas",
    "results": "Results",
    "reference": "Reference",
}
LISTED = re.compile(
    r"^- \[(?P<title>[^\]]+)\]\((?P<page>[\w/.-]+)\.md\)(?:: (?P<about>.*))?$", re.M
)


def listed() -> dict[str, tuple[str, str]]:
    """Return the pages that docs/index.md lists: their titles, and what it says of them."""
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    return {m["page"]: (m["title"], m["about"] or "") for m in LISTED.finditer(index)}


def pages_of(section: str, first: tuple[str, ...] = ()) -> list[str]:
    """Return the pages of a section but its index, in order.

    Args:
        section: A folder of docs/.
        first: Pages of other folders' making, to come after those that are listed.
    """
    found = {
        path.relative_to(DOCS).with_suffix("").as_posix()
        for path in (DOCS / section).rglob("*")
        if path.suffix in {".md", ".rst"} and path.stem != "index"
    }
    order = [*listed(), *first]
    return [page for page in order if page in found] + sorted(found - set(order))


def sections() -> Iterator[tuple[str, str]]:
    """Yield the folders that have pages, with their titles."""
    for section, title in SECTIONS.items():
        if pages_of(section):
            yield section, title


def indexes() -> dict[Path, str]:
    """Return a page for each section that has none, with where it lies."""
    titles, found = listed(), {}
    for section, title in sections():
        if (DOCS / section / "index.md").exists():
            continue
        lines = [title, "=" * len(title), ""]
        for page in pages_of(section):
            name, about = titles.get(page, ("", ""))
            link = f":doc:`{name} </{page}>`" if name else f":doc:`/{page}`"
            about = re.sub(r"`([^`]+)`", r"``\1``", about)
            lines.append(f"- {link}: {about}" if about else f"- {link}")
        found[DOCS / section / "index.rst"] = "\n".join(lines)
    return found


def below(page: str, first: tuple[str, ...] = ()) -> list[str]:
    """Return the pages below an index, with the titles that the navigation shows.

    Args:
        page: Name of the index.
        first: As for `pages_of`.
    """
    if page == "index":
        return [f"{title} </{section}/index>" for section, title in sections()]
    titles = listed()
    found = pages_of(page.partition("/")[0], first)
    return [f"{titles[p][0]} </{p}>" if p in titles else f"/{p}" for p in found]


def as_cards(app: Sphinx, doctree: nodes.document, page: str) -> None:
    """Make the lists of pages on an index look like cards.

    Args:
        app: Of the build.
        doctree: Of the page; changed.
        page: Its name.
    """
    if page != "index" and not page.endswith("/index"):
        return
    if page == "index":
        doctree.next_node(nodes.section)["classes"].append("home")
    for bullets in doctree.findall(nodes.bullet_list):
        lines = [item.next_node(nodes.paragraph) for item in bullets]
        if not all(line and isinstance(line[0], nodes.reference) for line in lines):
            continue
        bullets["classes"].append("cards")
        for line in lines:
            if len(line) > 1:
                about = line[1].astext().removeprefix(":").lstrip()
                line[1] = nodes.Text(about[:1].upper() + about[1:])


def narrow(app: Sphinx, doctree: nodes.document, page: str) -> None:
    """Mark pictures that are higher than wide: across the whole text they would be large.

    Args:
        app: Of the build.
        doctree: Of the page; changed.
        page: Its name.
    """
    for image in doctree.findall(nodes.image):
        path = Path(app.srcdir, image["uri"])
        if path.suffix == ".png":
            width, height = struct.unpack(">II", path.read_bytes()[16:24])
            image["classes"] += ["tall"] * (height > width)
