"""The same numbers on a GPU; run where there is one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from cases import CASES, Case
from scodkit import Categorical, Monitor
from scodkit.sketch import (
    SRFT,
    Exact,
    Fold,
    FrequentDirections,
    Gaussian,
    Map,
    Nystrom,
    Sketch,
    SparseSign,
    TwoSided,
)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def data(case: Case, size: int, seed: int) -> object:
    call = case.inputs(size, 4, seed)
    return dict(call.kwargs) if call.kwargs else call.args[0]


@pytest.mark.parametrize("mapping", [Fold(), Gaussian(), SRFT(), SparseSign()], ids=str)
def test_maps_are_the_same_on_every_device(mapping: Map) -> None:
    here = torch.empty(0, dtype=torch.float64)
    shape = (5000, 64)
    on_cpu = mapping.rows(1000, 3000, shape, 7, here)
    on_gpu = mapping.rows(1000, 3000, shape, 7, here.cuda()).cpu()
    torch.testing.assert_close(on_gpu, on_cpu, rtol=1e-12, atol=1e-14)


@pytest.mark.filterwarnings("ignore::scodkit.errors.EngineFallbackWarning")
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
@pytest.mark.parametrize(
    "sketch", [Nystrom(12), TwoSided(16), FrequentDirections(8), Exact()], ids=str
)
def test_scores_agree_with_the_cpu(case: Case, sketch: Sketch, tmp_path: Path) -> None:
    train, test = data(case, 30, 1), data(case, 6, 2)
    model = case.model(4)
    monitor = Monitor(model, Categorical(), rank=6, sketch=sketch)
    expected = monitor.fit([train], progress=False).score(test)
    monitor.save(tmp_path / "cpu.scod")
    part = Monitor(model, Categorical(), rank=6, sketch=sketch).fit([train], progress=False)

    model.cuda()  # the monitor follows
    followed = monitor.score(test)
    assert followed.is_cuda
    torch.testing.assert_close(followed.cpu(), expected, rtol=1e-7, atol=1e-12)

    fitted = Monitor(model, Categorical(), rank=6, sketch=sketch).fit([train], progress=False)
    assert fitted.basis.vectors.is_cuda
    torch.testing.assert_close(fitted.score(test).cpu(), expected, rtol=1e-6, atol=1e-12)

    loaded = Monitor.load(tmp_path / "cpu.scod", model)
    assert loaded.basis.vectors.is_cuda
    torch.testing.assert_close(loaded.score(test).cpu(), expected, rtol=1e-7, atol=1e-12)

    if sketch.linear:  # a part fitted on the CPU merges with one fitted here
        both = fitted.merge(part)
        assert both.basis.num_data == 60
        torch.testing.assert_close(
            both.basis.values.cpu(), part.basis.values, rtol=1e-6, atol=1e-9
        )
    fitted.to("cpu")
    assert not fitted.score(test).is_cuda


def test_half_precision_on_the_gpu() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4)).cuda()
    x, test = torch.randn(64, 8), torch.randn(8, 8)
    full = Monitor(model, Categorical(), rank=8).fit([x], progress=False).score(test)
    half = Monitor(model.bfloat16(), Categorical(), rank=8, inputs=lambda b: b.bfloat16())
    scores = half.fit([x], progress=False).score(test)
    assert half.basis.vectors.dtype == torch.float32
    torch.testing.assert_close(scores, full, rtol=0.2, atol=0.02 * float(full.max()))
