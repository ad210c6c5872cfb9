"""What methods that look at gradients in weight space share: which weights, which engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from scodkit.baselines.baseline import Baseline, Picks
from scodkit.errors import OptionError
from scodkit.factors import FactorSource, MemoryBudget, choose_engine
from scodkit.likelihoods import Likelihood
from scodkit.model.network import Inputs
from scodkit.model.parameters import ParameterSet, Selection, select


class WeightSpaceBaseline(Baseline):
    """A method that pulls rows at the output back to the weights.

    Args:
        model: The trained network.
        likelihood: What distribution its output parametrises; any.
        parameters: Which weights, as for `Monitor`.
        picks: ``inputs=``, ``outputs=``; see `Picks`.

    Attributes:
        memory_budget: Bytes that per-sample gradients may take at a time, as of a `Monitor`.
    """

    handles: ClassVar[tuple[type[Likelihood], ...]] = (Likelihood,)
    because: ClassVar = "it is no likelihood"
    memory_budget = MemoryBudget()

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood,
        *,
        parameters: Selection = "all",
        **picks: Unpack[Picks],
    ) -> None:
        super().__init__(model, likelihood, **picks)
        self._selection = parameters
        self._chosen: ParameterSet | None = None
        self._last_source: FactorSource | None = None

    def _parameters(self, call: Inputs) -> ParameterSet:
        """Return the chosen weights; the first call settles the choice."""
        if self._chosen is None:
            self._chosen = select(self._selection, self._network, call)
        return self._chosen

    def _source(self, call: Inputs) -> FactorSource:
        """Return what turns batches into factors; the engine is chosen on a first batch."""
        source = self._last_source
        if source is None or source.engine.device != self._network.device:
            with torch.no_grad():
                shape = tuple(self._network(call.samples(slice(0, 2))).shape[1:])
            engine = choose_engine(self._network, self._parameters(call), call)
            source = FactorSource(engine, self.likelihood, shape, self.memory_budget)
            self._last_source = source
        return replace(source, budget=self.memory_budget)

    def save(self, path: str | Path) -> None:
        """Write what was learnt to one file, atomically; the model itself is not in it.

        Args:
            path: Where to.

        Raises:
            OptionError: If the choice of weights needs a batch, and there was none yet.
        """
        self._ready()
        if self._chosen is None and not isinstance(self._selection, (str, list, tuple)):
            raise OptionError(
                f"expected settled parameters, but {self._selection!r} is settled by the "
                "first batch; fit or score one before saving"
            )
        super().save(path)

    def _options(self) -> Mapping[str, Any]:
        if self._chosen is None:
            return {"parameters": self._selection}
        return {"parameters": [block.name for block in self._chosen.blocks]}


def squared_lengths(source: FactorSource, call: Inputs) -> tuple[Tensor, Tensor]:
    """Return a batch's output ``(B, *shape)`` and ``|L|_F^2``, ``(B,)`` in float64."""
    outputs: dict[int, Tensor] = {}
    totals: dict[int, Tensor] = {}
    for piece in source.pieces(call):
        start = piece.samples.start
        outputs[start] = piece.output
        totals[start] = totals.get(start, 0.0) + piece.factors.squared_norms()
    return torch.cat(list(outputs.values())), torch.cat(list(totals.values()))
