"""What is published agrees with what the code says: extras, versions, citation, workflows."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

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


def module(path: str) -> ModuleType:
    """Return the module of a file of the tree."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def test_every_extra_is_tried_before_it_is_published() -> None:
    trials, adapters = module("tests/try_dist.py"), module("tests/support/adapter_trials.py")
    assert PROJECT["optional-dependencies"].keys() <= trials.TRIALS.keys()
    assert {*trials.ADAPTERS, "pytorch-ood"} == adapters.TRIALS.keys()


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


def readme_of_an_index(repository: str) -> str:
    """Return the README that is built with this address of the repository."""
    metadata = {"urls": {"Repository": repository}} if repository else {}
    module("hatch_build.py").ReadmeHook(str(ROOT), {}).update(metadata)
    assert metadata["readme"]["content-type"] == "text/markdown"
    return metadata["readme"]["text"]


def targets(text: str) -> list[str]:
    """Return all that a page in Markdown links to or shows."""
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    return re.findall(r"\]\(([^)]+)\)", text) + re.findall(r'(?:src|href)="([^"]+)"', text)


def test_files_that_the_readme_links_to_exist() -> None:
    own = [t for t in targets((ROOT / "README.md").read_text("utf-8")) if "://" not in t]
    assert len(own) > 10
    assert not [t for t in own if not (ROOT / t.partition("#")[0]).is_file()]


def test_an_index_shows_the_readme_with_whole_addresses() -> None:
    text = readme_of_an_index("https://example.org/scodkit/")
    found = targets(text)
    assert len(found) == len(targets((ROOT / "README.md").read_text("utf-8")))
    assert not [target for target in found if not target.startswith("https://")]
    assert 'src="https://example.org/scodkit/raw/HEAD/docs/images/hero.png"' in text
    assert "](https://example.org/scodkit/blob/HEAD/docs/guides/fused.md#absurd-inputs)" in text


def test_without_an_address_the_readme_of_an_index_has_no_dead_links() -> None:
    text = readme_of_an_index("")
    assert not [target for target in targets(text) if not target.startswith("https://")]
    assert "<img" not in text
    assert "Above: a network that learned stopping distances" in text
    assert "<!--" not in text
