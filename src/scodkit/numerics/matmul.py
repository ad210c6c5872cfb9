"""Matrix products in mixed precision: bfloat16 summed in float32, tall matrices in float64.

Matrix units multiply bfloat16 exactly and accumulate in float32; precision would only be lost
by rounding the result, or a float32 factor, to bfloat16. Neither happens here.

A tall matrix ``(N, m)`` has a row for each weight. It is processed in chunks of rows, so that
only a chunk at a time exists in float64; its rows may be distributed over processes.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from scodkit.numerics.torch_private import get_proxy_mode, onednn_linear

# entries summed in float32 at a time
_SLICE = 4096

# a float32 number is the sum of this many bfloat16 numbers
PARTS = 3

# rows for each column from which splitting the columns is cheaper than converting the rows, and
# rows of a tall result whose parts stay in a GPU's cache
_SEVERAL = 4
_TALL_PARTS = 1 << 16

# rows and columns up to which a product over a long axis leaves most of a GPU idle, unless
# that axis is split into slices
_NARROW = 128
_SLICES = 512
_SHORTEST, _LONGEST = 64, 1024

# entries of a tall matrix in a chunk: more on a GPU, to keep it busy; float64 copies of a chunk
# (the last one back in float32); and square matrices of its width beside them
_TALL_CHUNK, _TALL_CHUNK_ON_GPU = 1 << 19, 1 << 23
_TALL_COPIES = 2.5
_TALL_SQUARES = 5

# multiplications from which oneDNN's overhead of 10 us does not count, and rows on both sides:
# MKL is faster with a vector
_PRODUCTS, _ROWS = 1 << 20, 2
_MATRIX = 2  # axes

# the length of an axis from which oneDNN sums float32 along it as exactly as MKL does; along
# 1000 entries it errs three times as much, and a score is a difference of near-equal sums
_AS_EXACT = 1 << 15

# products of half-precision matrices with float32 results need torch 2.8
_OUT_DTYPE = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 8)

# torch's TF32 switch is global to the process: one thread at a time may change it
_SWITCH = threading.RLock()

# sums over rows of a tall matrix, reduced over the processes that share the rows
AddUp = Callable[[Tensor], Tensor]


def opaque_to_tracers(
    name: str,
    function: Callable[..., Tensor],
    empty: Callable[..., Tensor],
    schema: str | None = None,
) -> Callable[..., Tensor]:
    """Return a function on CUDA tensors that a tracer records as a single custom op.

    Calling an op costs more than calling the function: the op is used only while tracing.

    Args:
        name: Of the op, with its namespace.
        function: The implementation.
        empty: Takes the same arguments and returns a tensor of the result's shape and dtype.
        schema: Of the op, where torch cannot read it from the function's annotations.
    """
    op = torch.library.custom_op(
        name, function, mutates_args=(), device_types="cuda", schema=schema
    )
    op.register_fake(empty)
    return lambda *args: (function if get_proxy_mode() is None else op)(*args)


@contextmanager
def tf32_products(allowed: bool) -> Iterator[None]:
    """Allow or forbid TF32 in products of float32 matrices on a GPU inside this context."""
    with _SWITCH:
        before = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = allowed
        try:
            yield
        finally:
            torch.backends.cuda.matmul.allow_tf32 = before


def convolution_bmm(a: Tensor, b: Tensor) -> Tensor:
    """Return the batched ``a @ b``, on a GPU in TF32 if torch's convolutions use it."""
    if a.is_cuda and a.dtype == torch.float32 and torch.backends.cudnn.allow_tf32:
        return _tf32_bmm(a, b)
    return torch.bmm(a, b)


def _bmm_in_tf32(a: Tensor, b: Tensor) -> Tensor:
    # autograd has one thread per GPU: waiting here for a thread that waits for its own
    # backward pass would be a deadlock
    if not _SWITCH.acquire(blocking=False):
        return torch.bmm(a, b)
    try:
        with tf32_products(True):  # a trace would not include the switch
            return torch.bmm(a, b)
    finally:
        _SWITCH.release()


