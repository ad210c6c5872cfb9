"""Backward pass from rows at the output to the layers, and from there to weight space."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeGuard

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.func import vmap

from scodkit.factors.engine import (
    Factors,
    Head,
    HeldFactors,
    Linearization,
    Sums,
    Tall,
)
from scodkit.factors.rules import Derived, Layer, Place, Rows
from scodkit.factors.rules.rows import LookedUp, Outer, Summed, dense, project_whole
from scodkit.factors.uses import InFactors, Totals, Uses
from scodkit.model.parameters import ParameterSet
from scodkit.numerics.torch_private import out_of_map, pull_back

# bytes of an average layer's output on a GPU: up to _FOLDED directions are folded into the
# batch where the number of kernels matters most (some run decomposed); up to _BATCHED they go
# through one batched call; above that a single direction keeps the GPU busy
_FOLDED = 1 << 20
# bytes of the gradients at all layers up to which they are kept together: fewer calls
_AT_ONCE = 1 << 24
_BATCHED = 1 << 25

# bytes of rows: below the first, blocks are concatenated for one product; above the second,
# and on a CPU above the first, the copy costs more than the call it saves
_TINY = 1 << 20
_LARGE_ON_GPU = 1 << 25

Take = Callable[[int, Tensor], None]


@dataclass
class Edges:
    """Gradient edges of the layers' outputs.

    Recorded at the call: a later in-place operation moves an output along the graph.

    Args:
        of_layers: One for each layer.
        starts: Indices of the layers with nothing before them that requires gradients.
        output_bytes: Total size of the layers' outputs.
        shared: First columns of parameters that are used more than once, or in parts.
        leaves: What derived tensors are computed from: columns of parameters, and the tensors
            that stand for these in the graph.
    """

    of_layers: list[GradientEdge] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    output_bytes: int = 0
    shared: set[int] = field(default_factory=set)
    leaves: list[tuple[Place, Tensor]] = field(default_factory=list)


def backward(
    output: Tensor, edges: Edges, rows: Tensor, take: Take, *, few_kernels: bool = False
) -> None:
    """Pull rows back to every layer.

    Args:
        output: The output of the network, with its graph.
        edges: The layers in the graph.
        rows: At the output, ``(b, q, d)``.
        take: Called with the index of a layer and the gradients at its output, ``(q,
            *shape)``; not called for layers that get no gradient.
        few_kernels: Prefer launching few kernels on a GPU over launching them quickly.
    """
    count = rows.shape[1]
    average = edges.output_bytes / len(edges.of_layers)
    if count == 1 and edges.output_bytes <= _AT_ONCE:
        inputs = tuple(edges.of_layers)
        deltas = pull_back((output,), (rows.view(output.shape),), inputs=inputs)
        for i, delta in enumerate(deltas):
            if delta is not None:
                take(i, delta.unsqueeze(0))
        return
    if count == 1:
        row = rows.view(output.shape)
        _stream(output, edges, row, lambda i, delta: take(i, delta.unsqueeze(0)))
        return
    by_direction = rows.transpose(0, 1).reshape(count, *output.shape)
    if few_kernels and output.is_cuda and average <= _FOLDED:
        _folded(output, edges, by_direction, take)
    elif count * edges.output_bytes <= _AT_ONCE:
        _hand_over(_gradients(output, edges.of_layers, by_direction, batched=True), take)
    elif not output.is_cuda or average <= _BATCHED:
        _stream(output, edges, by_direction, take, batched=True)
    else:
        separate = [_gradients(output, edges.of_layers, row) for row in by_direction]
        together = zip(*separate, strict=True)
        _hand_over((None if d[0] is None else torch.stack(d) for d in together), take)


def _gradients(
    output: Tensor,
    edges: Sequence[GradientEdge] | Sequence[Tensor],
    rows: Tensor,
    *,
    batched: bool = False,
) -> Sequence[Tensor | None]:
    return torch.autograd.grad(
        output, edges, rows, retain_graph=True, allow_unused=True, is_grads_batched=batched
    )


def _hand_over(deltas: Iterable[Tensor | None], take: Take) -> None:
    for i, delta in enumerate(deltas):
        if delta is not None:
            take(i, delta)


def _stream(
    output: Tensor, edges: Edges, rows: Tensor, take: Take, *, batched: bool = False
) -> list[Tensor]:
    """Pull back one row, passing on gradients as they arrive at the layers.

    Autograd visits only nodes on a path to a requested edge: those of the layers that start
    the graph. Nearly always every other layer lies on such a path; those that do not are
    requested in a second backward pass.

    Args:
        output: The output of the network, with its graph.
        edges: The layers in the graph.
        rows: At the output, of its shape; or ``(q, *shape)``, in one vmapped call.
        take: See `backward`.
        batched: Whether there are several rows.

    Returns:
        The requested gradients, which a function under `vmap` has to return.
    """
    missing = set(range(len(edges.of_layers))).difference(edges.starts)
    returned: list[Tensor] = []

    def arrived(i: int, number: int, gradients: tuple[Tensor | None, ...]) -> None:
        delta = gradients[number]
        if delta is not None:
            missing.discard(i)
            take(i, out_of_map(delta, len(rows)) if batched else delta)

    def request(layers: list[int]) -> None:
        ends = [edges.of_layers[i] for i in layers]
        deltas = _gradients(output, ends, rows, batched=batched) if ends else ()
        for i, delta in zip(layers, deltas, strict=True):
            if delta is not None:
                take(i, delta)
                returned.append(delta)

    handles = [
        edges.of_layers[i].node.register_prehook(
            partial(arrived, i, edges.of_layers[i].output_nr)
        )
        for i in missing
    ]
    try:
        request(edges.starts)
    finally:
        for handle in handles:
            handle.remove()
    request(sorted(missing))
    return returned


def _folded(output: Tensor, edges: Edges, rows: Tensor, take: Take) -> None:
    """Pull rows ``(q, ...)`` back with directions as a vmap axis: fewer, larger kernels."""

    def take_all(i: int, delta: Tensor) -> None:
        _AllDirections.apply(delta, len(rows), partial(take, i))  # type: ignore[no-untyped-call]

    vmap(lambda row: tuple(_stream(output, edges, row, take_all)))(rows)


class _AllDirections(torch.autograd.Function):
    """Passes the gradient of all directions to a function, from within a vmap over them."""

    @staticmethod
    def forward(delta: Tensor, count: int, see: Callable[[Tensor], None]) -> Tensor:
        """Return a gradient that is the same for all directions, after passing it on."""
        see(delta.expand(count, *delta.shape))
        return delta.detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Save nothing: there is no second derivative."""

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[int, None, None],
        delta: Tensor,
        count: int,
        see: Callable[[Tensor], None],
    ) -> tuple[Tensor, int]:
        """Return a gradient that differs by direction, and its vmapped axis; pass it on."""
        see(delta.movedim(in_dims[0], 0))
        return delta.detach(), in_dims[0]


