"""Names of torch that are not public, in one place: look here first when torch changes.

`tests/numerics/test_torch_private.py` says what each must do.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
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

# flattens tensors and joins them, at once
flattened: Callable[[list[Tensor]], Tensor] = torch._C._nn.flatten_dense_tensors

# operators, behind which no module is to be looked for
OPERATORS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)

# all convolutions are one of these
Convolution = torch.nn.modules.conv._ConvNd

# what a block of activation checkpointing calls, of the kind that is not reentrant: its name in
# ``torch.utils.checkpoint``, and torch's own
AROUND_CHECKPOINT = "_checkpoint_without_reentrant_generator"
around_checkpoint = checkpoint._checkpoint_without_reentrant_generator

# torch's own attention, which hands its parts, not the whole call, to torch-function modes
attention = types.FunctionType(
    F.multi_head_attention_forward.__code__,
    {**F.multi_head_attention_forward.__globals__, "has_torch_function": lambda _: False},
    argdefs=F.multi_head_attention_forward.__defaults__,
)

# ``torch.autograd.grad`` of one row at an output: ``pull_back((output,), (row,), inputs=...)``.
# The graph is kept, and None comes back for inputs that the output does not depend on. A third
# of that function's time on a small network goes into a comparison of shapes, left out here
pull_back: Callable[..., Sequence[Tensor | None]] = functools.partial(
    torch.autograd.Variable._execution_engine.run_backward,
    keep_graph=True,
    create_graph=False,
    allow_unreachable=True,
    accumulate_grad=False,
)

# torch numbers maps by how deep they are nested: that of torch.autograd.grad is outermost
_LEVEL = 1


def out_of_map(gradient: Tensor, count: int) -> Tensor:
    """Return a gradient of all directions, from within torch's map over ``count`` of them."""
    return torch._remove_batch_dim(gradient, _LEVEL, count, 0)


def compile_graph(traced: Any, example: list[Any]) -> Any:
    """Return inductor's code of a traced function.

    Args:
        traced: From `make_fx`.
        example: Tensors it was traced with.
    """
    # the calls between kernels in C++ too: a tenth of the time of a small network
    return torch._inductor.compile(traced, example, {"cpp_wrapper": not example[0].is_cuda})