_tf32_bmm = opaque_to_tracers("scodkit::tf32_bmm", _bmm_in_tf32, empty=torch.bmm)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``F.linear(x, weight, bias)``.

    In float32 on a CPU by oneDNN, as torch's own recurrent layers and convolutions are: it
    uses the wide vectors of any processor, and is twice as fast where MKL does not.
    """
    if get_proxy_mode() is None and _for_onednn(x, weight):
        onednn = torch.backends.mkldnn.enabled and not torch.is_autocast_enabled("cpu")
        if onednn_linear and onednn and (bias is None or _plain_on_cpu(bias)):
            return onednn_linear(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias)


def _for_onednn(x: Tensor, weight: Tensor) -> bool:
    """Return whether a product is large, and of matrices that oneDNN takes without a copy."""
    if x.ndim < _MATRIX or weight.ndim != _MATRIX or x.numel() * len(weight) < _PRODUCTS:
        return False
    vectors = min(x.numel() // x.shape[-1], len(weight)) < _ROWS
    turned = weight if weight.is_contiguous() else weight.mT
    return not vectors and _plain_on_cpu(x) and _plain_on_cpu(turned)


def _plain_on_cpu(tensor: Tensor) -> bool:
    """Return whether a tensor is dense, in float32, on a CPU, and its graph not recorded."""
    recorded = tensor.requires_grad and torch.is_grad_enabled()
    here = tensor.dtype == torch.float32 and tensor.is_cpu and not recorded
    return here and tensor.layout == torch.strided and tensor.is_contiguous()


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """Return ``a @ b`` for matrices of any floating dtypes, accumulated in the wider one.

    Args:
        a: ``(m, n)``.
        b: ``(n, r)``.

    Returns:
        ``(m, r)`` in float32, or in float64 if one of them is.
    """
    wide = sum_dtype(a, b)
    if a.is_cuda and a.dtype == torch.float32 and b.dtype == torch.bfloat16 and _OUT_DTYPE:
        # splitting a few rows is cheaper than converting a long matrix to float32
        parts = in_parts(a.T, b.dtype).T.contiguous()
        return matmul(parts, b).view(PARTS, len(a), -1).sum(0)
    if _on_matrix_units(a, a) and b.dtype == torch.float32 and len(a) > _SEVERAL * b.shape[1]:
        return _summed(matmul(a, in_parts(b, a.dtype)))  # likewise, a few columns
    on_units = _on_matrix_units(a, b)
    if not on_units:
        a, b = a.to(wide), b.to(wide)
    if a.is_cuda and _is_long(a, b):
        return _in_slices(a, b)
    if on_units:
        return torch.mm(a, b, out_dtype=wide)
    return linear(a, b.mT) if a.shape[1] >= _AS_EXACT else a @ b


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
        parts = in_parts(b, a.dtype)
        # the products of a few rows at a time stay in the cache until they are summed
        for start in range(0, len(a), _TALL_PARTS):
            some = slice(start, start + _TALL_PARTS)
            total[some] += _summed(matmul(a[some], parts))
    else:
        total.addmm_(a.to(total.dtype), b)


class Thin:
    """A matrix of a few columns ``(n, r)``, to multiply many others with.

    Args:
        matrix: In float32 or float64; not rounded to the dtype of the others.
    """

    def __init__(self, matrix: Tensor) -> None:
        self.matrix = matrix

    def after(self, a: Tensor) -> Tensor:
        """Return ``a @ matrix``, accumulated in the wider dtype.

        Args:
            a: ``(..., n)``, in any floating dtype.

        Returns:
            ``(..., r)`` in float32, or in float64 if one of them is.
        """
        if _on_matrix_units(a, a) and self.matrix.dtype == torch.float32:
            rows = matmul(a.reshape(-1, a.shape[-1]), self._parts)
            return _summed(rows).view(*a.shape[:-1], -1)
        wide = sum_dtype(a, self.matrix)
        return a.to(wide) @ self.matrix.to(wide)

    @functools.cached_property
    def _parts(self) -> Tensor:
        with torch.inference_mode(False):  # or no later gradient could go through them
            return in_parts(self.matrix, torch.bfloat16)


def wide_bmm(a: Tensor, b: Tensor) -> Tensor:
    """Return the batched ``a @ b`` in float32, or in float64 if one of them is."""
    if _on_matrix_units(a, b):
        return torch.bmm(a, b, out_dtype=torch.float32)
    wide = sum_dtype(a, b)
    return torch.bmm(a.to(wide), b.to(wide))


def _is_long(a: Tensor, b: Tensor) -> bool:
    return max(a.shape[0], b.shape[1]) <= _NARROW and a.shape[1] >= 2 * _LONGEST


def _in_slices(a: Tensor, b: Tensor) -> Tensor:
    """Return ``a @ b`` for a few long rows, in slices that occupy all of a GPU (split-k)."""
    # measured on an H200: the fastest length is about a 512th, as a power of two
    length = 1 << max(1, a.shape[1] // _SLICES).bit_length() - 1
    length = min(max(length, _SHORTEST), _LONGEST)
    count = a.shape[1] // length
    whole = count * length
    slices = a[:, :whole].view(len(a), count, length).transpose(0, 1)
    pieces = b[:whole].view(count, length, -1)
    options: dict[str, Any] = {"out_dtype": torch.float32} if _on_matrix_units(a, b) else {}
    rest = torch.mm(a[:, whole:], b[whole:], **options)
    return torch.bmm(slices, pieces, **options).sum(0) + rest


def _summed(products: Tensor) -> Tensor:
    """Return ``a @ b`` from the products of ``a`` with the parts of ``b``, side by side."""
    return products.view(len(products), PARTS, -1).sum(1)


def in_parts(b: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a float32 ``(n, r)`` as concatenated half-precision parts that sum to it."""
    parts = b.new_empty(len(b), PARTS, b.shape[1], dtype=dtype)
    for part in parts.unbind(1):
        part.copy_(b)
        b = b - part  # in float32, which no copy of the part is made in
    return parts.flatten(1)


