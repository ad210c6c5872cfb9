"""Methods to compare with, all under the protocol of the `Monitor`.

To add one, copy the class `Residual`: an option, a fit, a score.
"""

from scodkit.baselines.baseline import Baseline, Detector, Picks
from scodkit.baselines.deep_ensemble import DeepEnsemble
from scodkit.baselines.kfac_laplace import KFACLaplace
from scodkit.baselines.knn import KNN
from scodkit.baselines.local_ensemble import LocalEnsemble
from scodkit.baselines.mahalanobis import Mahalanobis
from scodkit.baselines.one_pass import Energy, GradNorm, MaxLogit, MaxSoftmax, Naive
from scodkit.baselines.residual import Residual, ViM
from scodkit.baselines.sketched_lanczos import SketchedLanczos
from scodkit.baselines.weight_space import IdentityCurvature

__all__ = [
    "KNN",
    "Baseline",
    "DeepEnsemble",
    "Detector",
    "Energy",
    "GradNorm",
    "IdentityCurvature",
    "KFACLaplace",
    "LocalEnsemble",
    "Mahalanobis",
    "MaxLogit",
    "MaxSoftmax",
    "Naive",
    "Picks",
    "Residual",
    "SketchedLanczos",
    "ViM",
]
