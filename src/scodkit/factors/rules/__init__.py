"""Torch functions of chosen parameters that the hook engine supports, each with its rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from scodkit.factors.rules import broadcast
from scodkit.factors.rules.embedding import Embedding
from scodkit.factors.rules.layer import (
    Batch,
    Convolution,
    Derived,
    Layer,
    Linear,
    Place,
    Product,
    TransposedConvolution,
    UnsupportedCallError,
    biased_product,
)
from scodkit.factors.rules.recurrent import REFUSALS, UNROLLED, Gates, gates, unrolled
from scodkit.factors.rules.rows import Outer, Rows

_TRANSPOSED = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
_NORMS = (F.batch_norm, F.layer_norm, F.group_norm, F.instance_norm, F.rms_norm)

# a rule takes the batch, and then the function's arguments under the same names
RULES: dict[Callable[..., Any], Callable[..., Layer]] = {
    F.linear: Linear,
    **dict.fromkeys([torch.conv1d, torch.conv2d, torch.conv3d], Convolution),
    **dict.fromkeys(_TRANSPOSED, TransposedConvolution),
    F.embedding: Embedding,
    gates: Gates,
    **{func: broadcast.norm(func) for func in _NORMS},
    **dict.fromkeys([torch.mul, Tensor.mul], broadcast.product),
    **dict.fromkeys([torch.add, Tensor.add, Tensor.add_], broadcast.total),
    **dict.fromkeys([torch.matmul, Tensor.matmul, torch.mm, Tensor.mm], Product),
    torch.addmm: biased_product,
    **dict.fromkeys([Tensor.expand, Tensor.expand_as], broadcast.expansion),
}

__all__ = [
    "REFUSALS",
    "RULES",
    "UNROLLED",
    "Batch",
    "Derived",
    "Layer",
    "Outer",
    "Place",
    "Rows",
    "UnsupportedCallError",
    "unrolled",
]
