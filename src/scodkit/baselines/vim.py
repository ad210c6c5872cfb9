"""Virtual-logit matching (Wang et al., 2022)."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from scodkit.baselines.baseline import State, TrainingData, check_finite, class_logits
from scodkit.baselines.features import Moments, principal_components
from scodkit.baselines.one_pass import energy
from scodkit.baselines.residual import Residual, length_outside, settled_dim
from scodkit.errors import BatchError, OptionError
from scodkit.likelihoods import Categorical
from scodkit.model.network import Inputs


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
        picks: ``inputs=``, ``outputs=``; see `Picks`.

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
        offset = moments.means[0] - origin
        _, directions, rank = principal_components(
            moments.covariance() + offset[:, None] * offset, moments.rounding()
        )
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
            logits = check_finite(class_logits(self.likelihood, forward.output), "logits")
            largest += logits.double().amax(1).sum()
            length += length_outside(forward.features, state["origin"], state["outside"]).sum()
        if not largest > 0:
            raise BatchError(
                "expected the largest logit to be positive on average, as the scale of the "
                "virtual one, got a negative mean over the training data; compare with "
                "Residual here"
            )
        return largest / length

    def _judge(self, call: Inputs, state: State) -> tuple[Tensor, Tensor]:
        forward = self._pass(call, len(state["origin"]))
        logits = class_logits(self.likelihood, forward.output).double()
        length = length_outside(forward.features, state["origin"], state["outside"])
        return forward.output, state["alpha"] * length + energy(logits)
