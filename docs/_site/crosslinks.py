"""Names in prose become links to the reference; links out of docs/ to what the site can show.

A page says `Monitor.fit`, `monitor.fit(loader)` or `KNN` in code, as it would on GitHub. The
first time that a section of the page does so, the site makes it a link.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import reference
from docutils import nodes
from sphinx.addnodes import desc, desc_signature, literal_strong, pending_xref
from sphinx.application import Sphinx
from sphinx.util.nodes import make_refnode

NAME = re.compile(r"(?:scodkit\.)?([A-Za-z_][\w.]*)(?:\(.*\))?", re.DOTALL)
# what pages call an object of a class
CALLED = {"monitor": "Monitor", "fused": "Fused", "calibration": "Calibration"}


def by_short_name(app: Sphinx) -> dict[str, tuple[str, str]]:
    """Return page and anchor of every name of the reference, by what prose may call it.

    Args:
        app: Of the build.
    """
    found: dict[str, tuple[str, str]] = {}
    objects = app.env.get_domain("py").get_objects()
    # of names that two things have, the one nearest to the top of the package is meant
    for whole, _, kind, page, anchor, _ in sorted(objects, key=lambda o: o[0].count(".")):
        if kind == "module":
            continue
        parts = whole.removeprefix("scodkit.").split(".")
        classes = [i for i, part in enumerate(parts) if part[0].isupper()]
        short = parts[classes[0] if classes else -1 :]
        for name in (".".join(parts), ".".join(short)):
            if len(name) > 2:
                found.setdefault(name, (page, anchor))
    for variable, cls in CALLED.items():
        for name in [n for n in found if n.startswith(f"{cls}.")]:
            found[variable + name.removeprefix(cls)] = found[name]
    return found


def name_fields(app: Sphinx, doctree: nodes.document) -> None:
    """Give the fields of data classes, which docstrings list as arguments, anchors.

    Args:
        app: Of the build.
        doctree: Of a page; changed.
    """
    domain = app.env.domains.python_domain
    for entry in doctree.findall(desc):
        if entry["objtype"] != "class" or not entry[0]["ids"]:
            continue
        cls = entry[0]["ids"][0]
        fields = getattr(reference.thing(cls), "__dataclass_fields__", {})
        for lists in (part for part in entry[-1] if isinstance(part, nodes.field_list)):
            for name in lists.findall(literal_strong):
                anchor = f"{cls}.{name.astext()}"
                if name.astext() in fields and anchor not in domain.objects:
                    name["ids"].append(anchor)
                    domain.note_object(anchor, "attribute", anchor, location=entry)


def whole_types(app: Sphinx, doctree: nodes.document) -> None:
    """Let types be what they are called: Sphinx takes ``bytes`` for an attribute of some class.

    Args:
        app: Of the build.
        doctree: Of a page; changed.
    """
    for node in doctree.findall(pending_xref):
        if node.get("refdomain") == "py" and node["reftype"] in ("class", "exc", "obj"):
            for hint in ("refspecific", "py:class"):
                node.attributes.pop(hint, None)


def in_prose(doctree: nodes.document) -> Iterator[nodes.literal]:
    """Yield code in running text that is no link, no heading, no signature and on no card."""
    for literal in list(doctree.findall(nodes.literal)):
        parent: Any = literal
        while parent is not None and not isinstance(
            parent, (nodes.reference, nodes.title, nodes.term, desc_signature)
        ):
            if "cards" in parent.get("classes", ()):  # each is a link as a whole
                break
            parent = parent.parent
        if parent is None:
            yield literal


def section_of(node: nodes.Node) -> Any:
    """Return the section, or the entry of the reference, that a node is in."""
    while node.parent is not None and not isinstance(node, (nodes.section, nodes.row, desc)):
        node = node.parent
    return node


def class_of(node: Any) -> str:
    """Return the class whose entry of the reference a node is in, with a dot; or nothing."""
    while node is not None:
        if isinstance(node, desc) and node["objtype"] == "class":
            return f"{node[0]['fullname']}."
        node = node.parent
    return ""


def link_names(app: Sphinx, doctree: nodes.document, page: str) -> None:
    """Make names in prose links.

    Args:
        app: Of the build.
        doctree: Of the page; changed.
        page: Its name.
    """
    names = by_short_name(app)
    seen = set()
    for literal in in_prose(doctree):
        match = NAME.fullmatch(literal.astext())
        target = (
            names.get(f"{class_of(literal)}{match[1]}", names.get(match[1])) if match else None
        )
        key = (id(section_of(literal)), target)
        if target is None or key in seen:
            continue
        seen.add(key)
        link = make_refnode(app.builder, page, *target, [literal.deepcopy()])
        literal.replace_self(link)


def find_type(app: Sphinx, env: Any, node: Any, content: nodes.Element) -> nodes.Node | None:
    """Find a type of ours that a signature names by the module which defines it.

    Args:
        app: Of the build.
        env: Of the build.
        node: What refers to it.
        content: What the link shows.

    Returns:
        A link, or nothing if it is none of ours.
    """
    if node.get("refdomain") != "py":
        return None
    name = app.config.scodkit_names.get(node["reftarget"], node["reftarget"])
    target = by_short_name(app).get(name.removeprefix("scodkit.").rpartition(".")[2])
    if target is None or not name.rpartition(".")[2][0].isupper():
        return None
    return make_refnode(app.builder, node["refdoc"], *target, [content])
