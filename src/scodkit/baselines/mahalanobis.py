"""Mahalanobis distance to the nearest class of training features (Lee et al., 2018)."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from scodkit.baselines.baseline import State, TrainingData, class_logits
from scodkit.baselines.features import FeatureBaseline, Moments
from scodkit.baselines.predictions import CLOSED_FORM
from scodkit.errors import BatchError
from scodkit.likelihoods import Bernoulli, Categorical, Likelihood
from scodkit.model.inputs import Inputs


class Mahalanobis(FeatureBaseline):
    """Least squared distance of the features to a class mean, in standard deviations; >= 0.

    Classification has one mean per class and one covariance for all of them, and so needs
    targets to fit; regression has one mean, and does not. Directions in which the training
    features do not vary (less than 1e-12 of the largest variance) are left out, as by a
    pseudo-inverse. One pass over the data, one forward pass a sample; nothing is shrunk.

    Args:
        model: The trained network.
        likelihood: `Categorical` or `Bernoulli`, of one variable; `Gaussian` or
            `HeteroscedasticGaussian`.
        layer: Name of the module whose input are the features; None for the last Linear one.
        inputs: Picks the model's inputs from a batch, as for `Monitor`.
        outputs: Picks the prediction from what the model returns, as for `Monitor`.
        targets: Picks the targets from a training batch; see `Picks`.

    Examples:
        >>> x = torch.tensor([[0.0], [2.0], [10.0], [12.0]])  # variance 1 about 1 and 11
        >>> method = Mahalanobis(torch.nn.Linear(1, 2), Categorical())
        >>> method = method.fit([(x, torch.tensor([0, 0, 1, 1]))], progress=False)
        >>> method.score(torch.tensor([[1.0], [8.0]]))
        tensor([0., 9.])
    """

    learnt: ClassVar = ("centre", "whitener", "means")
    handles: ClassVar = CLOSED_FORM
    because: ClassVar = "it does not say whether there are classes, each with its own mean"

    @property
    def takes_targets(self) -> bool:
        """Whether a fit reads the targets of the training data."""
        return isinstance(self.likelihood, (Categorical, Bernoulli))

    def _learn(self, data: TrainingData) -> State:
        moments: Moments | None = None
        for forward, targets in self._training_passes(data, with_targets=self.takes_targets):
            labels, classes = None, 1
            if targets is not None:
                labels, classes = _class_indices(self.likelihood, forward.output, targets)
            moments = moments or Moments(classes)
            moments.add(forward.features, labels, forward.precision)
        assert moments is not None  # data without samples is refused before
        return whitening(moments)

    def _output_and_score(self, call: Inputs, state: State) -> tuple[Tensor, Tensor]:
        forward = self._pass(call, len(state["centre"]))
        white = (forward.features - state["centre"]) @ state["whitener"]
        # by differences: near a mean, squares that are expanded would cancel
        exact = "donot_use_mm_for_euclid_dist"
        distances = torch.cdist(white, state["means"], compute_mode=exact)
        return forward.output, distances.amin(1).square()


def whitening(moments: Moments) -> State:
    """Return the map of features to coordinates of variance 1, and the class means there.

    Raises:
        BatchError: If the features do not vary within any class.
    """
    means = moments.means[moments.counts > 0]
    variances, directions, rank = moments.principal_components()
    # a constant's mean is off by rounding, which is no variance
    if not rank or variances[0] <= (1e-14 * means.abs().max()).square():
        raise BatchError(
            "expected training features that vary within a class, got the same ones for all "
            "samples of each; fit on more samples, or name another module: layer='...'"
        )
    whitener = directions[:, :rank] * variances[:rank].rsqrt()
    centre = means.mean(0)
    return {"centre": centre, "whitener": whitener, "means": (means - centre) @ whitener}


def _class_indices(
    likelihood: Likelihood, output: Tensor, targets: Tensor
) -> tuple[Tensor, int]:
    """Return labels ``(B,)`` and the number of classes.

    Raises:
        BatchError: If targets are anything but one class index per sample.
    """
    classes = class_logits(likelihood, output).shape[1]
    flat = targets.reshape(len(targets), -1)
    labels = flat[:, 0].long()
    whole = flat.shape[1] == 1 and bool((flat[:, 0] == labels).all())
    if not whole or bool(((labels < 0) | (labels >= classes)).any()):
        what = f"values {float(flat.min()):g} to {float(flat.max()):g}"
        raise BatchError(
            f"expected one class index from 0 to {classes - 1} per sample as targets, got "
            f"{what} of shape {tuple(targets.shape)}; pick them with targets=lambda batch: "
            "..., for one-hot targets batch[1].argmax(1)"
        )
    return labels, classes
