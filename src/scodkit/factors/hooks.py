"""Batched factors from one forward pass and one backward pass to the layers' outputs.

The forward pass records the calls of layers with their inputs; the backward pass computes the
gradients at their outputs, and the rules compute per-sample gradients, one layer at a time.
Autograd computes no gradient of a weight.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from scodkit.errors import first_line
from scodkit.factors.alone import LoopEngine, SingleEngine
from scodkit.factors.engine import Engine, Head, Linearization
from scodkit.factors.pieces import Alone, check_some_alone, finite_samples, num_alone, tolerance
from scodkit.factors.products import Jacobian
from scodkit.factors.projected import ProjectedLinearization
from scodkit.factors.pullback import HookLinearization, Watched
from scodkit.factors.recorder import Recorder
from scodkit.factors.rules import UnsupportedCallError
from scodkit.factors.samples import Strangers, constants_of
from scodkit.factors.script import OtherCallsError, Replay, Script
from scodkit.model.inputs import Inputs
from scodkit.model.network import Network
from scodkit.model.parameters import ParameterSet
from scodkit.model.projected import ProjectedSet
from scodkit.numerics.torch_private import as_if_traced

# bytes of the layers' outputs up to which directions are run as copies of the samples
_SMALL = 1 << 20
_SMALL_ON_GPU = 1 << 27

# cached scripts, one per shape of batch, and failed replays after which none is added
_MOST_SCRIPTS = 16
_OFTEN = 5

# how a pass is run that cannot be followed at once: whether as if the model was traced, and
# whether what weights alone give, with as many rows as samples, has a row for each sample
_WAYS = ((False, True), (False, False), (True, True), (True, False))

# weights up to which memory suffices for a direction in weight space beside the batch
_MANY_WEIGHTS = 50_000_000

# non-zero rows without which a check proves nothing
_TWO = 2

# chooses another engine for a batch, given the reason
Otherwise = Callable[[Network, ParameterSet, Inputs, str], Engine]


def why_not_followed(engine: Engine, call: Inputs) -> str | None:
    """Return why a model was left to another engine; None if it was not.

    Args:
        engine: Of the model.
        call: A batch.
    """
    if isinstance(engine, HookEngine):
        return None
    try:
        HookEngine(engine.network, engine.parameters).linearize(call)
    except UnsupportedCallError as error:
        return str(error)
    return None


class HookEngine(Engine):
    """Per-sample gradients by a rule for each kind of layer.

    Attributes:
        check_every: Check the first batch of every layout, and one in so many later ones; 0
            for no checks at all.
        otherwise: Chooses the fallback engine for batches that this one refuses; None to
            raise instead.
        known_alone: Samples that were run alone when the engine was chosen, until the first
            check.
    """

    check_every = 0

    def __init__(self, network: Network, parameters: ParameterSet) -> None:
        super().__init__(network, parameters)
        self.otherwise: Otherwise | None = None
        self.known_alone: Alone | None = None
        self._single: SingleEngine | None = None
        self._checksum = Checksum(network, parameters)
        self._batches = 0
        self._traced = False  # whether the last recorded pass ran as if it was traced
        self._constants: dict[int, Tensor] = {}
        self._older: Strangers = {}
        self._other_calls = 0  # passes that differed from their script
        self._scripts: dict[object, Script] = {}  # by the inputs' shapes
        self._checked: set[object] = set()  # layouts of batches
        self._others: dict[object, Engine] = {}  # fallback engines, by layout
        self._delta_bytes = 0  # of one row at all layers' outputs; known after one batch
        self._itemsize: float = parameters.itemsize(network.model)  # average over a row
        model = network.model
        tensors = (*model.parameters(), *model.buffers())
        self._copies = any(tensor.is_inference() for tensor in tensors)

    def __getstate__(self) -> dict[str, Any]:
        # these are keyed by tensor id, which is not valid for copies
        empty = ("_constants", "_older", "_scripts")
        return {
            **vars(self),
            **{name: {} for name in empty},
            "_single": None,
            "known_alone": None,
        }

    def linearize(self, call: Inputs) -> Linearization:
        """Return the linearisation from a forward pass with recorded layers.

        Raises:
            UnsupportedCallError: If rows cannot be assigned to samples with certainty, and
                there is no fallback engine.
        """
        script = self._scripts.get(call.shapes)
        if script is not None:
            linear = self._replayed(call, script)
            if linear is not None:
                return linear
            del self._scripts[call.shapes]
        return self._followed(call)

    def _replayed(self, call: Inputs, script: Script) -> Linearization | None:
        """Return the replay of a script; None if the calls differ, or if a check is due."""
        if self.check_every and call.batch_size > 1:
            if (self._batches + 1) % self.check_every == 0:
                return None  # this batch is due to be checked
            self._batches += 1
        replay = Replay(script)
        try:
            output = self._run(call, replay, script.traced)
            differs = next(replay.steps, None) is not None  # a call is missing
        except (OtherCallsError, UnsupportedCallError):
            differs = True
        if differs:
            self._other_calls += 1
            return None
        return self._linearization(replay, output, None)

    def _followed(self, call: Inputs) -> Linearization:
        """Return a pass that tracks its samples, its rows checked if a check is due.

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
            fallback = self.otherwise(self.network, self.parameters, call, str(error))
            self._others[layout] = fallback
            return fallback.linearize(call)
        self.known_alone = None  # the user's data must not be retained
        # replays of a model with data-dependent control flow would fail again and again
        usable = recorder.script.complete and self._other_calls < _OFTEN
        if checked and usable and linear.head is None:
            if len(self._scripts) >= _MOST_SCRIPTS:
                self._scripts.clear()
            self._scripts[call.shapes] = recorder.script
        return linear

    def _recorded(self, call: Inputs) -> tuple[Linearization, Recorder]:
        recorder, output = self._first_followed(call)
        self._older = recorder.strangers
        self._delta_bytes = recorder.edges.output_bytes // max(1, call.batch_size)
        self._delta_bytes += recorder.derived_bytes
        if self.network.precision is not None:
            row_bytes = recorder.row_bytes(output.itemsize)
            self._itemsize = row_bytes / self.parameters.in_full().num_parameters
        projected = isinstance(self.parameters, ProjectedSet)
        head = None if projected else recorder.head(output)
        self.finds_head = head is not None
        recorder.script.edges = replace(recorder.edges, of_layers=[])
        return self._linearization(recorder, output, head), recorder

    def _linearization(
        self, watched: Watched, output: Tensor, head: Head | None
    ) -> HookLinearization:
        projected = isinstance(self.parameters, ProjectedSet)
        kind = ProjectedLinearization if projected else HookLinearization
        return kind(watched, output, self.parameters, self.recording, head)

    def _first_followed(self, call: Inputs) -> tuple[Recorder, Tensor]:
        """Return a recording of a pass, run in the first way in which it can be followed.

        Raises:
            UnsupportedCallError: If there is none.
        """
        recorder, found = self._attempt(call, self._traced, True)
        for way in _WAYS:
            if isinstance(found, Tensor):
                break
            # a tensor seen again, unmodified, existed before this pass: a mask or a table
            if way != (self._traced, True) or recorder.strangers:
                recorder, found = self._attempt(call, *way)
        if not isinstance(found, Tensor):
            raise found
        self._traced = recorder.script.traced
        return recorder, found

    def _attempt(
        self, call: Inputs, traced: bool, per_sample: bool
    ) -> tuple[Recorder, Tensor | UnsupportedCallError]:
        """Return a recording, with the output of the pass or why it cannot be followed."""
        recorder = self._recorder(call, per_sample)
        recorder.script.traced = traced
        try:
            output = self._run(call, recorder, traced)
            recorder.check(output)
        except UnsupportedCallError as error:
            self._older = recorder.strangers or self._older
            return recorder, error
        return recorder, output

    def _recorder(self, call: Inputs, per_sample: bool = True) -> Recorder:
        module = self.network.running(call)
        if self._older or not self._constants:  # before the pass: they depend on no sample yet
            self._constants = constants_of(module)
        return Recorder(
            module,
            self.parameters.in_full(),
            call.batch_size,
            self._constants,
            self._older,
            copies=self._copies,
            per_sample=per_sample,
        )

    def _run(self, call: Inputs, watcher: Recorder | Replay, traced: bool) -> Tensor:
        """Return the output of a watched pass.

        Raises:
            UnsupportedCallError: If the model fails because it is watched.
            OtherCallsError: If it makes other calls than the replayed ones.
            OutOfMemoryError: If memory does not suffice.
        """
        # what a model reads of its batch in passing, such as whether anything is masked at
        # all, it does not read while it is traced: there each sample is computed by itself
        try:
            with as_if_traced() if traced else contextlib.nullcontext():
                return self.network(call, watcher)
        except (OtherCallsError, UnsupportedCallError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # perhaps it cannot be traced, or not without a graph
            if not traced and not self._runs(call):
                raise
            how = "as if traced" if traced else "while it was recorded"
            raise UnsupportedCallError(f"{how}, it raised {first_line(error)}") from error

    def _runs(self, call: Inputs) -> bool:
        """Return whether the model runs on a batch, when nobody watches."""
        with contextlib.suppress(Exception), torch.no_grad():
            self.network(call)
            return True
        return False

    def _check(self, call: Inputs, linear: Linearization, layout: object) -> bool:
        """Check the first batch of a layout, and one in `check_every` of the later ones.

        Returns:
            Whether a batch of this layout has passed a check, now or before.

        Raises:
            UnsupportedCallError: If rows are not those of their samples.
        """
        self._batches += 1
        if layout in self._checked and self._batches % self.check_every:
            return True
        rounded = self.network.device.type == "cuda" or self.network.precision is not None
        with self.network.in_full_precision():
            if rounded:  # two correct computations differ by 1e-3 in TF32, 1e-2 in bfloat16
                linear, _ = self._recorded(call)
            count = num_alone(self.parameters)
            proves = check_some_alone(
                self.network, call, linear.output, count, self.known_alone
            )
            distance = self._checksum.distance(call, linear)
        if distance is None:  # rows are zero: leave it to the next batch
            return layout in self._checked
        if not distance <= tolerance(linear.output):
            raise UnsupportedCallError(f"rows are {distance:.1e} off, relative to their size")
        if proves:
            self._checked.add(layout)
        return layout in self._checked

    def of(self, network: Network) -> HookEngine:
        """See `Engine.of`.

        Returns:
            An engine that takes over `known_alone`, which this one drops: the user's data must
            not be retained.
        """
        engine = copy.copy(self)
        engine.network = network
        engine.known_alone, self.known_alone = self.known_alone, None
        return engine

    def learn(self, call: Inputs) -> None:
        """Record one sample, to know sizes that decide how the first batch is split.

        Args:
            call: A batch, of which the first sample is run.
        """
        with contextlib.suppress(UnsupportedCallError):
            self._recorded(call.samples(slice(0, 1)))

    def num_calls(self, call: Inputs) -> int | None:
        """See `Engine.num_calls`.

        Returns:
            The number of calls of layers; a layer that is called twice counts twice.
        """
        return len(self._recorded(call)[1].layers)

    def for_single(self) -> Engine:
        """See `Engine.for_single`.

        Returns:
            Plain autograd, unless the model has tensors created in inference mode, or weights
            are projected: then no whole gradient is formed.
        """
        if self._copies or isinstance(self.parameters, ProjectedSet):
            return self
        if self._single is None:
            self._single = SingleEngine(self.network, self.parameters)
        return self._single

    def for_copies(self, call: Inputs, rows: int) -> Engine | None:
        """See `Engine.for_copies`.

        Returns:
            An engine without a fallback, if the layers are so small that call overhead, not
            arithmetic, dominates the time; None otherwise.
        """
        try:
            _, alone = self._recorded(call.samples(slice(0, 1)))
        except UnsupportedCallError:
            return None
        limit = _SMALL_ON_GPU if self.network.device.type == "cuda" else _SMALL
        if not 0 < rows * alone.edges.output_bytes <= limit:
            return None
        engine = copy.copy(self)
        engine.otherwise, engine._others = None, {}
        return engine

    def row_bytes(self, held: bool) -> int:
        """Return the bytes of one row in weight space, and of its gradients at the layers.

        Args:
            held: Whether the whole row is in memory at once, or one block at a time.
        """
        full, widest = self.parameters.in_full(), self.parameters.widest
        if full is not self.parameters:  # for norms a whole gradient may be formed
            widest = 2 * self.parameters.num_parameters + full.widest
        columns = self.parameters.num_parameters + widest if held else 2 * widest
        return int(columns * self._itemsize) + self._delta_bytes


class Checksum:
    """Checks rows against directional derivatives that are computed without them.

    The directional derivative of a sample's output along a direction in weight space is the
    product of its row with that direction. Forward-mode autograd, or plain autograd, computes
    it without the rows.

    Args:
        network: The model.
        parameters: The chosen weights.
    """

    def __init__(self, network: Network, parameters: ParameterSet) -> None:
        self._network, self._parameters = network, parameters
        # the methods still in use: forward mode, plain autograd; by halves if none is left
        few = parameters.in_full().num_parameters <= _MANY_WEIGHTS
        self._ways = [self._forward_mode, self._plain_autograd] if few else []
        self._count = 0  # of checks; the seed of the next one

    def distance(self, call: Inputs, linear: Linearization) -> float | None:
        """Return the largest error of any sample's row, relative to the norm of the row.

        Args:
            call: A batch.
            linear: The network linearised at it.

        Returns:
            None if rows are zero, which proves nothing.
        """
        self._count += 1
        generator = torch.Generator().manual_seed(self._count)
        shape = (call.batch_size, 1, linear.output[0].numel())
        rows = torch.randn(shape, generator=generator).to(linear.output)
        rows = rows.masked_fill(~finite_samples(call, linear.output)[:, None, None], 0.0)
        if not self._ways:
            return self._by_halves(linear, rows, generator)
        direction = torch.randn(self._parameters.num_parameters, generator=generator).to(rows)
        norms, along = linear.pull_back(rows).project(direction[:, None])
        distance = None
        for way in list(self._ways):
            try:
                slopes = way(call, rows, direction)
            except Exception:  # whatever a third-party module raises under a transform
                self._ways.remove(way)
                continue
            distance = _relative((along[:, 0, 0] - slopes).abs(), norms.sqrt())
            if distance is None or distance <= tolerance(rows):
                break
            # forward mode ignores a model's no_grad, and a custom derivative may be wrong:
            # plain autograd decides, now and later
            if way is not self._ways[-1]:
                self._ways.remove(way)
        return distance if self._ways else self._by_halves(linear, rows, generator)

    def _forward_mode(self, call: Inputs, rows: Tensor, direction: Tensor) -> Tensor:
        """Return directional derivatives ``r_i . (J_i v)`` by forward mode, ``(B,)``."""
        jacobian = Jacobian(self._network, self._parameters.in_full(), call)
        pushed = jacobian.push(self._parameters.spread(direction[None]))[0]
        return (pushed * rows[:, 0]).double().sum(1)

    def _plain_autograd(self, call: Inputs, rows: Tensor, direction: Tensor) -> Tensor:
        """Return the same by plain autograd, one sample at a time: all may not fit memory."""
        loop = LoopEngine(self._network, self._parameters)
        slopes = []
        for i, row in enumerate(rows):
            factors = loop.alone(call.samples(slice(i, i + 1))).pull_back(row[None])
            slopes.append(factors.project(direction[:, None])[1][0, 0, 0])
        return torch.stack(slopes)

    @staticmethod
    def _by_halves(
        linear: Linearization, rows: Tensor, generator: torch.Generator
    ) -> float | None:
        """Return how much gradient leaks into samples whose rows are set to zero."""
        half = torch.randperm(len(rows), generator=generator) < len(rows) // 2
        others = rows.masked_fill(half.to(rows.device)[:, None, None], 0.0)
        norms = linear.pull_back(others).squared_norms().sqrt()
        return _relative(norms * half.to(norms.device), norms.max().expand_as(norms))


def _relative(error: Tensor, size: Tensor) -> float | None:
    """Return the largest relative error; None if fewer than two sizes are non-zero."""
    usable = (size > 0) & size.isfinite()
    if bool((error[~usable].nan_to_num(0.0) > 0).any()):
        return float("inf")
    if int(usable.sum()) < _TWO:
        return None
    return float((error[usable] / size[usable]).max())
