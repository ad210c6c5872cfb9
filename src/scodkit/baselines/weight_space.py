"""Methods that score gradients in weight space: which weights, which engine, which rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from scodkit.baselines.baseline import Baseline, State
from scodkit.errors import OptionError
from scodkit.factors.choose import choose_engine
from scodkit.factors.engine import Factors
from scodkit.factors.pieces import FactorSource, MemoryBudget
from scodkit.model.inputs import Inputs
from scodkit.model.parameters import ParameterSet, Selection, select


@dataclass(eq=False, repr=False, kw_only=True)
class WeightSpaceBaseline(Baseline):
    """A method that pulls rows at the output back to the weights.

    Args:
        model: The trained network.
        likelihood: What distribution its output parametrises; any.
        parameters: Which weights, as for `Monitor`.
        inputs: Picks the model's inputs from a batch, as for `Monitor`.
        outputs: Picks the prediction from what the model returns, as for `Monitor`.
        targets: Picks the targets from a training batch; see `Picks`.

    Attributes:
        parameters: Names of the chosen weights; before the first batch, the choice as given.
        memory_budget: Bytes that per-sample gradients may take at a time, as of a `Monitor`.
    """

    memory_budget = MemoryBudget()

    parameters: Selection = "all"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._chosen: ParameterSet | None = None
        self._last_source: FactorSource | None = None

    def _parameters(self, call: Inputs) -> ParameterSet:
        """Return the chosen weights; the first call settles the choice."""
        if self._chosen is None:
            self._chosen = select(self.parameters, self._network, call)
            vars(self)["parameters"] = list(self._chosen.names)
        return self._chosen

    def _parameters_beyond(self, rank: int, call: Inputs) -> ParameterSet:
        """Return the chosen weights, of which there must be more than ``rank``.

        Raises:
            OptionError: If ``rank`` directions would leave nothing outside.
        """
        parameters = self._parameters(call)
        if rank >= parameters.num_parameters:
            raise OptionError(
                f"expected rank < {parameters.num_parameters}, the number of weights, got "
                f"{rank}: nothing would be outside; type a smaller rank="
            )
        return parameters

    def _source(self, call: Inputs) -> FactorSource:
        """Return the source of factors; the first batch on a device chooses its engine."""
        source = self._last_source
        if source is None or source.engine.device != self._network.device:
            with torch.no_grad():
                shape = tuple(self._network(call.samples(slice(0, 2))).shape[1:])
            engine = choose_engine(self._network, self._parameters(call), call)
            source = FactorSource(engine, self.likelihood, shape, self.memory_budget)
            self._last_source = source
        return replace(source, budget=self.memory_budget)

    def save(self, path: str | Path) -> None:
        """Write the fitted state to one file, atomically; the model itself is not in it.

        Args:
            path: File to write.

        Raises:
            OptionError: If the choice of weights needs a batch, and none was seen yet.
        """
        self._ready()
        if not isinstance(self.parameters, (str, list, tuple)):
            raise OptionError(
                f"expected settled parameters, but {self.parameters!r} is settled by the "
                "first batch; fit or score one before saving"
            )
        super().save(path)


def over_pieces(
    source: FactorSource,
    call: Inputs,
    value_of: Callable[[Factors], Tensor],
    join: Callable[[Tensor, Tensor], Tensor] = torch.add,
    *,
    hold: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return a batch's output ``(B, *shape)`` and a value for each sample, ``(B, ...)``.

    Args:
        source: Turns the batch into factors, piece by piece.
        call: The batch.
        value_of: Returns the values ``(b, ...)`` of a piece, from some of its directions.
        join: Combines the values of the same samples from further directions.
        hold: Whether ``value_of`` reads the factors more than once.
    """
    outputs: dict[int, Tensor] = {}
    values: dict[int, Tensor] = {}
    for piece in source.pieces(call, hold=hold):
        start, value = piece.samples.start, value_of(piece.factors)
        outputs[start] = piece.output
        values[start] = join(values[start], value) if start in values else value
    return torch.cat(list(outputs.values())), torch.cat(list(values.values()))


class IdentityCurvature(WeightSpaceBaseline):
    """``|L|_F^2``: how much any change of the weights would change this prediction.

    What a `Monitor` scores before it has seen data, at ``prior_scale=1``: SCOD without its
    sketch, the ablation that says what the training data's curvature is worth. No fit; as many
    backward passes as the likelihood has directions. Nats (squared units), >= 0.

    Args:
        model: The trained network.
        likelihood: What distribution its output parametrises; any.
        parameters: Which weights, as for `Monitor`.
        inputs: Picks the model's inputs from a batch, as for `Monitor`.
        outputs: Picks the prediction from what the model returns, as for `Monitor`.
        targets: Not used.

    Examples:
        >>> from scodkit import Gaussian
        >>> from torch import nn
        >>> method = IdentityCurvature(nn.Linear(2, 1), Gaussian())
        >>> method.score(torch.tensor([[3.0, 4.0]]))  # 3^2 + 4^2, and 1 for the bias
        tensor([26.])
    """

    learns: ClassVar = False

    def _output_and_score(self, call: Inputs, state: State) -> tuple[Tensor, Tensor]:
        return over_pieces(self._source(call), call, lambda factors: factors.squared_norms())
