"""Length of the features outside the training data's principal components.

As a score by itself: Ndiour et al. (2020); as part of ViM: Wang et al. (2022).

To add a baseline, copy `Residual`: it has an option, a fit, a score, and in ``learnt`` the
names of the tensors that a saved file must have.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from scodkit.baselines import baseline
from scodkit.baselines.baseline import State, TrainingData
from scodkit.baselines.features import FeatureBaseline, Moments
from scodkit.baselines.one_pass import energy
from scodkit.errors import BatchError, OptionError
from scodkit.likelihoods import Categorical
from scodkit.model.inputs import Inputs


@dataclass(eq=False, repr=False, kw_only=True)
class Residual(FeatureBaseline):
    """Length of the centred features' part outside ``dim`` principal components; >= 0.

    Units of the features. Directions in which the training features do not vary at all always
    count as outside. One pass over the data, one forward pass a sample.

    Args:
        model: The trained network.
        likelihood: What distribution its output parametrises; any.
        dim: Number of components, less than there are features ``m``. None for 1000 from
            ``m = 2048`` on and 512 from 768 on, as in the paper of ViM, and ``m // 2`` below.
        layer: Name of the module whose input are the features; None for the last Linear one.
        inputs: Picks the model's inputs from a batch, as for `Monitor`.
        outputs: Picks the prediction from what the model returns, as for `Monitor`.
        targets: Not used.

    Examples:
        >>> from scodkit import Gaussian
        >>> from torch import nn
        >>> x = torch.tensor([[-3.0, 0.1], [-3.0, -0.1], [3.0, 0.1], [3.0, -0.1]])
        >>> method = Residual(nn.Linear(2, 1), Gaussian(), dim=1).fit([x], progress=False)
        >>> method.score(torch.tensor([[100.0, 0.5]]))
        tensor([0.5000])
    """

    learnt: ClassVar[tuple[str, ...]] = ("mean", "outside")

    dim: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dim is not None:
            self.dim = baseline.whole_number("dim", self.dim)

    def _learn(self, data: TrainingData) -> State:
        moments = Moments()
        for forward, _ in self._training_passes(data):
            moments.add(forward.features, precision=forward.precision)
        dim = settled_dim(self.dim, moments.means.shape[1])
        _, directions, rank = moments.principal_components()
        outside = directions[:, min(dim, rank) :].contiguous()  # frees the other directions
        return {"mean": moments.means[0], "outside": outside}

    def _output_and_score(self, call: Inputs, state: State) -> tuple[Tensor, Tensor]:
        forward = self._pass(call, len(state["mean"]))
        return forward.output, length_outside(forward.features, state["mean"], state["outside"])


def length_outside(features: Tensor, centre: Tensor, outside: Tensor) -> Tensor:
    """Return the length ``(B,)`` of the features' part outside the principal components.

    Args:
        features: ``(B, m)``.
        centre: Where the components start, ``(m,)``.
        outside: The other directions, orthonormal: ``(m, r)``.
    """
    length: Tensor = torch.linalg.vector_norm((features - centre) @ outside, dim=1)
    return length


def settled_dim(dim: int | None, width: int) -> int:
    """Return the number of principal components to use.

    Args:
        dim: The option; None for the rule.
        width: Number of features.

    Raises:
        OptionError: If no direction would be left outside.
    """
    if dim is None:
        return 1000 if width >= 2048 else 512 if width >= 768 else width // 2
    if dim >= width:
        raise OptionError(
            f"expected dim below the number of features, {width}, got {dim}; type "
            f"dim={width // 2}, or None for the rule"
        )
    return dim


class ViM(Residual):
    """A virtual logit, made of the features' residual, minus logsumexp of the real ones.

    The log odds of the virtual class, in units of logits, of any sign: it ranks as the paper's
    probability does, without its rounding to 0 or 1. The virtual logit is ``alpha`` times the
    length of the features' part outside ``dim`` principal components. These are taken about
    the point ``-W^+ b``, where the logits are nearest to zero; ``alpha`` is such that over the
    training data the virtual logit and the largest real one have the same mean. Two passes
    over the data, with one forward pass a sample each.

    Args:
        model: The trained network; its output is what the last Linear layer returns, or the
            first of it.
        likelihood: `Categorical`.
        dim: Number of components, less than there are features ``m``. None for 1000 from
            ``m = 2048`` on and 512 from 768 on, as in the paper, and ``m // 2`` below.
        layer: Name of the Linear layer that makes the logits; None for the one called last.
        inputs: Picks the model's inputs from a batch, as for `Monitor`.
        outputs: Picks the prediction from what the model returns, as for `Monitor`.
        targets: Not used.

    Examples:
        >>> from torch import nn
        >>> model = nn.Linear(2, 2, bias=False)
        >>> model.weight.data = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
        >>> x = torch.tensor([[6.0, 0.1], [-6.0, 0.1], [6.0, -0.1], [-6.0, -0.1]])
        >>> method = ViM(model, Categorical(), dim=1).fit([x], progress=False)
        >>> method.score(torch.tensor([[6.0, 0.05], [6.0, 1.0]]))  # virtual logits 3 and 60
        tensor([-3.0000, 54.0000])
    """

    learnt: ClassVar = ("origin", "outside", "alpha")
    handles: ClassVar = (Categorical,)
    because: ClassVar = "it needs one logit per class, whose common offset means something"

    def _learn(self, data: TrainingData) -> State:
        data.check_repeatable("ViM")
        moments = Moments()
        for forward, _ in self._training_passes(data):
            weight, bias = forward.head()
            moments.add(forward.features, precision=forward.precision)
        # the shortest features whose logits come nearest to zero
        origin: Tensor = -torch.linalg.pinv(weight.double()) @ bias.double()
        _, directions, rank = moments.principal_components(origin)
        dim = settled_dim(self.dim, len(origin))
        if dim >= rank:
            raise OptionError(
                f"expected dim below {rank}, the number of directions in which the training "
                f"features vary, got {dim}, outside of which nothing is left; type a smaller "
                "dim, or compare with Residual here"
            )
        state = {"origin": origin, "outside": directions[:, dim:].contiguous()}
        return {**state, "alpha": self._alpha(data, state)}

    def _alpha(self, data: TrainingData, state: State) -> Tensor:
        """Return the mean largest logit over the mean length outside, over the training data.

        Raises:
            BatchError: If it is not positive.
        """
        largest = torch.zeros((), dtype=torch.float64, device=state["origin"].device)
        length = largest.clone()
        for forward, _ in self._training_passes(data):
            logits = baseline.check_finite(
                baseline.class_logits(self.likelihood, forward.output), "logits"
            )
            largest += logits.double().amax(1).sum()
            length += length_outside(forward.features, state["origin"], state["outside"]).sum()
        if not largest > 0:
            raise BatchError(
                "expected the largest logit to be positive on average, as the scale of the "
                "virtual one, got a negative mean over the training data; compare with "
                "Residual here"
            )
        return largest / length

    def _output_and_score(self, call: Inputs, state: State) -> tuple[Tensor, Tensor]:
        forward = self._pass(call, len(state["origin"]))
        logits = baseline.class_logits(self.likelihood, forward.output).double()
        length = length_outside(forward.features, state["origin"], state["outside"])
        return forward.output, state["alpha"] * length + energy(logits)
