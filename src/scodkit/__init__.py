"""Know when a neural network is out of its depth.

scodkit equips any trained PyTorch network with a task-relevant uncertainty score, after
training and without touching it, by sketching the curvature of its training data (SCOD,
UAI 2021).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from scodkit.version import __version__

if TYPE_CHECKING:
    from scodkit.calibration import Calibration
    from scodkit.eigenbasis import Eigenbasis
    from scodkit.explain import Explanation
    from scodkit.groups import predicted_class
    from scodkit.likelihoods import (
        Bernoulli,
        Categorical,
        Gaussian,
        HeteroscedasticGaussian,
        Likelihood,
        MonteCarlo,
    )
    from scodkit.monitor import Monitor
    from scodkit.parameters import LastLayers
    from scodkit.plan import Plan
    from scodkit.score import Certificate, Scored
    from scodkit.summary import Summary
    from scodkit.task import Task

__all__ = [
    "Bernoulli",
    "Calibration",
    "Categorical",
    "Certificate",
    "Eigenbasis",
    "Explanation",
    "Gaussian",
    "HeteroscedasticGaussian",
    "LastLayers",
    "Likelihood",
    "Monitor",
    "MonteCarlo",
    "Plan",
    "Scored",
    "Summary",
    "Task",
    "__version__",
    "predicted_class",
]

_MODULES = {
    "Bernoulli": "likelihoods",
    "Calibration": "calibration",
    "Categorical": "likelihoods",
    "Certificate": "score",
    "Eigenbasis": "eigenbasis",
    "Explanation": "explain",
    "Gaussian": "likelihoods",
    "HeteroscedasticGaussian": "likelihoods",
    "LastLayers": "parameters",
    "Likelihood": "likelihoods",
    "Monitor": "monitor",
    "MonteCarlo": "likelihoods",
    "Plan": "plan",
    "Scored": "score",
    "Summary": "summary",
    "Task": "task",
    "predicted_class": "groups",
}


def __getattr__(name: str) -> Any:
    """Import a name, or a module of the package, when it is first asked for: torch is slow.

    Args:
        name: Of the attribute.

    Returns:
        The class, function or module of that name.

    Raises:
        AttributeError: If there is no such thing.
    """
    if name in _MODULES:
        found = getattr(import_module(f"scodkit.{_MODULES[name]}"), name)
        globals()[name] = found
        return found
    missing = f"module 'scodkit' has no attribute {name!r}"
    if name.startswith("_"):  # or `__main__` would run the command
        raise AttributeError(missing)
    try:
        return import_module(f"scodkit.{name}")
    except ModuleNotFoundError as error:
        raise AttributeError(missing) from error


def __dir__() -> list[str]:
    """Return the public names, imported or not, beside what is there."""
    return sorted({*globals(), *__all__})
