"""The pages of the API reference: which names are on which, and the table of all of them.

``conf.py`` writes the pages as the site is built; ``make tables`` writes the table into
``docs/reference/index.md``, which people read where there is no site.
"""

from __future__ import annotations

import inspect
import os
import pkgutil
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sphinx.ext.autodoc.mock import mock

from scodkit import errors

# libraries that adapters are for: none needs to be here
HOSTS = ["lightning", "mlflow", "openood", "pytorch_ood", "sklearn", "transformers"]
ROOT = Path(__file__).parents[2]
INDEX = ROOT / "docs" / "reference" / "index.md"
START, END = "<!-- names: docs/_site/reference.py -->", "<!-- end names -->"


@dataclass(frozen=True)
class Page:
    """A page of the reference.

    Attributes:
        name: Of its file.
        title: In the navigation, and above its part of the table.
        names: What it is about, as users import it.
        about: What holds for all of them, in reStructuredText.
        inherited: Names whose inherited methods are told, too.
    """

    name: str
    title: str
    names: tuple[str, ...]
    about: str = ""
    inherited: tuple[str, ...] = ()


def thing(name: str) -> Any:
    """Return what a public name stands for, whatever is missing here.

    Args:
        name: As in `Page.names`.
    """
    with mock(HOSTS):
        return pkgutil.resolve_name(":".join(name.rsplit(".", 1)))


def _of(module: str, names: str) -> tuple[str, ...]:
    return tuple(f"{module}.{name}" for name in names.split())


def _errors() -> tuple[str, ...]:
    own = (v for v in vars(errors).values() if getattr(v, "__module__", "") == errors.__name__)
    return tuple(f"scodkit.errors.{v.__name__}" for v in own if inspect.isclass(v))


BASELINES = "DeepEnsemble Energy GradNorm IdentityCurvature KFACLaplace KNN LocalEnsemble"
BASELINES += " Mahalanobis MaxLogit MaxSoftmax Naive Residual SketchedLanczos ViM"
# in the order of the navigation
PAGES = (
    Page(
        "monitor",
        "Monitor",
        (
            *_of("scodkit", "Monitor Scored Certificate Plan Summary Eigenbasis"),
            "scodkit.scoring.boxes.BoxScores",
        ),
        inherited=("scodkit.Monitor",),
    ),
    Page(
        "fused",
        "Fused",
        (
            *_of("scodkit", "Fused Budget"),
            "scodkit.fused.FusedExplanation",
            "scodkit.scoring.evidence.Evidence",
        ),
    ),
    Page(
        "likelihoods",
        "Likelihoods",
        (
            *_of("scodkit", "Categorical Bernoulli Gaussian HeteroscedasticGaussian"),
            *_of("scodkit", "MonteCarlo Heads Task Likelihood"),
        ),
    ),
    Page(
        "parameters",
        "Parameters and large models",
        (
            *_of("scodkit", "LastLayers Projected"),
            "scodkit.model.projected.Projections",
            "scodkit.unsharded",
            "scodkit.parts.Shard",
            "scodkit.sharded.ShardedMonitor",
        ),
    ),
    Page(
        "alarms",
        "Alarms and calibration",
        (
            *_of("scodkit", "Calibration predicted_class DriftAlarm RolloutAlarm"),
            *_of("scodkit", "discoveries OnlineDiscoveries"),
        ),
        inherited=_of("scodkit", "DriftAlarm RolloutAlarm OnlineDiscoveries"),
    ),
    Page(
        "explanations",
        "Explanations",
        (
            "scodkit.Explanation",
            *_of("scodkit.explain", "Shares Saliency Columns References Nearest"),
        ),
    ),
    Page(
        "sketches",
        "Sketches",
        _of(
            "scodkit.sketch",
            "Nystrom TwoSided FrequentDirections Exact Sketch SketchState Map Fold"
            " Gaussian SparseSign SRFT",
        ),
    ),
    Page(
        "baselines",
        "Baselines",
        _of("scodkit.baselines", f"Baseline Detector Picks {BASELINES}"),
        "Every method here is a `Baseline`: its ``fit``, ``score``, ``to``, ``save`` and "
        "``load`` are told there once. :doc:`The guide </guides/baselines>` says which to "
        "compare with.",
    ),
    Page(
        "comparison",
        "Comparison and report",
        (
            *_of("scodkit", "compare Comparison"),
            *_of("scodkit.comparison", "MethodScores Cost"),
            *_of("scodkit.metrics", "separation Separation curves Curves Curve"),
            *_of("scodkit.report", "Report ScoredSet WatchedStream MethodLine read_numbers"),
        ),
    ),
    Page(
        "adapters",
        "Adapters",
        _of(
            "scodkit.adapters",
            "OutlierDetector PytorchOODDetector OpenOODPostprocessor MLflowModel"
            " mlflow_artifacts MonitoredModel Monitored ClosedForm LightningCallback"
            " HuggingFaceCallback save_pretrained from_pretrained",
        ),
    ),
    Page("errors", "Errors and warnings", _errors()),
)


