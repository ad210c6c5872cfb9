"""What a fit is made of: likelihood, sketch, weights; and the memory that takes."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from scodkit import artifact
from scodkit.costs import MANY, Work, compare
from scodkit.errors import EngineFallbackWarning, OptionError
from scodkit.factors import (
    FactorSource,
    Passes,
    Portions,
    ProductSource,
    choose_engine,
    choose_jacobian,
    count_passes,
    row_bytes,
)
from scodkit.likelihoods import Likelihood
from scodkit.mixed import sum_dtype
from scodkit.network import Inputs, Network
from scodkit.parameters import ParameterSet, Selection
from scodkit.plan import Plan
from scodkit.sketch import Sketch


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
    elif not 1e-100 < prior_scale < 1e100:
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
    """

    likelihood: Likelihood
    rank: int
    sketch: Sketch
    selection: Selection
    budget: int

    @property
    def identity(self) -> dict[str, Any]:
        """What two fits must have in common to be one, as plain data."""
        return {
            "likelihood": artifact.describe(self.likelihood),
            "sketch": artifact.describe(self.sketch),
            "rank": self.rank,
        }

    def plan(
        self,
        network: Network,
        parameters: ParameterSet,
        call: Inputs,
        num_data: int | None,
        products: bool | None = None,
    ) -> Plan:
        """Return the memory a fit takes on batches like ``call``, and which way it goes.

        Args:
            network: The model.
            parameters: The chosen weights.
            call: A batch.
            num_data: Samples to come, where known.
            products: Whether to fit by products with the curvature rather than in rows; None
                for the cheaper way.
        """
        output = first_output(network, call)
        directions = self.likelihood.num_directions(output.shape[1:])
        num_rows = None if num_data is None else num_data * directions
        columns = self.sketch.columns(parameters.num_parameters, self.rank, num_rows)
        one_row = row_bytes(network, parameters)
        # a batch's rows fill the budget at most, but one is formed in any case
        working = max(one_row, min(self.budget, call.batch_size * directions * one_row))
        working += directions * output[0].numel() * output.itemsize
        costs = None
        if self._may_take_products(network, parameters, directions, products):
            work = Work(call.batch_size, directions, parameters.num_parameters, columns)
            passes = count_passes(network, parameters, call)
            portions = self._portions(network, parameters, passes, work)
            costs = compare(work, passes, portions, working, products)
        plan = Plan.of(
            num_parameters=parameters.num_parameters,
            directions=directions,
            columns=columns,
            rank=self.rank,
            itemsize=sum_dtype(output).itemsize,
            kept_bytes=self.sketch.scratch_bytes(parameters.num_parameters, columns),
            working_bytes=working,
            device=network.device,
        )
        return replace(plan, costs=costs)

    def _may_take_products(
        self, network: Network, parameters: ParameterSet, directions: int, wanted: bool | None
    ) -> bool:
        """Return whether products are worth a thought.

        Raises:
            OptionError: If they are asked for where there are none.
        """
        objection = None
        if not self.sketch.takes_products:
            objection = f"{self.sketch} takes rows only: type sketch=Nystrom() or TwoSided()"
        elif self.likelihood.draws:
            objection = f"{self.likelihood} draws a few rows, which are cheap"
        elif parameters.itemsize(network.model) < torch.float32.itemsize:
            objection = "products lose too many digits with weights in half precision"
        if wanted and objection:
            raise OptionError(
                f"expected a fit that can be made by products, but {objection}; or leave out "
                "products=True"
            )
        return not objection and (wanted or (wanted is None and directions >= MANY))

    def _portions(
        self, network: Network, parameters: ParameterSet, passes: Passes, work: Work
    ) -> Portions:
        column = parameters.num_parameters * parameters.itemsize(network.model)
        return Portions.of(passes, column, self.budget, work.batch_size, work.columns)

    def source(self, network: Network, parameters: ParameterSet, call: Inputs) -> FactorSource:
        """Return what turns batches into factors; the engine is chosen on ``call``."""
        shape = tuple(first_output(network, call).shape[1:])
        engine = choose_engine(network, parameters, call)
        return FactorSource(engine, self.likelihood, shape, self.budget)

    def product_source(
        self, network: Network, parameters: ParameterSet, call: Inputs, wanted: bool | None
    ) -> ProductSource | None:
        """Return what turns batches into products with their curvature; tried on ``call``.

        Args:
            network: The model.
            parameters: The chosen weights.
            call: A batch.
            wanted: True where products are asked for.

        Returns:
            None, with a warning, where the model does not allow it and it is not asked for.

        Raises:
            OptionError: If the model does not allow it, and it is asked for.
        """
        kind, passed_over = choose_jacobian(network, parameters, call)
        if kind is None:
            words = f"products with the curvature of {type(network.model).__name__}"
            if wanted:
                raise OptionError(
                    f"expected {words} that agree with plain autograd, but all were passed "
                    f"over: {passed_over}; leave out products=True"
                )
            warnings.warn(
                f"{words} cannot be trusted, so it is fitted in rows, more slowly; passed "
                f"over: {passed_over}",
                EngineFallbackWarning,
                stacklevel=2,
            )
            return None
        passes = count_passes(network, parameters, call)
        columns = self.sketch.columns(parameters.num_parameters, self.rank)
        about = (kind, self.likelihood, passes, columns, self.budget)
        return ProductSource(network, parameters, *about)


def first_output(network: Network, call: Inputs) -> Tensor:
    """Return the model's output on the first samples of a batch, ``(b, *shape)``."""
    with torch.no_grad():
        return network(call.samples(slice(0, 2)))
