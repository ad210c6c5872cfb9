"""Whether scores tell where the network is wrong, and not only where its input is new."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

import numpy as np
import torch
from torch import Tensor

from scodbench.measure import Setup, fit, scores_of
from scodbench.methods import METHODS, PAPER, Case
from scodbench.rows import Row
from scodbench.samples import Samples
from scodbench.sweeps.points import RESAMPLES, sweep_row
from scodkit.errors import MissingPeerError, OptionError, ScodError
from scodkit.likelihoods import Gaussian
from scodkit.metrics import bootstrapped, separation

MIXED = "mixed"
_BATCH = 128
# of the held-out errors; what is above counts as large
_QUANTILE = 0.99


def error_sweep(setup: Setup) -> Iterator[Row]:
    """Yield how well scores tell large errors: a row for each of the paper's methods and Fused.

    An error is the distance of the output from its target, measured with the covariance of
    the residuals on the held-out set (Mahalanobis). It is large above the 99 % quantile of the
    held-out set's own errors, which no unknown input has a part in.

    Args:
        setup: Networks and data with a mixed set.

    Raises:
        OptionError: If there is no mixed set, or the network is not one for regression.
        MissingPeerError: If a library that a method stands on is not installed.
    """
    mixed = setup.splits.mixed
    if mixed is None or not isinstance(setup.domain.likelihood, Gaussian):
        raise OptionError(
            f"expected a domain with a Gaussian likelihood and a mixed set, got "
            f"{setup.domain.name}; type --domain taxinet"
        )
    held_out = _residuals(setup, setup.splits.selection)
    threshold = float(distances(held_out, held_out).quantile(_QUANTILE))
    large = distances(_residuals(setup, mixed), held_out) > threshold
    about = {"threshold": threshold, "threshold_share": float(large.double().mean())}
    for method in (*PAPER, "fused"):
        try:
            detector = METHODS[method](Case(setup.domain, setup.networks))
            fit(detector, setup, method)
            scores = scores_of(detector, mixed, setup.device)
            found = asdict(separation(scores[~large], scores[large], resamples=RESAMPLES))
            found["roc"] = roc(scores[~large], scores[large])
        except MissingPeerError:
            raise  # of this machine, not of the method
        except ScodError as error:
            found = {"auroc": None, "why": str(error)}
        yield sweep_row(setup, "errors", MIXED, {"method": method}, **about, **found)


def distances(residuals: Tensor, held_out: Tensor) -> Tensor:
    """Return how far residuals are from zero, in standard deviations of held-out ones.

    Args:
        residuals: ``(n, d)``, output less target.
        held_out: ``(m, d)`` residuals that the covariance is taken of, ``m > d``.

    Returns:
        Mahalanobis distances ``(n,)``, >= 0.

    Examples:
        >>> held_out = torch.tensor([[1.0], [-1.0], [1.0], [-1.0]])
        >>> distances(torch.tensor([[3.0]]), held_out).round(decimals=2)
        tensor([2.6000], dtype=torch.float64)
    """
    spread = torch.cov(held_out.double().T).reshape(held_out.shape[1], -1)
    root = torch.linalg.cholesky(spread)
    whitened: Tensor = torch.linalg.solve_triangular(root, residuals.double().T, upper=False)
    return whitened.square().sum(0).sqrt()


def _residuals(setup: Setup, samples: Samples) -> Tensor:
    """Return output less target, ``(n, d)``, on the CPU."""
    with torch.no_grad():
        return torch.cat(
            [
                (setup.networks[0](x) - target).cpu()
                for x, target in samples.batches(_BATCH, setup.device)
            ]
        )


def roc(known: Tensor, unknown: Tensor, points: int = 101) -> tuple[list[float], list[float]]:
    """Return the ROC curve, thinned out evenly along its way.

    Args:
        known: Scores ``(n,)``, larger = more atypical.
        unknown: Scores ``(m,)``.
        points: How many, both ends included.

    Returns:
        Shares of known and of unknown inputs above falling thresholds.

    Examples:
        >>> roc(torch.tensor([1.0, 2.0]), torch.tensor([2.0, 3.0]), points=3)
        ([0.0, 0.25, 1.0], [0.0, 0.75, 1.0])
    """
    (whole,) = bootstrapped(known, unknown, 0, 0)
    # their sum only grows along the curve
    where = np.linspace(0, 2, points)
    along = whole.false + whole.true
    false, true = (np.interp(where, along, rate).round(5) for rate in (whole.false, whole.true))
    return false.tolist(), true.tolist()
