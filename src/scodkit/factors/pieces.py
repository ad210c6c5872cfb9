"""A batch cut into pieces within a memory budget; checks that samples do not interact."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
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
from scodkit.numerics.matmul import add_matmul, matmul, sum_dtype

# directions of a sample from which on it is worth to go without rows; fewer are left to rows,
# which give a certificate
MANY = 100

# directions up to which a sample alone is best left to plain autograd
_FEW = 8

# shapes of batches that it is kept for whether they go in one piece
_MOST_SHAPES = 64

# copies of outputs, moved along each column, in float64, that lengths in closed form take
_COPIES_OF_MOVED = 4

# default budget for rows in weight space, in bytes; and the share of a GPU's
# memory, whose other uses are not known beforehand
_BYTES = 2**30
_SHARE_OF_GPU = 8

# bytes of samples that keys are made of at a time
_AT_ONCE = 1 << 16


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
class HeadPiece:
    """Some samples of a batch, whose lengths are had in closed form.

    Args:
        head: The layer at the network's end; its inputs of bad samples are zero.
        output: The outputs ``(b, o)``.
        clean: The same, zero for bad samples.
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
        copies: Of each sample, one for each of its directions: an ordinary backward pass
            serves them all then. 1 for directions that are pulled back together.
    """

    engine: Engine
    copies: int


@dataclass(frozen=True)
class FactorSource:
    """Everything that turns batches into Fisher factors.

    Args:
        engine: Pulls rows back to weight space.
        likelihood: Says which rows.
        shape: Of a typical sample's output.
        budget: Bytes that rows in weight space may take at a time. One row is always formed.
        add_up: Adds up what is a sum over weights, where several processes divide these.
        most_rows: As many as fit into the budget of each of those processes.
        ways: How batches are scored in one piece, by their shapes; see `whole`.
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
        """How many rows a typical sample has, ``p``."""
        return self.likelihood.num_directions(self.shape)

    def named(self) -> FactorSource:
        """Return the same source of rows that each stand for an output."""
        return replace(self, likelihood=self.likelihood.named())

    def pieces(self, call: Inputs, *, hold: bool = False) -> Iterator[Piece]:
        """Cut a batch into pieces and yield their factors.

        Every sample comes with all its directions before the next samples start.

        Args:
            call: The batch.
            hold: Whether the factors will be read more than once: then their rows are formed
                once and held, and the pieces are smaller for it.

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
                del factors  # or it would be there while the next rows are formed
            del linear

    def whole(self, call: Inputs) -> Whole | None:
        """Return how to score a batch in one piece; None where it does not fit into one.

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
        if engine is not self.engine or directions == 1:
            return Whole(engine, 1)
        copies = engine.for_copies(call, size * directions)
        return None if copies is None else Whole(copies, directions)

    @property
    def ends_in_head(self) -> bool:
        """Whether lengths of many rows are had in closed form, see `Head`."""
        closed = self.likelihood.closed and self.engine.finds_head and self.add_up is None
        return closed and self.directions >= MANY

    def heads(self, call: Inputs, columns: int) -> Iterator[HeadPiece]:
        """Cut a batch into pieces whose lengths are had in closed form.

        Args:
            call: The batch.
            columns: ``k``, of the matrix they are projected on.

        Yields:
            The pieces, in order; none after the first that has no such layer.
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
        """Return how many samples have their lengths in closed form at a time.

        Args:
            columns: ``k``, of the matrix they are projected on.
        """
        return max(1, self.budget // self.head_bytes(columns, 1))

    def head_bytes(self, columns: int, samples: int) -> int:
        """Return what lengths in closed form take at least: without what led to the layer.

        Args:
            columns: ``k``, of the matrix they are projected on.
            samples: How many at a time.
        """
        outputs = max(1, math.prod(self.shape))
        return samples * _COPIES_OF_MOVED * columns * outputs * torch.float64.itemsize

    def counted_head(self, call: Inputs, columns: int) -> int | None:
        """Return the peak bytes of lengths in closed form, by computing them once.

        Args:
            call: A batch.
            columns: ``k``, of the matrix they are projected on.

        Returns:
            None where the model cannot be run under a dispatch mode.
        """
        few = call.samples(slice(0, self.heads_at_once(columns)))
        source = replace(self, engine=self.engine.unchecked())
        # one number that stands for all: the matrix itself may be the larger part
        matrix = self._zeros(1, 1).expand(self.engine.parameters.num_parameters, columns)

        def run() -> None:
            piece = source._head(few)
            assert piece is not None
            piece.head.energies(piece.clean, self.likelihood, matrix)

        return peak_bytes(run)

    @property
    def splits_samples(self) -> bool:
        """Whether the directions of one sample come in several pieces, if they are held."""
        return self.directions > self.rows_at_once(hold=True)

    def rows_at_once(self, hold: bool) -> int:
        """Return how many rows in weight space are formed at a time.

        Args:
            hold: Whether they are held.
        """
        if self.most_rows is not None:
            return self.most_rows
        return max(1, self.budget // self.engine.row_bytes(hold))

    def samples_at_once(self, hold: bool) -> int:
        """Return how many samples have their rows formed at a time.

        Args:
            hold: Whether these are held.
        """
        directions = max(1, self.directions)
        samples = max(1, self.rows_at_once(hold) // directions)
        if hold and self.engine.memory is not None:
            samples = min(samples, self.engine.memory.most_samples(self.budget, directions))
        return samples

    def counted(self, call: Inputs, *, hold: bool, columns: int = 1) -> int | None:
        """Return the peak bytes of a batch in rows, by forming its first piece.

        Args:
            call: A batch.
            hold: Whether the rows are held, or projected as they are formed.
            columns: ``k``, of the matrix they are added to, or projected on.

        Returns:
            None where the model cannot be run under a dispatch mode.
        """
        whole = None if hold else self.whole(call)
        copies = 1 if whole is None else whole.copies
        engine = (self.engine if whole is None else whole.engine).unchecked()
        matrix = _Zeros(
            self._zeros(self.engine.parameters.num_parameters if hold else 0, columns)
        )

        def run(part: Inputs) -> None:
            linear = engine.linearize(part.repeated(copies) if copies > 1 else part)
            rows = self.rows(linear.output[::copies], part)[1]
            if copies > 1:
                rows = rows.flatten(0, 1)[:, None]
            factors = linear.pull_back(rows[:, : self.rows_at_once(hold)])
            if hold:
                _add(factors.hold(), matrix)
            else:
                factors.project(matrix)

        if not hold:  # lets the matrix grow as long as it has to be, before anything counts
            with contextlib.suppress(Exception):  # then nothing is counted, either
                run(call.first(2))
        return peak_bytes(lambda: run(call.samples(slice(0, self.samples_at_once(hold)))))

    def _zeros(self, *size: int) -> Tensor:
        """Return zeros where the weights are, of the dtype they are summed in."""
        weights = self.engine.parameters.weights(self.engine.network.model).values()
        return torch.zeros(*size, dtype=sum_dtype(*weights), device=self.engine.network.device)

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
    """A tall matrix of zeros, in the memory of as many rows as are read at once.

    Args:
        rows: The first of them, ``(n, k)``; more are made when they are asked for.
    """

    def __init__(self, rows: Tensor) -> None:
        self._rows = rows

    def __getitem__(self, rows: slice) -> Tensor:
        count = rows.stop - rows.start
        if count > len(self._rows):
            self._rows = self._rows.new_zeros(count, self._rows.shape[1])
        return self._rows[:count]


def _add(factors: Factors, matrix: Tall) -> None:
    """Use factors as a sketch ``(N, k)`` does."""
    for columns, rows in factors.blocks():
        flat = rows.flatten(0, 1)
        add_matmul(matrix[columns], flat.mT, matmul(flat, matrix[columns]))
    factors.squared_norms()


def fill_samples(tensor: Tensor, where: Tensor, value: float = 0.0) -> Tensor:
    """Return a tensor ``(B, ...)`` with a value in place of some samples, ``(B,)``."""
    # no look at `where` itself: on a GPU it would have to be waited for
    return tensor.masked_fill(where.view(-1, *(1,) * (tensor.ndim - 1)), value)


def finite_samples(call: Inputs, output: Tensor) -> Tensor:
    """Return which samples have neither a NaN nor an infinity in inputs and output, ``(B,)``.

    Args:
        call: The batch.
        output: What the model made of it, ``(B, *shape)``.
    """
    # the largest magnitudes: infinite or NaN where an entry is
    largest = [
        torch.linalg.vector_norm(t.reshape(len(output), -1), torch.inf, dim=1)
        for t in (*call.tensors(), output)
        if t.is_floating_point() and t.numel()
    ]
    finite: Tensor = functools.reduce(torch.maximum, largest) < torch.inf
    return finite


def sample_keys(call: Inputs) -> Tensor:
    """Return one integer per sample, ``(B,)`` on the CPU, that depends on that sample alone."""
    keys = torch.zeros(call.batch_size, dtype=torch.int64)
    for tensor in call.tensors():
        raw = tensor.detach().contiguous().reshape(call.batch_size, -1)
        raw = raw.view(torch.uint8).reshape(call.batch_size, -1)
        # odd multipliers that differ by place, in wrapping arithmetic: alike on every device
        place = torch.arange(raw.shape[1], device=raw.device) * 2654435761 | 1
        # a few at a time: products take eight times the bytes
        chunks = torch.split(raw, max(1, _AT_ONCE // max(1, raw.shape[1])))
        keys = keys * 1000003 + torch.cat([(chunk * place).sum(1) for chunk in chunks]).cpu()
    return keys


class MemoryBudget:
    """An attribute: bytes that per-sample gradients may take at a time, by default a share.

    Owners have a ``_network``. The more samples a GPU works on at a time, the faster it is: an
    eighth of its memory, 1 GiB at least.

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
            OptionError: If that is not a number of them.
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


