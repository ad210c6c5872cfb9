"""How samples are parted: the same way every time, whatever the seed of a network."""

from __future__ import annotations

import torch
from torch import Tensor

_SEED = 20210727  # any; one for all domains


def order(count: int, salt: int = 0) -> Tensor:
    """Return the numbers below ``count`` in an order that never changes, ``(count,)``.

    Args:
        count: How many.
        salt: For another order.
    """
    generator = torch.Generator().manual_seed(_SEED + salt)
    return torch.randperm(count, generator=generator)


def some(count: int, most: int, salt: int = 0) -> Tensor:
    """Return at most ``most`` of the numbers below ``count``, the same every time.

    Args:
        count: How many there are.
        most: How many to take.
        salt: For another choice.
    """
    return order(count, salt)[:most]
