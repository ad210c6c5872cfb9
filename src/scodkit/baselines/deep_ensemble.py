"""Deep ensembles (Lakshminarayanan et al., 2017)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from scodkit.baselines.baseline import Baseline, Picks, State
from scodkit.baselines.predictive import mixture
from scodkit.baselines.weight_sets import Sets, WeightSets, named_tensors
from scodkit.errors import BatchError, OptionError
from scodkit.likelihoods import (
    Bernoulli,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    Likelihood,
)
from scodkit.model.network import Inputs, Network


class DeepEnsemble(Baseline):
    """Uncertainty of the mixture of several networks, each trained from another start.

    For regression the total variance of the mixture (squared output units, summed over
    outputs): that of the means, and the mean of the variances. For classification the entropy
    of the mean probabilities (nats, summed over variables). No fit; one forward pass for each
    network, all of them at once where they are alike and the batch is small.

    The output of a call is the mixture's: the mean of the means (and the logarithm of the total
    variance, where networks predict theirs), or the mean probabilities as logits.

    Args:
        models: Two or more trained networks, on one device; left as found.
        likelihood: What distribution their outputs parametrise.
        picks: ``inputs=``, ``outputs=``; see `Picks`. The same for all networks.

    Raises:
        OptionError: If there are not two different networks, or the likelihood is unknown.

    Examples:
        >>> models = [nn.Linear(1, 1), nn.Linear(1, 1)]
        >>> for sign, model in zip([1.0, -1.0], models):
        ...     _ = nn.init.constant_(model.weight, sign), nn.init.zeros_(model.bias)
        >>> method = DeepEnsemble(models, Gaussian(variance=0.5))
        >>> method.score(torch.tensor([[0.0], [2.0]]))  # 0.5, and 0.5 + the variance of -2, 2
        tensor([0.5000, 4.5000])
    """

    handles: ClassVar = (Categorical, Bernoulli, Gaussian, HeteroscedasticGaussian)
    because: ClassVar = "the mixture of such predictions has no closed form here"
    learns: ClassVar = False

    def __init__(
        self, models: Sequence[nn.Module], likelihood: Likelihood, **picks: Unpack[Picks]
    ) -> None:
        members = _checked(models)
        super().__init__(members[0], likelihood, **picks)
        others = [
            Network(model, picks.get("inputs"), picks.get("outputs")) for model in members[1:]
        ]
        self._members = [self._network, *others]
        self._runs = WeightSets(self._network)

    @contextlib.contextmanager
    def _evaluating(self) -> Iterator[None]:
        # in one order for all ensembles: two that share networks must not wait for each other
        with contextlib.ExitStack() as stack:
            for member in sorted(self._members, key=lambda member: id(member.model)):
                stack.enter_context(member.evaluating())
            yield

    def _models(self) -> list[nn.Module]:
        return [member.model for member in self._members]

    def _judge(self, call: Inputs, state: State) -> tuple[Tensor, Tensor]:
        self._check_devices()
        sets = Sets(len(self._members), self._stacked, self._one_by_one)
        outputs = self._runs.outputs(sets, call)
        predictive = mixture(self.likelihood, outputs)
        return predictive.output, predictive.score

    def _one_by_one(self, call: Inputs) -> Tensor:
        outputs = [member(call) for member in self._members]
        shapes = {tuple(output.shape[1:]) for output in outputs}
        if len(shapes) > 1:
            raise BatchError(
                "expected outputs of one shape from all networks of an ensemble, got "
                f"{', '.join(map(str, sorted(shapes)))}; leave those out that predict "
                "something else"
            )
        return torch.stack(outputs)

    def _stacked(self) -> dict[str, Tensor]:
        """Return the weights of all networks; made anew, as they may have been changed.

        Raises:
            ValueError: If they cannot be stacked.
        """
        each = [named_tensors(member.model) for member in self._members]
        if any(_shapes(tensors) != _shapes(each[0]) for tensors in each):
            raise ValueError("the networks' weights differ in name, shape or dtype")
        return {name: torch.stack([tensors[name] for tensors in each]) for name in each[0]}

    def _check_devices(self) -> None:
        devices = sorted({str(member.device) for member in self._members})
        if len(devices) > 1:
            raise OptionError(
                "expected all networks of an ensemble on one device, got them on "
                f"{', '.join(devices)}; type .to({devices[-1]!r})"
            )


def _shapes(tensors: dict[str, Tensor]) -> dict[str, tuple[object, ...]]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}


def _checked(models: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the networks of an ensemble as a list.

    Raises:
        OptionError: If there are not two different ones.
    """
    if isinstance(models, nn.Module) and not isinstance(models, nn.ModuleList):
        raise OptionError(
            f"expected a list of trained networks, got one {type(models).__name__}; type "
            "DeepEnsemble([first, second, ...], ...)"
        )
    members = list(models)
    for member in members:
        if not isinstance(member, nn.Module):
            raise OptionError(
                f"expected a list of trained networks, got a {type(member).__name__} in it"
            )
    if len({id(member) for member in members}) < max(2, len(members)):
        raise OptionError(
            f"expected two or more networks, each of its own, got {len(members)} of which "
            f"{len({id(member) for member in members})} differ; train them from different seeds"
        )
    return members
