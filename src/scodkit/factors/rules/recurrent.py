"""Recurrent layers and cells, rewritten in functions that have rules.

torch runs a whole LSTM in one call, which tells nothing of the steps inside. Given the states
before each step, the gradients of its weights are those of two linear layers over all steps at
once: one of the inputs, one of these states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from torch.overrides import wrap_torch_function

from scodkit.factors.rules.layer import Batch, Derived, Layer, Place, UnsupportedCallError
from scodkit.factors.rules.rows import Rows, Summed
from scodkit.factors.rules.steps import BY_FUNCTION
from scodkit.numerics.matmul import linear
from scodkit.numerics.torch_private import of_all_directions


class Gates(Layer):
    """What goes into the gates of a recurrent layer: ``y = x W^T + b + h V^T + c``.

    Args:
        batch: As of any layer.
        x: Inputs of all steps.
        before: States ``h`` before each.
        w_ih: Weights of the inputs.
        w_hh: Weights of the states.
        biases: Of the inputs and of the states, if there are any.
    """

    takes_parameters = False

    def __init__(
        self,
        batch: Batch,
        x: Tensor,
        before: Tensor,
        w_ih: Tensor,
        w_hh: Tensor,
        *biases: Tensor,
    ) -> None:
        super().__init__(batch, [w_ih, w_hh, *biases], x, before)
        self._weights, self._biases = (w_ih, w_hh), biases

    def gradients(self, delta: Tensor) -> Iterator[tuple[Place | Derived, Rows]]:
        """See `Layer.gradients`."""
        delta = self.batch.lead(delta, axis=1).transpose(0, 1)  # (b, q, m, o)
        for weight, a in zip(self._weights, self.inputs, strict=True):
            if id(weight) in self.places:
                yield self.places[id(weight)], Summed(delta, self.batch.lead(a.to(delta)))
        chosen = [self.places[id(bias)] for bias in self._biases if id(bias) in self.places]
        if chosen:
            sums = delta.sum(2)  # of both biases, which nobody writes to
            yield from ((place, sums) for place in chosen)


class _Gates(torch.autograd.Function):
    """What `Gates` describes; how states depend on earlier ones is left to the steps."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, before: Tensor, w_ih: Tensor, w_hh: Tensor, *biases: Tensor
    ) -> Tensor:
        """Return ``y``."""
        ctx.save_for_backward(x, before, w_ih)
        return linear(x, w_ih, *biases[:1]) + linear(before, w_hh, *biases[1:])

    @staticmethod
    def backward(ctx: Any, rows: Tensor) -> tuple[Tensor | None, ...]:
        """Return gradients; at weights only where no sample has a part in ``y``.

        Elsewhere backward passes end at ``y``, and `Gates` takes them further.
        """
        x, before, weight = ctx.saved_tensors
        needed: tuple[bool, ...] = ctx.needs_input_grad
        wanted = [i for i, own in enumerate(needed) if own]

        def at(i: int, y: Tensor) -> Tensor:
            own = y.flatten(1, -2)
            if i == 0:
                return linear(y, weight.to(y.dtype).mT)  # autocast leaves weights alone
            a = {2: x, 3: before}.get(i)
            return own.sum(1) if a is None else own.mT @ a.to(y.dtype).flatten(0, -2)

        pulled = of_all_directions(lambda y: [at(i, y) for i in wanted], [rows])
        found = dict(zip(wanted, pulled, strict=True))
        return tuple(map(found.get, range(len(needed))))


@wrap_torch_function(lambda *args: args)
def gates(x: Tensor, before: Tensor, w_ih: Tensor, w_hh: Tensor, *biases: Tensor) -> Tensor:
    """Return what goes into the gates, as `Gates` describes, ``(..., g h)``."""
    found: Tensor = _Gates.apply(x, before, w_ih, w_hh, *biases)  # type: ignore[no-untyped-call]
    return found


# one step: the inputs' part of the gates, the states' part, the states; returns the new states
Step = Callable[[Tensor, Tensor, Sequence[Tensor]], tuple[Tensor, ...]]

_SEQUENCES = 3  # axes of a batch of sequences


def _lstm(inputs: Tensor, hidden: Tensor, states: Sequence[Tensor]) -> tuple[Tensor, ...]:
    enter, forget, new, leave = (inputs + hidden).chunk(4, 1)
    cell = forget.sigmoid() * states[1] + enter.sigmoid() * new.tanh()
    return leave.sigmoid() * cell.tanh(), cell


