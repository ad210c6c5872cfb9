"""Formulas are drawn in the browser by KaTeX, which the site brings along (static/katex)."""

from __future__ import annotations

from typing import Any

from docutils import nodes
from sphinx.application import Sphinx


def write(writer: Any, node: nodes.Node, tag: str) -> None:
    """Write a formula as text for static/formulas.js."""
    writer.body.append(f'<{tag} class="math">{writer.encode(node.astext())}</{tag}>')
    raise nodes.SkipNode


def inline(writer: Any, node: nodes.math) -> None:
    """Write a formula in a line."""
    write(writer, node, "span")


def block(writer: Any, node: nodes.math_block) -> None:
    """Write a formula between paragraphs."""
    write(writer, node, "div")


def add_scripts(app: Sphinx, page: str, template: str, context: Any, doctree: Any) -> None:
    """Load KaTeX on pages that have formulas."""
    formulas = (nodes.math, nodes.math_block)
    if doctree is None or not list(doctree.findall(lambda node: isinstance(node, formulas))):
        return
    app.add_css_file("katex/katex.min.css")
    for script in ("katex/katex.min.js", "formulas.js"):
        app.add_js_file(script, loading_method="defer")


def setup(app: Sphinx) -> dict[str, bool]:
    """Make ``katex`` a way to draw formulas."""
    app.add_html_math_renderer("katex", (inline, None), (block, None))
    app.connect("html-page-context", add_scripts)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
