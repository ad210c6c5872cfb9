"""Batched factors from one forward pass and one backward pass to the layers' outputs.

The layers a forward pass calls are remembered with their inputs; the backward pass brings the
rows to their outputs, and the rules form per-sample gradients of one layer after the other.
Autograd computes no gradient of a weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from scodkit.factors.alone import SingleEngine
from scodkit.factors.backward import backward
from scodkit.factors.checks import check_some_alone, tolerance
from scodkit.factors.checksum import Checksum
from scodkit.factors.engine import Engine, Factors, HeldFactors, Linearization, Sums, Tall
from scodkit.factors.head import Head
from scodkit.factors.recorder import Recorder
from scodkit.factors.replay import OtherCallsError, Replay, Script
from scodkit.factors.rules import Outer, Rows, UnsupportedCallError
from scodkit.factors.samples import Known, Strangers, constants_of
from scodkit.model.network import Inputs, Network
from scodkit.model.parameters import ParameterSet

# bytes of rows: below the first, blocks are put together for one product; above the second,
# and on a CPU above the first, the copy costs more than the call it saves
_TINY = 1 << 20
_LARGE_ON_GPU = 1 << 25


# bytes at the layers' outputs up to which directions are copies of the samples
_SMALL = 1 << 20
_SMALL_ON_GPU = 1 << 27

# shapes of batches whose passes are kept
_MOST_SCRIPTS = 16
_OFTEN = 5

# chooses another engine for a batch, given why
Otherwise = Callable[[Network, ParameterSet, Inputs, str], Engine]


class HookEngine(Engine):
    """Per-sample gradients by a rule for each kind of layer.

    Attributes:
        check_every: How often later batches are checked as the first of every layout is: one
            in so many; 0 for no checks at all.
        otherwise: Chooses an engine for batches that this one cannot be trusted with; None to
            refuse them.
    """

    check_every = 0

    def __init__(self, network: Network, parameters: ParameterSet) -> None:
        super().__init__(network, parameters)
        self.otherwise: Otherwise | None = None
        self._few_kernels = False
        self._single: SingleEngine | None = None
        self._checksum = Checksum(network, parameters)
        self._batches = 0
        self._constants: dict[int, Tensor] = {}
        self._older: Strangers = {}
        self._known: Known = {}
        self._other_calls = 0  # how many passes were not as scripted
        self._scripts: dict[object, Script] = {}  # of passes, by the inputs' shapes
        self._checked: set[object] = set()  # layouts of batches
        self._others: dict[object, Engine] = {}  # who takes the layouts this one cannot
        self._as_if: tuple[int, int] | None = None  # samples and directions to go by
        self._delta_bytes = 0  # of one row at all layers' outputs; known after one batch
        self._itemsize: float = parameters.itemsize(network.model)  # on average over a row
        model = network.model
        tensors = (*model.parameters(), *model.buffers())
        self._copies = any(tensor.is_inference() for tensor in tensors)

    def __getstate__(self) -> dict[str, Any]:
        # tensors go by their ids, which copies do not share
        empty = ("_constants", "_older", "_known", "_scripts")
        return {**vars(self), **{name: {} for name in empty}, "_single": None}

    def linearize(self, call: Inputs) -> Linearization:
        """Return one forward pass with the calls on chosen parameters remembered.

        Raises:
            UnsupportedCallError: If rows cannot be known to be their samples', and there is no
                other engine to leave the batch to.
        """
        shapes = tuple([(t.shape, t.dtype) for t in call.tensors()])
        script = self._scripts.get(shapes)
        if script is not None:
            linear = self._replayed(call, script)
            if linear is not None:
                return linear
            del self._scripts[shapes]
        return self._looked_at(call, shapes)

    def _replayed(self, call: Inputs, script: Script) -> Linearization | None:
        """Return the pass of a batch whose calls are those of the script; None if not."""
        if self.check_every and call.batch_size > 1:
            if (self._batches + 1) % self.check_every == 0:
                return None  # it is the turn of this batch to be checked
            self._batches += 1
        replay = Replay(script)
        try:
            with torch.enable_grad():
                output = self.network(call, replay)
            replay.check_end()
        except OtherCallsError:
            self._other_calls += 1
            return None
        return _HookLinearization(
            replay, output, self.parameters, _Ways(self._few_kernels, self._as_if), None
        )

    def _looked_at(self, call: Inputs, shapes: object) -> Linearization:
        """Return a pass in which samples are followed, checked where that is due.

        Raises:
            UnsupportedCallError: As `linearize` does.
        """
        layout = tuple((len(t), t.ndim, t.dtype) for t in call.tensors())
        if layout in self._others:
            return self._others[layout].linearize(call)
        try:
            linear, recorder = self._recorded(call)
            checked = call.batch_size == 1 or not self.check_every
            if not checked:
                checked = self._check(call, linear, (layout, recorder.layout))
        except UnsupportedCallError as error:
            if self.otherwise is None:
                raise
            other = self.otherwise(self.network, self.parameters, call, str(error))
            self._others[layout] = other
            return other.linearize(call)
        script = recorder.script
        # a model that decides by values makes other calls time and again
        usable = script is not None and script.complete and self._other_calls < _OFTEN
        if checked and script is not None and usable and linear.head is None:
            if len(self._scripts) >= _MOST_SCRIPTS:
                self._scripts.clear()
            self._scripts[shapes] = script
        return linear

    def _recorded(self, call: Inputs) -> tuple[Linearization, Recorder]:
        recorder = self._recorder(call)
        try:
            output = self._watched(recorder, call)
        except UnsupportedCallError:
            if not recorder.strangers:
                raise
            # what is met again, as it was, is older than this pass: a mask or a table
            self._older = recorder.strangers
            recorder = self._recorder(call)
            output = self._watched(recorder, call)
        finally:
            self._older = recorder.strangers
        self._delta_bytes = recorder.edges.output_bytes // max(1, call.batch_size)
        if self.network.precision is not None:
            row_bytes = recorder.row_bytes(output.itemsize)
            self._itemsize = row_bytes / self.parameters.num_parameters
        head = recorder.head(output)
        self.finds_head = head is not None
        ways = _Ways(self._few_kernels, self._as_if)
        return _HookLinearization(recorder, output, self.parameters, ways, head), recorder

    def _recorder(self, call: Inputs) -> Recorder:
        module = self.network.running(call)
        if self._older or not self._constants:  # before the pass: then no sample is in them
            self._constants = constants_of(module)
        seen = (self._constants, self._older, self._known)
        return Recorder(module, self.parameters, call.batch_size, *seen, copies=self._copies)

    def _watched(self, recorder: Recorder, call: Inputs) -> Tensor:
        with torch.enable_grad():
            output = self.network(call, recorder)
        recorder.check(output)
        return output

    def _check(self, call: Inputs, linear: Linearization, layout: object) -> bool:
        """Check the first batch of a layout, and one in so many of the others.

        Returns:
            Whether a batch of this layout was found to be right, now or before.

        Raises:
            UnsupportedCallError: If rows are not those of their samples.
        """
        self._batches += 1
        if layout in self._checked and self._batches % self.check_every:
            return True
        rounded = self.network.device.type == "cuda" or self.network.precision is not None
        with self.network.in_full_precision():
            if rounded:  # two right ways would differ by 1e-3 in TF32, by 1e-2 in bfloat16
                linear, _ = self._recorded(call)
            told = check_some_alone(self.network, call, linear.output)
            distance = self._checksum.distance(call, linear)
        if distance is None:  # rows of zeros: the next batch may tell
            return layout in self._checked
        if not distance <= tolerance(linear.output):
            raise UnsupportedCallError(f"rows are {distance:.1e} off, relative to their size")
        if told:
            self._checked.add(layout)
        return layout in self._checked

    def for_single(self) -> Engine:
        """See `Engine.for_single`.

        Returns:
            Plain autograd, unless the engine is there for counting.
        """
        if self._as_if is not None or self._copies:
            return self
        if self._single is None:
            self._single = SingleEngine(self.network, self.parameters)
        return self._single

    def folds(self, rows: int) -> bool:
        """See `Engine.folds`.

        Returns:
            Whether the layers are so small that calls, not numbers, take the time.
        """
        limit = _SMALL_ON_GPU if self.network.device.type == "cuda" else _SMALL
        return self._as_if is None and 0 < rows * self._delta_bytes <= limit

    def for_recording(self) -> HookEngine:
        """See `Engine.for_recording`.

        Returns:
            An engine that launches fewer kernels on a GPU, more slowly.
        """
        engine = self.unchecked()
        engine.recording = True
        engine._few_kernels = self.network.device.type == "cuda"
        return engine

    def as_if_for(self, samples: int, directions: int) -> HookEngine:
        """See `Engine.as_if_for`.

        Returns:
            An engine that pulls directions back, and puts layers together, as it would there.
        """
        engine = self.unchecked()
        engine._as_if = (samples, directions)
        return engine

    def row_bytes(self, held: bool) -> int:
        """Return the working memory of one row in weight space, and at the layers' outputs.

        Args:
            held: Whether all of the row is held at once, or block after block.
        """
        widest = self.parameters.widest
        columns = self.parameters.num_parameters + widest if held else 2 * widest
        return int(columns * self._itemsize) + self._delta_bytes


@dataclass(frozen=True)
class _Ways:
    """By what the engine chooses among ways to compute the same.

    Args:
        few_kernels: Prefer launching few kernels.
        as_if: Samples and directions to go by; None for those there are.
    """

    few_kernels: bool
    as_if: tuple[int, int] | None

    def times(self, rows: Tensor) -> tuple[float, float]:
        """Return how many times the samples, and the rows ``(b, q, d)``, there are."""
        if self.as_if is None:
            return 1.0, 1.0
        samples = self.as_if[0] / rows.shape[0]
        return samples, samples * self.as_if[1] / rows.shape[1]


class _HookLinearization(Linearization):
    def __init__(
        self,
        watched: Recorder | Replay,
        output: Tensor,
        parameters: ParameterSet,
        ways: _Ways,
        head: Head | None,
    ) -> None:
        self.layers, self.edges = watched.layers, watched.edges
        self.graph = output
        self.parameters = parameters
        self.ways = ways
        self.output = output.detach()
        self.head = head

    def pull_back(self, rows: Tensor) -> Factors:
        return HookFactors(self, rows)


class HookFactors(Factors):
    """Rows formed from layers and the gradients at their outputs, each time they are read.

    Args:
        linear: The network at the batch.
        rows: The rows at the output, ``(b, q, d)``.
    """

    def __init__(self, linear: _HookLinearization, rows: Tensor) -> None:
        self._linear, self._rows = linear, rows
        self._num_samples, self._directions = rows.shape[:2]
        self.num_rows = self._num_samples * self._directions

    def blocks(self) -> Iterable[tuple[slice, Tensor]]:
        """Return ranges of columns with their rows, small neighbours together."""
        return self.hold().blocks()

    @torch.no_grad()
    def hold(self) -> Factors:
        """Return the rows, formed once and for all, each layer's as its gradients arrive."""
        held: list[tuple[slice, Tensor]] = []
        small = _Neighbours(self._limit)
        self._each(lambda columns, rows: held.extend(small.add(columns, _dense(rows))))
        return HeldFactors([*held, *small.rest()])

    @torch.no_grad()
    def project(self, matrix: Tall) -> tuple[Tensor, Tensor]:
        """See `Factors.project`.

        Returns:
            The same. Unless layers are so large that directions are pulled back one by one,
            gradients are dropped as soon as they are used; large outer products are never
            formed.
        """
        linear, rows = self._linear, self._rows
        length = linear.parameters.num_parameters
        small = self.num_rows * length * rows.itemsize <= _TINY and linear.ways.as_if is None
        if small and isinstance(matrix, Tensor) and matrix.dtype == rows.dtype:
            on_cpu = not matrix.is_cuda and not rows.is_cuda
            return self._project_all(matrix) if on_cpu else self._project_blocks(matrix)
        return self._project_blocks(matrix)

    def _project_all(self, matrix: Tensor) -> tuple[Tensor, Tensor]:
        """Return what `project` does, in one product: in a small network, calls count most."""
        blocks: dict[int, Tensor] = {}

        def use(columns: slice, rows: Rows) -> None:
            blocks[columns.start] = rows if type(rows) is Tensor else _dense(rows)

        self._each(use)
        whole = torch.cat([blocks[start] for start in sorted(blocks)], dim=2)
        along = whole.view(self.num_rows, -1) @ matrix
        # in float64: a score is a difference of near-equal sums
        norms = torch.linalg.vector_norm(whole, dim=(1, 2), dtype=torch.float64)
        shape = (self._num_samples, self._directions, -1)
        return norms.square(), along.view(shape).double()

    def _project_blocks(self, matrix: Tall) -> tuple[Tensor, Tensor]:
        sums, device = Sums(), self._rows.device
        _, times = self._linear.ways.times(self._rows)
        small = _Neighbours(self._limit)

        def use(columns: slice, rows: Rows) -> None:
            if isinstance(rows, Outer) and rows.nbytes > _TINY / times:
                sums.add(rows.squared_norms(), rows.project(matrix[columns].to(device)))
                return
            for some, together in small.add(columns, _dense(rows)):
                sums.add_rows(together, matrix[some].to(device), times)

        self._each(use)
        for some, together in small.rest():
            sums.add_rows(together, matrix[some].to(device), times)
        return sums.result

    def _each(self, use: Callable[[slice, Rows], None]) -> None:
        """Hand over the rows of each chosen parameter, on the way back.

        Uses of a parameter are summed; where none has a part in the output, rows are zero.
        """
        linear, layers = self._linear, self._linear.layers
        missing = {block.columns.start: block.columns for block in linear.parameters.blocks}
        waiting = dict.fromkeys(missing, 0)
        for layer in layers:
            layer.check_unchanged()
            for parameter in layer.parameters:
                if id(parameter) in layer.places:
                    waiting[layer.places[id(parameter)].block.start] += 1
        sums: dict[int, Tensor] = {}

        def take(i: int, delta: Tensor) -> None:
            for place, rows in layers[i].gradients(delta):
                start = place.block.start
                waiting[start] -= 1
                if waiting[start] or start in sums or place.columns != place.block:
                    if start not in sums:
                        sums[start] = self._zeros(place.block)
                    part = slice(place.columns.start - start, place.columns.stop - start)
                    sums[start][:, :, part] += _dense(rows)
                if not waiting[start]:
                    use(missing.pop(start), sums.pop(start, rows))

        # nothing arrives where there are no layers, or no graph
        if layers and linear.graph.requires_grad:
            samples, _ = linear.ways.times(self._rows)
            few_kernels = linear.ways.few_kernels
            backward(
                linear.graph,
                linear.edges,
                self._rows,
                take,
                few_kernels=few_kernels,
                times=samples,
            )
        for start, columns in missing.items():
            use(columns, sums.pop(start) if start in sums else self._zeros(columns))

    def _zeros(self, columns: slice) -> Tensor:
        return self._rows.new_zeros(*self._rows.shape[:2], columns.stop - columns.start)

    @property
    def _limit(self) -> float:
        _, times = self._linear.ways.times(self._rows)
        if not self._rows.is_cuda:
            return _TINY / times
        widest = self._linear.parameters.widest * self.num_rows * self._rows.itemsize * times
        return min(_LARGE_ON_GPU, max(_TINY, widest)) / times