# relative distance allowed between two ways to round the same numbers
_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3}
_TOLERANCE_HALF = 1e-1
# and between a sample's output alone and in a batch, which differ by the order of sums alone
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
    """Return ``|actual - expected| / |expected|``; infinite where that is no number."""
    error = float(torch.linalg.vector_norm(actual - expected, dtype=torch.float64))
    size = float(torch.linalg.vector_norm(expected, dtype=torch.float64))
    if error == 0:
        return 0.0
    return error / size if size and not math.isnan(error / size) else math.inf


def num_alone(parameters: ParameterSet) -> int:
    """Return how many samples to run alone, to compare a batch with."""
    return _FEWER_SAMPLES if parameters.num_parameters > _LARGE else _SAMPLES


def distinct(call: Inputs, count: int) -> list[int]:
    """Return the indices of samples for a trial: distinct, and finite if any are.

    Args:
        call: A batch.
        count: How many to return at most.
    """
    nothing = torch.zeros(call.batch_size, 1, device=call.tensors()[0].device)
    finite = finite_samples(call, nothing).tolist()
    first = {key: i for i, key in reversed(list(enumerate(sample_keys(call).tolist())))}
    unlike = sorted(first.values())
    return [i for i in unlike if finite[i]][:count] or unlike[:count]


def pick(call: Inputs, which: list[int]) -> Inputs:
    """Return some samples of a batch."""
    return call.map(lambda t: t[torch.tensor(which, device=t.device)])


def check_alone(network: Network, together: Tensor, alone: Tensor) -> None:
    """Refuse samples whose output alone differs from that in a batch.

    Args:
        network: The model.
        together: Their outputs in a batch, ``(b, *shape)``.
        alone: The same of each alone.

    Raises:
        BatchError: If it does.
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
        output: What the model made of it.
        count: How many samples.
        known: Samples that were run alone before; if these are the same, they are not again.

    Returns:
        Whether that proves anything: samples with equal outputs prove nothing.
    """
    which = distinct(call, count)
    few = pick(call, which)
    if known is not None and _equal(few, known.samples):
        alone = known.output
    else:
        with torch.no_grad():
            alone = torch.cat(
                [network(few.samples(slice(i, i + 1))) for i in range(len(which))]
            )
    check_alone(network, output[torch.tensor(which, device=output.device)], alone)
    return bool((alone != alone[:1]).any())


def _equal(one: Inputs, other: Inputs) -> bool:
    return one.shapes == other.shapes and all(map(torch.equal, one.tensors(), other.tensors()))
