"""What is published agrees with what the code says: extras, versions, citation, workflows."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import yaml

import scodkit
from scodkit import errors

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
SOURCES = sorted((ROOT / "src").rglob("*.py"))


def document(path: str) -> dict:
    return yaml.safe_load((ROOT / path).read_text(encoding="utf-8"))


def extras_asked_for() -> set[str]:
    """Return the extras that errors and pages tell users to install."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    told = [path.read_text(encoding="utf-8") for path in pages]
    code = [path.read_text(encoding="utf-8") for path in SOURCES]
    named = re.findall(r'optional\(\s*[\w."]+,\s*"([\w-]+)"', " ".join(code))
    typed = re.findall(r"pip install [\"'](?:scodkit|\.)\[([\w,-]+)\]", " ".join(told))
    return {extra for list_ in [*named, *typed] for extra in list_.split(",")}


def test_every_extra_that_is_named_exists() -> None:
    asked_for = extras_asked_for()
    assert {"alarms", "cli", "plots", "report", "peers"} <= asked_for
    assert asked_for <= PROJECT["optional-dependencies"].keys()


def test_a_missing_library_says_what_works_from_a_clone_and_from_an_index() -> None:
    with pytest.raises(errors.MissingPeerError) as caught:
        errors.optional("no_such_library.part", "plots", "pip install another")
    assert str(caught.value).endswith(
        'type: pip install "scodkit[plots]", or in a clone: pip install ".[plots]"; '
        "then: pip install another"
    )


def test_the_citation_is_of_this_version() -> None:
    citation = document("CITATION.cff")
    assert citation["version"] == scodkit.__version__
    assert citation["license"] == PROJECT["license"]
    (paper,) = citation["references"]
    assert [a["family-names"] for a in paper["authors"]] == ["Sharma", "Azizan", "Pavone"]


def test_the_workflow_has_the_declared_floors() -> None:
    matrix = document(".github/workflows/test.yml")["jobs"]["versions"]["strategy"]["matrix"]
    assert min(matrix["python"], key=lambda v: int(v[2:])) == PROJECT["requires-python"][2:]
    (oldest,) = [case for case in matrix["include"] if case.get("oldest")]
    (torch,) = [need for need in PROJECT["dependencies"] if need.startswith("torch")]
    assert oldest["torch"] == torch.removeprefix("torch>=") + ".0"
    pinned = (ROOT / "constraints.txt").read_text()
    assert f"torch=={matrix['torch'][0]}" in pinned


@pytest.mark.parametrize("form", sorted((ROOT / ".github" / "ISSUE_TEMPLATE").iterdir()))
def test_issue_forms_ask_for_something(form: Path) -> None:
    fields = document(str(form.relative_to(ROOT)))
    assert fields["name"]
    assert fields["description"]
    assert any(part.get("validations", {}).get("required") for part in fields["body"])


def test_commit_hooks_download_nothing() -> None:
    (repository,) = document(".pre-commit-config.yaml")["repos"]
    assert repository["repo"] == "local"
    for hook in repository["hooks"]:
        assert hook["language"] == "system"
        assert hook["entry"].startswith(".venv/bin/")
