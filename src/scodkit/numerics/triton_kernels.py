"""Triton kernels; imported only if Triton is installed."""

import triton
from triton import language as tl


@triton.jit
def project(
    rows,
    matrix,
    result,
    count,
    length,
    columns,
    step,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # separate sums for each column of a block, reduced at the end of the program
    part = tl.program_id(0)
    r = tl.arange(0, ROWS)
    k = tl.arange(0, COLUMNS)
    products = tl.zeros((ROWS, BLOCK, COLUMNS), tl.float32)
    squares = tl.zeros((ROWS, BLOCK), tl.float32)
    first = part * step
    last = tl.minimum(first + step, length)
    for start in range(first, last, BLOCK):
        n = start + tl.arange(0, BLOCK)
        here = n < last
        entry = r[:, None].to(tl.int64) * length + n[None, :]
        a = tl.load(rows + entry, mask=(r[:, None] < count) & here[None, :], other=0.0)
        a = a.to(tl.float32)
        place = n[:, None].to(tl.int64) * columns + k[None, :]
        b = tl.load(matrix + place, mask=here[:, None] & (k[None, :] < columns), other=0.0)
        products += a[:, :, None] * b.to(tl.float32)[None, :, :]
        squares += a * a
    line = (part * count + r) * (columns + 1)
    inside = (r[:, None] < count) & (k[None, :] < columns)
    tl.store(result + line[:, None] + k[None, :], tl.sum(products, 1), mask=inside)
    tl.store(result + line + columns, tl.sum(squares, 1), mask=r < count)


@triton.jit(
    do_not_specialize=[
        *("q", "b", "c", "height", "width", "step_down", "step_across"),
        *("gap_down", "gap_across", "above", "left", "down", "across"),
    ]
)
def patches(
    source,
    result,
    q,
    b,
    c,
    height,
    width,
    step_down,
    step_across,
    gap_down,
    gap_across,
    above,
    left,
    down,
    across,
    filled,
    HIGH: tl.constexpr,
    WIDE: tl.constexpr,
    PLANES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # a few planes of the source; in the result the first two axes are swapped
    plane = (tl.program_id(0) * PLANES + tl.arange(0, PLANES)).to(tl.int64)[:, None]
    channel = plane % c
    sample = (plane // c) % b
    target = ((sample * q + plane // (c * b)) * c + channel) * HIGH * WIDE
    p = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    y = (p // across) * step_down - above
    x = (p % across) * step_across - left
    exists = plane < q * b * c
    there = exists & (p < down * across)
    for i in tl.static_range(HIGH):
        for j in tl.static_range(WIDE):
            row = y + i * gap_down
            column = x + j * gap_across
            seen = there & (row >= 0) & (row < height) & (column >= 0) & (column < width)
            place = plane * height * width + row * width + column
            value = tl.load(source + place, mask=seen, other=0.0)
            to = (target + i * WIDE + j) * filled + p
            tl.store(result + to, value, mask=exists & (p < filled))


@triton.jit
def accumulate(
    rows,
    parts,
    total,
    count,
    length,
    columns,
    stride,
    wide,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # a float32 product is a sum of bfloat16 parts, each multiplied exactly
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    k = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    here = (n < length)[:, None]
    sums = tl.zeros((BLOCK, COLUMNS), tl.float32)
    for start in range(0, count, ROWS):
        r = start + tl.arange(0, ROWS)
        entry = r[None, :].to(tl.int64) * stride + n[:, None]
        a = tl.load(rows + entry, mask=here & (r < count)[None, :], other=0.0)
        for part in tl.static_range(PARTS):
            place = (r[:, None] * PARTS + part) * wide + k[None, :]
            b = tl.load(parts + place, mask=(r < count)[:, None], other=0.0)
            sums = tl.dot(a, b, sums)
    here = here & (k < columns)[None, :]
    place = n[:, None].to(tl.int64) * columns + k[None, :]
    before = tl.load(total + place, mask=here, other=0.0)
    tl.store(total + place, before + sums, mask=here)


@triton.jit
def contract(
    vectors,
    weights,
    result,
    samples,
    places,
    width,
    step_direction,
    step_sample,
    step_place,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
):
    # a program has a block of places m and all places n from there on: both are symmetric
    block = tl.program_id(0)
    line = tl.program_id(1)
    direction = (line // samples).to(tl.int64)
    sample = (line % samples).to(tl.int64)
    first = vectors + direction * step_direction + sample * step_sample
    m = block * BLOCK + tl.arange(0, BLOCK)
    from_m = first + m[:, None].to(tl.int64) * step_place
    of_m = weights + (sample * places + m[:, None]) * places
    sums = tl.zeros((BLOCK,), tl.float32)
    for other in range(block, tl.num_programs(0)):
        n = other * BLOCK + tl.arange(0, BLOCK)
        from_n = first + n[:, None].to(tl.int64) * step_place
        inner = tl.zeros((BLOCK, BLOCK), tl.float32)
        for start in range(0, width, STEP):
            c = start + tl.arange(0, STEP)
            inside = (c < width)[None, :]
            x = tl.load(from_m + c[None, :], mask=(m < places)[:, None] & inside, other=0.0)
            y = tl.load(from_n + c[None, :], mask=(n < places)[:, None] & inside, other=0.0)
            inner = tl.dot(x, tl.trans(y), inner)
        here = (m < places)[:, None] & (n < places)[None, :]
        weight = tl.load(of_m + n[None, :], mask=here, other=0.0)
        sums += tl.sum(inner * weight, 1) * tl.where(other > block, 2.0, 1.0)
    tl.store(result + line * tl.num_programs(0) + block, tl.sum(sums, 0))
