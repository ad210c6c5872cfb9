"""How samples are parted: the same way every time, whatever the seed of a network."""

from __future__ import annotations

from collections.abc import Sequence

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


def parted_by_group(groups: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Part samples so that none of a group are in two parts, the same way every time.

    Args:
        groups: ``(n,)`` integers: the group of each sample.
        sizes: Of all parts but the last, which gets the rest; whole groups are taken until a
            part has as many samples.

    Returns:
        Numbers of the samples in each part.

    Examples:
        >>> first, rest = parted_by_group(torch.tensor([7, 8, 7, 9]), [1])
        >>> sorted(torch.cat([first, rest]).tolist())
        [0, 1, 2, 3]
    """
    names, own = groups.unique(return_inverse=True)  # type: ignore[no-untyped-call]
    place = order(len(names)).argsort()[own]  # of each sample's group
    found = place.argsort(stable=True)
    parts, start = [], 0
    for size in sizes:
        stop = min(start + size, len(found))
        while stop < len(found) and place[found[stop]] == place[found[stop - 1]]:
            stop += 1
        parts.append(found[start:stop])
        start = stop
    return [*parts, found[start:]]
