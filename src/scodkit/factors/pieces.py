"""A batch cut into pieces that fit a memory budget, each with its factors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from scodkit.factors.engine import Engine, Factors
from scodkit.likelihoods import Likelihood
from scodkit.network import Inputs


@dataclass(frozen=True)
class Piece:
    """Some samples of a batch, with some of their directions.

    Args:
        samples: Which samples of the batch.
        output: Their outputs ``(b, *shape)``.
        finite: ``(b,)``, False where an input or the output has a NaN or an infinity; the
            rows of those samples mean nothing.
        factors: Their rows in weight space, ``(b, q, n)`` per block.
        complete: True when these are the samples' last directions.
    """

    samples: slice
    output: Tensor
    finite: Tensor
    factors: Factors
    complete: bool


@dataclass(frozen=True)
class FactorSource:
    """Everything that turns batches into Fisher factors.

    Args:
        engine: Pulls rows back to weight space.
        likelihood: Says which rows.
        directions: How many rows a typical sample has, ``p``.
        budget: Bytes that rows in weight space may take at a time. One row is always formed.
    """

    engine: Engine
    likelihood: Likelihood
    directions: int
    budget: int

    def pieces(self, call: Inputs) -> Iterator[Piece]:
        """Cut a batch into pieces and yield their factors.

        Every sample comes with all its directions before the next samples start.

        Args:
            call: The batch.

        Yields:
            The pieces, in order.
        """
        rows_at_once = self._rows_at_once
        step = max(1, rows_at_once // max(1, self.directions))
        for start in range(0, call.batch_size, step):
            samples = slice(start, min(start + step, call.batch_size))
            some = call if step >= call.batch_size else call.samples(samples)
            linear = self.engine.linearize(some)
            finite, rows = self._rows(linear.output, some)
            for first in range(0, rows.shape[1], rows_at_once):
                factors = linear.pull_back(rows[:, first : first + rows_at_once])
                complete = first + rows_at_once >= rows.shape[1]
                yield Piece(samples, linear.output, finite, factors, complete)

    @property
    def splits_samples(self) -> bool:
        """Whether the directions of one sample come in several pieces."""
        return self.directions > self._rows_at_once

    @property
    def _rows_at_once(self) -> int:
        return max(1, self.budget // self.engine.row_bytes)

    def _rows(self, output: Tensor, call: Inputs) -> tuple[Tensor, Tensor]:
        keys = sample_keys(call) if self.likelihood.draws else None
        finite = torch.stack(
            [t.reshape(len(output), -1).isfinite().all(1) for t in (*call.tensors(), output)]
        ).all(0)
        if bool(finite.all()):
            return finite, self.likelihood.factor(output, keys)
        directions = self.likelihood.num_directions(output.shape[1:])
        rows = output.new_zeros(output.shape[0], directions, output[0].numel())
        if bool(finite.any()):
            kept = None if keys is None else keys[finite.to(keys.device)]
            rows[finite] = self.likelihood.factor(output[finite], kept)
        return finite, rows


def sample_keys(call: Inputs) -> Tensor:
    """Return one integer per sample, ``(B,)`` on the CPU, that depends on that sample alone."""
    keys = torch.zeros(call.batch_size, dtype=torch.int64)
    for tensor in call.tensors():
        raw = tensor.detach().cpu().contiguous().reshape(call.batch_size, -1)
        raw = raw.view(torch.uint8).reshape(call.batch_size, -1).to(torch.int64)
        # odd multipliers that differ by place, in wrapping arithmetic
        place = torch.arange(raw.shape[1]) * 2654435761 | 1
        keys = keys * 1000003 + (raw * place).sum(1)
    return keys
