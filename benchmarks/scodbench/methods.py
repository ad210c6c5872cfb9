"""The methods that are compared, made for a domain's trained network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from scodbench.domain import Domain
from scodkit import Fused, baselines
from scodkit.baselines import Baseline, Detector
from scodkit.monitor import Monitor
from scodkit.sketch import FrequentDirections, Nystrom, Sketch, TwoSided


@dataclass(frozen=True)
class Case:
    """What a method is made of.

    Args:
        domain: Likelihood, sketch sizes, last layers.
        networks: The network that is looked at, then others for ensembles.
    """

    domain: Domain
    networks: Sequence[nn.Module]


Make = Callable[[Case], Detector]


def _scod(case: Case, sketch: Sketch | None = None) -> Detector:
    chosen = case.domain.all_layers
    sketch = Nystrom(size=chosen.size) if sketch is None else sketch
    return Monitor(case.networks[0], case.domain.likelihood, chosen.rank, sketch=sketch)


def _scod_last(case: Case) -> Detector:
    chosen, layers = case.domain.last, case.domain.last_layers
    return Monitor(
        case.networks[0],
        case.domain.likelihood,
        chosen.rank,
        sketch=Nystrom(size=chosen.size),
        parameters=layers,
    )


def _sketched_lanczos(case: Case) -> Detector:
    """Return SLU at SCOD's memory for scoring: as many vectors, so none has to be sketched."""
    network = case.networks[0]
    weights = sum(parameter.numel() for parameter in network.parameters())
    rank = case.domain.all_layers.rank
    method = baselines.SketchedLanczos(network, case.domain.likelihood, rank=rank, size=weights)
    # so that the small domains need one pass, not one a vector
    method.memory_budget = max(method.memory_budget, 2**31)
    return method


def _kfac_laplace(case: Case, **options: Any) -> Detector:
    """Return the method for all layers it has factors for; norms keep the weights they have."""
    network = case.networks[0]
    norms = any(isinstance(module, nn.BatchNorm2d) for module in network.modules())
    return baselines.KFACLaplace(
        network, case.domain.likelihood, skip_unsupported=norms, **options
    )


def _baseline(kind: Callable[..., Baseline], **options: object) -> Make:
    return lambda case: kind(case.networks[0], case.domain.likelihood, **options)


# named as the baselines, in snake case; what comes after is the same with other options
METHODS: dict[str, Make] = {
    "scod": _scod,
    "scod_ll": _scod_last,
    "fused": lambda case: Fused(case.networks[0], case.domain.likelihood),
    "naive": _baseline(baselines.Naive),
    "deep_ensemble": lambda case: baselines.DeepEnsemble(case.networks, case.domain.likelihood),
    "local_ensemble": lambda case: baselines.LocalEnsemble(
        case.networks[0], case.domain.likelihood, rank=case.domain.local_rank
    ),
    "kfac_laplace": lambda case: _kfac_laplace(case, samples=30),
    "kfac_laplace_glm": _kfac_laplace,
    "kfac_laplace_ll": _baseline(baselines.KFACLaplace, last_layer=True),
    "sketched_lanczos": _sketched_lanczos,
    "identity_curvature": _baseline(baselines.IdentityCurvature),
    "max_softmax": _baseline(baselines.MaxSoftmax),
    "max_logit": _baseline(baselines.MaxLogit),
    "energy": _baseline(baselines.Energy),
    "mahalanobis": _baseline(baselines.Mahalanobis),
    "knn": _baseline(baselines.KNN),
    "vim": _baseline(baselines.ViM),
    "residual": _baseline(baselines.Residual),
    "grad_norm": _baseline(baselines.GradNorm),
    # other sketches, at the memory of the first
    "scod_two_sided": lambda case: _scod(case, TwoSided(size=case.domain.all_layers.size)),
    "scod_frequent_directions": lambda case: _scod(
        case, FrequentDirections(size=case.domain.all_layers.size // 2)
    ),
}

# as people read them
TITLES = {
    "scod": "SCOD",
    "scod_ll": "SCOD, last layers",
    "fused": "Fused",
    "naive": "Naive (entropy)",
    "deep_ensemble": "Deep Ensemble, 5",
    "local_ensemble": "Local Ensemble",
    "kfac_laplace": "KFAC Laplace, 30 samples",
    "kfac_laplace_glm": "KFAC Laplace, closed form",
    "kfac_laplace_ll": "KFAC Laplace, last layer",
    "sketched_lanczos": "Sketched Lanczos",
    "identity_curvature": "SCOD without its sketch",
    "max_softmax": "Max softmax",
    "max_logit": "Max logit",
    "energy": "Energy",
    "mahalanobis": "Mahalanobis",
    "knn": "KNN",
    "vim": "ViM",
    "residual": "Residual",
    "grad_norm": "GradNorm",
    "scod_two_sided": "SCOD, the paper's sketch",
    "scod_frequent_directions": "SCOD, Frequent Directions",
}

# learn from fewer samples, `Domain.hessian_on`
HESSIAN = ("local_ensemble",)

# by the likelihood of held-out targets: sampled weights need a tighter prior than the marginal
# likelihood of the training data asks for
TUNED = ("kfac_laplace",)

# the paper's own comparison
PAPER = ("scod", "scod_ll", "naive", "deep_ensemble", "local_ensemble", "kfac_laplace")
