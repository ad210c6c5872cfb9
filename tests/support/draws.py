"""Numbers drawn from a seed of their own: the same in every test, whatever ran before."""

from __future__ import annotations

import torch
from torch import Tensor


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Normal numbers, drawn in float64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def normal(count: int, seed: int) -> Tensor:
    """Normal scores in float64, drawn in float32."""
    return torch.randn(count, generator=torch.Generator().manual_seed(seed)).double()


def normal_cdf(x: Tensor) -> Tensor:
    return torch.special.ndtr(x)
