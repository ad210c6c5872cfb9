"""Scores of a single forward pass, without a fit."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from scodkit.baselines.baseline import Baseline, State, class_logits
from scodkit.baselines.features import FeatureBaseline
from scodkit.baselines.predictions import CLOSED_FORM, entropy
from scodkit.errors import OptionError
from scodkit.likelihoods import Bernoulli, Categorical
from scodkit.model.inputs import Inputs


class OutputBaseline(Baseline):
    """A method whose score is a function of the model's output alone."""

    learns: ClassVar = False

    def _output_and_score(self, call: Inputs, state: State) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            output = self._network(call)
            return output, self._score_of(output)

    @abstractmethod
    def _score_of(self, output: Tensor) -> Tensor:
        """Return the scores ``(B,)`` of outputs ``(B, *shape)``."""


class Naive(OutputBaseline):
    """Entropy of the predicted distribution, in nats: no fit, one forward pass.

    This is the uncertainty the network itself states. The entropies of several variables
    (pixels, independent logits) are added up. For regression with a fixed variance the score
    is a constant, which cannot tell anything from anything.

    Args:
        model: The trained network.
        likelihood: What distribution its output parametrises.
        inputs: Picks the model's inputs from a batch, as for `Monitor`.
        outputs: Picks the prediction from what the model returns, as for `Monitor`.
        targets: Not used.

    Examples:
        >>> from torch import nn
        >>> method = Naive(nn.Identity(), Categorical())
        >>> method.score(torch.tensor([[0.0, 0.0], [9.0, 0.0]]))
        tensor([0.6931, 0.0012])
    """

    handles: ClassVar = CLOSED_FORM
    because: ClassVar = "its entropy has no closed form here"

    def _score_of(self, output: Tensor) -> Tensor:
        return entropy(self.likelihood, output)


class MaxSoftmax(OutputBaseline):
    """One minus the largest class probability (Hendrycks and Gimpel, 2017). In [0, 1].

    No fit, one forward pass.

    Args:
        model: The trained network.
        likelihood: `Categorical`, or `Bernoulli` with one logit.
        inputs: Picks the model's inputs from a batch, as for `Monitor`.
        outputs: Picks the prediction from what the model returns, as for `Monitor`.
        targets: Not used.

    Examples:
        >>> from torch import nn
        >>> method = MaxSoftmax(nn.Identity(), Categorical())
        >>> method.score(torch.zeros(1, 4))
        tensor([0.7500])
    """

    handles: ClassVar = (Categorical, Bernoulli)
    because: ClassVar = "it needs class probabilities"

    def _score_of(self, output: Tensor) -> Tensor:
        logits = class_logits(self.likelihood, output)
        # the sum over the other classes: 1 - q would round to zero for a confident prediction
        largest = logits.argmax(1, keepdim=True)
        others = logits.log_softmax(1).scatter(1, largest, -torch.inf)
        return others.exp().sum(1)


class MaxLogit(OutputBaseline):
    """Minus the largest logit (Hendrycks et al., 2022). Units of logits, any sign.

    No fit, one forward pass.

    Args:
        model: The trained network.
        likelihood: `Categorical`.
        inputs: Picks the model's inputs from a batch, as for `Monitor`.
        outputs: Picks the prediction from what the model returns, as for `Monitor`.
        targets: Not used.

    Examples:
        >>> from torch import nn
        >>> method = MaxLogit(nn.Identity(), Categorical())
        >>> method.score(torch.tensor([[9.0, 0.0], [1.0, 0.0]]))
        tensor([-9., -1.])
    """

    handles: ClassVar = (Categorical,)
    because: ClassVar = "it needs one logit per class, whose common offset means something"

    def _score_of(self, output: Tensor) -> Tensor:
        return -class_logits(self.likelihood, output).amax(1)


@dataclass(eq=False, repr=False, kw_only=True)
class Energy(OutputBaseline):
    """``-T log sum exp(logits / T)`` (Liu et al., 2020). Units of logits, any sign.

    No fit, one forward pass.

    Args:
        model: The trained network.
        likelihood: `Categorical`.
        temperature: ``T``.
        inputs: Picks the model's inputs from a batch, as for `Monitor`.
        outputs: Picks the prediction from what the model returns, as for `Monitor`.
        targets: Not used.

    Examples:
        >>> from torch import nn
        >>> method = Energy(nn.Identity(), Categorical())
        >>> method.score(torch.tensor([[9.0, 0.0], [0.0, 0.0]]))
        tensor([-9.0001, -0.6931])
    """

    handles: ClassVar = (Categorical,)
    because: ClassVar = "it needs one logit per class, whose common offset means something"

    temperature: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.temperature < torch.inf:
            raise OptionError(
                f"expected a positive, finite temperature, got {self.temperature!r}"
            )

    def _score_of(self, output: Tensor) -> Tensor:
        return energy(class_logits(self.likelihood, output), self.temperature)


def energy(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Return ``-T log sum exp(logits / T)`` of logits ``(B, C)``: ``(B,)``."""
    return -temperature * (logits / temperature).logsumexp(1)


class GradNorm(FeatureBaseline):
    """Minus the L1 norm of the gradient of KL(uniform || prediction) in the last weight; <= 0.

    The paper (Huang et al., 2021) found larger norms for in-distribution data, hence the minus.
    The gradient is the outer product of ``softmax - 1/C`` and the features, and its norm the
    product of theirs: no fit, one forward pass and no backward pass. Units of the features.

    Args:
        model: The trained network; its output is what the last Linear layer returns, or the
            first of it.
        likelihood: `Categorical`.
        layer: Name of the Linear layer that makes the logits; None for the one called last.
        inputs: Picks the model's inputs from a batch, as for `Monitor`.
        outputs: Picks the prediction from what the model returns, as for `Monitor`.
        targets: Not used.

    Examples:
        >>> from torch import nn
        >>> model = nn.Linear(2, 2, bias=False)
        >>> model.weight.data = torch.tensor([[0.0, 0.0], [0.0, 9.0]])
        >>> GradNorm(model, Categorical()).score(torch.tensor([[3.0, 0.0], [3.0, 5.0]]))
        tensor([-0., -8.])
    """

    handles: ClassVar = (Categorical,)
    because: ClassVar = "it compares class probabilities with equal ones"
    learns: ClassVar = False

    def _output_and_score(self, call: Inputs, state: State) -> tuple[Tensor, Tensor]:
        forward = self._pass(call)
        forward.head()  # refuses outputs that are not the layer's
        logits = class_logits(self.likelihood, forward.output).double()
        slope = logits.softmax(1) - 1 / logits.shape[1]
        return forward.output, -slope.abs().sum(1) * forward.features.abs().sum(1)
