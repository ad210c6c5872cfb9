"""Deep ensembles (Lakshminarayanan et al., 2017); a network at several sets of weights."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.func import vmap
from typing_extensions import Unpack

from scodkit.baselines.baseline import Baseline, Picks, State
from scodkit.baselines.predictions import CLOSED_FORM, mixture
from scodkit.errors import BatchError, EngineFallbackWarning, OptionError, first_line
from scodkit.likelihoods import Likelihood
from scodkit.model.inputs import Inputs
from scodkit.model.network import Network

# samples times sets of weights in one vectorised pass; larger ones take memory, not less time
_TOGETHER = 256

# samples in a trial, the relative error of a vectorised output that counts as rounding, and
# the share of the largest outputs below which others need not be as precise
_FEW = 2
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
_TOLERANCE_HALF = 1e-1
_SMALL_SHARE = 1e-2


class DeepEnsemble(Baseline):
    """Uncertainty of the mixture of several networks, each trained from another start.

    For regression the total variance of the mixture (squared output units, summed over
    outputs): that of the means, and the mean of the variances. For classification the entropy
    of the mean probabilities (nats, summed over variables). No fit; one forward pass for each
    network, all of them at once where they are alike and the batch is small.

    The output of a call is the mixture's: the mean of the means (and the logarithm of the total
    variance, where networks predict theirs), or the mean probabilities as logits.

    Args:
        models: Two or more trained networks, on one device; left unchanged.
        likelihood: What distribution their outputs parametrise.
        picks: ``inputs=``, ``outputs=``; see `Picks`. The same for all networks.

    Raises:
        OptionError: If there are not two different networks, or the likelihood is unknown.

    Examples:
        >>> from scodkit import Gaussian
        >>> models = [nn.Linear(1, 1), nn.Linear(1, 1)]
        >>> for sign, model in zip([1.0, -1.0], models):
        ...     _ = nn.init.constant_(model.weight, sign), nn.init.zeros_(model.bias)
        >>> method = DeepEnsemble(models, Gaussian(variance=0.5))
        >>> method.score(torch.tensor([[0.0], [2.0]]))  # 0.5, and 0.5 + the variance of -2, 2
        tensor([0.5000, 4.5000])
    """

    handles: ClassVar = CLOSED_FORM
    because: ClassVar = "the mixture of such predictions has no closed form here"
    learns: ClassVar = False

    def __init__(
        self, models: Sequence[nn.Module], likelihood: Likelihood, **picks: Unpack[Picks]
    ) -> None:
        members = _checked(models)
        super().__init__(members[0], likelihood, **picks)
        others = [Network(model, self.inputs, self.outputs) for model in members[1:]]
        self._members = [self._network, *others]
        self._weight_sets = WeightSets(self._network)

    @contextlib.contextmanager
    def _evaluating(self) -> Iterator[None]:
        # in one order for all ensembles: two that share networks must not deadlock
        with contextlib.ExitStack() as stack:
            for member in sorted(self._members, key=lambda member: id(member.model)):
                stack.enter_context(member.evaluating())
            yield

    def _models(self) -> list[nn.Module]:
        return [member.model for member in self._members]

    def _output_and_score(self, call: Inputs, state: State) -> tuple[Tensor, Tensor]:
        devices = sorted({str(member.device) for member in self._members})
        if len(devices) > 1:
            raise OptionError(
                "expected all networks of an ensemble on one device, got them on "
                f"{', '.join(devices)}; type .to({devices[-1]!r})"
            )
        outputs = self._weight_sets.outputs(call, self._members, self._stacked)
        predictive = mixture(self.likelihood, outputs)
        return predictive.output, predictive.score

    def _stacked(self) -> dict[str, Tensor]:
        """Return the weights of all networks; not cached, as they may have been changed.

        Raises:
            ValueError: If they cannot be stacked.
        """
        members = [
            dict(itertools.chain(model.named_parameters(), model.named_buffers()))
            for model in self._models()
        ]
        shapes = [{name: (t.shape, t.dtype) for name, t in m.items()} for m in members]
        if any(others != shapes[0] for others in shapes):
            raise ValueError("the networks' weights differ in name, shape or dtype")
        return {name: torch.stack([m[name] for m in members]) for name in members[0]}


def _checked(models: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the networks of an ensemble as a list.

    Raises:
        OptionError: If there are not two different ones.
    """
    # a Sequential can be iterated over, but its layers are no ensemble
    is_single = isinstance(models, nn.Module) and not isinstance(models, nn.ModuleList)
    members: list[Any] = [models] if is_single else list(models)
    different = {id(member) for member in members if isinstance(member, nn.Module)}
    if len(different) < max(2, len(members)):
        got = ", ".join(type(member).__name__ for member in members) or "none"
        raise OptionError(
            "expected a list of two or more trained networks, each a different object, got "
            f"{got}, of which {len(different)} differ; type DeepEnsemble([first, second], ...) "
            "with networks trained from different seeds"
        )
    return members


