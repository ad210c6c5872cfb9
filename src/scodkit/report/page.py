"""A page as one file of HTML that needs nothing from anywhere."""

from __future__ import annotations

import base64
import hashlib
from importlib import resources

from bokeh.core.types import ID
from bokeh.embed import json_item
from bokeh.resources import Resources
from jinja2 import Environment, StrictUndefined
from jinja2.utils import htmlsafe_json_dumps
from markupsafe import Markup

from scodkit import __version__
from scodkit.report.section import Page


def render(page: Page) -> str:
    """Return a page as HTML.

    Scripts, style and pictures are inside. Words from outside are escaped; and were one to
    get through, the page's policy lets no script run but the two whose hashes it names, and
    nothing be fetched.

    Args:
        page: What is on it.
    """
    charts = [chart for section in page.sections for chart in section.charts]
    plots = [json_item(chart.plot, ID(chart.name)) for chart in charts]
    bokeh, script = _bokeh(), _text("page.js")
    template = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, keep_trailing_newline=True
    ).from_string(_text("page.html"))
    return template.render(
        title=page.title,
        lead=page.lead,
        facts=page.facts,
        notes=page.notes,
        sections=page.sections,
        version=__version__,
        policy=_policy(bokeh, script),
        style=Markup(_text("page.css")),
        plots=htmlsafe_json_dumps(plots),
        bokeh=Markup(bokeh),
        script=Markup(script),
    )


def _text(name: str) -> str:
    return resources.files("scodkit.report").joinpath(name).read_text(encoding="utf-8")


def _bokeh() -> str:
    held = Resources(mode="inline", components=["bokeh"], minified=True, log_level="error")
    return "\n".join(held.js_raw).replace("</script", "<\\/script")


def _policy(*scripts: str) -> str:
    """Return a Content-Security-Policy: these scripts, styles and pictures inside, no more."""
    hashes = [
        "'sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() + "'"
        for script in scripts
    ]
    # bokeh puts its own styles into the page
    return (
        f"default-src 'none'; script-src {' '.join(hashes)}; style-src 'unsafe-inline'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
