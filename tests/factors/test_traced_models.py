"""Models that read their whole batch in passing, and do not while they are traced."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from draws import noise
from engines import Uses, chosen_engine, randomised, right_rows
from scodkit.factors.hooks import HookEngine
from scodkit.factors.pullback import HookLinearization
from scodkit.model.inputs import Inputs


def test_a_model_that_reads_its_whole_batch_is_run_as_if_it_was_traced() -> None:
    """As Hugging Face's models do: without padding in the batch they take a shorter way."""

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        mask = (x > -9).all(2)
        if not torch.compiler.is_compiling() and bool(mask.all()):
            return m.f(x).sum(1)
        return (m.f(x) * mask[..., None]).sum(1)

    model = Uses(forward, f=nn.Linear(3, 2))
    assert right_rows(model, noise(4, 5, 3)) == (HookEngine, [])
    assert not torch.compiler.is_compiling()


def test_a_model_that_fails_when_it_is_traced_is_run_as_it_is() -> None:
    """Also where it fails in later batches only: they are left to others."""

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        mask = (x > -9).all(2)
        if torch.compiler.is_compiling():
            assert x.shape[1] != 6
        elif bool(mask.all()):
            return m.f(x).sum(1)
        return (m.f(x) * mask[..., None]).sum(1)

    model = Uses(forward, f=nn.Linear(3, 2))
    kind, said = right_rows(model, noise(4, 5, 3), then=noise(4, 6, 3))
    assert kind is HookEngine
    assert len(said) == 1
    assert "as if traced, it raised AssertionError" in said[0]
    kind, said = right_rows(model, noise(4, 6, 3), then=noise(4, 5, 3))
    assert kind is not HookEngine


def test_a_failure_under_tracing_is_the_model_s_own_where_it_fails_anyway() -> None:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        embedded = m.e(x)
        if not torch.compiler.is_compiling() and bool((x >= 0).all()):
            return m.f(embedded).sum(1)
        return (m.f(embedded) * (x >= 0)[..., None]).sum(1)

    model = Uses(forward, e=nn.Embedding(5, 3), f=nn.Linear(3, 2))
    engine = chosen_engine(randomised(model), Inputs((torch.arange(12).view(3, 4) % 5,), {}))
    with pytest.raises(IndexError), engine.network.evaluating():
        engine.linearize(Inputs((torch.full((3, 4), 5),), {}))
    with engine.network.evaluating():
        linear = engine.linearize(Inputs((torch.full((3, 4), 4),), {}))
    assert isinstance(linear, HookLinearization)


def test_only_models_that_need_it_are_run_as_if_traced() -> None:
    seen: list[bool] = []

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        seen.append(torch.compiler.is_compiling())
        return (x + m.p(torch.arange(x.shape[1]))).flatten(1)

    right_rows(Uses(forward, p=nn.Embedding(7, 3)), noise(4, 4, 3))
    assert seen
    assert not any(seen)


def test_a_model_that_does_so_in_any_case_is_left_to_others() -> None:
    model = Uses(lambda m, x: m.f(x if bool((x > -99).all()) else -x), f=nn.Linear(3, 2))
    kind, said = right_rows(model, noise(4, 3))
    assert kind is not HookEngine
    assert "mixed up" in said[0]
