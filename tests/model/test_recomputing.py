"""Models with activation checkpointing: the same scores, by the fast engine."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from scodkit import Categorical, Monitor
from scodkit.factors.hooks import HookEngine
from scodkit.model.twin import Twin


class Checkpointed(nn.Module):
    """Blocks that are recomputed on the way back, or not."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3))
        )
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "plain":
            return self.head(self.blocks(x))
        if self.kind == "sequential":
            return self.head(checkpoint_sequential(self.blocks, 2, x, use_reentrant=False))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.kind == "reentrant")
        return self.head(x)


KINDS = ("reentrant", "not reentrant", "sequential")


def scores(kind: str, **options) -> tuple[Monitor, Tensor]:
    x = torch.randn(30, 6, generator=torch.Generator().manual_seed(1))
    monitor = Monitor(Checkpointed(kind), Categorical(), rank=20, **options)
    return monitor, monitor.fit([x], progress=False).score(x[:4])


@pytest.mark.parametrize("kind", KINDS)
def test_scores_are_those_of_the_plain_model(kind: str) -> None:
    monitor, found = scores(kind)
    assert torch.allclose(found, scores("plain")[1], rtol=1e-5)
    assert isinstance(monitor._ready().source.engine, HookEngine)


@pytest.mark.parametrize("kind", KINDS)
def test_training_still_recomputes_before_and_after(kind: str) -> None:
    model = Checkpointed(kind).train()
    x = torch.randn(5, 6, requires_grad=True)
    calls = []
    model.blocks[0].register_forward_pre_hook(lambda *_: calls.append(1))

    def step() -> Tensor:
        model.zero_grad()
        calls.clear()
        model(x).sum().backward()
        assert len(calls) == 2  # on the way forth, and again on the way back
        return model.blocks[0][0].weight.grad.clone()

    before = step()
    Monitor(model, Categorical(), rank=3).fit([x.detach()], progress=False)
    assert torch.equal(step(), before)


@pytest.mark.parametrize("kind", KINDS)
def test_other_threads_recompute_meanwhile(kind: str) -> None:
    model, calls, errors = Checkpointed(kind), [], []
    model.blocks[0].register_forward_pre_hook(lambda *_: calls.append(1))

    def train() -> None:
        try:
            model(torch.randn(5, 6, requires_grad=True)).sum().backward()
        except Exception as error:
            errors.append(error)

    with Twin(nn.Linear(1, 1)).held():
        other = threading.Thread(target=train)
        other.start()
        other.join()
        assert (len(calls), errors) == (2, [])
        with Twin(nn.Linear(1, 1)).held():
            pass
        model(torch.randn(5, 6, requires_grad=True)).sum().backward()
    assert len(calls) == 3
    train()
    assert (len(calls), errors) == (5, [])