class WeightSets:
    """Runs a network at several sets of weights.

    Small batches take one vectorised pass, which is first compared with one pass per set.
    Others take one pass per set, which needs no more memory than the network itself does.

    Args:
        network: The architecture, and the weights that no set has.

    Attributes:
        works: Whether the vectorised pass is right; None before it has been tried.
    """

    def __init__(self, network: Network) -> None:
        self._network = network
        self.works: bool | None = None

    def outputs(
        self,
        call: Inputs,
        runs: Sequence[Callable[[Inputs], Tensor]],
        stacked: Callable[[], dict[str, Tensor]],
    ) -> Tensor:
        """Return the outputs at each set of weights, ``(K, B, *shape)``, without gradients.

        Args:
            call: The batch; not empty. The network is held in eval mode.
            runs: Functions that return the output at one of the ``K`` sets each.
            stacked: Returns the sets by name of the parameter or buffer, ``(K, ...)`` each.

        Raises:
            BatchError: If the outputs differ in shape.
        """

        def at_once(batch: Inputs) -> Tensor:
            outputs: Tensor = vmap(lambda weights: self._network.at(weights, batch))(stacked())
            return outputs

        with torch.no_grad():
            if len(runs) * call.batch_size > _TOGETHER:
                return _one_by_one(runs, call)
            if self.works is None:
                few = call.samples(slice(0, _FEW))
                with self._network.in_full_precision():  # in TF32 the two differ by 1e-3
                    self.works = self._agrees(lambda: at_once(few), _one_by_one(runs, few))
            return at_once(call) if self.works else _one_by_one(runs, call)

    def _agrees(self, at_once: Callable[[], Tensor], expected: Tensor) -> bool | None:
        """Return whether both give the same outputs; None where these are not finite."""
        if not expected.isfinite().all():
            return None
        try:
            distance = _distance(at_once(), expected)
            reason = f"at once its outputs are {distance:.1e} off, relative"
        except Exception as error:  # whatever a third-party module raises under a transform
            distance = torch.inf
            reason = f"at once it raised {first_line(error)}"
        if distance <= _TOLERANCE.get(expected.dtype, _TOLERANCE_HALF):
            return True
        warnings.warn(
            f"{type(self._network.model).__name__} is run at one set of weights after the "
            f"other, for the same scores, more slowly; {reason}",
            EngineFallbackWarning,
            stacklevel=2,
        )
        return False


def _one_by_one(runs: Sequence[Callable[[Inputs], Tensor]], call: Inputs) -> Tensor:
    outputs = [run(call) for run in runs]
    shapes = {tuple(output.shape[1:]) for output in outputs}
    if len(shapes) > 1:
        raise BatchError(
            "expected outputs of one shape from all networks of an ensemble, got "
            f"{', '.join(map(str, sorted(shapes)))}; leave those out that predict "
            "something else"
        )
    return torch.stack(outputs)


def _distance(actual: Tensor, expected: Tensor) -> float:
    """Return the largest distance of any set's outputs, relative to their size."""
    sizes = expected.flatten(1).norm(dim=1)
    sizes = sizes.clamp_min(max(_SMALL_SHARE * float(sizes.max()), 1e-30))
    return float(((actual - expected).flatten(1).norm(dim=1) / sizes).max())
