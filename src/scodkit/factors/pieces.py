"""Splits a batch into pieces within a memory budget; checks that samples do not interact."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scodkit.errors import BatchError, OptionError
from scodkit.factors.engine import Engine, Factors, Head, SharedFactors, Tall
from scodkit.factors.live_bytes import peak_bytes
from scodkit.likelihoods import Likelihood
from scodkit.model.inputs import Inputs
from scodkit.model.network import Network
from scodkit.model.parameters import ParameterSet
from scodkit.numerics.hashing import bytes_of
from scodkit.numerics.kernels import accumulate
from scodkit.numerics.matmul import matmul, sum_dtype

# directions per sample from which the closed form pays; with fewer, rows are used, which give
# a certificate
MANY = 100

# directions up to which plain autograd is fastest for a single sample
_FEW = 8

# entries of the cache of `FactorSource.whole`, one per shape of batch
_MOST_SHAPES = 64

# float64 copies of the outputs, per column, that norms in closed form need
_COPIES_OF_MOVED = 4

# rows at the output are alive as formed, with bad samples masked, and on their way back
_COPIES_AT_OUTPUT = 3

# default budget for rows in weight space, in bytes; on a GPU this fraction (one in so many) of
# its memory, whose other uses are not known in advance
_BYTES = 2**30
_SHARE_OF_GPU = 8

# bytes of samples that are hashed at a time
_AT_ONCE = 1 << 16


@dataclass(frozen=True)
class Piece:
    """A slice of a batch's samples, with a slice of their directions.

    Args:
        samples: The slice of the batch.
        output: Their outputs ``(b, *shape)``.
        finite: ``(b,)``, False where an input or the output has a NaN or an infinity; the
            rows of those samples are meaningless.
        factors: Their rows in weight space, ``(b, q, n)`` per block.
        complete: True when these are the samples' last directions.
    """

    samples: slice
    output: Tensor
    finite: Tensor
    factors: Factors
    complete: bool


@dataclass(frozen=True)
class HeadPiece:
    """A slice of a batch's samples, whose norms have a closed form.

    Args:
        head: The layer at the network's end; its inputs are zero for non-finite samples.
        output: The outputs ``(b, o)``.
        clean: The same, zero for non-finite samples.
        finite: ``(b,)``, False where an input or the output has a NaN or an infinity.
    """

    head: Head
    output: Tensor
    clean: Tensor
    finite: Tensor


class Whole(NamedTuple):
    """How a batch is scored in one piece.

    Args:
        engine: Pulls rows back to weight space.
        copies: Copies of each sample, one per direction, so that one ordinary backward pass
            computes them all; 1 to pull directions back together.
    """

    engine: Engine
    copies: int


@dataclass(frozen=True)
class FactorSource:
    """The Fisher factors of batches: engine, likelihood and memory budget.

    Args:
        engine: Pulls rows back to weight space.
        likelihood: Gives the rows at the output.
        shape: Of a typical sample's output.
        budget: Bytes for rows in weight space at a time. At least one row is computed.
        add_up: Sums over processes, where several of them share the weights.
        most_rows: Rows that fit into the budget of each of those processes.
        ways: Cache of `whole`, by the shapes of batches.
    """

    engine: Engine
    likelihood: Likelihood
    shape: tuple[int, ...]
    budget: int
    add_up: Callable[[Tensor], Tensor] | None = None
    most_rows: int | None = None
    ways: dict[object, Whole | None] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @property
    def directions(self) -> int:
        """Number of rows of a typical sample, ``p``."""
        return self.likelihood.num_directions(self.shape)

    def named(self) -> FactorSource:
        """Return a copy whose rows each correspond to one output."""
        return replace(self, likelihood=self.likelihood.named())

    def pieces(self, call: Inputs, *, hold: bool = False) -> Iterator[Piece]:
        """Split a batch into pieces and yield their factors.

        All directions of a sample come before those of the next samples.

        Args:
            call: The batch.
            hold: Whether the factors will be read more than once: then their rows are
                materialised, and the pieces are smaller.

        Yields:
            The pieces, in order.
        """
        rows_at_once, step = self.rows_at_once(hold), self.samples_at_once(hold)
        for start in range(0, call.batch_size, step):
            samples = slice(start, min(start + step, call.batch_size))
            part = call if step >= call.batch_size else call.samples(samples)
            linear = self.engine.linearize(part)
            finite, rows = self.rows(linear.output, part)
            for first in range(0, rows.shape[1], rows_at_once):
                factors = linear.pull_back(rows[:, first : first + rows_at_once])
                factors = factors.hold() if hold else factors
                if self.add_up is not None:
                    factors = SharedFactors(factors, self.add_up)
                complete = first + rows_at_once >= rows.shape[1]
                yield Piece(samples, linear.output, finite, factors, complete)
                del factors  # or it would be alive while the next rows are computed
            del linear

    def whole(self, call: Inputs) -> Whole | None:
        """Return how to score a batch in one piece; None if it does not fit into one.

        Args:
            call: A batch; others of the same shapes are scored the same way.
        """
        shapes = call.shapes
        if shapes not in self.ways:
            if len(self.ways) >= _MOST_SHAPES:
                self.ways.clear()
            self.ways[shapes] = self._as_whole(call)
        return self.ways[shapes]

    def _as_whole(self, call: Inputs) -> Whole | None:
        if self.engine.recording or self.add_up is not None:
            return None
        if self.likelihood.draws or self.ends_in_head:
            return None
        size, directions = call.batch_size, self.directions
        engine = self.engine.for_single() if size == 1 and directions <= _FEW else self.engine
        if size * directions > max(1, self.budget // engine.row_bytes(held=False)):
            return None
        if size > self._samples_at_output:
            return None
        if engine is not self.engine or directions == 1:
            return Whole(engine, 1)
        copies = engine.for_copies(call, size * directions)
        return None if copies is None else Whole(copies, directions)

    @property
    def ends_in_head(self) -> bool:
        """Whether norms of many rows are computed in closed form, see `Head`."""
        closed = self.likelihood.closed and self.engine.finds_head and self.add_up is None
        return closed and self.directions >= MANY

    def heads(self, call: Inputs, columns: int) -> Iterator[HeadPiece]:
        """Split a batch into pieces whose norms have a closed form.

        Args:
            call: The batch.
            columns: ``k``, of the matrix they are projected on.

        Yields:
            The pieces, in order, up to the first that has no such layer.
        """
        step = self.heads_at_once(columns)
        for start in range(0, call.batch_size, step):
            piece = self._head(call.samples(slice(start, min(start + step, call.batch_size))))
            if piece is None:
                return
            yield piece

    def _head(self, call: Inputs) -> HeadPiece | None:
        linear = self.engine.linearize(call)
        if linear.head is None:
            return None
        finite = finite_samples(call, linear.output)
        head = replace(linear.head, inputs=fill_samples(linear.head.inputs, ~finite))
        return HeadPiece(head, linear.output, fill_samples(linear.output, ~finite), finite)

    def heads_at_once(self, columns: int) -> int:
        """Return for how many samples norms are computed in closed form at a time.

        Args:
            columns: ``k``, of the matrix they are projected on.
        """
        return max(1, self.budget // self.head_bytes(columns, 1))

    def head_bytes(self, columns: int, samples: int) -> int:
        """Return the bytes of norms in closed form, without those of the layers before.

        Args:
            columns: ``k``, of the matrix they are projected on.
            samples: How many at a time.
        """
        outputs = max(1, math.prod(self.shape))
        return samples * _COPIES_OF_MOVED * columns * outputs * torch.float64.itemsize

    def counted_head(self, call: Inputs, columns: int) -> int | None:
        """Return the peak bytes of norms in closed form, by computing them once.

        Args:
            call: A batch.
            columns: ``k``, of the matrix they are projected on.

        Returns:
            None if the model cannot be run under a dispatch mode.
        """
        few = call.samples(slice(0, self.heads_at_once(columns)))
        source = replace(self, engine=self.engine.unchecked())
        # a single zero, expanded: the matrix itself may take more memory than the norms
        matrix = zeros(self.engine, 1, 1).expand(self.engine.parameters.num_parameters, columns)

        def run() -> None:
            piece = source._head(few)
            assert piece is not None
            piece.head.energies(piece.clean, self.likelihood, matrix)

        return peak_bytes(run)

    @property
    def splits_samples(self) -> bool:
        """Whether one sample's directions come in several pieces, if materialised."""
        return self.directions > self.rows_at_once(hold=True)

    def rows_at_once(self, hold: bool) -> int:
        """Return how many rows in weight space are computed at a time.

        Args:
            hold: Whether they are materialised.
        """
        if self.most_rows is not None:
            return self.most_rows
        return max(1, self.budget // self.engine.row_bytes(hold))

    @property
    def _samples_at_output(self) -> int:
        """For how many samples all rows at the output are formed, which come as a whole."""
        row = _COPIES_AT_OUTPUT * math.prod(self.shape) * torch.float32.itemsize
        return max(1, self.budget // max(1, self.directions * row))

    def samples_at_once(self, hold: bool) -> int:
        """Return for how many samples rows are computed at a time.

        Args:
            hold: Whether the rows are materialised.
        """
        directions = max(1, self.directions)
        samples = max(1, self.rows_at_once(hold) // directions)
        samples = min(samples, self._samples_at_output)
        if hold and self.engine.memory is not None:
            samples = min(samples, self.engine.memory.most_samples(self.budget, directions))
        return samples

    def counted(self, call: Inputs, *, hold: bool, columns: int = 1) -> int | None:
        """Return the peak bytes of a batch's rows, by computing those of its first piece.

        Rows that are projected come with the check of the first batch of a shape.

        Args:
            call: A batch.
            hold: Whether the rows are materialised, or projected as they are computed.
            columns: ``k``, of the matrix they are added to, or projected on.

        Returns:
            None if the model cannot be run under a dispatch mode.
        """
        whole = None if hold else self.whole(call)
        copies = 1 if whole is None else whole.copies
        chosen = self.engine if whole is None else whole.engine
        matrix = _Zeros(
            zeros(self.engine, self.engine.parameters.num_parameters if hold else 0, columns)
        )

        def run(engine: Engine, part: Inputs) -> None:
            linear = engine.linearize(part.repeated(copies) if copies > 1 else part)
            rows = self.rows(linear.output[::copies], part)[1]
            if copies > 1:
                rows = rows.flatten(0, 1)[:, None]
            factors = linear.pull_back(rows[:, : self.rows_at_once(hold)])
            if hold:
                add_rows(factors.hold(), matrix)
            else:
                factors.project(matrix)

        if not hold:  # grow the matrix to its final size, outside the measurement
            with contextlib.suppress(Exception):  # the measurement will fail, too
                run(chosen.unchecked(), call.first(min(2, call.batch_size)))
        checked = not hold and chosen is self.engine
        engine = chosen.afresh() if checked else chosen.unchecked()
        part = call.samples(slice(0, self.samples_at_once(hold)))
        return peak_bytes(lambda: run(engine, part))

    def rows(self, output: Tensor, call: Inputs) -> tuple[Tensor, Tensor]:
        """Return which samples are finite ``(B,)``, and the rows at the output ``(B, p, d)``.

        Args:
            output: Of the model.
            call: The batch.
        """
        keys = sample_keys(call) if self.likelihood.draws else None
        finite = finite_samples(call, output)
        rows = self.likelihood.factor(fill_samples(output, ~finite), keys)
        return finite, fill_samples(rows, ~finite)


class _Zeros:
    """A tall matrix of zeros that allocates only as many rows as are read at once.

    Args:
        rows: The first rows, ``(n, k)``; more are allocated when they are read.
    """

    def __init__(self, rows: Tensor) -> None:
        self._rows = rows

    def __getitem__(self, rows: slice) -> Tensor:
        count = rows.stop - rows.start
        if count > len(self._rows):
            self._rows = self._rows.new_zeros(count, self._rows.shape[1])
        return self._rows[:count]


def zeros(engine: Engine, *size: int) -> Tensor:
    """Return zeros on the weights' device, in the dtype that their rows are summed in."""
    weights = engine.parameters.weights(engine.network.model).values()
    return torch.zeros(*size, dtype=sum_dtype(*weights), device=engine.network.device)


def add_rows(factors: Factors, matrix: Tall) -> None:
    """Use factors as the update of a sketch ``(N, k)`` does."""
    for columns, rows in factors.blocks():
        flat = rows.flatten(0, 1)
        accumulate(matrix[columns], flat, matmul(flat, matrix[columns]))
    factors.squared_norms()


def fill_samples(tensor: Tensor, where: Tensor, value: float = 0.0) -> Tensor:
    """Return a tensor ``(B, ...)`` with the samples of a mask ``(B,)`` set to a value."""
    # the values of `where` are not read: on a GPU that would synchronise
    return tensor.masked_fill(where.view(-1, *(1,) * (tensor.ndim - 1)), value)


def finite_samples(call: Inputs, output: Tensor) -> Tensor:
    """Return which samples have neither a NaN nor an infinity in inputs and output, ``(B,)``.

    Args:
        call: The batch.
        output: The model's output, ``(B, *shape)``.
    """
    return finite_rows([*call.tensors(), output])


def finite_rows(tensors: Iterable[Tensor]) -> Tensor:
    """Return which samples have only finite entries in all tensors, ``(B,)``.

    Args:
        tensors: ``(B, ...)`` each; those of integers have no other entries.
    """
    # the largest magnitudes: infinite or NaN where an entry is
    largest = [
        torch.linalg.vector_norm(t.reshape(t.shape[0], -1), torch.inf, dim=1)
        for t in tensors
        if t.is_floating_point() and t.numel()
    ]
    finite: Tensor = functools.reduce(torch.maximum, largest) < torch.inf
    return finite


def sample_keys(call: Inputs) -> Tensor:
    """Return one integer per sample, ``(B,)`` on the CPU, that depends on that sample alone."""
    keys = torch.zeros(call.batch_size, dtype=torch.int64)
    for tensor in call.tensors():
        raw = bytes_of(tensor)
        # odd multipliers that differ by position, in wrapping arithmetic: equal on all devices
        place = torch.arange(raw.shape[1], device=raw.device) * 2654435761 | 1
        # a few at a time: products take eight times the bytes
        chunks = torch.split(raw, max(1, _AT_ONCE // max(1, raw.shape[1])))
        keys = keys * 1000003 + torch.cat([(chunk * place).sum(1) for chunk in chunks]).cpu()
    return keys


class MemoryBudget:
    """Descriptor for a memory budget: bytes for per-sample gradients at a time.

    Owners have a ``_network``. The default is 1 GiB; on a GPU, which is faster the more samples
    it processes at a time, an eighth of its memory, but at least 1 GiB.

    Examples:
        >>> class Owner:
        ...     memory_budget = MemoryBudget()
        ...     _network = torch.zeros(1)  # anything that is on a device
        >>> Owner().memory_budget == 2**30
        True
    """

    def __get__(self, owner: Any, kind: type) -> int:
        """Return the bytes."""
        given: int | None = vars(owner).get("_memory_budget")
        return default_budget(owner._network.device) if given is None else given

    def __set__(self, owner: Any, value: int) -> None:
        """Set the bytes.

        Raises:
            OptionError: If the value is not a positive integer.
        """
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise OptionError(
                f"expected memory_budget as a whole number of bytes, got {value!r}; for 4 GiB "
                "type monitor.memory_budget = 4 * 2**30"
            )
        owner._memory_budget = value


@functools.cache
def default_budget(device: torch.device) -> int:
    """Return the default memory budget of a device, in bytes."""
    if device.type != "cuda":
        return _BYTES
    whole: int = torch.cuda.get_device_properties(device).total_memory
    return max(_BYTES, whole // _SHARE_OF_GPU)


# relative distance allowed between two computations that differ by rounding
_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3}
_TOLERANCE_HALF = 1e-1
# and between a sample's output alone and in a batch, which differ only by the order of sums
_TOLERANCE_ALONE = {torch.float64: 1e-10, torch.float32: 3e-4}

# samples that are run alone, and fewer for models whose rows are large
_SAMPLES, _FEWER_SAMPLES = 3, 2
_LARGE = 5_000_000

ADVICE = (
    "the score of a sample must not depend on its batch: set batch_first=True in recurrent "
    "layers, give BatchNorm its running statistics, pick inputs with the batch first "
    "(inputs=lambda batch: ...)"
)


class Alone(NamedTuple):
    """Samples that were run one by one.

    Args:
        samples: Their inputs.
        output: ``(b, *shape)``, detached.
    """

    samples: Inputs
    output: Tensor


def tolerance(like: Tensor) -> float:
    """Return the relative distance allowed between gradients of this dtype."""
    return _TOLERANCE.get(like.dtype, _TOLERANCE_HALF)


def relative_distance(actual: Tensor, expected: Tensor) -> float:
    """Return ``|actual - expected| / |expected|``; infinite where that is NaN."""
    error = float(torch.linalg.vector_norm(actual - expected, dtype=torch.float64))
    size = float(torch.linalg.vector_norm(expected, dtype=torch.float64))
    if error == 0:
        return 0.0
    return error / size if size and not math.isnan(error / size) else math.inf


def num_alone(parameters: ParameterSet) -> int:
    """Return how many samples to run alone and compare with a batch."""
    return _FEWER_SAMPLES if parameters.num_parameters > _LARGE else _SAMPLES


def distinct(call: Inputs, count: int) -> list[int]:
    """Return the indices of samples for a trial: distinct, and finite if any are.

    Args:
        call: A batch.
        count: How many to return at most.
    """
    no_output = torch.zeros(call.batch_size, 1, device=call.tensors()[0].device)
    finite = finite_samples(call, no_output).tolist()
    first = {key: i for i, key in reversed(list(enumerate(sample_keys(call).tolist())))}
    indices = sorted(first.values())
    return [i for i in indices if finite[i]][:count] or indices[:count]


def pick(call: Inputs, which: list[int]) -> Inputs:
    """Return the samples of a batch at some indices."""
    return call.map(lambda t: t[torch.tensor(which, device=t.device)])


def check_alone(network: Network, together: Tensor, alone: Tensor) -> None:
    """Make sure that samples have the same output alone as in a batch.

    Args:
        network: The model.
        together: Their outputs in a batch, ``(b, *shape)``.
        alone: Their outputs one at a time, ``(b, *shape)``.

    Raises:
        BatchError: If they do not.
    """
    limit = _TOLERANCE_ALONE.get(network.precision or alone.dtype, _TOLERANCE_HALF)
    if together.is_cuda and torch.backends.cuda.matmul.allow_tf32:
        limit = max(limit, 1e-2)
    expected, actual = alone.detach().double(), together.detach().double()
    known = expected.isfinite()
    gap = torch.where(known, actual - expected, 0.0).nan_to_num(torch.inf).abs().max()
    scale = torch.where(known, expected, 0.0).abs().max()
    if float(gap) > limit * max(float(scale), 1e-6):
        raise BatchError(
            "expected the same output for a sample alone and in a batch, got outputs "
            f"{float(gap):.1e} apart; {ADVICE}"
        )


def check_some_alone(
    network: Network, call: Inputs, output: Tensor, count: int, known: Alone | None = None
) -> bool:
    """Refuse a batch whose samples interact, by running a few of them alone.

    Args:
        network: The model.
        call: The batch.
        output: The model's output.
        count: How many samples.
        known: Samples that were run alone before; they are not run again if they are the same.

    Returns:
        Whether that proves anything: samples with equal outputs prove nothing.
    """
    indices = distinct(call, count)
    few = pick(call, indices)
    if known is not None and _equal(few, known.samples):
        alone = known.output
    else:
        with torch.no_grad():
            alone = torch.cat(
                [network(few.samples(slice(i, i + 1))) for i in range(len(indices))]
            )
    check_alone(network, output[torch.tensor(indices, device=output.device)], alone)
    return bool((alone != alone[:1]).any())


def _equal(one: Inputs, other: Inputs) -> bool:
    return one.shapes == other.shapes and all(map(torch.equal, one.tensors(), other.tensors()))