def _gru(inputs: Tensor, hidden: Tensor, states: Sequence[Tensor]) -> tuple[Tensor, ...]:
    reset_in, update_in, new_in = inputs.chunk(3, 1)
    reset_on, update_on, new_on = hidden.chunk(3, 1)
    update = (update_in + update_on).sigmoid()
    new = (new_in + (reset_in + reset_on).sigmoid() * new_on).tanh()
    return (new + update * (states[0] - new),)


def _tanh(inputs: Tensor, hidden: Tensor, _: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return ((inputs + hidden).tanh(),)


def _relu(inputs: Tensor, hidden: Tensor, _: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return ((inputs + hidden).relu(),)


_CELLS: dict[Callable[..., Any], Step] = {
    torch.lstm_cell: _lstm,
    torch.gru_cell: _gru,
    torch.rnn_tanh_cell: _tanh,
    torch.rnn_relu_cell: _relu,
}
UNROLLED = frozenset({*BY_FUNCTION, *_CELLS})

# of steps only the first states can be weights, or made of weights alone
REFUSALS = dict.fromkeys(
    BY_FUNCTION.values(),
    "a recurrent layer whose first states are weights: begin with zeros, or leave these "
    "weights out of parameters=...",
)


def unrolled(func: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Return what a recurrent layer or cell returns, by functions that have rules.

    Args:
        func: One of `UNROLLED`.
        args: Its arguments, as torch's modules pass them.

    Raises:
        UnsupportedCallError: If it is given packed sequences, or projects its states.
    """
    if func in _CELLS:
        x, given, w_ih, w_hh, *biases = args
        states = given if isinstance(given, (tuple, list)) else (given,)
        b_ih, b_hh = biases or (None, None)
        after = _CELLS[func](F.linear(x, w_ih, b_ih), F.linear(states[0], w_hh, b_hh), states)
        return after if len(after) > 1 else after[0]
    if not isinstance(args[2], (list, tuple)) or args[0].ndim != _SEQUENCES:
        raise UnsupportedCallError(
            "a recurrent layer of packed sequences: pad them instead, and pick the last step "
            "of each with y[torch.arange(len(y)), lengths - 1]"
        )
    x, given, weights, has_biases, num_layers, _, _, both_ways, batch_first = args
    ways = 2 if both_ways else 1
    each = 4 if has_biases else 2
    if len(weights) != each * num_layers * ways:
        raise UnsupportedCallError(
            "a recurrent layer with a projection of its states: leave out proj_size, and put a "
            "Linear layer after it"
        )
    starts = [s.unbind(0) for s in (given if isinstance(given, (tuple, list)) else (given,))]
    time = 1 if batch_first else 0
    ends: list[tuple[Tensor, ...]] = []
    for layer in range(num_layers):
        outputs = []
        for way in range(ways):
            i = layer * ways + way
            one = weights[i * each : (i + 1) * each]
            start = [state[i] for state in starts]
            y, end = _one_way(func, x.flip(time) if way else x, start, one, batch_first)
            outputs.append(y.flip(time) if way else y)
            ends.append(end)
        x = torch.cat(outputs, 2) if both_ways else outputs[0]
    return (x, *(torch.stack(states, 0) for states in zip(*ends, strict=True)))


def _one_way(
    func: Callable[..., Any],
    x: Tensor,
    states: Sequence[Tensor],
    weights: Sequence[Tensor],
    batch_first: bool,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return the outputs of one layer in one direction, and its last states.

    Args:
        func: The layer's function.
        x: Sequences, ``(B, T, i)`` or ``(T, B, i)``.
        states: Before the first step, ``(B, h)`` each.
        weights: Of the inputs and of the states, and their biases if there are any.
        batch_first: Whether samples come before steps.
    """
    time = 1 if batch_first else 0
    w_ih, w_hh, *biases = weights
    with torch.no_grad():  # torch's own kernel has the states of all steps in one call
        given = tuple(state.unsqueeze(0) for state in states)
        fixed = (list(weights), bool(biases), 1, 0.0, False, False, batch_first)
        after, *ends = func(x, given if len(given) > 1 else given[0], *fixed)
        length = after.shape[time] - 1
        before = torch.cat([states[0].unsqueeze(time), after.narrow(time, 0, length)], time)
    before = before.contiguous()
    parts: list[Tensor | None]
    if func is torch.gru:  # the states' part of its last gate is multiplied by another gate
        parts = [F.linear(x, w_ih, *biases[:1]), F.linear(before, w_hh, *biases[1:])]
    else:
        parts = [gates(x, before, w_ih, w_hh, *biases), None]
    cells = [*states[1:], *(end.squeeze(0) for end in ends[1:])]
    made, *cell = BY_FUNCTION[func](
        *parts, time, w_hh.detach(), before, after, states[0], *cells
    )
    return made, (made.select(time, -1), *cell)
