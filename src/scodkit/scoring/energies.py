"""The terms of scores: squared norms of Fisher factors, in total and along a basis."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from scodkit.factors.engine import Factors, Sums
from scodkit.factors.pieces import FactorSource
from scodkit.model.inputs import Inputs
from scodkit.model.projected import ProjectedSet
from scodkit.sketch.eigenbasis import Eigenbasis


@dataclass(frozen=True)
class Energies:
    """The terms of a score: the squared norms of ``L``, in total and along the basis.

    Args:
        total: ``|L|_F^2``, ``(b,)`` in float64.
        along: ``|u_j^T L|^2`` for each basis vector, ``(b, k)`` in float64.
    """

    total: Tensor
    along: Tensor

    @staticmethod
    def none(basis: Eigenbasis) -> Energies:
        """Return the energies of an empty batch."""
        empty = basis.values.new_empty(0, basis.rank, dtype=torch.float64)
        return Energies(empty.sum(1), empty)

    def __add__(self, other: Energies) -> Energies:
        """Return the energies of two sets of directions of the same samples."""
        return Energies(self.total + other.total, self.along + other.along)


def energies(factors: Factors, basis: Eigenbasis) -> Energies:
    """Return the squared norms that a score is computed from."""
    total, along = factors.project(basis.vectors)
    return Energies(total, along.square().sum(1))


def group_energies(
    source: FactorSource, call: Inputs, basis: Eigenbasis
) -> tuple[Tensor, Energies, Tensor]:
    """Return the energies of each group of rows: of each token, pixel, box.

    Args:
        source: As in `score_batch`; its likelihood tells the groups.
        call: The batch; not empty.
        basis: The eigenbasis, on the model's device.

    Returns:
        The output ``(B, *shape)``; energies ``(B, g)`` and ``(B, g, k)``; ``(B,)`` booleans,
        False for samples with a NaN or an infinity.
    """
    parts: dict[int, Energies] = {}
    outputs: dict[int, Tensor] = {}
    good: dict[int, Tensor] = {}
    done: dict[int, int] = {}  # directions
    # what projections leave out of each row is known if rows are held
    hold = isinstance(source.engine.parameters, ProjectedSet)
    for piece in source.pieces(call, hold=hold):
        start = piece.samples.start
        groups = source.likelihood.groups(piece.output.shape[1:])
        count = int(groups.max()) + 1
        rows = _each_row(piece.factors, basis)
        first, size = done.get(start, 0), rows.total.shape[1]
        own = groups[first : first + size].to(rows.total.device)
        part = Energies(
            rows.total.new_zeros(len(rows.total), count).index_add(1, own, rows.total),
            rows.along.new_zeros(len(rows.total), count, basis.rank).index_add(
                1, own, rows.along
            ),
        )
        parts[start] = parts[start] + part if start in parts else part
        outputs[start], good[start], done[start] = piece.output, piece.finite, first + size
    total = joined([part.total for part in parts.values()])
    along = joined([part.along for part in parts.values()])
    finite = joined(list(good.values())) & (total.sum(1) + along.sum((1, 2)) < torch.inf)
    return joined(list(outputs.values())), Energies(total, along), finite


def _each_row(factors: Factors, basis: Eigenbasis) -> Energies:
    """Return the energies of every row, ``(b, q)`` and ``(b, q, k)``."""
    sums, shape = Sums(), torch.Size()
    for columns, rows in factors.blocks():
        shape = rows.shape[:2]
        vectors = basis.vectors[columns].to(rows.device)
        sums.add_rows(rows.flatten(0, 1)[:, None], vectors)
    total, along = sums.result
    total = total.view(shape)
    if factors.outside is not None:
        total = total + factors.outside.sum(2)
    return Energies(total, along.square().view(*shape, -1))


def finite_ones(parts: list[Energies], finite: Tensor) -> Energies:
    """Return the energies of all samples; infinite where these or a sample are not finite."""
    total = joined([part.total for part in parts])
    along = joined([part.along for part in parts])
    # the sum is infinite or NaN where one of its terms is
    good = finite & (total + along.sum(1) < torch.inf)
    return Energies(torch.where(good, total, torch.inf), torch.where(good[:, None], along, 0.0))


def joined(parts: list[Tensor]) -> Tensor:
    """Return tensors as one."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)