def sum_dtype(*tensors: Tensor) -> torch.dtype:
    """Return the dtype to sum in: float64 if one is float64, else float32 (also for halves)."""
    wide = any(tensor.dtype == torch.float64 for tensor in tensors)
    return torch.float64 if wide else torch.float32


def _on_matrix_units(a: Tensor, b: Tensor) -> bool:
    return a.is_cuda and a.dtype == b.dtype == torch.bfloat16 and _OUT_DTYPE


def alone(sums: Tensor) -> Tensor:
    """Return sums unchanged: the `AddUp` of a single process, which has all rows."""
    return sums


def tall_chunks(a: Tensor) -> Iterator[slice]:
    """Yield slices of rows of a tall matrix, each small enough for copies in float64."""
    step = max(1, _tall_numbers(a.device) // max(1, a.shape[1]))
    for start in range(0, a.shape[0], step):
        yield slice(start, min(start + step, a.shape[0]))


def tall_bytes(length: int, width: int, device: torch.device) -> int:
    """Return the scratch bytes of `tall_svd` on a matrix ``(length, width)``."""
    chunks = _TALL_COPIES * min(length * width, _tall_numbers(device))
    return int(chunks + _TALL_SQUARES * width**2) * torch.float64.itemsize


def _tall_numbers(device: torch.device) -> int:
    return _TALL_CHUNK_ON_GPU if device.type == "cuda" else _TALL_CHUNK


def tall_gram(a: Tensor) -> Tensor:
    """Return ``a^T a`` in float64 for a tall ``a``, chunk by chunk."""
    total = torch.zeros(a.shape[1], a.shape[1], dtype=torch.float64, device=a.device)
    for chunk in tall_chunks(a):
        wide = a[chunk].double()
        total += matmul(wide.mT, wide)
    return total


def tall_times(a: Tensor, small: Tensor, overwrite: bool = False) -> Tensor:
    """Return ``a @ small`` for tall ``a`` in its dtype, with float64 products by chunks.

    Args:
        a: ``(N, m)``.
        small: ``(m, r)`` in float64.
        overwrite: Store the result in the memory of ``a``; needs ``r <= m``.
    """
    result = a[:, : small.shape[1]] if overwrite else a.new_empty(len(a), small.shape[1])
    for chunk in tall_chunks(a):
        result[chunk] = (a[chunk].double() @ small).to(a.dtype)
    return result


def tall_svd(a: Tensor, add_up: AddUp = alone) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``U, s, V`` with ``a = U diag(s) V^T`` for a tall matrix, in its own memory.

    For float32, two rounds of Gram matrices in float64: the first gives the directions, the
    second restores the orthogonality that small ones lose by squaring. Directions below
    rounding error are dropped.

    Args:
        a: ``(N, m)``, or this process's rows of it; may be overwritten.
        add_up: Reduces sums over rows across all processes.

    Returns:
        ``U (N, r)``, or its rows, in the dtype of ``a``; ``s (r,)`` descending and ``V (m, r)``
        in float64.
    """
    if a.dtype == torch.float64 and add_up is alone:
        # squaring loses half the digits of float64; float32 data has no more than that
        q, r = torch.linalg.qr(a)
        inner, s, turned = torch.linalg.svd(r, full_matrices=False)
        significant = s > torch.finfo(torch.float64).eps * max(a.shape) * s[:1]
        return tall_times(q, inner[:, significant]), s[significant], turned.mT[:, significant]
    squared, right = torch.linalg.eigh(add_up(tall_gram(a)))
    floor = torch.finfo(torch.float64).eps * max(a.shape)
    significant = squared > floor * squared[-1:].clamp_min(0)
    scale, right = squared[significant].sqrt(), right[:, significant]
    left = tall_times(a, right / scale, overwrite=True)
    # left = Q R with R near the identity, so a = Q (R diag(scale)) right^T
    gram_values, gram_vectors = torch.linalg.eigh(add_up(tall_gram(left)))
    root = gram_values.sqrt()
    inner, s, turned = torch.linalg.svd(root[:, None] * gram_vectors.mT * scale)
    u = tall_times(left, (gram_vectors / root) @ inner, overwrite=True)
    return u, s, right @ turned.mT


def squared_norms(rows: Tensor) -> Tensor:
    """Return the sum of squares of each sample's rows ``(b, q, n)``: ``(b,)`` in float64."""
    wide = sum_dtype(rows)
    if rows.is_cuda or rows.shape[1] * rows.shape[2] <= _SLICE:
        norms: Tensor = torch.linalg.vector_norm(rows, dim=(1, 2), dtype=wide)
        return norms.double().square()
    # a CPU adds float32 numbers sequentially: short float32 sums, then float64
    flat = rows.flatten(1)
    whole = flat.shape[1] // _SLICE * _SLICE
    slices = flat[:, :whole].reshape(len(flat), whole // _SLICE, _SLICE)
    long: Tensor = torch.linalg.vector_norm(slices, dim=2, dtype=wide)
    rest: Tensor = torch.linalg.vector_norm(flat[:, whole:], dim=1, dtype=wide)
    return long.double().square().sum(1) + rest.double().square()
