"""What a fit is made of: likelihood, sketch, weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from scodkit.errors import OptionError
from scodkit.factors import CHECK_EVERY, FactorSource, choose_engine, named_engine
from scodkit.likelihoods import Likelihood
from scodkit.model.network import Inputs, Network
from scodkit.model.parameters import ParameterSet, Selection
from scodkit.sketch import Sketch, documents


def check_options(
    model: object, likelihood: object, rank: object, sketch: object, prior_scale: float
) -> None:
    """Refuse what a monitor cannot be made of, at once rather than after a pass.

    Raises:
        OptionError: With what to type instead.
    """
    problem = None
    if not isinstance(model, nn.Module) or isinstance(model, torch.jit.ScriptModule):
        problem = f"an nn.Module that is not scripted, got {type(model).__name__}"
    elif not isinstance(likelihood, Likelihood):
        problem = (
            f"a likelihood object, got {likelihood!r}; type Categorical(), Gaussian(), "
            "Bernoulli() or another from scodkit"
        )
    elif not isinstance(rank, int) or rank < 1:
        problem = f"an integer rank >= 1, got {rank!r}"
    elif not isinstance(sketch, Sketch):
        problem = f"a sketch object, got {sketch!r}; type Nystrom() or another, with brackets"
    elif not 1e-100 < prior_scale < 1e100:  # whose squares are numbers
        problem = f"a positive, finite prior_scale, got {prior_scale!r}"
    if problem:
        raise OptionError(f"expected {problem}")


@dataclass(frozen=True)
class Recipe:
    """What to fit.

    Args:
        likelihood: What distribution the output parametrises.
        rank: ``k``.
        sketch: How the curvature is summarised.
        selection: Which weights.
        budget: Bytes that rows in weight space may take at a time.
        check_every: One in so many batches is checked, 0 for none; see `HookEngine`.
    """

    likelihood: Likelihood
    rank: int
    sketch: Sketch
    selection: Selection
    budget: int
    check_every: int = CHECK_EVERY

    @property
    def identity(self) -> dict[str, Any]:
        """What two fits must have in common to be one, as plain data."""
        return {
            "likelihood": documents.describe(self.likelihood),
            "sketch": documents.describe(self.sketch),
            "rank": self.rank,
        }

    def source(self, network: Network, parameters: ParameterSet, call: Inputs) -> FactorSource:
        """Return what turns batches into factors; the engine is chosen on ``call``."""
        shape = tuple(first_output(network, call).shape[1:])
        engine = choose_engine(network, parameters, call, self.check_every)
        return FactorSource(engine, self.likelihood, shape, self.budget)

    def source_again(
        self, network: Network, parameters: ParameterSet, engine: str, shape: tuple[int, ...]
    ) -> FactorSource | None:
        """Return what turns batches into factors, with the engine of an earlier fit.

        Args:
            network: The model.
            parameters: The chosen weights.
            engine: Its name.
            shape: Of a typical sample's output.

        Returns:
            None where another engine has to be chosen, as the device is another.
        """
        again = named_engine(engine, network, parameters, self.check_every)
        if again is None:
            return None
        return FactorSource(again, self.likelihood, shape, self.budget)


def first_output(network: Network, call: Inputs) -> Tensor:
    """Return the model's output on the first samples of a batch, ``(b, *shape)``."""
    with torch.no_grad():
        return network(call.samples(slice(0, 2)))
