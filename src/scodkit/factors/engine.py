"""The interface between code that computes Fisher factors and code that uses them.

An engine linearises the network at a batch; the linearisation pulls rows at the output back
to rows in weight space. Rows come in blocks of columns, so that no engine has to hold, and no
caller can request, one flat tensor over all parameters. `Head` needs no rows at all.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from typing_extensions import Self

from scodkit.factors.live_bytes import Memory
from scodkit.factors.rules.rows import activations_along, project_whole
from scodkit.likelihoods import Likelihood
from scodkit.model.inputs import Inputs
from scodkit.model.network import Network
from scodkit.model.parameters import ParameterSet
from scodkit.numerics import kernels
from scodkit.numerics.matmul import matmul, squared_norms, sum_dtype

# while a row is being computed, its block, the block's source and one temporary are alive
_COPIES_PER_ROW = 3

# bytes of rows up to which call overhead, not arithmetic, dominates the time
_FEW_BYTES = 1 << 20


class Tall(Protocol):
    """A matrix ``(N, k)`` that is read by slices of rows."""

    def __getitem__(self, rows: slice, /) -> Tensor:
        """Return a slice of its rows, ``(n, k)``."""
        ...


class Factors(ABC):
    """Rows in weight space for ``b`` samples and ``q`` directions each.

    Row ``(i, j)`` is column ``j`` of the Fisher factor ``L`` of sample ``i``: a vector of ``N``
    entries, split into blocks along the parameters.

    Attributes:
        num_rows: ``b q``.
        outside: What is not in the columns but belongs to the squared norms, in rows of
            projected weights: squares of each parameter, ``(b, q, parameters)`` in float64,
            known if rows are held; None if the columns are all there is.
    """

    num_rows: int
    outside: Tensor | None = None

    @abstractmethod
    def blocks(self) -> Iterable[tuple[slice, Tensor]]:
        """Return ranges of columns with their rows ``(b, q, n)``.

        The ranges tile ``range(N)``, in any order. May be called more than once.
        """

    def hold(self) -> Factors:
        """Return the same rows materialised in memory, to be read more than once."""
        return self

    def add_up(self, sums: Tensor) -> Tensor:
        """Reduce sums over columns across the processes that share the columns, if any do.

        Args:
            sums: Over the columns of this process; may be overwritten.

        Returns:
            The sums over all columns.
        """
        return sums

    def project(self, matrix: Tall) -> tuple[Tensor, Tensor]:
        """Return ``|L|_F^2`` and the rows times a matrix, block by block.

        Args:
            matrix: ``(N, k)``; if it is on another device, it is copied block by block.

        Returns:
            Squared norms ``(b,)`` in float64, and products ``(b, q, k)`` summed in float64:
            a score is a difference of near-equal sums.
        """
        sums = Sums()
        for columns, rows in self.blocks():
            sums.add_rows(rows, matrix[columns].to(rows.device))
        norms, along = sums.result
        return self._with_outside(norms), along

    def squared_norms(self) -> Tensor:
        """Return ``|L|_F^2``, ``(b,)`` in float64; NaN or inf if an entry is."""
        inside = torch.stack([squared_norms(rows) for _, rows in self.blocks()]).sum(0)
        return self._with_outside(inside)

    def _with_outside(self, norms: Tensor) -> Tensor:
        return norms if self.outside is None else norms + self.outside.sum((1, 2))


class Sums:
    """Squared norms and projections, summed over blocks of columns in float64."""

    def __init__(self) -> None:
        self._norms: Tensor | None = None
        self._along: Tensor | None = None

    def add(self, norms: Tensor, along: Tensor) -> None:
        """Add a block's squared norms ``(b,)`` and projections ``(b, q, k)``."""
        self._norms = norms if self._norms is None else self._norms + norms
        self._along = along.double() if self._along is None else self._along + along

    def add_rows(self, rows: Tensor, matrix: Tensor) -> None:
        """Add a block's rows ``(b, q, n)``, multiplied by a matrix ``(n, k)``."""
        if kernels.projects(rows, matrix):
            self.add(*kernels.project(rows, matrix))
            return
        along = matmul(rows.flatten(0, 1), matrix)
        self.add(squared_norms(rows), along.view(*rows.shape[:2], -1))

    @property
    def result(self) -> tuple[Tensor, Tensor]:
        """The sums over all blocks; at least one must have been added."""
        assert self._norms is not None
        assert self._along is not None
        return self._norms, self._along


