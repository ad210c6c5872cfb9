"""Methods to compare with, all under the protocol of the `Monitor`: one file for each."""

from scodkit.baselines.baseline import Baseline, Picks
from scodkit.baselines.cost import Cost
from scodkit.baselines.energy import Energy
from scodkit.baselines.identity_curvature import IdentityCurvature
from scodkit.baselines.max_logit import MaxLogit
from scodkit.baselines.max_softmax import MaxSoftmax
from scodkit.baselines.naive import Naive
from scodkit.baselines.protocol import Detector

__all__ = [
    "Baseline",
    "Cost",
    "Detector",
    "Energy",
    "IdentityCurvature",
    "MaxLogit",
    "MaxSoftmax",
    "Naive",
    "Picks",
]
