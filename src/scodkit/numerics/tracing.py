"""Operations that whoever traces a function must not look into."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

if TYPE_CHECKING:
    from torch._library.custom_ops import CustomOpDef


def is_traced() -> bool:
    """Return whether operations are being written down, rather than only carried out."""
    return get_proxy_mode() is not None


def single_operation(name: str, function: Callable[..., Tensor]) -> CustomOpDef:
    """Return a function on CUDA tensors as an operation of that name.

    Calling it costs more than calling the function: it is for those who trace.
    """
    return torch.library.custom_op(name, function, mutates_args=(), device_types="cuda")
