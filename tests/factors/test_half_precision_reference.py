"""Weights in bfloat16, where plain autograd itself adds up too roughly to be a reference."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from scodkit import Categorical, Monitor


class Segments(nn.Module):
    """Many places that share the few rows of an embedding, as types of tokens do."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(2, 16)
        self.head = nn.Linear(16, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits ``(B, 3)`` of tokens ``(B, T)``."""
        return self.head(torch.tanh(self.embedding(tokens)).mean(1))


def test_sums_that_torch_rounds_do_not_count_against_ours() -> None:
    """A fallback to the loop would warn, which is an error here."""
    torch.manual_seed(0)
    model, tokens = Segments().bfloat16().eval(), torch.randint(0, 2, (6, 3000))
    monitor = Monitor(model, Categorical(), rank=3).fit([tokens], progress=False)
    assert monitor.fitted.engine.startswith("HookEngine")
    exact = Monitor(model.float(), Categorical(), rank=3).fit([tokens], progress=False)
    assert torch.allclose(monitor.basis.values, exact.basis.values, rtol=0.03)
