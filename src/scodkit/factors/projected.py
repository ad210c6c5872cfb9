"""Rows in projected coordinates, with the exact squares of what the projections leave out."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from scodkit.factors.engine import Factors, HeldFactors, Tall
from scodkit.factors.pullback import HookFactors, HookLinearization
from scodkit.factors.rules import Rows
from scodkit.factors.rules.rows import compressed, dense, each_squared
from scodkit.model.parameters import ParameterSet
from scodkit.model.projected import ProjectedSet
from scodkit.numerics.matmul import sum_dtype


def held_factors(parameters: ParameterSet, rows: Mapping[str, Tensor]) -> HeldFactors:
    """Return factors from whole gradients by name, ``(b, q, *shape of the parameter)``.

    Args:
        parameters: The chosen weights; if they are projected, so are the gradients.
        rows: The gradients.
    """
    flat = {name: own.flatten(2) for name, own in rows.items()}
    if not isinstance(parameters, ProjectedSet):
        return HeldFactors([(b.columns, flat[b.name]) for b in parameters.blocks])
    like = next(iter(flat.values()))
    filling = _Filling(parameters, like)
    for block in parameters.full.blocks:
        filling.put(block.columns, flat[block.name])
    return filling.factors()


class ProjectedLinearization(HookLinearization):
    """A `HookLinearization` whose rows are in projected coordinates."""

    def pull_back(self, rows: Tensor) -> Factors:
        """See `Linearization.pull_back`.

        Returns:
            Rows that are computed when they are read.
        """
        return ProjectedFactors(self, rows)


class ProjectedFactors(HookFactors):
    """Rows in projected coordinates, computed from layers each time they are read."""

    def hold(self) -> Factors:
        """Return the rows; gradients are projected as they arrive at each layer."""
        parameters = self._linear.parameters
        assert isinstance(parameters, ProjectedSet)
        filling = _Filling(parameters, self._rows)
        self.each(filling.put, self.in_factors())
        return filling.factors()

    def project(self, matrix: Tall) -> tuple[Tensor, Tensor]:
        """Return what `Factors.project` describes."""
        return self.hold().project(matrix)

    def squared_norms(self) -> Tensor:
        """Return what `Factors.squared_norms` describes."""
        return self.hold().squared_norms()


class _Filling:
    """Projected rows of all parameters, put in one after the other.

    Args:
        parameters: The projected weights.
        like: A tensor ``(b, q, ...)`` of the rows' device.
    """

    def __init__(self, parameters: ProjectedSet, like: Tensor) -> None:
        self._pairs = parameters.pairs_at(like.device)
        self._size = parameters.num_parameters
        self._parts: dict[int, Tensor] = {}
        self._outside: dict[int, Tensor] = {}

    def put(self, columns: slice, rows: Rows) -> None:
        """Add the rows of a parameter.

        Args:
            columns: Of the whole parameter, among all weights.
            rows: Its gradients.
        """
        place, _, pair = self._pairs[columns.start]
        if pair is None:
            whole = dense(rows)
            self._parts[place] = whole.to(sum_dtype(whole))
            self._outside[place] = whole.new_zeros(whole.shape[:2], dtype=torch.float64)
            return
        part, squares = compressed(rows, pair)
        part = part if pair.kept is None else part[..., pair.kept]
        self._parts[place] = part
        # rounding may leave less in all than there is inside, or more where that is all
        outside = (squares - each_squared(part)).clamp_min(0)
        self._outside[place] = torch.zeros_like(outside) if pair.complete else outside

    def factors(self) -> HeldFactors:
        """Return the rows of all parameters as one block."""
        places = sorted(self._parts)
        rows = torch.cat([self._parts[i] for i in places], dim=2)
        outside = torch.stack([self._outside[i] for i in places], dim=2)
        return HeldFactors([(slice(0, self._size), rows)], outside)