class Watched(Protocol):
    """A forward pass whose calls on chosen parameters were recorded.

    Attributes:
        layers: The calls, in order.
        derived: Tensors computed from chosen parameters alone, in order.
        edges: Gradient edges of the layers' outputs.
    """

    layers: list[Layer]
    derived: list[Tensor]
    edges: Edges


class HookLinearization(Linearization):
    """A network linearised at one batch, from the layers of a recorded forward pass.

    Args:
        watched: The forward pass.
        output: Of the network, with its graph.
        parameters: The chosen weights.
        few_kernels: See `backward`.
        head: The chosen layer, if it is a single one at the network's end.
    """

    def __init__(
        self,
        watched: Watched,
        output: Tensor,
        parameters: ParameterSet,
        few_kernels: bool,
        head: Head | None,
    ) -> None:
        self.layers, self.edges, self.derived = watched.layers, watched.edges, watched.derived
        self.graph = output
        self.parameters = parameters
        self.few_kernels = few_kernels
        self.output = output.detach()
        self.head = head

    def pull_back(self, rows: Tensor) -> Factors:
        """See `Linearization.pull_back`.

        Returns:
            Rows that are computed when they are read.
        """
        return HookFactors(self, rows)


class HookFactors(Factors):
    """Rows computed from layers and the gradients at their outputs, each time they are read.

    Args:
        linear: The network linearised at the batch.
        rows: The rows at the output, ``(b, q, d)``.
    """

    def __init__(self, linear: HookLinearization, rows: Tensor) -> None:
        self._linear, self._rows = linear, rows
        self.num_rows = rows.shape[0] * rows.shape[1]

    def blocks(self) -> Iterable[tuple[slice, Tensor]]:
        """Return ranges of columns with their rows; small adjacent blocks are merged."""
        return self.hold().blocks()

    def hold(self) -> Factors:
        """Return the rows, materialised as the gradients arrive at each layer."""
        blocks: list[tuple[slice, Tensor]] = []
        small = _Neighbours(self._limit)
        self.each(lambda columns, rows: blocks.extend(small.add(columns, dense(rows))))
        return HeldFactors([*blocks, *small.rest()])

    def project(self, matrix: Tall) -> tuple[Tensor, Tensor]:
        """See `Factors.project`.

        Returns:
            The same. Unless layers are so large that directions are pulled back one by one,
            gradients are freed as soon as they are used; large outer products are never
            materialised.
        """
        parameters, device = self._linear.parameters, self._rows.device
        size = self.num_rows * parameters.num_parameters * self._rows.itemsize
        if size <= _TINY and device.type != "cuda":
            part = matrix[slice(0, parameters.num_parameters)]
            if part.dtype == self._rows.dtype and part.device == device:
                # in one product: in a small network, call overhead dominates the time
                return project_whole(self._all_columns().to(part.dtype), part)
        sums, small = Sums(), _Neighbours(self._limit)

        def use(columns: slice, rows: Rows) -> None:
            if _pays_in_factors(rows) and rows.nbytes > _TINY:
                sums.add(*rows.energies(matrix[columns].to(device)))
                return
            for span, together in small.add(columns, dense(rows)):
                sums.add_rows(together, matrix[span].to(device))

        self.each(use)
        for span, together in small.rest():
            sums.add_rows(together, matrix[span].to(device))
        return sums.result

    def _all_columns(self) -> Tensor:
        """Return the rows of all parameters, ``(b, q, N)``."""
        parts: dict[int, Tensor] = {}

        def keep(columns: slice, rows: Rows) -> None:
            parts[columns.start] = dense(rows)

        self.each(keep)
        return torch.cat([parts[start] for start in sorted(parts)], dim=2)

    @torch.no_grad()
    def each(self, use: Callable[[slice, Rows], None], sums: Uses | None = None) -> None:
        """Run the backward pass, and pass on the rows of each chosen parameter.

        Args:
            use: Called with the columns of each parameter and its rows, which are zero if no
                use of it affects the output.
            sums: Adds up the uses of a parameter with several; by default as one tensor.
        """
        linear, layers = self._linear, self._linear.layers
        sums = Totals(self._rows) if sums is None else sums
        missing = linear.parameters.in_full().by_start.copy()
        of_derived: dict[int, Tensor] = {}

        def take(i: int, delta: Tensor) -> None:
            layers[i].check_unchanged()
            for place, rows in layers[i].gradients(delta):
                if isinstance(place, Derived):
                    before = of_derived.get(place.index)
                    of_derived[place.index] = (
                        dense(rows) if before is None else before + dense(rows)
                    )
                elif place.block.start not in linear.edges.shared:
                    use(missing.pop(place.block.start), rows)
                else:
                    sums.add(place, rows)

        # there are no gradients without layers, or without a graph
        if layers and linear.graph.requires_grad:
            few = linear.few_kernels
            backward(linear.graph, linear.edges, self._rows, take, few_kernels=few)
        for index, rows in of_derived.items():
            self._pull_further(linear.derived[index], rows, sums.add)
        for columns in missing.values():
            use(columns, sums.pop(columns))

    def _pull_further(
        self, derived: Tensor, rows: Tensor, add: Callable[[Place, Tensor], None]
    ) -> None:
        """Pull rows of a derived tensor back to the parameters it was computed from.

        Args:
            derived: The tensor, with its graph.
            rows: ``(b, q, n)``, ``n`` its number of entries.
            add: Called with columns and their rows.
        """
        places, leaves = zip(*self._linear.edges.leaves, strict=True)
        flat = rows.reshape(-1, *derived.shape)
        pulled = _gradients(derived, leaves, flat, batched=True)
        for place, gradient in zip(places, pulled, strict=True):
            if gradient is not None:
                add(place, gradient.reshape(*rows.shape[:2], -1))

    def in_factors(self) -> Uses:
        """Return what adds up uses of parameters without materialising them, for `each`."""
        return InFactors(self._linear.parameters.in_full(), self._rows)

    @property
    def _limit(self) -> int:
        if not self._rows.is_cuda:
            return _TINY
        widest = self._linear.parameters.widest * self.num_rows * self._rows.itemsize
        return min(_LARGE_ON_GPU, max(_TINY, widest))


def _pays_in_factors(rows: Rows) -> TypeGuard[Outer | Summed | LookedUp]:
    """Return whether rows are multiplied faster without being materialised."""
    if isinstance(rows, LookedUp):
        return rows.sparse
    return isinstance(rows, Outer) or (isinstance(rows, Summed) and not rows.a.is_cuda)


class _Neighbours:
    """Merges small adjacent blocks, to have fewer and larger products.

    Args:
        limit: Bytes of rows to buffer at most.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._waiting: list[tuple[slice, Tensor]] = []
        self._bytes = 0

    def add(self, columns: slice, rows: Tensor) -> list[tuple[slice, Tensor]]:
        """Return the blocks that are ready once this one is buffered."""
        size = rows.numel() * rows.itemsize
        if size > self._limit:
            return [(columns, rows)]
        ready = self.rest() if self._bytes + size > self._limit else []
        self._waiting.append((columns, rows))
        self._bytes += size
        return ready

    def rest(self) -> list[tuple[slice, Tensor]]:
        """Return the buffered blocks, with runs of adjacent ones merged."""
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