class HeldFactors(Factors):
    """Factors whose rows are in memory.

    Args:
        blocks: Ranges of columns with their rows ``(b, q, n)``.
        outside: See `Factors`.
    """

    def __init__(
        self, blocks: list[tuple[slice, Tensor]], outside: Tensor | None = None
    ) -> None:
        self._blocks = blocks
        self.num_rows = blocks[0][1].shape[0] * blocks[0][1].shape[1]
        self.outside = outside

    def blocks(self) -> Iterable[tuple[slice, Tensor]]:
        """Return each range of columns with its rows."""
        return self._blocks

    def project(self, matrix: Tall) -> tuple[Tensor, Tensor]:
        """See `Factors.project`.

        Returns:
            The same; for a few rows in a single block on a CPU, with as few calls as possible.
        """
        columns, rows = self._blocks[0]
        if len(self._blocks) == 1 and not rows.is_cuda and rows.nbytes <= _FEW_BYTES:
            part = matrix if isinstance(matrix, Tensor) else matrix[columns]
            if part.dtype == rows.dtype and part.device == rows.device:
                norms, along = project_whole(rows, part)
                return self._with_outside(norms), along
        return super().project(matrix)


class FactorsOf(Factors):
    """The factors of a subset of a batch's samples.

    Args:
        factors: Of all samples.
        kept: Boolean mask ``(b,)``, True for the samples to keep.
    """

    def __init__(self, factors: Factors, kept: Tensor) -> None:
        self._factors = factors
        self._kept = kept
        self.outside = None if factors.outside is None else factors.outside[kept]
        self.num_rows = factors.num_rows // max(1, len(kept)) * int(kept.sum())

    def blocks(self) -> Iterable[tuple[slice, Tensor]]:
        """Return each range of columns with the rows of the kept samples."""
        for columns, rows in self._factors.blocks():
            yield columns, rows[self._kept.to(rows.device)]

    def add_up(self, sums: Tensor) -> Tensor:
        """See `Factors.add_up`.

        Returns:
            The sums.
        """
        return self._factors.add_up(sums)


class SharedFactors(Factors):
    """Rows whose columns are distributed over several processes.

    Args:
        columns: The columns of this process.
        add_up: Sums a tensor over all processes (an all-reduce).
    """

    def __init__(self, columns: Factors, add_up: Callable[[Tensor], Tensor]) -> None:
        self._columns, self._add_up = columns, add_up
        self.num_rows = columns.num_rows

    def blocks(self) -> Iterable[tuple[slice, Tensor]]:
        """Return the ranges of columns of this process, relative to its first column."""
        return self._columns.blocks()

    def hold(self) -> Factors:
        """See `Factors.hold`.

        Returns:
            The same, with the columns of this process in memory.
        """
        return SharedFactors(self._columns.hold(), self._add_up)

    def add_up(self, sums: Tensor) -> Tensor:
        """See `Factors.add_up`.

        Returns:
            The sums over the columns of all processes.
        """
        return self._add_up(sums)

    def project(self, matrix: Tall) -> tuple[Tensor, Tensor]:
        """See `Factors.project`.

        Returns:
            The same, over the columns of all processes.
        """
        norms, along = self._columns.project(matrix)
        flat = self._add_up(torch.cat([norms[:, None], along.flatten(1)], dim=1))
        return flat[:, 0], flat[:, 1:].reshape(along.shape)

    def squared_norms(self) -> Tensor:
        """See `Factors.squared_norms`.

        Returns:
            ``(b,)``, over the columns of all processes.
        """
        return self._add_up(self._columns.squared_norms())


class Linearization(ABC):
    """A network linearised at one batch: its output, and the transpose of its Jacobian.

    Attributes:
        output: The model's output, ``(B, *shape)``, detached.
        head: The chosen layer, if it is a single one at the network's end.
    """

    output: Tensor
    head: Head | None = None

    @abstractmethod
    def pull_back(self, rows: Tensor) -> Factors:
        """Return ``J_i^T r`` for every row ``r`` of every sample ``i``.

        Args:
            rows: Rows at the flattened output, ``(B, q, d)``.

        Returns:
            The same rows in weight space.
        """


