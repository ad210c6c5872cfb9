"""GPU kernels for operations where torch's leave most of the memory bandwidth unused.

They are written in Triton, which comes with torch for CUDA; without it, or on other devices,
callers compute the same in torch.
"""

from __future__ import annotations

import functools
import warnings

import torch
from torch import Tensor
from torch.nn.functional import pad

from scodkit.errors import EngineFallbackWarning
from scodkit.numerics.matmul import PARTS, add_matmul, in_parts, opaque_to_tracers

try:
    from scodkit.numerics import triton_kernels
except Exception:  # not installed, or not for this machine
    triton_kernels = None  # type: ignore[assignment]

# rows and columns up to which a product is computed here; with more, torch keeps a GPU busy
_MOST_ROWS = 8
_MOST_COLUMNS = 128
_LONGEST = 1 << 30  # indices have 32 bits
# entries a program sums at a time, and how many programs share a product
_TILE = 4096
_PROGRAMS = 1024

# positions of a plane that a program copies at a time; with small planes it copies several, up
# to the last size, as long as enough programs are left to keep a GPU busy
_BLOCKS = (16, 64, 256, 1024)
_BUSY = 128

_DTYPES = (torch.float32, torch.bfloat16)

# of a GPU whose matrix units multiply bfloat16
_AMPERE = (8, 0)

# weights of a sketch, rows and columns that a program of `accumulate` multiplies at a time:
# measured on an H200, within 4 % of the fastest of 36 choices at 32 to 320 rows
_WEIGHTS, _ROWS, _COLUMNS = 64, 32, (16, 128)
# places that a program of `contract` pairs with others at a time, and entries of their vectors
_PLACES, _ENTRIES = (16, 128), 64


def run_on(tensor: Tensor) -> bool:
    """Return whether the kernels can be used for a tensor."""
    return triton_kernels is not None and tensor.is_cuda and _launches(tensor.device)


@functools.cache
def _launches(device: torch.device) -> bool:
    """Return whether kernels can be launched: Triton needs a C compiler and a recent GPU."""
    try:
        _launch_project(torch.ones(1, 1, device=device), torch.ones(1, 1, device=device))
        torch.cuda.synchronize(device)
    except Exception as error:  # whatever a compiler or a driver may raise
        warnings.warn(
            f"Triton's kernels cannot be launched on {device} ({type(error).__name__}); those "
            "of torch are used, which are slower",
            EngineFallbackWarning,
            stacklevel=4,
        )
        return False
    return True


def projects(rows: Tensor, matrix: Tensor) -> bool:
    """Return whether `project` supports such rows and such a matrix.

    Args:
        rows: ``(b, q, n)``.
        matrix: ``(n, k)``.
    """
    count = rows.shape[0] * rows.shape[1]
    few = count <= _MOST_ROWS and matrix.shape[1] <= _MOST_COLUMNS
    suited = few and 0 < rows.shape[2] <= _LONGEST
    return suited and rows.dtype in _DTYPES and matrix.dtype in _DTYPES and run_on(rows)


