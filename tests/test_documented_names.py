"""What README and the pages import exists, and the public names are these."""

from __future__ import annotations

import ast
import doctest
import importlib
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import scodkit
from scodkit import errors
from scodkit.errors import MissingPeerError

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

PARSER = doctest.DocTestParser()

# names that users import; one that goes needs a line in CHANGELOG.md
PUBLIC = {
    "scodkit": [
        *("Bernoulli", "Budget", "Calibration", "Categorical", "Certificate", "Eigenbasis"),
        *(
            "Explanation",
            "Fused",
            "Gaussian",
            "Heads",
            "HeteroscedasticGaussian",
            "LastLayers",
            "Likelihood",
        ),
        *("Monitor", "MonteCarlo", "Plan", "Projected", "Scored", "Summary", "Task"),
        "__version__",
        *("DriftAlarm", "OnlineDiscoveries", "RolloutAlarm", "discoveries"),
        *("Comparison", "compare", "predicted_class", "unsharded"),
    ],
    "scodkit.adapters": [
        *("ClosedForm", "HuggingFaceCallback", "LightningCallback", "MLflowModel", "Monitored"),
        *("MonitoredModel", "OpenOODPostprocessor", "OutlierDetector", "PytorchOODDetector"),
        *("from_pretrained", "mlflow_artifacts", "save_pretrained"),
    ],
    "scodkit.alarms": ["DriftAlarm", "OnlineDiscoveries", "RolloutAlarm", "discoveries"],
    "scodkit.baselines": [
        *("Baseline", "DeepEnsemble", "Detector", "Energy", "GradNorm", "IdentityCurvature"),
        *("KFACLaplace", "KNN", "LocalEnsemble", "Mahalanobis", "MaxLogit", "MaxSoftmax"),
        *("Naive", "Picks", "Residual", "SketchedLanczos", "ViM"),
    ],
    "scodkit.sketch": [
        *("SRFT", "Exact", "Fold", "FrequentDirections", "Gaussian", "Map", "Nystrom"),
        *("Sketch", "SketchState", "SparseSign", "TwoSided"),
    ],
    "scodkit.explain": ["Explanation", "References"],
    "scodkit.comparison": ["Comparison", "Cost", "MethodScores", "compare"],
    "scodkit.metrics": ["Curve", "Curves", "Separation", "curves", "separation"],
    "scodkit.parts": ["Shard"],
    "scodkit.report": ["MethodLine", "Report", "ScoredSet", "WatchedStream", "read_numbers"],
    "scodkit.sharded": ["ShardedMonitor"],
}


def imports(page: Path) -> list[tuple[str, str]]:
    """Return modules and names that the Python blocks of a page import from scodkit."""
    found = []
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        if block.startswith(">>> "):
            block = "".join(example.source for example in PARSER.get_examples(block))
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("scodkit"):
                found += [(str(node.module), alias.name) for alias in node.names]
            elif isinstance(node, ast.Import):
                found += [(a.name, "") for a in node.names if a.name.startswith("scodkit")]
    return found


def exists(module: str, name: str) -> bool:
    found = importlib.import_module(module)
    # listed, as the library that an adapter is for may be missing
    return not name or name in dir(found) or hasattr(found, name)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_imports_of_pages_exist(page: Path) -> None:
    missing = [f"{m}.{n}" for m, n in imports(page) if not exists(m, n)]
    assert not missing


def test_the_readme_imports_something() -> None:
    assert ("scodkit", "Monitor") in imports(ROOT / "README.md")


@pytest.mark.parametrize("module", PUBLIC)
def test_public_names_exist(module: str) -> None:
    missing = [name for name in PUBLIC[module] if not exists(module, name)]
    assert not missing


@pytest.mark.parametrize("module", ["scodkit", "scodkit.alarms", "scodkit.sketch"])
def test_public_names_are_no_others(module: str) -> None:
    assert sorted(importlib.import_module(module).__all__) == sorted(PUBLIC[module])


def test_every_public_name_is_in_the_reference() -> None:
    text = (ROOT / "docs" / "reference" / "index.md").read_text(encoding="utf-8")
    named = {
        f"scodkit.{name}" for name in re.findall(r"^\| \[`([\w.]+)`\]", text, re.MULTILINE)
    }
    assert "scodkit.Monitor" in named
    documented = {identity(name) for name in named}
    public = {f"{module}.{name}" for module in PUBLIC for name in PUBLIC[module]}
    missing = [name for name in public if identity(name) not in documented]
    assert missing == ["scodkit.__version__"]


def identity(name: str) -> Any:
    """Return what a name stands for, or the name where its library is missing."""
    if name.removeprefix("scodkit.") in vars(errors):
        name = f"scodkit.errors.{name.removeprefix('scodkit.')}"
    try:
        return pkgutil.resolve_name(":".join(name.rsplit(".", 1)))
    except MissingPeerError:
        assert name.startswith("scodkit.adapters.")
        return name


def test_the_table_of_the_reference_is_that_of_the_docstrings() -> None:
    pytest.importorskip("sphinx", reason="the site is not built here")
    # in a process of its own, which pretends to have the libraries of adapters
    program = ROOT / "docs" / "_site" / "reference.py"
    ran = subprocess.run(
        [sys.executable, str(program), "--check"], capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_name_methods_that_exist(page: Path) -> None:
    called = set(re.findall(r"\bmonitor\.(\w+)\(", page.read_text(encoding="utf-8")))
    assert not {name for name in called if not hasattr(scodkit.Monitor, name)}
    if page.name == "README.md":
        assert called >= {"fit", "calibrate", "flag", "certify"}
    if page.name == "overview.md":
        assert called >= {"fit", "calibrate", "flag", "explain", "save", "certify", "plan"}
