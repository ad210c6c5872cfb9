"""A small network, data for it, and a monitor of both: what tests of files save and load."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cases import mlp
from scodkit import Categorical, Likelihood, Monitor


def network() -> nn.Module:
    torch.manual_seed(0)
    return mlp(4)


def data(size: int = 30, seed: int = 0) -> Tensor:
    return torch.randn(size, 3, generator=torch.Generator().manual_seed(seed))


def fitted(likelihood: Likelihood | None = None, **options: object) -> Monitor:
    monitor = Monitor(network(), likelihood or Categorical(), rank=5, **options)
    return monitor.fit([data()], progress=False)
