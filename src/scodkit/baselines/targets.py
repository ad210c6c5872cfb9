"""Which targets a likelihood's loss is defined for."""

from __future__ import annotations

from torch import Tensor

from scodkit.errors import BatchError
from scodkit.likelihoods import Bernoulli, Categorical, HeteroscedasticGaussian, Likelihood


def check_targets(likelihood: Likelihood, output: Tensor, targets: Tensor) -> None:
    """Refuse targets the loss is not defined for.

    Args:
        likelihood: Whose loss.
        output: Of the model, ``(B, *shape)``.
        targets: ``(B, ...)``.

    Raises:
        BatchError: With what was expected.
    """
    likelihood.factor(output[:1])  # refuses outputs that are not its own
    wanted, form = output[0].numel(), "finite numbers"
    fits = True
    if isinstance(likelihood, Categorical):
        _, wanted, classes = likelihood.logits(output).shape
        form = f"class indices from 0 to {classes - 1}"
        inside = (targets >= 0) & (targets < classes)
        fits = not targets.is_floating_point() and bool(inside.all())
    elif isinstance(likelihood, HeteroscedasticGaussian):
        wanted //= 2
    elif isinstance(likelihood, Bernoulli):
        form = "numbers from 0 to 1"
        fits = bool(((targets >= 0) & (targets <= 1)).all())
    if not fits or targets[0].numel() != wanted:
        raise BatchError(
            f"expected {wanted} target(s) a sample, {form}, for {likelihood!r} and an output "
            f"of shape {tuple(output.shape)}, got a {targets.dtype} of shape "
            f"{tuple(targets.shape)} from {targets.min()} to {targets.max()}; say which they "
            "are: targets=lambda batch: ..."
        )
