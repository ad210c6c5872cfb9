"""What distribution the output parametrises, as a square root of its Fisher information.

A likelihood turns an output ``theta`` of shape ``(B, *shape)``, flattened to ``d`` numbers per
sample, into rows ``R`` of shape ``(B, p, d)`` with ``R^T R = F_theta``: what matters at the
output. ``p`` is the number of directions: as many as that matrix has ranks, unless the
likelihood truncates or samples.
"""

from scodkit.likelihoods.categorical import Categorical
from scodkit.likelihoods.heads import Heads
from scodkit.likelihoods.independent import Bernoulli, Gaussian, HeteroscedasticGaussian
from scodkit.likelihoods.likelihood import Likelihood
from scodkit.likelihoods.monte_carlo import MonteCarlo

__all__ = [
    "Bernoulli",
    "Categorical",
    "Gaussian",
    "Heads",
    "HeteroscedasticGaussian",
    "Likelihood",
    "MonteCarlo",
]
