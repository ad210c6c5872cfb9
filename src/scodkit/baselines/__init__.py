"""Methods to compare with, all under the protocol of the `Monitor`: one file for each."""

from scodkit.baselines.baseline import Baseline, Detector, Picks
from scodkit.baselines.deep_ensemble import DeepEnsemble
from scodkit.baselines.energy import Energy
from scodkit.baselines.grad_norm import GradNorm
from scodkit.baselines.identity_curvature import IdentityCurvature
from scodkit.baselines.kfac_laplace import KFACLaplace
from scodkit.baselines.knn import KNN
from scodkit.baselines.local_ensemble import LocalEnsemble
from scodkit.baselines.mahalanobis import Mahalanobis
from scodkit.baselines.max_logit import MaxLogit
from scodkit.baselines.max_softmax import MaxSoftmax
from scodkit.baselines.naive import Naive
from scodkit.baselines.residual import Residual
from scodkit.baselines.sketched_lanczos import SketchedLanczos
from scodkit.baselines.vim import ViM

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
