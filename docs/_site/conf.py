"""Sphinx builds the site from the pages of docs/ and from docstrings: ``make docs``."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import crosslinks  # noqa: E402
import navigation  # noqa: E402
import reference  # noqa: E402

import scodkit  # noqa: E402

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = HERE.parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
# where this site and its source are, once they have addresses: [project.urls] of pyproject.toml
URLS = PROJECT.get("urls", {})
REPOSITORY = URLS.get("Repository", "").removesuffix("/")

project = "scodkit"
author = "The scodkit developers"
copyright = author
version = release = scodkit.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "formulas",
]
exclude_patterns = ["_site"]
nitpicky = False

myst_enable_extensions = ["dollarmath", "html_image"]
myst_heading_anchors = 4
default_role = "code"

autodoc_mock_imports = reference.HOSTS
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_type_aliases = {"ArrayLike": "ArrayLike"}
autodoc_preserve_defaults = True
autodoc_inherit_docstrings = False
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 80
add_module_names = False
toc_object_entries_show_parents = "hide"
napoleon_numpy_docstring = False
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

html_math_renderer = "katex"
html_theme = "pydata_sphinx_theme"
html_title = "scodkit"
html_baseurl = URLS.get("Documentation", "")
html_static_path = ["static"]
html_css_files = ["site.css"]
html_search_scorer = str(HERE / "scorer.js")
html_favicon = "static/favicon.svg"
html_show_sourcelink = False
html_copy_source = False
html_context = {"default_mode": "auto"}
if REPOSITORY:
    html_context["edit_page_url_template"] = f"{REPOSITORY}/edit/main/docs/{{{{ file_name }}}}"
    html_context["edit_page_provider_name"] = "GitHub"
html_theme_options: dict[str, Any] = {
    "logo": {
        "text": "scodkit",
        "image_light": "static/logo.svg",
        "image_dark": "static/logo.svg",
    },
    "navbar_align": "left",
    "navbar_persistent": ["search-button-field"],
    "navbar_end": ["theme-switcher", "navbar-icon-links"],
    "header_links_before_dropdown": 6,
    "show_nav_level": 1,
    "show_toc_level": 2,
    "secondary_sidebar_items": {"**": ["page-toc"], "index": []},
    "pygments_light_style": "github-light-high-contrast",
    "pygments_dark_style": "github-dark-high-contrast",
    "footer_start": ["copyright"],
    "footer_end": [],
    "show_version_warning_banner": False,
}
if REPOSITORY:
    html_theme_options["use_edit_page_button"] = True
    html_theme_options["secondary_sidebar_items"]["**"] = ["page-toc", "edit-this-page"]
    html_theme_options["icon_links"] = [
        {"name": "Repository", "url": REPOSITORY, "icon": "fa-brands fa-github"}
    ]
html_sidebars = {"index": [], "**": ["sidebar-nav-bs"]}


def read(app: Any, page: str, content: list[str]) -> None:
    """Add the table of contents to the index of a section, and turn links to source files.

    Args:
        app: Of the build.
        page: Its name.
        content: Its text; changed.
    """
    text = content[0]
    if page == "reference/index":
        text = re.sub(r"\[(`[^`]+`)\]\([./]*/src/[^)]*\)", r"\1", text)
    if page == "index" or page.endswith("/index"):
        first = tuple(f"reference/{p.name}" for p in reference.PAGES)
        lines = [":hidden:", "", *navigation.below(page, first)]
        if Path(app.env.doc2path(page)).suffix == ".md":
            text += "\n".join(["\n\n```{toctree}", *lines, "```\n"])
        else:
            text += "\n   ".join(["\n\n.. toctree::", *lines])
    content[0] = text


# stands for a colon of a sentence until docstrings are parsed: types are in signatures
COLON = "\N{RATIO}"


def before(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Let letters follow code, as they do in Markdown, and colons stand in what is returned."""
    for i, line in enumerate(lines):
        if i and lines[i - 1].strip() in ("Returns:", "Yields:"):
            line = line.replace(":", COLON)
        lines[i] = re.sub(r"(?<=[^\s`(])(`{1,2})(?=[A-Za-z])", r"\1\\ ", line)


def after(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Put colons back."""
    lines[:] = [line.replace(COLON, ":") for line in lines]


def write_pages() -> None:
    """Write the pages that are not committed, and remove those of earlier builds."""
    for path in (ROOT / "docs").rglob("*.rst"):
        path.unlink()
    for path, text in reference.files().items():
        path.write_text(text, encoding="utf-8")
    for path, text in navigation.indexes().items():
        path.write_text(text, encoding="utf-8")


def mend(app: Any, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Mend what Sphinx writes.

    Links back from source code take all of a module to be under one name; signatures of several
    lines are definition lists without a term, and heads of columns may have no name: screen
    readers stumble over both. A number and its interval stay on one line.
    """
    body = context.get("body", "").replace('<th class="head"><p></p></th>', "<td></td>")
    body = re.sub(r"(?<=\d) ± (?=\d)", "\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}", body)
    body = re.sub(r"(?<=\d) (?=\([\d.]+(-[\d.]+)?\))", "\N{NO-BREAK SPACE}", body)
    if doctree is None or not str(app.env.doc2path(page)).endswith(".md"):
        context["page_source_suffix"] = ""  # written at the build: there is nothing to edit
    alias = r"TypeAliasForwardRef</em><em>\(</em><em>'(\w+)'</em><em>\)"
    body = re.sub(alias, r"\1</em><em>", body)
    if page.startswith("_modules/"):
        body = re.sub(r'<a class="viewcode-back".*?</a>', "", body, flags=re.DOTALL)
    spans = {"<dl>": '<span class="lines">', "<dd>": '<span class="line">'}
    spans |= {"</dl>": "</span>", "</dd>": "</span>"}
    lines = r'<dl>\s*<dd><em class="sig-param".*?</dl>'
    tags = re.compile("|".join(spans))
    body = re.sub(
        lines, lambda m: tags.sub(lambda tag: spans[tag[0]], m[0]), body, flags=re.DOTALL
    )
    context["body"] = body


def setup(app: Any) -> None:
    """Write the pages that are not committed, and connect what changes the others.

    Args:
        app: Of the build.
    """
    write_pages()
    app.add_config_value("scodkit_names", reference.documented(), "")
    app.connect("source-read", read)
    app.connect("autodoc-process-docstring", before, priority=1)
    app.connect("autodoc-process-docstring", after, priority=900)
    app.connect("html-page-context", mend)
    app.connect("doctree-read", crosslinks.name_fields)
    app.connect("doctree-read", crosslinks.whole_types)
    app.connect("missing-reference", crosslinks.find_type)
    app.connect("doctree-resolved", navigation.as_cards)
    app.connect("doctree-resolved", navigation.narrow)
    app.connect("doctree-resolved", crosslinks.link_names)
