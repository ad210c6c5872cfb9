"""Digests of tensors, and counter-based random numbers from integer arithmetic alone.

The random numbers are the same on every device and in every version of torch. Each is a
function of a seed and a counter, so they can be computed in any order; there is no state.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_EVEN = 23  # bits of a uniform number: exact in float32, and below 1 times anything
_AT_ONCE = 2**24  # bytes that are hashed


def hashed(seed: int, stream: int, counter: Tensor) -> Tensor:
    """Return 32 well-mixed bits for each counter, as int64.

    Args:
        seed: Of the random numbers.
        stream: Index of one of several uses of a seed.
        counter: Integers, of any shape.
    """
    low, high = counter & _MASK, counter >> 32
    h = mixed((low ^ _key(seed, stream)) & _MASK)
    return mixed((h + high * 0x9E3779B1 + _key(seed, stream + 101)) & _MASK)


def signs(seed: int, stream: int, counter: Tensor) -> Tensor:
    """Return -1 or 1 for each counter; the arguments are those of `hashed`."""
    return (hashed(seed, stream, counter) & 1) * 2 - 1


def shares(seed: int, stream: int, counter: Tensor) -> Tensor:
    """Return a uniform random number in [0, 1) for each counter, in float32.

    Args:
        seed: As in `hashed`.
        stream: As in `hashed`.
        counter: As in `hashed`.
    """
    return (hashed(seed, stream, counter) >> (32 - _EVEN)).float() * 2.0**-_EVEN


def mixed(bits: Tensor) -> Tensor:
    """Return 32 bits after one more round of mixing."""
    # multipliers below 2**31: a product of 32 and 31 bits fits int64 exactly
    h = ((bits ^ (bits >> 16)) * 0x21F0AAAD) & _MASK
    h = ((h ^ (h >> 15)) * 0x735A2D97) & _MASK
    return h ^ (h >> 15)


def _key(seed: int, stream: int) -> int:
    """Return 32 bits for a seed and a stream (splitmix64, in Python's exact integers)."""
    mask = 0xFFFFFFFFFFFFFFFF
    z = (seed + (stream + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return (z ^ (z >> 31)) >> 32


def bytes_of(tensor: Tensor) -> Tensor:
    """Return the bytes of each row of a tensor ``(n, ...)``, as ``(n, b)`` in uint8."""
    count, width = len(tensor), math.prod(tensor.shape[1:])
    rows = tensor.detach().reshape(count, width).contiguous()
    # an axis of one element may have any stride, such as 0 in numpy's x[:, None]: that is
    # contiguous, too, but cannot be viewed
    return rows.as_strided((count, width), (max(1, width), 1)).view(torch.uint8)


def digest_of(tensors: Mapping[str, Tensor], salt: str = "") -> str:
    """Return a hash over tensors: names, shapes, dtypes and every byte.

    Args:
        tensors: By name, on any device; their order does not matter.
        salt: Hashed before them.
    """
    digest = hashlib.sha256(salt.encode())
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name}:{tuple(tensor.shape)}:{tensor.dtype};".encode())
        # copies: a storage that numpy has seen cannot be resized, as FSDP2 does
        for piece in torch.split(bytes_of(tensor[None])[0], _AT_ONCE):
            digest.update(piece.clone().numpy().data)
    return digest.hexdigest()
