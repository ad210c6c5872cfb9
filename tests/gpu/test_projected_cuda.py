"""Projected weights on a GPU: the same rows as plain autograd's; run where there is one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from cases import CASES, Case
from scodkit import Categorical, Monitor, Projected
from scodkit.factors.rules.rows import LookedUp, Summed
from scodkit.model.projected import Pair

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


@pytest.mark.parametrize("case", [case for case in CASES if case.batched], ids=lambda c: c.name)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_scores_are_those_of_plain_autograd(case: Case, dtype: torch.dtype) -> None:
    model, call = case.model(3, dtype).cuda(), case.inputs(12, 3, dtype=dtype).map(Tensor.cuda)
    monitor = Monitor(model, Categorical(), rank=4, parameters=Projected(rank=1))
    monitor.fit([call], progress=False)
    found = monitor.selftest(call)
    assert found.engine == "HookEngine"
    assert found.distance < (1e-6 if dtype == torch.float64 else 1e-2), str(found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("places", [3, 200])
def test_norms_and_projections_are_summed_in_float32(dtype: torch.dtype, places: int) -> None:
    torch.manual_seed(places)
    delta = torch.randn(4, 3, places, 48, device="cuda").to(dtype)
    a = torch.randn(4, places, 32, device="cuda").to(dtype)
    tokens = torch.randint(0, 48, (4, places), device="cuda")
    out, into = (torch.linalg.qr(torch.randn(n, 8, device="cuda")).Q for n in (48, 32))
    pair = Pair((48, 32), out, into)
    exact = Pair((48, 32), out.double(), into.double())
    for rows, wide in (
        (Summed(delta, a), Summed(delta.double(), a.double())),
        (
            LookedUp(tokens, delta[..., :32].contiguous(), 48),
            LookedUp(tokens, delta[..., :32].double().contiguous(), 48),
        ),
    ):
        for found, expected in zip(rows.compressed(pair), wide.compressed(exact), strict=True):
            size = expected.abs().max()
            assert (found.double() - expected).abs().max() <= 1e-5 * size


def test_weights_in_bfloat16() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, dropout=0.0)
    model = nn.Sequential(layer, nn.Flatten(), nn.Linear(64 * 9, 5)).bfloat16().cuda().eval()
    x = torch.randn(40, 9, 64, device="cuda").bfloat16()
    monitor = Monitor(model, Categorical(), rank=8, parameters=Projected(rank=8))
    monitor.fit([x], progress=False)
    assert monitor.selftest(x[:6]).ok
    assert 0 < monitor.basis.captured <= monitor.basis.inside <= 1
