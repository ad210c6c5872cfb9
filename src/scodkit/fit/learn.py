"""A short first pass that learns projections from the gradients of a fit's first samples.

The columns of ``P_in`` are the leading eigenvectors of the mean of ``G^T G`` over per-sample
gradients ``G`` of a weight, those of ``P_out`` of ``G G^T``. For short sides the moment is
summed up whole. For longer ones it is multiplied with a few more columns than are wanted, which
are then made orthonormal, in several rounds over the samples (subspace iteration). Of all
entries of the projected gradients those are looked at that the eigenvalues of both sides let
expect to be the largest.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from scodkit.errors import NonFiniteError
from scodkit.factors.alone import LoopEngine
from scodkit.factors.engine import Engine
from scodkit.factors.hooks import HookEngine
from scodkit.factors.moments import Moments
from scodkit.factors.pieces import FactorSource, finite_samples, pick
from scodkit.factors.pullback import HookFactors
from scodkit.factors.rules import Rows
from scodkit.likelihoods import Likelihood
from scodkit.model.inputs import Inputs
from scodkit.model.network import Network
from scodkit.model.parameters import ParameterSet
from scodkit.model.projected import Pair, Projected, Projections
from scodkit.numerics.matmul import sum_dtype

# sides whose moment is summed up whole; rounds over the samples for others, and columns for
# each one that is wanted
_SHORT = 256
_ROUNDS = 3
_PER_COLUMN = 4
_TINY = 1e-300

# float64 copies of the columns of one side while they are made orthonormal
_COPIES = 3


def read_ahead(
    network: Network, first: Inputs, batches: Iterable[Any], samples: int
) -> tuple[list[Inputs], Iterable[Any]]:
    """Return the inputs of the first batches, with so many samples, and all batches again.

    Args:
        network: Takes inputs out of batches.
        first: The inputs of the first batch.
        batches: All of them.
        samples: How many to read.
    """
    stream = iter(batches)
    calls, read, count = [first], [next(stream)], first.batch_size
    while count < samples:
        more = list(itertools.islice(stream, 1))
        if not more:
            break
        read += more
        calls.append(network.inputs_of(more[0]))
        count += calls[-1].batch_size
    calls[-1] = calls[-1].first(calls[-1].batch_size - max(0, count - samples))
    return calls, itertools.chain(read, stream)


def learn(
    projected: Projected,
    network: Network,
    parameters: ParameterSet,
    likelihood: Likelihood,
    shape: tuple[int, ...],
    calls: list[Inputs],
    budget: int,
) -> Projections:
    """Return projections for a model's weights.

    Args:
        projected: How.
        network: The model, held in eval mode.
        parameters: The weights.
        likelihood: Of its outputs.
        shape: Of a typical sample's output.
        calls: Samples to learn from.
        budget: Bytes for gradients at a time.
    """
    engine = _engine_for(network, parameters, calls[0])
    source = FactorSource(engine, likelihood, shape, budget)
    weights = parameters.weights(network.model)
    ends: dict[int, tuple[str, _End, _End]] = {}
    for block in parameters.blocks:
        sides = projected.sides(block.shape)
        if sides is not None:
            name, like = block.name, weights[block.name]
            out = _End(sides[0], projected, f"{name} out", like)
            into = _End(sides[1], projected, f"{name} in", like)
            ends[block.columns.start] = (name, out, into)
    for _ in range(_ROUNDS):
        moments = {
            start: Moments(
                (out.size, into.size), out.probe, into.probe, projected.moments == "kfac"
            )
            for start, (_, out, into) in ends.items()
            if out.probe is not None or into.probe is not None
        }
        if not moments:
            break
        _add_samples(moments, source, calls)
        for start, found in moments.items():
            _, out, into = ends[start]
            out.take(found.of_out)
            into.take(found.of_in)
    pairs = {}
    both = [(out, into) for _, out, into in ends.values()]
    masks = _entries(both, projected.rank, gradients=projected.moments == "gradient")
    for (name, out, into), mask in zip(ends.values(), masks, strict=True):
        pairs[name] = _pair(out, into, mask)
    return Projections(projected, parameters.names, pairs).to("cpu")


def learning_bytes(projected: Projected, parameters: ParameterSet, itemsize: int) -> int:
    """Return what is held until a fit has its projections, beside rows within the budget.

    Args:
        projected: How they are learnt, or given.
        parameters: The weights.
        itemsize: Bytes of a weight.

    Returns:
        Columns and moments of all sides while they are learnt, and those of the longest in
        float64; or a whole gradient, if that is more: plain autograd forms it to compare with.
    """
    sizes = [math.prod(block.shape) for block in parameters.blocks]
    wide = max(itemsize, torch.float32.itemsize)
    # what is in half precision is projected from a copy
    gradient = itemsize * sum(sizes) + (wide * max(sizes) if wide > itemsize else 0)
    if projected.given is not None or projected.moments == "random":
        return gradient
    ends = [
        size * (size if size <= max(_SHORT, width) else width)
        for block in parameters.blocks
        for size in projected.sides(block.shape) or ()
        for width in [min(size, _PER_COLUMN * projected.rank)]
    ]
    longest = _COPIES * torch.float64.itemsize * max(ends, default=0)
    return max(gradient, 2 * wide * sum(ends) + longest)


def _entries(ends: Iterable[tuple[_End, _End]], rank: int, *, gradients: bool) -> list[Tensor]:
    """Return which entries of the projected gradients to look at, a mask for each weight.

    Those with the largest mean squares over all weights, ``rank^2`` for each on average, as if
    the sides of a weight were independent: ``lambda_i mu_j / tr`` with the eigenvalues of both.
    Every weight has one at least.

    Args:
        ends: Both sides of each weight.
        rank: Of the projections.
        gradients: Whether eigenvalues are those of the gradients' own moments.
    """
    expected = []
    for out, into in ends:
        of_out, of_in = (end.values[: end.most].clamp_min(0) for end in (out, into))
        sums = float(out.values.sum()), float(into.values.sum())
        # of gradients either side's is what all squares sum to; else weights count alike
        mass = max(sums) if gradients else math.prod(sums)
        squares = of_out[:, None] * of_in / max(mass, _TINY)
        squares[0, 0] = torch.inf
        expected.append(squares)
    flat = torch.cat([squares.flatten() for squares in expected] or [torch.empty(0)])
    count = min(len(expected) * rank**2, len(flat))
    chosen = torch.zeros(len(flat), dtype=torch.bool)
    chosen[flat.argsort(descending=True, stable=True)[:count]] = True
    parts = torch.split(chosen, [squares.numel() for squares in expected])
    return [part.view_as(squares) for part, squares in zip(parts, expected, strict=True)]


def _pair(out: _End, into: _End, mask: Tensor) -> Pair:
    """Return the projections whose product has the entries of a mask."""
    sides = (out.size, into.size)
    rows, columns = (int(mask.any(axis).nonzero().max()) + 1 for axis in (1, 0))
    inside = mask[:rows, :columns]
    if bool(inside.all()):
        return Pair(sides, out.leading(rows, whole=True), into.leading(columns, whole=True))
    kept = inside.flatten().nonzero()[:, 0]
    return Pair(sides, out.leading(rows), into.leading(columns), kept)


class _End:
    """Finds the leading directions of one side of a weight.

    Args:
        size: Of the side.
        projected: How.
        name: Of the side: it sets where the search starts.
        weight: The weight.

    Attributes:
        probe: Columns to multiply the moment with in the next round; None if it is over.
        values: Eigenvalues of the moment, the largest first, in float64 on the CPU.
        most: How many directions may be used.
    """

    def __init__(self, size: int, projected: Projected, name: str, weight: Tensor) -> None:
        self.size = size
        dtype, width = sum_dtype(weight), min(size, _PER_COLUMN * projected.rank)
        generator = torch.Generator().manual_seed(crc32(f"{projected.seed} {name}".encode()))
        self.probe: Tensor | None = None
        self.most = width
        # random ones have none: any would do
        self.values = 1 / torch.arange(1, width + 1, dtype=torch.float64)
        self._rounds = 1 if size <= max(_SHORT, width) else _ROUNDS
        if self._rounds == 1 and projected.moments != "random":
            self.probe = torch.eye(size, dtype=dtype, device=weight.device)
            return
        start = torch.randn(size, width, generator=generator, dtype=torch.float64)
        self._found = torch.linalg.qr(start.to(weight.device)).Q.to(dtype)
        if projected.moments != "random":
            self.probe = self._found

    def take(self, moment: Tensor | None) -> None:
        """Use the moment times the columns.

        Args:
            moment: ``(size, l)``; None if there were no columns.

        Raises:
            NonFiniteError: If it has overflowed.
        """
        if moment is None or self.probe is None:
            return
        if not bool(moment.isfinite().all()):
            raise NonFiniteError(
                "expected finite gradients to learn projections from, but they overflow; type "
                "Projected(given=...) with those of other data, or monitor fewer layers"
            )
        self._rounds -= 1
        if self._rounds:
            self.probe = torch.linalg.qr(moment).Q
            return
        core = (self.probe.mT @ moment).double()
        values, turned = torch.linalg.eigh((core + core.mT) / 2)
        found = torch.linalg.qr(self.probe.double() @ turned.flip(1)).Q
        self.values, self._found = values.flip(0).cpu(), found.to(moment.dtype)
        self.probe = None

    def leading(self, count: int, *, whole: bool = False) -> Tensor | None:
        """Return the first so many directions, ``(size, count)``.

        Args:
            count: How many.
            whole: Whether all of them may be any, as the identity's: then None.
        """
        everything = whole and count == self.size
        return None if everything else self._found[:, :count].contiguous()


def _add_samples(
    moments: Mapping[int, Moments], source: FactorSource, calls: Iterable[Inputs]
) -> None:
    """Add the gradients of samples to the moments of weights.

    Args:
        moments: By the first column of the weight.
        source: Computes the gradients.
        calls: Inputs of the samples; those with a NaN or an infinity are left out.
    """
    blocks = source.engine.parameters.blocks

    def use(columns: slice, rows: Rows) -> None:
        if columns.start in moments:
            moments[columns.start].add(rows)

    for call in calls:
        if call.batch_size == 0:
            continue
        with torch.no_grad():
            finite = finite_samples(call, source.engine.network(call))
        if not bool(finite.any()):
            continue
        for piece in source.pieces(pick(call, finite.nonzero()[:, 0].tolist())):
            if isinstance(piece.factors, HookFactors):
                piece.factors.each(use, piece.factors.in_factors())
                continue
            for columns, rows in piece.factors.blocks():
                for own in (block.columns for block in blocks):
                    use(own, rows[:, :, own.start - columns.start : own.stop - columns.start])


def _engine_for(network: Network, parameters: ParameterSet, call: Inputs) -> Engine:
    """Return the fastest engine that runs: its rows are checked once they are projected."""

    def loop(network: Network, parameters: ParameterSet, *_: object) -> Engine:
        return LoopEngine(network, parameters)

    engine = HookEngine(network, parameters)
    engine.otherwise = loop  # of batches that are computed in another way
    try:
        engine.linearize(call.first(2))
    except Exception:  # whatever a third-party module raises under a torch function mode
        return loop(network, parameters)
    return engine