class Engine(ABC):
    """A method to pull rows back through a network, for a fixed choice of parameters.

    Args:
        network: The model.
        parameters: The chosen weights.

    Attributes:
        finds_head: Whether its last linearisation had a head.
        check_every: Check the rows of one in so many later batches, in engines that need it.
        recording: Whether its calls are recorded (CUDA graph): no value may be read then.
        memory: A bound on the memory of materialised rows and of computing them, from the
            trial in which the engine was chosen; None if it was not tried, or not measured.
    """

    finds_head = False
    check_every = 0
    recording = False
    memory: Memory | None = None

    def __init__(self, network: Network, parameters: ParameterSet) -> None:
        self.network = network
        self.parameters = parameters
        self.device = network.device  # kernels differ by device: a trial holds for one only

    @abstractmethod
    def linearize(self, call: Inputs) -> Linearization:
        """Run a forward pass on a batch and keep what the backward pass needs."""

    def of(self, network: Network) -> Engine:
        """Return the engine for the same model, run in another precision."""
        engine = copy.copy(self)
        engine.network = network
        return engine

    def unchecked(self) -> Self:
        """Return a copy of the engine that checks no batch."""
        engine = copy.copy(self)
        engine.check_every = 0
        return engine

    def afresh(self) -> Self:
        """Return an engine of the same kind that has checked no batch yet."""
        engine = type(self)(self.network, self.parameters)
        engine.check_every = self.check_every
        return engine

    def num_calls(self, call: Inputs) -> int | None:
        """Return the number of calls in a forward pass on chosen weights; None if unknown.

        Args:
            call: A batch.
        """
        return None

    def for_single(self) -> Engine:
        """Return the engine for batches of one sample with few rows."""
        return self

    def for_copies(self, call: Inputs, rows: int) -> Engine | None:
        """Return the engine that pulls directions back as copies of their samples, if faster.

        Args:
            call: The batch. The result depends on its shapes alone, not on earlier batches:
                the same inputs have the same score, to the last bit.
            rows: Number of rows, over all samples.

        Returns:
            None where copies are not faster.
        """
        return None

    def for_recording(self) -> Engine:
        """Return a copy of the engine for calls that are recorded once and replayed often.

        On a GPU it may launch fewer kernels, at a higher cost of launching each.
        """
        engine = self.unchecked()
        engine.recording = True
        return engine

    def row_bytes(self, held: bool) -> int:
        """Return the working memory of one row in weight space, in bytes.

        Args:
            held: Whether the whole row is in memory at once, or one block at a time.
        """
        return row_bytes(self.network, self.parameters)


def row_bytes(network: Network, parameters: ParameterSet) -> int:
    """Return the working memory needed to compute one row in weight space, in bytes.

    Of projected weights, too: it is what plain autograd takes.
    """
    size = parameters.itemsize(network.model)
    return _COPIES_PER_ROW * parameters.in_full().num_parameters * size


@dataclass(frozen=True)
class Head:
    """A linear layer at a network's end, chosen alone: squared norms without a single row.

    With ``output = W a + b`` a row ``r`` at the output is ``r (a, 1)^T`` in weight space. So
    ``|L|_F^2`` is ``(|a|^2 + 1) tr F_theta``, and along a vector of weights ``u``, which moves
    the output by ``v = U_W a + u_b``, it is ``v^T F_theta v``: one product for each vector,
    whatever the number of outputs.

    Args:
        inputs: ``a``, ``(B, i)``.
        weight: Columns of ``W`` among the chosen weights; None if it is not chosen.
        bias: Columns of ``b``; None if it is not chosen.
    """

    inputs: Tensor
    weight: slice | None
    bias: slice | None

    def energies(
        self, output: Tensor, likelihood: Likelihood, matrix: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the squared norms of the factors, in total and along each column.

        Args:
            output: The network's output, ``(B, o)``, finite.
            likelihood: One with a closed form.
            matrix: ``(N, k)``; if it is on another device, it is copied.

        Returns:
            ``|L|_F^2 (B,)`` and ``|u^T L|^2 (B, k)``, in float64.
        """
        device, count = output.device, matrix.shape[1]
        batch, outputs = output.shape  # not its len(), which is a constant in a trace
        lengths = output.new_zeros(batch, dtype=torch.float64)
        moved = output.new_zeros(batch, count, outputs, dtype=torch.float64)
        if self.weight is not None:
            wide = sum_dtype(self.inputs)
            a = self.inputs.to(wide)
            columns = matrix[self.weight].to(device, wide)
            moved += activations_along(a, columns).permute(1, 2, 0)
            lengths += a.double().square().sum(1)
        if self.bias is not None:
            moved += matrix[self.bias].to(device).mT
            lengths += 1
        along = torch.linalg.vecdot(moved, likelihood.curvature_times(output, moved))
        return lengths * likelihood.curvature_trace(output), along.clamp_min(0)
