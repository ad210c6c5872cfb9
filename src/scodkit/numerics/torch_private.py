"""Private names of torch, in one place: look here first when torch changes.

`tests/numerics/test_torch_private.py` specifies what each must do.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode as get_proxy_mode
from torch.fx.experimental.proxy_tensor import make_fx as make_fx
from torch.nn import functional as F  # noqa: N812
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

# the function that `torch.set_grad_enabled` and `torch.no_grad` call, seen by function modes
set_grad_enabled = torch._C._set_grad_enabled

# a context in which no torch function mode is called
without_torch_function = torch._C.DisableTorchFunction

# copies a list of tensors into another one, in one call
foreach_copy = torch._foreach_copy_

# flattens tensors and concatenates them, in one call
flattened: Callable[[list[Tensor]], Tensor] = torch._C._nn.flatten_dense_tensors

# operators, which never lead to a module
OPERATORS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)

# base class of all convolutions
Convolution = torch.nn.modules.conv._ConvNd

# the generator that non-reentrant activation checkpointing calls around a block: its name in
# ``torch.utils.checkpoint``, and torch's own function. In newer versions (2.15 is one) the
# first name is only a shim for other callers
_GENERATOR = "_checkpoint_without_reentrant_generator"
AROUND_CHECKPOINT = next(
    n for n in (_GENERATOR + "_impl", _GENERATOR) if hasattr(checkpoint, n)
)
around_checkpoint: Callable[..., Iterator[None]] = getattr(checkpoint, AROUND_CHECKPOINT)

# torch's attention, changed to dispatch its parts, not the whole call, to function modes
attention = types.FunctionType(
    F.multi_head_attention_forward.__code__,
    {**F.multi_head_attention_forward.__globals__, "has_torch_function": lambda _: False},
    argdefs=F.multi_head_attention_forward.__defaults__,
)

# ``torch.autograd.grad`` of one row at an output: ``pull_back((output,), (row,), inputs=...)``.
# The graph is retained, and the result is None for inputs that the output does not depend on.
# On a small network a third of `grad`'s time is a comparison of shapes, which is left out here
pull_back: Callable[..., Sequence[Tensor | None]] = functools.partial(
    torch.autograd.Variable._execution_engine.run_backward,
    keep_graph=True,
    create_graph=False,
    allow_unreachable=True,
    accumulate_grad=False,
)

# ``F.linear`` of float32 tensors on a CPU by oneDNN, whatever torch itself would use: takes
# ``(x, weight, bias, "none", [], "")``. It reads a bias as if it was contiguous, is a thousand
# times slower if a matrix has gaps between its rows, and has no derivative. None if torch was
# built without oneDNN
onednn_linear: Callable[..., Tensor] | None = getattr(
    torch.ops.mkldnn, "_linear_pointwise", None
)

_is_compiling = torch.compiler.is_compiling
_ITS_CODE = _is_compiling.__code__
_as_it_is = types.FunctionType(_ITS_CODE, _is_compiling.__globals__)
_TRACING = threading.Lock()
_traced_passes = 0  # in all threads
_this_thread = threading.local()  # .traced: whether it runs a model as if it was traced


@contextlib.contextmanager
def as_if_traced() -> Iterator[None]:
    """Have ``torch.compiler.is_compiling()`` return True: models avoid reading values then.

    In this thread only: others, which may train or compile, get torch's own answer, and the
    flag behind it is left alone.
    """
    before = is_traced()
    _count_traced(1)
    _this_thread.traced = True
    try:
        yield
    finally:
        _this_thread.traced = before
        _count_traced(-1)


def _count_traced(change: int) -> None:
    global _traced_passes
    with _TRACING:
        _traced_passes += change
        # the code, not the function: it has been imported by name, and the compiler knows it
        _is_compiling.__code__ = _asked.__code__ if _traced_passes else _ITS_CODE


def is_traced() -> bool:
    """Return whether this thread runs a model as if it was traced."""
    return getattr(_this_thread, "traced", False)


def _asked() -> bool:
    # run among the names of torch.compiler
    from scodkit.numerics import torch_private

    return torch_private.is_traced() or torch_private._as_it_is()


_functorch = torch._C._functorch

# torch numbers vmaps by their nesting level: that of torch.autograd.grad is outermost
_LEVEL = 1


def out_of_map(gradient: Tensor, count: int) -> Tensor:
    """Return a gradient of all directions, from within torch's vmap over ``count`` of them."""
    return torch._remove_batch_dim(gradient, _LEVEL, count, 0)


def of_all_directions(
    function: Callable[..., Sequence[Tensor]], gradients: Sequence[Tensor]
) -> list[Tensor]:
    """Return what a function computes from gradients of all directions at once.

    Args:
        function: Takes gradients with directions along a leading axis; its results have it too.
        gradients: Within a vmap over directions, or of a single one.
    """
    of_func = any(map(_functorch.is_batchedtensor, gradients))  # torch.func.vmap's
    vmap: Any = _functorch if of_func else torch
    mapped = next(filter(_functorch.is_batchedtensor if of_func else _in_map, gradients), None)
    if mapped is None:
        return [one.squeeze(0) for one in function(*(g.unsqueeze(0) for g in gradients))]
    level = _functorch.maybe_get_level(mapped) if of_func else _LEVEL
    count = len(vmap._remove_batch_dim(mapped, level, 1, 0))
    led = [vmap._remove_batch_dim(one, level, count, 0) for one in gradients]
    return [vmap._add_batch_dim(one, 0, level) for one in function(*led)]


def _in_map(gradient: Tensor) -> bool:
    """Return whether a gradient has the axis of the vmap of torch.autograd.grad."""
    return bool(torch._C._dispatch_keys(gradient).has("Batched"))


def compile_graph(traced: Any, example: list[Any]) -> Any:
    """Return a traced function, compiled by inductor.

    Args:
        traced: From `make_fx`.
        example: Tensors it was traced with.
    """
    # each input has a fake tensor of a mode of its own, where the compiler expects one mode
    for node in traced.graph.nodes:
        node.meta.pop("val", None)
    # a C++ wrapper for the calls between kernels: a tenth of the time of a small network
    return torch._inductor.compile(traced, example, {"cpp_wrapper": not example[0].is_cuda})
