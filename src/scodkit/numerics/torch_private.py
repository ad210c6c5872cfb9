"""Names of torch that are not public, in one place: look here first when torch changes.

`tests/numerics/test_torch_private.py` says what each must do.
"""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.fx.experimental.proxy_tensor import get_proxy_mode as get_proxy_mode
from torch.fx.experimental.proxy_tensor import make_fx as make_fx
from torch.nn import functional as F  # noqa: N812
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

# what `torch.set_grad_enabled` and `torch.no_grad` call, as torch-function modes see it
set_grad_enabled = torch._C._set_grad_enabled

# a context in which no torch-function mode is asked
without_torch_function = torch._C.DisableTorchFunction

# copies many tensors into many others, at once
foreach_copy = torch._foreach_copy_

# operators, behind which no module is to be looked for
OPERATORS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)

# all convolutions are one of these
Convolution = torch.nn.modules.conv._ConvNd

# what a block of activation checkpointing calls, of the kind that is not reentrant
around_checkpoint = checkpoint._checkpoint_without_reentrant_generator

# torch's own attention, which hands its parts, not the whole call, to torch-function modes
attention = types.FunctionType(
    F.multi_head_attention_forward.__code__,
    {**F.multi_head_attention_forward.__globals__, "has_torch_function": lambda _: False},
    argdefs=F.multi_head_attention_forward.__defaults__,
)

# torch numbers maps by how deep they are nested: that of torch.autograd.grad is outermost
_LEVEL = 1


def replace_around_checkpoint(function: Any) -> None:
    """Let blocks of activation checkpointing call another function."""
    checkpoint._checkpoint_without_reentrant_generator = function


def out_of_map(gradient: Tensor, count: int) -> Tensor:
    """Return a gradient of all directions, from within torch's map over ``count`` of them."""
    return torch._remove_batch_dim(gradient, _LEVEL, count, 0)


def pull_back(
    output: Tensor, row: Tensor, inputs: Sequence[Tensor | GradientEdge]
) -> Sequence[Tensor | None]:
    """Return ``torch.autograd.grad`` of one row at an output; the graph is kept.

    A third of that function's time on a small network is spent on comparing shapes.

    Args:
        output: With a graph.
        row: Of its shape and dtype; this is not checked.
        inputs: What to differentiate by; None comes back where the output does not depend.
    """
    engine = torch.autograd.Variable._execution_engine
    found: Sequence[Tensor | None] = engine.run_backward(
        (output,), (row,), True, False, tuple(inputs), True, accumulate_grad=False
    )
    return found


def compile_graph(traced: Any, example: list[Any]) -> Any:
    """Return inductor's code of a traced function.

    Args:
        traced: From `make_fx`.
        example: Tensors it was traced with.
    """
    # the calls between kernels in C++ too: a tenth of the time of a small network
    return torch._inductor.compile(traced, example, {"cpp_wrapper": not example[0].is_cuda})
