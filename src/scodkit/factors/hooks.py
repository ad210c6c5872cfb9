"""Batched factors from one forward pass and one backward pass to the layers' outputs.

The layers a forward pass calls are remembered with their inputs; the backward pass brings the
rows to their outputs, and the rules form per-sample gradients of one layer after the other.
Autograd computes no gradient of a weight.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.func import vmap

from scodkit.errors import BatchError
from scodkit.factors.engine import Engine, Factors, HeldFactors, Linearization, Sums
from scodkit.factors.recorder import Place, Recorder
from scodkit.factors.rules import Batch, Fold, Layer, Outer, Rows
from scodkit.factors.trial import Trial
from scodkit.network import Inputs, Network
from scodkit.parameters import ParameterSet

# bytes of rows: below the first, blocks are put together for one product; above the second,
# and on a CPU above the first, the copy costs more than the call it saves
_TINY = 1 << 20
_LARGE_ON_GPU = 1 << 25

# bytes of an average layer's output up to which, on a GPU, directions are folded into the
# batch (fewest kernels, but some run decomposed), and up to which they go back one by one
# within a single call; above that each alone keeps the GPU busy
_FOLDED = 1 << 20
_BATCHED = 1 << 25


class HookEngine(Engine):
    """Per-sample gradients by a rule for each kind of layer."""

    def __init__(self, network: Network, parameters: ParameterSet) -> None:
        super().__init__(network, parameters)
        self._folds: set[Fold] = set()  # in the layers of batches seen so far
        self._delta_bytes = 0  # of one row at all layers' outputs; known after one batch
        self._itemsize = parameters.itemsize(network.model)
        tensors = (*network.model.parameters(), *network.model.buffers())
        self._copies = any(tensor.is_inference() for tensor in tensors)

    def linearize(self, call: Inputs) -> Linearization:
        """Return one forward pass with the calls on chosen parameters remembered."""
        batch = Batch(call.batch_size)
        recorder = Recorder(self.network.model, self.parameters, batch, copies=self._copies)
        with recorder:
            output = self.network(call)
        self._delta_bytes = recorder.output_bytes // max(1, call.batch_size)
        if not batch.folds <= self._folds:
            self._try_again(call, batch.folds)
        return _HookLinearization(recorder, output, self.parameters)

    def _try_again(self, call: Inputs, folds: set[Fold]) -> None:
        """Try the engine on a batch whose layers are laid out as none before it.

        Raises:
            BatchError: If it gets that batch wrong.
        """
        first, fresh = not self._folds, folds - self._folds
        self._folds |= folds
        if first:  # this is the trial itself
            return
        with self.network.in_full_precision():
            reason = Trial(self.network, self.parameters, call).objection(self)
        if reason is not None:
            self._folds -= fresh
            raise BatchError(
                "expected batches in which every sample takes part in every layer alike, got "
                f"one that is laid out otherwise ({reason}); pad the samples instead of "
                "packing them"
            )

    def row_bytes(self, held: bool) -> int:
        """Return the working memory of one row in weight space, and at the layers' outputs.

        Args:
            held: Whether all of the row is held at once, or block after block.
        """
        widest = self.parameters.widest
        columns = self.parameters.num_parameters + widest if held else 2 * widest
        # while a layer's rows are formed, so is a copy of its gradients
        return columns * self._itemsize + 2 * self._delta_bytes


class _HookLinearization(Linearization):
    def __init__(self, recorder: Recorder, output: Tensor, parameters: ParameterSet) -> None:
        self._recorder = recorder
        self._graph = output
        self._parameters = parameters
        self.output = output.detach()

    def pull_back(self, rows: Tensor) -> Factors:
        layers = self._recorder.layers
        deltas: Iterable[Tensor | None] = [None] * len(layers)
        if layers and self._graph.requires_grad:
            deltas = _backward(self._graph, self._recorder, rows)
        used = []
        for layer, delta in zip(layers, deltas, strict=True):
            layer.check_unchanged()
            if delta is not None:
                used.append((layer, delta))
        return HookFactors(self._parameters, self._recorder.places, used, rows)


def _backward(output: Tensor, recorder: Recorder, rows: Tensor) -> list[Tensor | None]:
    """Return the gradients at each layer, ``(q, *shape)``; None where nothing arrives."""
    by_direction = rows.transpose(0, 1).reshape(rows.shape[1], *output.shape)
    edges = recorder.edges
    if rows.shape[1] == 1:
        found = _gradients(output, edges, by_direction[0])
        return [None if delta is None else delta[None] for delta in found]
    if output.is_cuda and recorder.output_bytes <= _FOLDED * len(edges):
        return _folded(output, edges, by_direction)
    if not output.is_cuda or recorder.output_bytes <= _BATCHED * len(edges):
        return list(_gradients(output, edges, by_direction, is_grads_batched=True))
    separate = [_gradients(output, edges, direction) for direction in by_direction]
    return [
        None if deltas[0] is None else torch.stack(deltas)
        for deltas in zip(*separate, strict=True)
    ]


def _gradients(
    output: Tensor, edges: list[GradientEdge], rows: Tensor, *, is_grads_batched: bool = False
) -> tuple[Tensor, ...]:
    return torch.autograd.grad(
        output,
        edges,
        rows,
        retain_graph=True,
        allow_unused=True,
        is_grads_batched=is_grads_batched,
    )


def _folded(output: Tensor, edges: list[GradientEdge], rows: Tensor) -> list[Tensor | None]:
    """Return the gradients with the directions folded into the batch: few, larger kernels."""
    reached: list[int] = []

    def back(direction: Tensor) -> tuple[Tensor, ...]:
        found = _gradients(output, edges, direction)
        reached[:] = [i for i, delta in enumerate(found) if delta is not None]
        return tuple(found[i] for i in reached)

    deltas = vmap(back)(rows)
    by_layer: list[Tensor | None] = [None] * len(edges)
    for i, delta in zip(reached, deltas, strict=True):
        by_layer[i] = delta
    return by_layer


class HookFactors(Factors):
    """Rows formed from layers and the gradients at their outputs, each time they are read.

    Args:
        parameters: The chosen weights.
        places: Where tensors with chosen weights sit, by id.
        used: The layers, with gradients ``(q, *shape of the output)``.
        rows: The rows at the output, ``(b, q, d)``.
    """

    def __init__(
        self,
        parameters: ParameterSet,
        places: Mapping[int, Place],
        used: list[tuple[Layer, Tensor]],
        rows: Tensor,
    ) -> None:
        self._parameters = parameters
        self._places = places
        self._used = used
        self._rows = rows
        self.num_rows = rows.shape[0] * rows.shape[1]

    @torch.no_grad()
    def blocks(self) -> Iterable[tuple[slice, Tensor]]:
        """Return ranges of columns with their rows, small neighbours together."""
        small = _Neighbours(self._limit)
        for columns, rows in self._pieces():
            yield from small.add(columns, _dense(rows))
        yield from small.rest()

    def hold(self) -> Factors:
        """Return the rows, formed once and for all."""
        return HeldFactors(list(self.blocks()))

    @torch.no_grad()
    def project(self, matrix: Tensor) -> tuple[Tensor, Tensor]:
        """See `Factors.project`.

        Returns:
            The same; large outer products are never formed on the way.
        """
        sums = Sums()
        small = _Neighbours(self._limit)
        for columns, rows in self._pieces():
            if isinstance(rows, Outer) and rows.nbytes > _TINY:
                sums.add(rows.squared_norms(), rows.project(matrix[columns]))
                continue
            for some, together in small.add(columns, _dense(rows)):
                sums.add_rows(together, matrix[some])
        for some, together in small.rest():
            sums.add_rows(together, matrix[some])
        return sums.result

    @property
    def _limit(self) -> int:
        if not self._rows.is_cuda:
            return _TINY
        widest = self._parameters.widest * self.num_rows * self._rows.itemsize
        return min(_LARGE_ON_GPU, max(_TINY, widest))

    @torch.no_grad()
    def _pieces(self) -> Iterator[tuple[slice, Rows]]:
        """Yield each chosen parameter once, summed over the calls it takes part in."""
        waiting = Counter(
            self._places[id(parameter)].block.start
            for layer, _ in self._used
            for parameter in layer.parameters
            if id(parameter) in self._places
        )
        unused = [b.columns for b in self._parameters.blocks if b.columns.start not in waiting]
        sums: dict[int, Tensor] = {}
        for layer, delta in self._used:
            for parameter, rows in layer.gradients(delta, lambda p: id(p) in self._places):
                place = self._places[id(parameter)]
                start = place.block.start
                waiting[start] -= 1
                if waiting[start] or start in sums or place.columns != place.block:
                    into = sums.setdefault(start, self._zeros(place.block))
                    own = slice(place.columns.start - start, place.columns.stop - start)
                    into[:, :, own] += _dense(rows)
                if not waiting[start]:
                    yield place.block, sums.pop(start, rows)
        for columns in unused:
            yield columns, self._zeros(columns)

    def _zeros(self, columns: slice) -> Tensor:
        return self._rows.new_zeros(*self._rows.shape[:2], columns.stop - columns.start)


def _dense(rows: Rows) -> Tensor:
    return rows if isinstance(rows, Tensor) else rows.dense()


class _Neighbours:
    """Puts small blocks that are neighbours together, so that a product with them pays.

    Args:
        limit: Bytes of rows to hold back at most.
    """

    def __init__(self, limit: int) -> None:
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
