"""Gradients at the outputs of layers, handed over as they arrive on the way back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.func import vmap

# bytes of an average layer's output on a GPU, up to which directions are folded into the batch
# where few kernels count for most (some run decomposed), and up to which they go back one by
# one within a single call; above that each alone keeps the GPU busy
_FOLDED = 1 << 20
# bytes of gradients at all layers up to which they are held together: fewer calls
_AT_ONCE = 1 << 24
_BATCHED = 1 << 25

# torch numbers maps by how deep they are nested: that of torch.autograd.grad is outermost
_LEVEL = 1

Take = Callable[[int, Tensor], None]


@dataclass
class Edges:
    """Where in a graph the layers' outputs were made.

    Kept because an in-place operation may since have moved an output further along the graph.

    Args:
        of_layers: One for each layer.
        starts: Which of the layers have nothing before them that needs gradients.
        output_bytes: Size of all layers' outputs together.
    """

    of_layers: list[GradientEdge] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    output_bytes: int = 0

    def add(self, output: Tensor, *, start: bool) -> None:
        """Note the output of the next layer."""
        if start:
            self.starts.append(len(self.of_layers))
        self.of_layers.append(get_gradient_edge(output))
        self.output_bytes += output.nbytes


def backward(
    output: Tensor,
    edges: Edges,
    rows: Tensor,
    take: Take,
    *,
    few_kernels: bool = False,
    times: float = 1.0,
) -> None:
    """Pull rows back to every layer.

    Args:
        output: The end of the graph.
        edges: The layers in it.
        rows: At the output, ``(b, q, d)``.
        take: Given the index of a layer, and the gradients at its output ``(q, *shape)``; not
            called for layers that nothing arrives at.
        few_kernels: Prefer launching few kernels on a GPU over launching them quickly.
        times: Go back as if the batch were so many times as large.
    """
    by_direction = rows.transpose(0, 1).reshape(rows.shape[1], *output.shape)
    average = times * edges.output_bytes / len(edges.of_layers)
    if len(by_direction) == 1 and times * edges.output_bytes <= _AT_ONCE:
        found = _gradients(output, edges.of_layers, by_direction[0])
        _hand_over([None if delta is None else delta[None] for delta in found], take)
    elif len(by_direction) == 1:
        _streamed(output, edges, by_direction[0], lambda i, delta: take(i, delta[None]))
    elif few_kernels and average <= _FOLDED:
        _folded(output, edges, by_direction, take)
    elif not output.is_cuda or average <= _BATCHED:
        _batched(output, edges, by_direction, take)
    else:
        separate = [_gradients(output, edges.of_layers, row) for row in by_direction]
        together = zip(*separate, strict=True)
        _hand_over((None if d[0] is None else torch.stack(d) for d in together), take)


def _gradients(
    output: Tensor, edges: Sequence[GradientEdge], rows: Tensor, *, batched: bool = False
) -> Sequence[Tensor | None]:
    return torch.autograd.grad(
        output, edges, rows, retain_graph=True, allow_unused=True, is_grads_batched=batched
    )


def _hand_over(deltas: Iterable[Tensor | None], take: Take) -> None:
    for i, delta in enumerate(deltas):
        if delta is not None:
            take(i, delta)


def _streamed(output: Tensor, edges: Edges, row: Tensor, take: Take) -> list[Tensor]:
    """Pull one row back.

    Returns:
        The gradients that were asked for, and handed over, too: a map has to return some.
    """
    found = _to_starts(output, edges, row, take)
    _hand_over(found, take)
    return [delta for delta in found if delta is not None]


def _batched(output: Tensor, edges: Edges, rows: Tensor, take: Take) -> None:
    """Pull rows ``(q, ...)`` back in one call, which maps over the directions."""

    def take_all(i: int, delta: Tensor) -> None:
        take(i, torch._remove_batch_dim(delta, _LEVEL, len(rows), 0))

    _hand_over(_to_starts(output, edges, rows, take_all, batched=True), take)


def _to_starts(
    output: Tensor, edges: Edges, rows: Tensor, take: Take, *, batched: bool = False
) -> list[Tensor | None]:
    """Return the gradients of layers that were asked for; the others are taken on the way.

    Only what lies on a way to something asked for is visited. Nearly always every way back
    ends at a start; some may end elsewhere, at other weights or at inputs that need gradients.
    """
    at_layers: list[Tensor | None] = [None] * len(edges.of_layers)
    seen = set(edges.starts)

    def note(i: int, delta: Tensor) -> None:
        seen.add(i)
        take(i, delta)

    def ask(layers: list[int]) -> None:
        if layers:
            asked = [edges.of_layers[i] for i in layers]
            found = _gradients(output, asked, rows, batched=batched)
            for i, delta in zip(layers, found, strict=True):
                at_layers[i] = delta

    with _watched(edges, note):
        ask(edges.starts)
    ask([i for i in range(len(at_layers)) if i not in seen])
    return at_layers


@contextmanager
def _watched(edges: Edges, take: Take) -> Iterator[None]:
    """Hand over what arrives at layers that others come before."""

    def arrived(i: int, number: int, gradients: tuple[Tensor | None, ...]) -> None:
        delta = gradients[number]
        if delta is not None:
            take(i, delta)

    starts = set(edges.starts)
    handles = [
        edge.node.register_prehook(partial(arrived, i, edge.output_nr))
        for i, edge in enumerate(edges.of_layers)
        if i not in starts
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _folded(output: Tensor, edges: Edges, rows: Tensor, take: Take) -> None:
    """Pull rows ``(q, ...)`` back with the directions in the batch: few, larger kernels."""

    def take_all(i: int, delta: Tensor) -> None:
        _AllDirections.apply(delta, len(rows), partial(take, i))  # type: ignore[no-untyped-call]

    vmap(lambda row: tuple(_streamed(output, edges, row, take_all)))(rows)


class _AllDirections(torch.autograd.Function):
    """Lets a function see a gradient for all directions, from within a map over them."""

    @staticmethod
    def forward(delta: Tensor, count: int, see: Callable[[Tensor], None]) -> Tensor:
        """Return a gradient that is the same for all directions, once it was seen."""
        see(delta.expand(count, *delta.shape))
        return delta.detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Keep nothing: nobody differentiates this."""

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[int, None, None],
        delta: Tensor,
        count: int,
        see: Callable[[Tensor], None],
    ) -> tuple[Tensor, int]:
        """Return one that differs, and its axis, once it was seen."""
        see(delta.movedim(in_dims[0], 0))
        return delta.detach(), in_dims[0]
