"""Errors, warnings and the command line lead to the page on failures, and it answers all."""

from __future__ import annotations

import copy
import pickle
import re
import sys
import traceback
from email.message import Message
from importlib import metadata
from pathlib import Path

import pytest

from command_line import own_folder, scod
from scodkit import errors
from scodkit.factors.rules.layer import UnsupportedCallError

GUIDES = Path(__file__).parents[1] / "docs" / "guides"
PAGE = (GUIDES / "failures.md").read_text(encoding="utf-8")
CLASSES = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, Exception)
]


def anchors(text: str) -> list[str]:
    """Return the anchors of the headings of a page, as GitHub and the site make them."""
    without_code = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", without_code, re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", one.lower()).replace(" ", "-") for one in headings]


@pytest.fixture
def fresh_address() -> None:
    errors._page.cache_clear()


@pytest.mark.parametrize("kind", CLASSES)
def test_every_class_has_a_section_with_an_answer(kind: type[Exception]) -> None:
    assert anchors(PAGE).count(kind.__name__.lower()) == 1
    section = re.search(rf"^### {kind.__name__}\n(.*?)^##", PAGE, re.MULTILINE | re.DOTALL)
    assert section is not None
    assert len(section[1].split()) > 12
    contents = PAGE.partition("## Data and batches")[0]
    assert f"[{kind.__name__}](#{kind.__name__.lower()})" in contents


def test_sections_are_of_classes_that_there_are() -> None:
    named = re.findall(r"^### (.*)$", PAGE, re.MULTILINE)
    assert sorted(named) == sorted(kind.__name__ for kind in CLASSES)


def test_links_within_the_guides_resolve() -> None:
    for path, anchor in re.findall(r"\]\(([\w./-]*)#([\w-]+)\)", PAGE):
        target = (GUIDES / path).resolve() if path else GUIDES / "failures.md"
        assert anchor in anchors(target.read_text(encoding="utf-8")), (path, anchor)


@pytest.mark.parametrize("kind", CLASSES)
def test_addresses_resolve(kind: type[Exception]) -> None:
    page, _, anchor = str(errors.more_about(kind)).partition("#")
    assert page.endswith(("guides/failures.md", "guides/failures.html"))
    assert anchor in anchors(PAGE)


@pytest.mark.parametrize("site", ["https://example.org/docs", "https://example.org/docs/"])
def test_the_address_is_that_of_the_package(
    site: str, fresh_address: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    described = Message()
    described["Project-URL"] = "Source, https://example.org/code"
    described["Project-URL"] = f"Documentation, {site}"
    monkeypatch.setattr(metadata, "metadata", lambda name: described)
    address = "https://example.org/docs/guides/failures.html#batcherror"
    try:
        assert errors.more_about(errors.BatchError) == address
    finally:
        errors._page.cache_clear()


def test_without_a_site_it_is_the_file_of_a_clone(
    fresh_address: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> Message:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "metadata", missing)
    try:
        assert errors.more_about(errors.FileError) == "docs/guides/failures.md#fileerror"
    finally:
        errors._page.cache_clear()


def test_classes_derived_elsewhere_lead_to_the_one_they_derive_from() -> None:
    assert errors.more_about(UnsupportedCallError) == errors.more_about(errors.BatchError)
    assert errors.more_about(ValueError) is None


@pytest.mark.skipif(sys.version_info < (3, 11), reason="notes came with Python 3.11")
@pytest.mark.parametrize("kind", [k for k in CLASSES if issubclass(k, errors.ScodError)])
def test_tracebacks_end_with_the_address_and_messages_do_not(kind: type[Exception]) -> None:
    error = kind("expected a, got b; type c")
    assert str(error) == "expected a, got b; type c"
    for one in (error, pickle.loads(pickle.dumps(error)), copy.copy(error)):
        lines = traceback.format_exception(one)
        assert lines[-1] == f"more: {errors.more_about(kind)}\n"
        assert "".join(lines).count("more: ") == 1


def test_the_command_line_says_where_to_read_on(tmp_path: Path) -> None:
    folder = own_folder(tmp_path)
    fit = "fit model.py:net train.csv -o m.scod --likelihood categorical"
    refused = scod(*fit.replace("train.csv", "trian.csv").split(), cwd=folder)
    assert refused.code == 2
    last = refused.err.splitlines()[-1]
    assert last == f"      more     {errors.more_about(errors.MissingFileError)}"
    assert scod(*fit.split(), cwd=folder).code == 0
    words = "calibrate m.scod model.py:net train.csv"  # which was fitted
    warned = scod(*words.split(), cwd=folder)
    assert warned.code == 0
    address = errors.more_about(errors.CalibrationWarning)
    assert f"      more     {address}\n" in warned.err
    usage = scod("fit", "--rnak", "3", cwd=folder)
    assert usage.code == 2
    assert "more" not in usage.err  # `scod fit --help` is what it says
