"""What README and the pages import exists, and the public names are these."""

from __future__ import annotations

import ast
import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import scodkit
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


def test_names_of_the_reference_exist() -> None:
    named = re.findall(
        r"^::: (\S+)", (ROOT / "docs" / "reference" / "index.md").read_text(), re.MULTILINE
    )
    assert "scodkit.Monitor" in named
    for whole in named:
        try:
            pkgutil.resolve_name(whole)
        except MissingPeerError:
            assert whole.startswith("scodkit.adapters.")


def test_the_readme_names_methods_that_exist() -> None:
    text = (ROOT / "README.md").read_text()
    called = set(re.findall(r"\bmonitor\.(\w+)\(", text))
    assert called >= {"fit", "calibrate", "flag", "explain", "save", "certify", "plan"}
    assert not {name for name in called if not hasattr(scodkit.Monitor, name)}
