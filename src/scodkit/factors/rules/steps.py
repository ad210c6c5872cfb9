"""The steps of a recurrent layer as one function, with its derivative in closed form.

Given the states before each step, which torch's own kernel computes, all gates are known at
once. What remains of the derivative is one product of matrices a step, of all directions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import wrap_torch_function

from scodkit.numerics.matmul import linear
from scodkit.numerics.torch_private import of_all_directions


@dataclass(frozen=True)
class _Slopes:
    """Derivatives within each step; all but ``across`` lead with steps and samples.

    Args:
        across: Weights of the states, ``(g h, h)``.
        gates: Of the state after the step by the states' part of each gate, ``(T, B, g, h)``;
            those of an LSTM but the last are of the cell.
        direct: Of the state after the step by the one before, past the gates, ``(T, B, h)``.
        new: Of the state by the inputs' part of the last gate, where that is another one.
        cell: Of the state by the cell after the step, and of that by the one before.
    """

    across: Tensor
    gates: Tensor
    direct: Tensor | None = None
    new: Tensor | None = None
    cell: tuple[Tensor, Tensor] | None = None

    def pull_back(self, time: int, rows: Tensor, last: Tensor | None = None) -> list[Tensor]:
        """Pull rows at all states back through the steps, the last one first.

        Args:
            time: The axis of the steps, without that of the directions.
            rows: ``(q, B, T, h)``, or ``(q, T, B, h)``.
            last: At the last cell, ``(q, B, h)``, where there are cells.

        Returns:
            Rows at the gates, ``(q, B, T, g h)`` or ``(q, T, B, g h)``: at the states' parts
            and, where these differ, at the inputs'. Then at the states before the first step,
            ``(q, B, h)`` each.
        """
        count = self.gates.shape[2]
        through = self.across.to(rows.dtype).mT  # autocast leaves weights alone
        ahead = rows.movedim((time + 1, 0), (0, 2))  # directions last: steps are contiguous
        at_gates = rows.new_empty(*ahead.shape[:3], count, rows.shape[3])
        # of the state after each step, from the second state to the one before the first
        states = None if self.new is None else at_gates.new_empty(ahead.shape)
        cell = None
        if last is not None:  # it is changed below
            cell = last.transpose(0, 1).clone(memory_format=torch.contiguous_format)
        cells = [each.unsqueeze(2).unbind(0) for each in self.cell or ()]
        # taken apart at once: a loop over views takes longer than what it computes
        slopes, places = self.gates.unsqueeze(2).unbind(0), at_gates.unbind(0)
        flat, above = at_gates.flatten(3).unbind(0), ahead.unbind(0)
        direct = None if self.direct is None else self.direct.unsqueeze(2).unbind(0)
        state = above[-1]
        for t in reversed(range(len(above))):
            if states is not None:
                states[t] = state
            if cell is None:
                torch.mul(slopes[t], state.unsqueeze(2), out=places[t])
            else:
                cell.addcmul_(cells[0][t], state)
                # all gates at once, then the last one, which is no gate of the cell, again
                torch.mul(slopes[t], cell.unsqueeze(2), out=places[t])
                torch.mul(slopes[t][:, :, -1], state, out=places[t][:, :, -1])
                cell.mul_(cells[1][t])
            before = linear(flat[t], through)
            if direct is not None:
                before.addcmul_(state, direct[t])
            state = before.add_(above[t - 1]) if t else before
        found = [at_gates]
        if self.new is not None and states is not None:
            of_inputs = at_gates.clone()
            torch.mul(states, self.new.unsqueeze(2), out=of_inputs[:, :, :, -1])
            found.append(of_inputs)
        ends = [state] if cell is None else [state, cell]
        led = (one.flatten(3).movedim((2, 0), (0, time + 1)) for one in found)
        return [*led, *(end.transpose(0, 1) for end in ends)]


@dataclass(frozen=True)
class _Known:
    """What is known before a derivative is asked for; tensors lead with the steps.

    Args:
        across: Weights of the states, ``(g h, h)``.
        cell: Before the first step, ``(B, h)``, if there is one.
        inputs: The inputs' part of the gates, ``(T, B, g h)``; of all but a GRU, their sum.
        hidden: The states' part, where it counts apart.
        before: States before each step, ``(T, B, h)``.
        after: States after each step.
    """

    across: Tensor
    cell: Tensor | None
    inputs: Tensor
    hidden: Tensor | None
    before: Tensor
    after: Tensor


def _lstm(known: _Known) -> _Slopes:
    assert known.cell is not None
    enter, forget, new, leave = known.inputs.chunk(4, 2)
    enter, forget, new, leave = enter.sigmoid(), forget.sigmoid(), new.tanh(), leave.sigmoid()
    added, cells = enter * new, [known.cell]
    for each, kept in zip(added.unbind(0), forget.unbind(0), strict=True):
        cells.append(torch.addcmul(each, kept, cells[-1]))
    # the derivative of a sigmoid s is s (1 - s), that of a tanh 1 - tanh^2
    slopes = [
        torch.addcmul(added, added, enter, value=-1),
        torch.stack(cells[:-1]).mul_(torch.addcmul(forget, forget, forget, value=-1)),
        torch.addcmul(enter, added, new, value=-1),
        torch.addcmul(known.after, known.after, leave, value=-1),
    ]
    # the state is leave tanh(cell); where leave underflows, so does all of this
    seen = known.after / leave.clamp_min(torch.finfo(leave.dtype).tiny)
    by_cell = torch.addcmul(leave, known.after, seen, value=-1)
    return _Slopes(known.across, torch.stack(slopes, 2), cell=(by_cell, forget))


def _gru(known: _Known) -> _Slopes:
    assert known.hidden is not None
    reset_in, update_in, new_in = known.inputs.chunk(3, 2)
    reset_on, update_on, new_on = known.hidden.chunk(3, 2)
    reset, update = (reset_in + reset_on).sigmoid(), (update_in + update_on).sigmoid()
    new = torch.addcmul(new_in, reset, new_on).tanh()
    by_new = (1 - update) * torch.addcmul(torch.ones_like(new), new, new, value=-1)
    kept = by_new * reset
    slopes = [kept * new_on * (1 - reset), (known.before - new) * update * (1 - update), kept]
    return _Slopes(known.across, torch.stack(slopes, 2), direct=update, new=by_new)


def _tanh(known: _Known) -> _Slopes:
    return _Slopes(known.across, (1 - known.after.square()).unsqueeze(2))


def _relu(known: _Known) -> _Slopes:
    return _Slopes(known.across, (known.after > 0).to(known.after.dtype).unsqueeze(2))


class _Steps(torch.autograd.Function):
    """The states after each step, given their values."""

    @staticmethod
    def forward(ctx: Any, slopes: _Slopes, time: int, *tensors: Any) -> tuple[Tensor, ...]:
        """Return the last of the tensors: the states after each step, and the last cell.

        They are those at the gates' parts of inputs and states, if these count apart, the
        states before the first step, and the results, of as many kinds as states.
        """
        ctx.slopes, ctx.time = slopes, time
        kinds = 1 if slopes.cell is None else 2
        return tuple(result.detach() for result in tensors[-kinds:])

    @staticmethod
    def backward(ctx: Any, *rows: Tensor) -> tuple[Any, ...]:
        """Return the gradients at the gates and at the states before the first step."""
        kinds = len(rows)
        found = of_all_directions(partial(ctx.slopes.pull_back, ctx.time), rows)
        gates, states = found[:-kinds], found[-kinds:]
        apart = None if ctx.slopes.new is None else gates[0]
        return None, None, gates[-1], apart, *states, *(None,) * kinds


# the parts of the gates, (B, T, g h) or (T, B, g h), or their sum and None; the axis of the
# steps; the weights of the states; states before and after each step; the first states, and the
# last cell if there is one
Steps = Callable[..., tuple[Tensor, ...]]


def _steps(kind: Callable[[_Known], _Slopes]) -> Steps:
    def given(*args: Any) -> list[Tensor]:
        return [arg for arg in args if isinstance(arg, Tensor)]

    @wrap_torch_function(given)
    def steps(
        inputs: Tensor,
        hidden: Tensor | None,
        time: int,
        across: Tensor,
        before: Tensor,
        after: Tensor,
        first: Tensor,
        *cells: Tensor,
    ) -> tuple[Tensor, ...]:
        with torch.no_grad():
            apart = None if hidden is None else hidden.movedim(time, 0)
            led, *states = (one.movedim(time, 0) for one in (inputs, before, after))
            slopes = kind(_Known(across, cells[0] if cells else None, led, apart, *states))
        every = (inputs, hidden, first, *cells[:1], after, *cells[1:])
        found: tuple[Tensor, ...] = _Steps.apply(slopes, time, *every)  # type: ignore[no-untyped-call]
        return found

    return steps


BY_FUNCTION: dict[Callable[..., Any], Steps] = {
    torch.lstm: _steps(_lstm),
    torch.gru: _steps(_gru),
    torch.rnn_tanh: _steps(_tanh),
    torch.rnn_relu: _steps(_relu),
}