def _dense(rows: Rows) -> Tensor:
    return rows if isinstance(rows, Tensor) else rows.dense()


class _Neighbours:
    """Puts small blocks that are neighbours together, so that a product with them pays.

    Args:
        limit: Bytes of rows to hold back at most.
    """

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._waiting: list[tuple[slice, Tensor]] = []
        self._bytes = 0

    def add(self, columns: slice, rows: Tensor) -> list[tuple[slice, Tensor]]:
        """Return the blocks that are large enough now that there is another one."""
        size = rows.numel() * rows.itemsize
        if size > self._limit:
            return [(columns, rows)]
        ready = self.rest() if self._bytes + size > self._limit else []
        self._waiting.append((columns, rows))
        self._bytes += size
        return ready

    def rest(self) -> list[tuple[slice, Tensor]]:
        """Return what waits, runs of neighbours as one."""
        runs: list[list[tuple[slice, Tensor]]] = []
        for columns, rows in sorted(self._waiting, key=lambda block: block[0].start):
            if runs and runs[-1][-1][0].stop == columns.start:
                runs[-1].append((columns, rows))
            else:
                runs.append([(columns, rows)])
        self._waiting, self._bytes = [], 0
        return [
            (slice(run[0][0].start, run[-1][0].stop), _side_by_side([rows for _, rows in run]))
            for run in runs
        ]


def _side_by_side(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts, dim=2) if len(parts) > 1 else parts[0].contiguous()
