"""Products of matrices in mixed precision against float64."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from draws import noise
from scodkit.numerics import matmul as matmul_module
from scodkit.numerics.matmul import (
    _LONGEST,
    _in_slices,
    _summed,
    add_matmul,
    in_parts,
    linear,
    matmul,
    tf32_products,
)
from scodkit.numerics.torch_private import make_fx, onednn_linear

DTYPES = [torch.float32, torch.bfloat16, torch.float64]
SEEDS = st.integers(0, 2**31)


def near(found: Tensor, a: Tensor, b: Tensor) -> bool:
    """Whether a product is right up to the rounding of its own dtype, entry by entry."""
    error = (found.double() - a.double() @ b.double()).abs()
    bound = a.double().abs() @ b.double().abs()
    return bool((error <= 8 * torch.finfo(found.dtype).eps * bound).all())


@pytest.mark.parametrize(("left", "right"), list(product(DTYPES, DTYPES)), ids=str)
@pytest.mark.parametrize("length", [0, 1, 300])
def test_matmul_sums_in_the_wider_dtype(left, right, length: int) -> None:
    a, b = noise(5, length, dtype=left), noise(length, 7, seed=1, dtype=right)
    found = matmul(a, b)
    wide = torch.float64 if torch.float64 in (left, right) else torch.float32
    assert found.dtype == wide
    assert found.shape == (5, 7)
    assert near(found, a, b)


@pytest.mark.parametrize(
    ("total", "left", "right"),
    [
        (torch.float32, torch.float32, torch.float32),
        (torch.float32, torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.bfloat16, torch.float32),
        (torch.float32, torch.float16, torch.float32),
        (torch.float64, torch.float64, torch.float64),
        (torch.float64, torch.float32, torch.float64),
        (torch.float64, torch.bfloat16, torch.float64),
    ],
    ids=str,
)
def test_add_matmul_adds_in_place_and_rounds_nothing_first(total, left, right) -> None:
    a, b = noise(5, 300, dtype=left), noise(300, 7, seed=1, dtype=right)
    into = torch.zeros(9, 7, dtype=total)
    add_matmul(into[2:7], a, b)
    assert near(into[2:7], a, b)
    add_matmul(into[2:7], a, b)
    assert near(into[2:7] / 2, a, b)
    assert not into[:2].any()
    assert not into[7:].any()


LARGE = (40, 700, 100)  # rows, length, columns: enough for oneDNN


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", [(10, 40, 24), LARGE], ids=str)
@pytest.mark.parametrize("strided", [False, True])
def test_linear_is_torch_s(dtype: torch.dtype, sizes: tuple[int, ...], strided: bool) -> None:
    rows, length, columns = sizes
    step = 2 if strided else 1
    x = noise(rows, step * length).to(dtype)[:, ::step]
    weight = noise(length, columns, seed=1).to(dtype).mT
    bias = noise(columns, seed=2).to(dtype)
    assert near(linear(x, weight), x, weight.mT)
    with_ones = torch.cat([x, torch.ones_like(x[:, :1])], 1)
    both = torch.cat([weight, bias[:, None]], 1)
    assert near(linear(x, weight, bias), with_ones, both.mT)
    halves = torch.stack(x.chunk(2))
    assert near(linear(halves, weight).view(rows, -1), x, weight.mT)


@pytest.fixture
def onednn_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The calls of oneDNN's product, as they are made."""
    calls: list[tuple[Any, ...]] = []

    def counted(*args: Any) -> Tensor:
        calls.append(args)
        return onednn_linear(*args)

    monkeypatch.setattr(matmul_module, "onednn_linear", counted)
    return calls


def test_linear_leaves_to_torch_what_onednn_cannot(onednn_calls, monkeypatch) -> None:
    x, weight = noise(*LARGE[:2]).float(), noise(*LARGE[:0:-1], seed=1).float()
    bias = torch.zeros(2, len(weight))
    linear(x, weight, bias[0])
    linear(x, weight.mT.contiguous().mT)
    with torch.no_grad():  # nothing is recorded
        linear(x, weight.clone().requires_grad_())
    assert len(onednn_calls) == 3
    expected = torch.autograd.functional.jacobian(lambda w: F.linear(x, w).sum(), weight)
    found = torch.autograd.functional.jacobian(lambda w: linear(x, w).sum(), weight)
    assert torch.equal(found, expected)
    with torch.autocast("cpu", torch.bfloat16):
        assert linear(x, weight).dtype == torch.bfloat16
    traced = make_fx(lambda x, weight: linear(x, weight))(x, weight)
    assert "mkldnn" not in traced.code
    linear(x[:1], weight)  # a vector
    gaps = torch.cat([weight, weight], 1)
    others = [(gaps[:, : x.shape[1]], bias[0]), (weight, bias.T.contiguous().T[0])]
    for own, of_bias in [*others, (weight, torch.zeros(1).expand(len(weight)))]:
        torch.testing.assert_close(linear(x, own, of_bias), F.linear(x, own, of_bias))
    with monkeypatch.context() as patch:
        patch.setattr(torch.backends.mkldnn, "enabled", False)
        linear(x, weight)
    assert len(onednn_calls) == 3
    monkeypatch.setattr(matmul_module, "onednn_linear", None)  # torch without oneDNN
    assert near(linear(x, weight), x, weight.mT)