def documented() -> dict[str, str]:
    """Return where each documented thing is defined, and the name that users import."""
    found = {}
    for page in PAGES:
        for name in page.names:
            public = thing(name)
            found[f"{public.__module__}.{public.__qualname__}"] = name
    return found


def _attributes(cls: type) -> list[str]:
    """Return what the docstring of a class itself lists."""
    _, _, listed = (inspect.getdoc(cls) or "").partition("\nAttributes:\n")
    return re.findall(r"^    (\w+):", listed.partition("\n\n")[0], re.MULTILINE)


def text(page: Page) -> str:
    """Return a page in reStructuredText.

    Args:
        page: One of `PAGES`.
    """
    lines = [page.title, "=" * len(page.title), "", page.about, ""]
    for name in page.names:
        public = thing(name)
        if inspect.isclass(public):
            kind = "exception" if issubclass(public, BaseException) else "class"
            lines += [f".. auto{kind}:: {name}", "   :members:"]
            lines += (
                [f"   :exclude-members: {told}"]
                if (told := ", ".join(_attributes(public)))
                else []
            )
            lines += ["   :inherited-members:"] * (name in page.inherited)
            if kind == "exception":  # each class has a section there
                anchor = public.__name__.lower()
                answer = f"../guides/failures.html#{anchor}"
                lines += ["", f"   `What to do about it <{answer}>`__"]
        else:
            lines += [f".. autofunction:: {name}"]
        lines.append("")
    return "\n".join(lines)


def files() -> dict[Path, str]:
    """Return the pages that are not committed, with where they lie."""
    return {INDEX.parent / f"{page.name}.rst": text(page) for page in PAGES}


def table() -> str:
    """Return all names in Markdown, with a line and the file of each."""
    lines = []
    for page in PAGES:
        lines += [f"## {page.title}", "", "| name | what it is |", "| --- | --- |"]
        for name in page.names:
            public = thing(name)
            first = (inspect.getdoc(public) or "").partition("\n")[0].replace("``", "`")
            assert first, f"{name} has no docstring"
            path = sys.modules[public.__module__].__file__  # of decorated functions, too
            assert path is not None
            link = Path(os.path.relpath(path, INDEX.parent)).as_posix()
            short = name.removeprefix("scodkit.").removeprefix("errors.")
            lines.append(f"| [`{short}`]({link}) | {first.replace('|', chr(92) + '|')} |")
        lines.append("")
    return "\n".join(lines)


def filled(index: str) -> str:
    """Return the index of the reference with its table as it is now.

    Args:
        index: Its text.
    """
    before, rest = index.split(START)
    return f"{before}{START}\n\n{table()}\n{END}{rest.split(END)[1]}"


def main(check: bool) -> None:
    """Fill the table, or exit if it is behind.

    Args:
        check: Whether to write nothing.
    """
    index = INDEX.read_text(encoding="utf-8")
    if (new := filled(index)) != index:
        if check:
            sys.exit(
                f"the table of {INDEX.relative_to(ROOT)} is out of date; type: make tables"
            )
        INDEX.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main("--check" in sys.argv)
