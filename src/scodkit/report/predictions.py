"""Predictions in words."""

from __future__ import annotations

from torch import Tensor

from scodkit.likelihoods import Bernoulli, Categorical, Likelihood
from scodkit.report.table import percent

_MOST_NUMBERS = 4


def in_words(likelihood: Likelihood, output: Tensor) -> str:
    r"""Return what a network says of one input.

    Args:
        likelihood: What distribution the output parametrises.
        output: ``(*shape)``, of one sample.

    Examples:
        >>> import torch
        >>> from scodkit import Gaussian
        >>> in_words(Categorical(), torch.tensor([0.0, 9.0]))
        'class 1 (100\xa0%)'
        >>> in_words(Gaussian(), torch.tensor([0.25, 3.0]))
        '0.25, 3'
    """
    if not bool(output.isfinite().all()):
        return "not finite"
    if isinstance(likelihood, Categorical) and output.ndim == 1:
        shares = output.double().softmax(0)
        best = int(shares.argmax())
        return f"class {best} ({percent(float(shares[best]), 0)})"
    values = output.double().flatten()[:_MOST_NUMBERS]
    if isinstance(likelihood, Bernoulli):
        shown = [percent(share, 0) for share in values.sigmoid().tolist()]
    else:
        shown = [f"{value:.3g}" for value in values.tolist()]
    more = f", ... ({output.numel()} numbers)" if output.numel() > _MOST_NUMBERS else ""
    return ", ".join(shown) + more
