"""The backward pass to layers: every way back is found, and nothing is kept for long."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

from draws import noise
from engines import (
    Uses,
    chosen_engine,
    close,
    joined,
    pulled,
    pulled_by,
    randomised,
    right_rows,
    same_as_the_loop,
)
from scodkit.factors import pullback
from scodkit.factors.alone import LoopEngine
from scodkit.factors.hooks import HookEngine
from scodkit.factors.pullback import Edges, Take, _folded, backward
from scodkit.model.inputs import Inputs


def test_directions_folded_into_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where the layers are small."""

    def folded(output: Tensor, edges: Edges, rows: Tensor, take: Take, **_: object) -> None:
        by_direction = rows.transpose(0, 1).reshape(rows.shape[1], *output.shape)
        _folded(output, edges, by_direction, take)

    monkeypatch.setattr(pullback, "backward", folded)
    model = Uses(
        lambda m, x: m.without(x).detach() + m.c(m.b(torch.tanh(m.a(x)).mT).mT),
        a=nn.Conv1d(2, 4, 2),
        b=nn.TransformerEncoderLayer(4, 2, 3, batch_first=True),
        without=nn.Conv1d(2, 3, 2),
        c=nn.Conv1d(4, 3, 1),
    )
    same_as_the_loop(model, noise(3, 2, 5))


def seen_on_the_way_back(factors: pullback.HookFactors) -> list[int]:
    seen: list[int] = []
    linear = factors._linear
    backward(linear.graph, linear.edges, factors._rows, lambda i, _: seen.append(i))
    return seen


@pytest.mark.parametrize("directions", [1, 3])
def test_gradients_are_handed_over_on_the_way_back(
    directions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pullback, "_AT_ONCE", 0)
    layers = [nn.Conv1d(4, 4, 3, padding=1) for _ in range(10)]
    model = randomised(nn.Sequential(*layers))
    factors = pulled(HookEngine, model, Inputs((noise(2, 4, 6),), {}), directions)
    assert seen_on_the_way_back(factors) == list(reversed(range(len(layers))))


def test_ways_back_that_end_at_other_weights() -> None:
    """The second layer has none of the chosen before it, but its input needs gradients."""

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        return m.a(x) + m.b(torch.sin(m.other(x)))

    model = Uses(forward, a=nn.Linear(3, 2), other=nn.Linear(3, 4), b=nn.Linear(4, 2))
    chosen = ["a.weight", "a.bias", "b.weight", "b.bias"]
    same_as_the_loop(model, noise(3, 3), names=chosen)
    assert right_rows(model, noise(3, 3), names=chosen) == (HookEngine, [])
    same_as_the_loop(model, noise(3, 3).requires_grad_())
    assert right_rows(model, noise(3, 3).requires_grad_()) == (HookEngine, [])


def test_ways_back_that_change_after_the_trial() -> None:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        return m.a(x) + m.b(torch.sin(m.other(x)))

    model = randomised(
        Uses(forward, a=nn.Linear(3, 2), other=nn.Linear(3, 4), b=nn.Linear(4, 2))
    )
    model.other.requires_grad_(False)
    chosen = ["a.weight", "a.bias", "b.weight", "b.bias"]
    call = Inputs((noise(3, 3),), {})
    engine = chosen_engine(model, call, chosen)
    assert isinstance(engine, HookEngine)
    expected = joined(pulled(LoopEngine, model, call, 2, chosen))
    for trains in (False, True):
        model.requires_grad_(trains)
        close(joined(pulled_by(engine, call, 2)), expected)


@pytest.mark.parametrize("fresh", [False, True])
def test_models_that_ask_for_slopes_of_their_inputs(fresh: bool) -> None:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        x = x.detach().clone() if fresh else x
        return m.b(torch.tanh(m.a(x.requires_grad_(True))))

    model = Uses(forward, a=nn.Linear(3, 4), b=nn.Linear(4, 2))
    same_as_the_loop(model, noise(3, 3))
    assert right_rows(model, noise(3, 3)) == (HookEngine, [])


def test_part_of_a_model_that_trains_is_streamed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pullback, "_AT_ONCE", 0)
    model = randomised(nn.Sequential(*[nn.Linear(3, 3) for _ in range(5)]))
    names = [f"{i}.weight" for i in (2, 3, 4)]
    factors = pulled(HookEngine, model, Inputs((noise(2, 3),), {}), 2, names)
    assert seen_on_the_way_back(factors) == [2, 1, 0]


def test_a_forward_pass_is_dropped_with_its_factors() -> None:
    model = randomised(nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2)))
    gc.disable()  # no cycle may keep it
    try:
        factors = pulled(HookEngine, model, Inputs((noise(2, 3),), {}), 2)
        factors.project(noise(20, 2))
        graph = weakref.ref(factors._linear)
        del factors
        assert graph() is None
    finally:
        gc.enable()
