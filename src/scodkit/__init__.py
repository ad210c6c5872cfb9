"""Know when a neural network is out of its depth.

scodkit equips any trained PyTorch network with a task-relevant uncertainty score, after
training and without touching it, by sketching the curvature of its training data (SCOD,
UAI 2021).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from scodkit.alarms import DriftAlarm as DriftAlarm
    from scodkit.alarms import OnlineDiscoveries as OnlineDiscoveries
    from scodkit.alarms import RolloutAlarm as RolloutAlarm
    from scodkit.alarms.discoveries import discoveries as discoveries
    from scodkit.calibration import Calibration as Calibration
    from scodkit.calibration import predicted_class as predicted_class
    from scodkit.comparison import Comparison as Comparison
    from scodkit.comparison import compare as compare
    from scodkit.explain import Explanation as Explanation
    from scodkit.fit.memory import Plan as Plan
    from scodkit.fused import Budget as Budget
    from scodkit.fused import Fused as Fused
    from scodkit.likelihoods import Bernoulli as Bernoulli
    from scodkit.likelihoods import Categorical as Categorical
    from scodkit.likelihoods import Gaussian as Gaussian
    from scodkit.likelihoods import Heads as Heads
    from scodkit.likelihoods import HeteroscedasticGaussian as HeteroscedasticGaussian
    from scodkit.likelihoods import Likelihood as Likelihood
    from scodkit.likelihoods import MonteCarlo as MonteCarlo
    from scodkit.likelihoods.task import Task as Task
    from scodkit.model.parameters import LastLayers as LastLayers
    from scodkit.model.projected import Projected as Projected
    from scodkit.model.unsharded import unsharded as unsharded
    from scodkit.monitor import Monitor as Monitor
    from scodkit.scoring.certificate import Certificate as Certificate
    from scodkit.scoring.score import Scored as Scored
    from scodkit.sketch.eigenbasis import Eigenbasis as Eigenbasis
    from scodkit.summary import Summary as Summary

# where each public name is: imported when it is first asked for, as torch takes seconds
_MODULES = {
    "Bernoulli": "likelihoods",
    "Budget": "fused",
    "Calibration": "calibration",
    "Categorical": "likelihoods",
    "Certificate": "scoring.certificate",
    "Comparison": "comparison",
    "DriftAlarm": "alarms",
    "Eigenbasis": "sketch.eigenbasis",
    "Explanation": "explain",
    "Fused": "fused",
    "Gaussian": "likelihoods",
    "Heads": "likelihoods",
    "HeteroscedasticGaussian": "likelihoods",
    "LastLayers": "model.parameters",
    "Likelihood": "likelihoods",
    "Monitor": "monitor",
    "MonteCarlo": "likelihoods",
    "OnlineDiscoveries": "alarms",
    "Plan": "fit.memory",
    "Projected": "model.projected",
    "RolloutAlarm": "alarms",
    "Scored": "scoring.score",
    "Summary": "summary",
    "Task": "likelihoods.task",
    "compare": "comparison",
    "discoveries": "alarms",
    "predicted_class": "calibration",
    "unsharded": "model.unsharded",
}

__all__ = ["__version__", *_MODULES]


if not TYPE_CHECKING:  # which would take every name for one of ours

    def __getattr__(name: str) -> Any:
        """Import a public name, or a module of the package, when it is first asked for.

        Args:
            name: Of the attribute.

        Returns:
            The class, function or module of that name.

        Raises:
            AttributeError: If there is no such thing.
            ModuleNotFoundError: If a module of ours needs a library that is not installed.
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
            if error.name != f"scodkit.{name}":  # another library is missing
                raise
            raise AttributeError(missing) from error


def __dir__() -> list[str]:
    """Return the public names, imported or not, beside what is there."""
    return sorted({*globals(), *__all__})
