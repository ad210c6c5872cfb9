"""Know when a neural network is out of its depth.

scodkit equips any trained PyTorch network with a task-relevant uncertainty score, after
training and without touching it, by sketching the curvature of its training data (SCOD,
UAI 2021).
"""

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
from scodkit.version import __version__

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
