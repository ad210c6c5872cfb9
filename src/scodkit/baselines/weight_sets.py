"""One architecture at several sets of weights: all in one pass, where that works and pays."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import vmap

from scodkit.errors import EngineFallbackWarning
from scodkit.factors.trial import first_line
from scodkit.model.network import Inputs, Network, ordinary

# samples times sets of weights in one pass: beyond it memory grows, and nothing is gained
_TOGETHER = 256

# samples in a trial, and the relative distance allowed between two ways to round an output
_FEW = 2
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
_TOLERANCE_HALF = 1e-1
_SMALL_SHARE = 1e-2


@dataclass(frozen=True)
class Sets:
    """Several sets of weights of one architecture.

    Args:
        count: ``K``.
        stacked: Returns them by name of the parameter or buffer, ``(K, ...)`` each.
        one_by_one: The slow way: returns the outputs ``(K, B, *shape)`` for a call.
    """

    count: int
    stacked: Callable[[], dict[str, Tensor]]
    one_by_one: Callable[[Inputs], Tensor]


class WeightSets:
    """Runs a network at several sets of weights.

    In one vectorised pass for small batches, which is tried once against one pass per set;
    else one after the other, which takes no more memory than the network itself does.

    Args:
        network: Says what the architecture is, and gives the weights that no set has.

    Attributes:
        works: Whether the vectorised pass does; None before it has been tried.
    """

    def __init__(self, network: Network) -> None:
        self._network = network
        self.works: bool | None = None

    def outputs(self, sets: Sets, call: Inputs) -> Tensor:
        """Return the outputs at each set of weights, ``(K, B, *shape)``, without gradients.

        Args:
            sets: The sets of weights.
            call: The batch; not empty. The network is held in eval mode.
        """
        with torch.no_grad():
            if sets.count * call.batch_size > _TOGETHER:
                return sets.one_by_one(call)
            if self.works is None:
                with self._network.in_full_precision():  # two ways differ by 1e-3 in TF32
                    self.works = self._try(sets, call.samples(slice(0, _FEW)))
            return self._at_once(sets, call) if self.works else sets.one_by_one(call)

    def _try(self, sets: Sets, few: Inputs) -> bool | None:
        """Return whether the vectorised pass gives the right outputs; None if none can tell."""
        wanted = sets.one_by_one(few)
        if not wanted.isfinite().all():
            return None
        try:
            found = self._at_once(sets, few)
            off = _distance(found, wanted)
            reason = f"at once its outputs are {off:.1e} off, relative"
        except Exception as error:  # whatever a third-party module raises under a transform
            off = torch.inf
            reason = f"at once it raised {type(error).__name__}: {first_line(error)}"
        if off <= _TOLERANCE.get(wanted.dtype, _TOLERANCE_HALF):
            return True
        warnings.warn(
            f"{type(self._network.model).__name__} is run at one set of weights after the "
            f"other, for the same scores, more slowly; {reason}",
            EngineFallbackWarning,
            stacklevel=2,
        )
        return False

    def _at_once(self, sets: Sets, call: Inputs) -> Tensor:
        outputs: Tensor = vmap(lambda some: self._network.at(some, call))(sets.stacked())
        return outputs


def _distance(found: Tensor, wanted: Tensor) -> float:
    """Return the largest distance of any set's outputs, relative to their size."""
    sizes = wanted.flatten(1).norm(dim=1)
    # outputs much smaller than the others' are not expected to be as precise
    sizes = sizes.clamp_min(max(_SMALL_SHARE * float(sizes.max()), 1e-30))
    return float(((found - wanted).flatten(1).norm(dim=1) / sizes).max())


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return every parameter and buffer by name, detached."""
    tensors = itertools.chain(model.named_parameters(), model.named_buffers())
    return {name: ordinary(tensor.detach()) for name, tensor in tensors}
