"""`Fused`, and scores in bfloat16, on a GPU; run where there is one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from cases import conv_batchnorm
from draws import noise
from scodkit import Bernoulli, Categorical, Fused, Gaussian, Monitor
from scodkit.likelihoods import Likelihood

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def images(count: int, seed: int) -> Tensor:
    return noise(count, 2, 5, 5, seed=seed).cuda()


@pytest.mark.parametrize("likelihood", [Categorical(), Bernoulli(), Gaussian()], ids=str)
def test_a_recorded_fused_score_is_the_eager_one(likelihood: Likelihood) -> None:
    torch.manual_seed(0)
    model = conv_batchnorm(4).double().eval().cuda()
    recorded, eager = (
        Fused(model, likelihood)
        .fit([images(200, 1)], progress=False)
        .calibrate([images(200, 2)], progress=False)
        for _ in range(2)
    )
    recorded.compile(images(6, 3))
    for seed in (4, 5):
        found, expected = recorded(images(6, seed)), eager(images(6, seed))
        torch.testing.assert_close(found.score, expected.score, rtol=1e-7, atol=1e-9)
        torch.testing.assert_close(found.p_value, expected.p_value)


def test_bfloat16_scores_can_be_recorded() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5)).cuda().eval()
    x = torch.randn(300, 20, device="cuda")
    monitor = Monitor(model, Categorical(), rank=20).fit([x], progress=False)
    full = monitor.score(x[:32])
    monitor.precision = torch.bfloat16
    half = monitor.score(x[:32])
    assert 0 < float((half / full - 1).abs().max()) < 0.2
    monitor.compile(x[:32])
    torch.testing.assert_close(monitor.score(x[:32]), half, rtol=1e-2, atol=0)
