"""Kernels that multiply bfloat16 on matrix units, beside float64; run where there is a GPU."""

from __future__ import annotations

import pytest
import torch

from scodkit.numerics import kernels

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

EPS = torch.finfo(torch.float32).eps


@pytest.mark.parametrize("count", [1, 7, 64, 320])
@pytest.mark.parametrize("columns", [3, 40, 152])
@pytest.mark.parametrize("length", [50, 4097])
def test_products_are_added_without_rounding_them(
    count: int, columns: int, length: int
) -> None:
    torch.manual_seed(0)
    rows = torch.randn(count, length + 9).bfloat16().cuda()[:, 5 : 5 + length]
    products, total = torch.randn(count, columns).cuda(), torch.randn(length, columns).cuda()
    assert kernels.multiplies(rows)
    expected = total.double() + rows.double().mT @ products.double()
    terms = total.double().abs() + rows.double().abs().mT @ products.double().abs()
    kernels.accumulate(total, rows, products)
    assert ((total - expected).abs() <= 8 * EPS * terms).all()


@pytest.mark.parametrize("places", [1, 16, 100, 197, 300])
@pytest.mark.parametrize("width", [8, 100, 768])
def test_inner_products_are_contracted(places: int, width: int) -> None:
    torch.manual_seed(0)
    vectors = torch.randn(3, 4, places, width).bfloat16().cuda()
    weights = torch.randn(4, places, places).cuda()
    weights = weights + weights.mT
    inner = vectors.double() @ vectors.double().mT
    expected = (inner * weights).sum((2, 3))
    terms = (inner * weights).abs().sum((2, 3))
    assert kernels.multiplies(vectors)
    found = kernels.contract(vectors, weights)
    assert ((found - expected).abs() <= 64 * EPS * terms).all()
    # samples need not be contiguous, as of sequences whose first axis is the place
    turned = vectors.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(kernels.contract(turned, weights), found)


def test_others_are_refused() -> None:
    matrix = torch.randn(8, 8).cuda()
    assert not kernels.multiplies(matrix)
    assert not kernels.multiplies(matrix.bfloat16().mT)
    assert not kernels.multiplies(matrix.bfloat16().cpu())
