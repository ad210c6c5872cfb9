"""Products of half-precision matrices, summed in float32.

Matrix units multiply bfloat16 exactly and add in float32; only rounding the result back to
bfloat16 would lose digits, and rounding a float32 factor to it. Neither happens here.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from scodkit.numerics.tracing import is_traced, single_operation

# a float32 number is the sum of this many bfloat16 numbers
_PARTS = 3

# rows and columns up to which a product over a long axis leaves most of a GPU idle, unless
# that axis is cut into slices
_NARROW = 128
_SLICES = 512
_SHORTEST, _LONGEST = 64, 1024


# products of half-precision matrices came with results in float32 in torch 2.8
_OUT_DTYPE = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 8)

# torch's switch is one for the whole process: whoever turns it must turn it back first
_SWITCH = threading.RLock()


@contextmanager
def tf32_products(allowed: bool) -> Iterator[None]:
    """Let products of float32 matrices on a GPU round their factors to TF32, or not."""
    with _SWITCH:
        before = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = allowed
        try:
            yield
        finally:
            torch.backends.cuda.matmul.allow_tf32 = before


def convolution_bmm(a: Tensor, b: Tensor) -> Tensor:
    """Return ``a @ b`` in batches, on a GPU in TF32 where torch's convolutions use it."""
    if a.is_cuda and a.dtype == torch.float32 and torch.backends.cudnn.allow_tf32:
        product: Tensor = (_traced_tf32_bmm if is_traced() else _tf32_bmm)(a, b)
        return product
    return torch.bmm(a, b)


def _tf32_bmm(a: Tensor, b: Tensor) -> Tensor:
    # autograd has one thread for each GPU: if it waited here for a thread that waits for its
    # own backward pass, neither would go on
    if not _SWITCH.acquire(blocking=False):
        return torch.bmm(a, b)
    try:
        with tf32_products(True):  # which a trace would not show
            return torch.bmm(a, b)
    finally:
        _SWITCH.release()


_traced_tf32_bmm = single_operation("scodkit::tf32_bmm", _tf32_bmm)


@_traced_tf32_bmm.register_fake
def _(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(a.shape[0], a.shape[1], b.shape[2])


def matmul(a: Tensor, b: Tensor, times: float = 1.0) -> Tensor:
    """Return ``a @ b`` for matrices of any floating dtypes, summed in the wider one.

    Args:
        a: ``(m, n)``.
        b: ``(n, r)``.
        times: Multiply as if ``a`` had so many times as many rows.

    Returns:
        ``(m, r)`` in float32, or in float64 if one of them is.
    """
    wide = sum_dtype(a, b)
    if a.is_cuda and a.dtype == torch.float32 and b.dtype == torch.bfloat16 and _OUT_DTYPE:
        # a few rows in parts are cheaper than a long matrix made wide
        parts = _in_parts(a.T, b.dtype).T.contiguous()
        return matmul(parts, b, times).view(_PARTS, len(a), -1).sum(0)
    on_units = _on_matrix_units(a, b)
    if not on_units:
        a, b = a.to(wide), b.to(wide)
    if a.is_cuda and _is_long(a, b, times):
        return _in_slices(a, b)
    return torch.mm(a, b, out_dtype=wide) if on_units else a @ b


def add_matmul(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add ``a @ b`` to ``total (m, r)`` in place, without rounding ``b`` to the dtype of ``a``.

    Args:
        total: In float32 or float64.
        a: ``(m, n)``, in any floating dtype.
        b: ``(n, r)``, in the dtype of ``a`` or of ``total``.
    """
    if a.dtype == total.dtype:
        total.addmm_(a, b.to(a.dtype))
    elif b.dtype == a.dtype:
        total += matmul(a, b)
    elif _on_matrix_units(a, a):
        found = matmul(a, _in_parts(b, a.dtype))
        for part in torch.chunk(found, _PARTS, dim=1):
            total += part
    else:
        total.addmm_(a.to(total.dtype), b)


def _is_long(a: Tensor, b: Tensor, times: float) -> bool:
    return (
        a.shape[0] * times <= _NARROW and b.shape[1] <= _NARROW and a.shape[1] >= 2 * _LONGEST
    )


def _in_slices(a: Tensor, b: Tensor) -> Tensor:
    """Return ``a @ b`` for a few long rows, a slice of them to each processor of a GPU."""
    # measured on an H200: the fastest length is about a 512th, as a power of two
    length = 1 << max(1, a.shape[1] // _SLICES).bit_length() - 1
    length = min(max(length, _SHORTEST), _LONGEST)
    count = a.shape[1] // length
    whole = count * length
    slices = a[:, :whole].view(len(a), count, length).transpose(0, 1)
    pieces = b[:whole].view(count, length, -1)
    if _on_matrix_units(a, b):
        result = torch.bmm(slices, pieces, out_dtype=torch.float32).sum(0)
        rest = torch.mm(a[:, whole:], b[whole:], out_dtype=torch.float32)
        return result + rest
    return torch.bmm(slices, pieces).sum(0) + a[:, whole:] @ b[whole:]


def _in_parts(b: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a float32 ``(n, r)`` as half-precision parts side by side, which sum to it."""
    parts = []
    for _ in range(_PARTS):
        parts.append(b.to(dtype))
        b = b - parts[-1].to(b.dtype)
    return torch.cat(parts, dim=1)


def sum_dtype(*tensors: Tensor) -> torch.dtype:
    """Return the dtype to sum in: float32 (half precision too), float64 if one of them is."""
    wide = any(tensor.dtype == torch.float64 for tensor in tensors)
    return torch.float64 if wide else torch.float32


def _on_matrix_units(a: Tensor, b: Tensor) -> bool:
    return a.is_cuda and a.dtype == b.dtype == torch.bfloat16 and _OUT_DTYPE
