"""Batched factors from one forward pass and one backward pass to the layers' outputs.

The layers a forward pass calls are remembered with their inputs; the backward pass brings the
rows to their outputs, and the rules form per-sample gradients of one layer after the other.
Autograd computes no gradient of a weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from scodkit.factors.backward import Take, backward
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
        return {**vars(self), **{name: {} for name in empty}}

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

    def for_recording(self) -> HookEngine:
        """See `Engine.for_recording`.

        Returns:
            An engine that launches fewer kernels on a GPU, more slowly.
        """
        engine = self.unchecked()
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
        recorder: Recorder | Replay,
        output: Tensor,
        parameters: ParameterSet,
        ways: _Ways,
        head: Head | None,
    ) -> None:
        self._recorder = recorder
        self._ways = ways
        self._graph = output
        self._parameters = parameters
        self.output = output.detach()
        self.head = head

    def pull_back(self, rows: Tensor) -> Factors:
        samples, all_rows = self._ways.times(rows)
        pull_back = partial(
            backward,
            self._graph,
            self._recorder.edges,
            rows,
            few_kernels=self._ways.few_kernels,
            times=samples,
        )
        # nothing arrives where there are no layers, or no graph
        reached = bool(self._recorder.layers) and self._graph.requires_grad
        take_all = pull_back if reached else lambda _: None
        return HookFactors(self._parameters, self._recorder, rows, take_all, all_rows)


class HookFactors(Factors):
    """Rows formed from layers and the gradients at their outputs, each time they are read.

    Args:
        parameters: The chosen weights.
        recorder: Saw the forward pass.
        rows: The rows at the output, ``(b, q, d)``.
        backward: Pulls them back, and hands over what arrives at each layer.
        times: Put layers together, and multiply, as if there were so many times as many rows.
    """

    def __init__(
        self,
        parameters: ParameterSet,
        recorder: Recorder | Replay,
        rows: Tensor,
        backward: Callable[[Take], None],
        times: float = 1.0,
    ) -> None:
        self._times = times
        self._parameters = parameters
        self._recorder = recorder
        self._rows = rows
        self._backward = backward
        self.num_rows = rows.shape[0] * rows.shape[1]

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
        sums, device = Sums(), self._rows.device
        small = _Neighbours(self._limit)

        def use(columns: slice, rows: Rows) -> None:
            if isinstance(rows, Outer) and rows.nbytes > _TINY / self._times:
                sums.add(rows.squared_norms(), rows.project(matrix[columns].to(device)))
                return
            for some, together in small.add(columns, _dense(rows)):
                sums.add_rows(together, matrix[some].to(device), self._times)

        self._each(use)
        for some, together in small.rest():
            sums.add_rows(together, matrix[some].to(device), self._times)
        return sums.result

    def _each(self, use: Callable[[slice, Rows], None]) -> None:
        """Hand over the rows of each chosen parameter, on the way back."""
        for layer in self._recorder.layers:
            layer.check_unchanged()
        blocks = _Blocks(self._parameters, self._recorder, self._rows)

        def take(i: int, delta: Tensor) -> None:
            for columns, rows in blocks.add(i, delta):
                use(columns, rows)

        self._backward(take)
        for columns, rows in blocks.rest():
            use(columns, rows)

    @property
    def _limit(self) -> float:
        if not self._rows.is_cuda:
            return _TINY / self._times
        widest = self._parameters.widest * self.num_rows * self._rows.itemsize * self._times
        return min(_LARGE_ON_GPU, max(_TINY, widest)) / self._times


class _Blocks:
    """Collects layers' gradients into those of whole parameters, summed over their uses.

    Args:
        parameters: The chosen weights.
        recorder: Saw the forward pass.
        rows: The rows at the output, ``(b, q, d)``.
    """

    def __init__(
        self, parameters: ParameterSet, recorder: Recorder | Replay, rows: Tensor
    ) -> None:
        self._layers = recorder.layers
        self._rows = rows
        # how many uses of each are still to come, and what they have summed to
        self._waiting = {block.columns.start: 0 for block in parameters.blocks}
        for layer in self._layers:
            for parameter in layer.parameters:
                if id(parameter) in layer.places:
                    self._waiting[layer.places[id(parameter)].block.start] += 1
        self._sums: dict[int, Tensor] = {}
        self._missing = {block.columns.start: block.columns for block in parameters.blocks}

    def add(self, index: int, delta: Tensor) -> Iterator[tuple[slice, Rows]]:
        """Yield the parameters whose gradients are complete with those of one more layer."""
        layer = self._layers[index]
        for place, rows in layer.gradients(delta):
            start = place.block.start
            self._waiting[start] -= 1
            if self._waiting[start] or start in self._sums or place.columns != place.block:
                if start not in self._sums:
                    self._sums[start] = self._zeros(place.block)
                own = slice(place.columns.start - start, place.columns.stop - start)
                self._sums[start][:, :, own] += _dense(rows)
            if not self._waiting[start]:
                del self._missing[start]
                yield place.block, self._sums.pop(start, rows)

    def rest(self) -> Iterator[tuple[slice, Rows]]:
        """Yield the others, of which some uses, or all, have no part in the output."""
        for start, columns in self._missing.items():
            yield (
                columns,
                self._sums.pop(start) if start in self._sums else self._zeros(columns),
            )

    def _zeros(self, columns: slice) -> Tensor:
        return self._rows.new_zeros(*self._rows.shape[:2], columns.stop - columns.start)


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