@pytest.mark.parametrize("length", [1000, 1 << 15, 1 << 17])
def test_a_product_along_a_basis_is_as_exact_as_its_dtype(length: int) -> None:
    basis = torch.linalg.qr(noise(length, 20))[0].float()
    rows = noise(24, length, seed=1).float() + 30 * noise(24, 20, seed=2).float() @ basis.mT
    exact = rows.double() @ basis.double()
    error = (matmul(rows, basis).double() - exact).abs() / rows.double().norm(dim=1)[:, None]
    assert error.mean() < 2.0**-24  # one by one, it would be three times that


def test_add_matmul_takes_a_transposed_block() -> None:
    rows, total = noise(6, 40, dtype=torch.bfloat16), noise(6, 3, seed=1, dtype=torch.float32)
    into = torch.zeros(40, 3)
    add_matmul(into, rows.mT, total)
    assert near(into, rows.mT, total)


# the lowest of 24 bits must be at least bfloat16's smallest number, 2**-133
@given(exponent=st.integers(-110, 126), seed=SEEDS)
@settings(max_examples=60, deadline=None)
def test_three_parts_are_the_float32_exactly(exponent: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(2**23, 2**24, (64, 2), generator=generator)
    signs = torch.randint(0, 2, (64, 2), generator=generator) * 2 - 1
    numbers = torch.ldexp((signs * bits).double(), torch.tensor(exponent - 23)).float()
    parts = in_parts(numbers, torch.bfloat16)
    assert parts.dtype == torch.bfloat16
    assert parts.shape == (64, 6)
    assert torch.equal(sum(part.double() for part in parts.chunk(3, dim=1)), numbers.double())


def test_parts_of_zeros_and_of_the_tiniest_stay_finite() -> None:
    numbers = torch.tensor([[0.0, -0.0, 2.0**-149, 2.0**-126, 3.3e38, -3.3e38]])
    sums = sum(part.double() for part in in_parts(numbers, torch.bfloat16).chunk(3, dim=1))
    assert sums.isfinite().all()
    assert ((sums - numbers.double()).abs() <= 2.0**-133).all()


def test_products_with_parts_sum_to_the_product() -> None:
    a, b = noise(9, 300, dtype=torch.bfloat16), noise(300, 7, seed=1, dtype=torch.float32)
    assert near(_summed(a.float() @ in_parts(b, a.dtype).float()), a, b)


@pytest.mark.parametrize("length", [_LONGEST, 2 * _LONGEST, 65_537, 600_000, 7000])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_slices_of_a_long_product_add_up(length: int, dtype: torch.dtype) -> None:
    a, b = noise(3, length, dtype=dtype), noise(length, 4, seed=1, dtype=dtype)
    found = _in_slices(a, b)
    assert found.dtype == dtype
    assert near(found, a, b)


def test_slices_of_a_narrow_view() -> None:
    wide, b = noise(3, 9000), noise(9000, 4, seed=1)
    assert near(_in_slices(wide[:, 17:6017], b[17:6017]), wide[:, 17:6017], b[17:6017])


def flag() -> bool:
    return torch.backends.cuda.matmul.allow_tf32


@pytest.fixture(params=[False, True])
def start(request: pytest.FixtureRequest) -> Iterator[bool]:
    before = flag()
    torch.backends.cuda.matmul.allow_tf32 = request.param
    yield request.param
    torch.backends.cuda.matmul.allow_tf32 = before


def test_tf32_is_as_it_was_afterwards(start: bool) -> None:
    with tf32_products(True):
        assert flag()
        with tf32_products(False):
            assert not flag()
        assert flag()
    assert flag() == start
    with pytest.raises(ZeroDivisionError), tf32_products(not start):
        raise ZeroDivisionError
    assert flag() == start
