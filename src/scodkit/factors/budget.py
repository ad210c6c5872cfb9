"""How much memory rows in weight space may take, where nobody has said."""

from __future__ import annotations

import functools
from typing import Any

import torch

from scodkit.errors import OptionError

_BYTES = 2**30
_SHARE_OF_GPU = 8  # whose other uses of memory are not known beforehand


class MemoryBudget:
    """An attribute: bytes that per-sample gradients may take at a time, until it is set.

    Owners have a ``_network``. The more samples a GPU works on at a time, the faster it is: an
    eighth of its memory, 1 GiB at least.

    Examples:
        >>> class Owner:
        ...     memory_budget = MemoryBudget()
        ...     _network = torch.zeros(1)  # anything that is on a device
        >>> Owner().memory_budget == 2**30
        True
    """

    def __get__(self, owner: Any, kind: type) -> int:
        """Return the bytes."""
        given: int | None = vars(owner).get("_memory_budget")
        return default_budget(owner._network.device) if given is None else given

    def __set__(self, owner: Any, value: int) -> None:
        """Set the bytes.

        Raises:
            OptionError: If that is not a number of them.
        """
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise OptionError(
                f"expected memory_budget as a whole number of bytes, got {value!r}; for 4 GiB "
                "type monitor.memory_budget = 4 * 2**30"
            )
        owner._memory_budget = value


@functools.cache
def default_budget(device: torch.device) -> int:
    """Return the bytes where nobody has said how many."""
    if device.type != "cuda":
        return _BYTES
    whole: int = torch.cuda.get_device_properties(device).total_memory
    return max(_BYTES, whole // _SHARE_OF_GPU)