def project(rows: Tensor, matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return the squared norms of a few long rows, and their products with a matrix.

    Args:
        rows: ``(b, q, n)``; see `projects`.
        matrix: ``(n, k)``.

    Returns:
        ``(b,)`` and ``(b, q, k)`` in float64, from sums of products in float32.
    """
    b, q, n = rows.shape
    parts = _project(rows.reshape(b * q, n).contiguous(), matrix.contiguous())
    sums = parts.sum(0, dtype=torch.float64).view(b, q, -1)
    return sums[..., -1].sum(1), sums[..., :-1]


def accumulate(total: Tensor, rows: Tensor, products: Tensor) -> None:
    """Add ``rows^T products`` in place, without rounding the products to the rows' dtype.

    Rows in bfloat16 take one pass over rows and total, summed in float32.

    Args:
        total: ``(n, T)`` in float32 or float64.
        rows: ``(R, n)``.
        products: ``(R, T)``, in the dtype of the total.
    """
    if not (multiplies(rows) and total.dtype == torch.float32 and total.is_contiguous()):
        add_matmul(total, rows.mT, products)
        return
    (count, length), columns = rows.shape, total.shape[1]
    at_once = _between(columns, _COLUMNS)
    blocks = -(-columns // at_once)
    wide = blocks * at_once  # or rows of the parts would not be aligned
    parts = in_parts(pad(products, (0, wide - columns)), rows.dtype)
    with torch.cuda.device(rows.device):
        triton_kernels.accumulate[(-(-length // _WEIGHTS), blocks)](
            rows,
            parts,
            total,
            count,
            length,
            columns,
            rows.stride(0),
            wide,
            PARTS=PARTS,
            ROWS=_ROWS,
            COLUMNS=at_once,
            BLOCK=_WEIGHTS,
        )


def multiplies(tensor: Tensor) -> bool:
    """Return whether `contract` supports a tensor: bfloat16, contiguous, on a recent GPU."""
    if tensor.dtype != torch.bfloat16 or tensor.stride(-1) != 1 or not run_on(tensor):
        return False
    return torch.cuda.get_device_capability(tensor.device) >= _AMPERE


def contract(vectors: Tensor, weights: Tensor) -> Tensor:
    """Return ``sum_mn (v_m . v_n) w_mn`` of vectors, without writing their inner products.

    Args:
        vectors: ``(q, b, m, n)``, which `multiplies` accepts.
        weights: ``(b, m, m)``, symmetric.

    Returns:
        ``(q, b)`` in float64, from sums in float32.
    """
    return _contract(vectors, weights.float().contiguous()).sum(2, dtype=torch.float64)


def patches(
    source: Tensor,
    kernel: tuple[int, int] = (1, 1),
    stride: tuple[int, int] = (1, 1),
    dilation: tuple[int, int] = (1, 1),
    margin: tuple[int, int] = (0, 0),
    positions: tuple[int, int] | None = None,
    fill: int = 1,
) -> Tensor:
    """Return the patch of each plane under the kernel of a convolution, at each position.

    Args:
        source: ``(q, b, c, height, width)``.
        kernel: Its height and width.
        stride: Between positions.
        dilation: Between the entries of the kernel.
        margin: Zero padding above and to the left; below and to the right it is implied.
        positions: How many along each axis; by default the size of the planes.
        fill: Pad the number of positions to a multiple of this, with zeros.

    Returns:
        ``(b, q, c kernel, positions)``.
    """
    down, across = positions or (source.shape[3], source.shape[4])
    filled = -(-down * across // fill) * fill
    geometry = [*kernel, *stride, *dilation, *margin, down, across, filled]
    return _patches(source.contiguous(), geometry)


def _launch_project(rows: Tensor, matrix: Tensor) -> Tensor:
    """Return ``(parts, R, k + 1)``: partial sums of ``rows @ matrix``, then of the squares."""
    (count, length), columns = rows.shape, matrix.shape[1]
    block, step = _shares(count, length, columns)
    result = _empty_products(rows, matrix)
    with torch.cuda.device(rows.device):
        triton_kernels.project[(len(result),)](
            rows,
            matrix,
            result,
            count,
            length,
            columns,
            step,
            ROWS=_power_of_two(count),
            COLUMNS=_power_of_two(columns),
            BLOCK=block,
        )
    return result


def _empty_products(rows: Tensor, matrix: Tensor) -> Tensor:
    (count, length), columns = rows.shape, matrix.shape[1]
    _, step = _shares(count, length, columns)
    return rows.new_empty(-(-length // step), count, columns + 1, dtype=torch.float32)


def _shares(count: int, length: int, columns: int) -> tuple[int, int]:
    """Return how many columns of the rows a program processes at a time, and in total."""
    block = max(1, _TILE // (_power_of_two(count) * _power_of_two(columns)))
    return block, -(-length // (_PROGRAMS * block)) * block


def _launch_contract(vectors: Tensor, weights: Tensor) -> Tensor:
    """Return ``(q, b, blocks)``: partial sums, one for each block of places."""
    result = _empty_contracted(vectors, weights)
    directions, samples, places, width = vectors.shape
    with torch.cuda.device(vectors.device):
        triton_kernels.contract[(result.shape[2], directions * samples)](
            vectors,
            weights,
            result,
            samples,
            places,
            width,
            *vectors.stride()[:3],
            BLOCK=_between(places, _PLACES),
            STEP=_ENTRIES,
        )
    return result


def _empty_contracted(vectors: Tensor, weights: Tensor) -> Tensor:
    directions, samples, places, _ = vectors.shape
    blocks = -(-places // _between(places, _PLACES))
    return weights.new_empty(directions, samples, blocks)


def _launch_patches(source: Tensor, geometry: list[int]) -> Tensor:
    q, b, c, _, _ = source.shape
    high, wide, *steps, filled = geometry
    result = _empty_patches(source, geometry)
    block = next((block for block in _BLOCKS if block >= filled), _BLOCKS[-1])
    planes = min(_BLOCKS[-1] // block, _power_of_two(-(-q * b * c // _BUSY)))
    with torch.cuda.device(source.device):
        triton_kernels.patches[(-(-q * b * c // planes), -(-filled // block))](
            source,
            result,
            *source.shape,
            *steps,
            filled,
            HIGH=high,
            WIDE=wide,
            PLANES=planes,
            BLOCK=block,
        )
    return result


def _empty_patches(source: Tensor, geometry: list[int]) -> Tensor:
    q, b, c, _, _ = source.shape
    high, wide, *_, filled = geometry
    return source.new_empty(b, q, c * high * wide, filled)


_project = opaque_to_tracers("scodkit::project", _launch_project, _empty_products)
_contract = opaque_to_tracers("scodkit::contract", _launch_contract, _empty_contracted)
_patches = opaque_to_tracers(
    "scodkit::patches",
    _launch_patches,
    _empty_patches,
    "(Tensor source, int[] geometry) -> Tensor",  # torch 2.6 does not read list[int]
)


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _between(number: int, ends: tuple[int, int]) -> int:
    """Return the power of two that a number fits into, between two ends."""
    return min(max(_power_of_two(number), ends[0]), ends[1])
