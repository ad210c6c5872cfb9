"""Distance to the k-th nearest training feature (Sun et al., 2022)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import normalize

from scodkit.baselines.baseline import State, TrainingData, whole_number
from scodkit.baselines.features import FeatureBaseline
from scodkit.errors import BatchError, OptionError
from scodkit.model.inputs import Inputs

# candidates beyond the k nearest whose distances are computed by differences
_SPARE = 16


@dataclass(eq=False, repr=False, kw_only=True)
class KNN(FeatureBaseline):
    """Euclidean distance of the features to the k-th nearest of the training data; >= 0.

    Of features scaled to length 1, so at most 2, unless ``normalise`` is off. The search is
    exact. One pass over the data, one forward pass a sample.

    Args:
        model: The trained network.
        likelihood: What distribution its output parametrises; any.
        k: Which neighbour; 50 as in the paper for CIFAR-10, and as in pytorch-ood.
        normalise: Scale features to length 1 first.
        most: Training samples to keep; of more, a random choice.
        seed: Fixes that choice.
        layer: Name of the module whose input are the features; None for the last Linear one.
        inputs: Picks the model's inputs from a batch, as for `Monitor`.
        outputs: Picks the prediction from what the model returns, as for `Monitor`.
        targets: Not used.

    Attributes:
        memory_budget: Bytes that distances may take at a time.

    Examples:
        >>> from scodkit import Gaussian
        >>> from torch import nn
        >>> method = KNN(nn.Linear(1, 1), Gaussian(), k=2, normalise=False)
        >>> method = method.fit([torch.tensor([[0.0], [1.0], [5.0]])], progress=False)
        >>> method.score(torch.tensor([[0.0], [9.0]]))
        tensor([1., 8.])
    """

    learnt: ClassVar = ("bank", "squares")
    memory_budget = 2**28

    k: int = 50
    normalise: bool = True
    most: int = 50_000
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.k, self.most = whole_number("k", self.k), whole_number("most", self.most)
        if self.most < self.k:
            raise OptionError(f"expected 1 <= k <= most, got k={self.k} and most={self.most}")

    def _learn(self, data: TrainingData) -> State:
        generator = torch.Generator().manual_seed(self.seed)
        samples: list[Tensor] = []
        keys: list[Tensor] = []
        for forward, _ in self._training_passes(data):
            samples.append(self._scaled(forward.features))
            # the smallest keys win: a random choice, however many samples there will be
            keys.append(torch.rand(len(samples[-1]), generator=generator, dtype=torch.float64))
            if sum(map(len, keys)) > 2 * self.most:
                samples, keys = _smallest(samples, keys, self.most)
        (bank,), _ = _smallest(samples, keys, self.most)
        if len(bank) < self.k:
            raise BatchError(
                f"expected at least k={self.k} training samples, got {len(bank)}; fit on more, "
                f"or type k={len(bank)} or less"
            )
        return {"bank": bank, "squares": bank.square().sum(1)}

    def _output_and_score(self, call: Inputs, state: State) -> tuple[Tensor, Tensor]:
        bank, squares = state["bank"], state["squares"]
        forward = self._pass(call, bank.shape[1])
        largest = max(len(bank), (self.k + _SPARE) * bank.shape[1])
        rows = max(1, self.memory_budget // (8 * largest))
        parts = torch.split(self._scaled(forward.features), rows)
        distances = [_kth_distance(part, bank, squares, self.k) for part in parts]
        return forward.output, torch.cat(distances)

    def _scaled(self, features: Tensor) -> Tensor:
        return normalize(features) if self.normalise else features


def _smallest(
    samples: list[Tensor], keys: list[Tensor], most: int
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the samples with the ``most`` smallest keys, in their order, as one piece."""
    joined, key = torch.cat(samples), torch.cat(keys)
    if len(key) <= most:
        return [joined], [key]
    chosen = key.topk(most, largest=False).indices.sort().values
    return [joined[chosen.to(joined.device)]], [key[chosen]]


def _kth_distance(queries: Tensor, bank: Tensor, squares: Tensor, k: int) -> Tensor:
    """Return the distance ``(B,)`` of queries ``(B, m)`` to the k-th nearest in the bank.

    A matrix product finds candidates; it is fast, but cancels for neighbours that are very
    near; so a few more than k are taken, and their distances computed by differences.
    """
    expanded = torch.addmm(squares, queries, bank.T, alpha=-2)
    count = min(k + _SPARE, len(bank))
    nearest = expanded.topk(count, dim=1, largest=False, sorted=False).indices
    exact = torch.linalg.vector_norm(queries[:, None] - bank[nearest], dim=2)
    distance: Tensor = exact.kthvalue(k, dim=1).values
    return distance
