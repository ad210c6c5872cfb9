"""Tall matrices, chunk by chunk in float64; their rows may be divided among processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

# numbers handled at a time where copies in float64 are needed, on a GPU more to keep it busy;
# and how many copies; and matrices of its width alone that there are beside them
_CHUNK, _CHUNK_ON_GPU = 1 << 19, 1 << 23
_COPIES = 2.5  # the last back in float32
_SQUARES = 5

AddUp = Callable[[Tensor], Tensor]


def alone(sums: Tensor) -> Tensor:
    """Return sums over all weights as they are: a process that holds all needs no other."""
    return sums


def tall_chunks(a: Tensor) -> Iterator[slice]:
    """Cut the rows of a tall matrix into the slices that it is worked through in."""
    step = max(1, _numbers(a.device) // max(1, a.shape[1]))
    for start in range(0, a.shape[0], step):
        yield slice(start, min(start + step, a.shape[0]))


def tall_bytes(length: int, width: int, device: torch.device) -> int:
    """Return what working through a tall matrix takes.

    Args:
        length: How many rows it has.
        width: How many columns.
        device: Where it is.
    """
    chunks = _COPIES * min(length * width, _numbers(device))
    return int(chunks + _SQUARES * width**2) * torch.float64.itemsize


def _numbers(device: torch.device) -> int:
    return _CHUNK_ON_GPU if device.type == "cuda" else _CHUNK


def tall_gram(a: Tensor, b: Tensor) -> Tensor:
    """Return ``a^T b`` in float64 for tall ``a`` and ``b``, a chunk of rows at a time."""
    total = torch.zeros(a.shape[1], b.shape[1], dtype=torch.float64, device=a.device)
    for chunk in tall_chunks(a):
        total += a[chunk].double().mT @ b[chunk].double()
    return total


def tall_times(a: Tensor, small: Tensor, overwrite: bool = False) -> Tensor:
    """Return ``a @ small`` for tall ``a`` in its dtype, with float64 products by chunks.

    Args:
        a: ``(N, m)``.
        small: ``(m, r)`` in float64.
        overwrite: Put the result into the memory of ``a``; needs ``r <= m``.
    """
    result = a[:, : small.shape[1]] if overwrite else a.new_empty(len(a), small.shape[1])
    for chunk in tall_chunks(a):
        result[chunk] = (a[chunk].double() @ small).to(a.dtype)
    return result


def tall_svd(a: Tensor, add_up: AddUp = alone) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``U, s, V`` with ``a = U diag(s) V^T`` for a tall matrix, in its own memory.

    For float32, two rounds of Gram matrices in float64: the first finds the directions, the
    second repairs what squaring did to the orthogonality of the small ones. Directions below
    rounding are dropped.

    Args:
        a: ``(N, m)``, or the rows of it that this process has; may be overwritten.
        add_up: Adds up sums over rows, over all processes.

    Returns:
        ``U (N, r)``, or its rows, in the dtype of ``a``; ``s (r,)`` descending and ``V (m, r)``
        in float64.
    """
    if a.dtype == torch.float64 and add_up is alone:
        # squaring would cost half the digits; data in float32 has only half of them
        q, r = torch.linalg.qr(a)
        inner, s, turned = torch.linalg.svd(r, full_matrices=False)
        kept = s > torch.finfo(torch.float64).eps * max(a.shape) * s[:1]
        return tall_times(q, inner[:, kept]), s[kept], turned.mT[:, kept]
    squared, right = torch.linalg.eigh(add_up(tall_gram(a, a)))
    floor = torch.finfo(torch.float64).eps * max(a.shape)
    kept = squared > floor * squared[-1:].clamp_min(0)
    scale, right = squared[kept].sqrt(), right[:, kept]
    left = tall_times(a, right / scale, overwrite=True)
    # left = Q R with R near the identity, so a = Q (R diag(scale)) right^T
    gram_values, gram_vectors = torch.linalg.eigh(add_up(tall_gram(left, left)))
    root = gram_values.sqrt()
    inner, s, turned = torch.linalg.svd(root[:, None] * gram_vectors.mT * scale)
    u = tall_times(left, (gram_vectors / root) @ inner, overwrite=True)
    return u, s, right @ turned.mT
