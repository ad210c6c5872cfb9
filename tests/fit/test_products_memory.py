"""Thousands of outputs are fitted in the memory of a few, in a process of its own."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

from oracles import dense_factors
from own_process import printed_by
from scodkit import Categorical, LastLayers, Monitor
from scodkit.model.inputs import Inputs
from scodkit.sketch import Nystrom

pytestmark = pytest.mark.slow

# the rows of one batch alone would take 64 x 3099 x 399,900 numbers, 317 GB; those of one
# sample 5 GB; the sketch and its basis take 0.4 GB
PROGRAM = """
    import resource, torch
    from torch import nn
    from scodkit import Categorical, LastLayers, Monitor

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, 3100))
    monitor = Monitor(model, Categorical(), rank=30, parameters=LastLayers(count=1))
    monitor.memory_budget = 300 * 2**20
    data = torch.randn(64, 16)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    monitor.fit(data.split(32), progress=False)
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    state = monitor.fitted.state
    plan = monitor.plan(data)  # afterwards: it computes, too
    assert plan.by_products and state.num_estimated == monitor.basis.num_data == 64
    assert state.num_rows == 64 * 3099
    print(peak, plan.fit_bytes)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts memory in KiB")
def test_a_last_layer_of_3100_outputs_takes_as_much_memory_as_planned() -> None:
    peak, planned = map(int, printed_by(PROGRAM).split())
    assert peak < 650 * 2**20
    assert peak < 1.4 * planned


def test_a_smaller_last_layer_is_that_of_a_dense_matrix() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 6), nn.ReLU(), nn.Linear(6, 140)).double()
    x = torch.randn(10, 16, dtype=torch.float64)
    found = Monitor(
        model, Categorical(), 12, sketch=Nystrom(30), parameters=LastLayers(count=1)
    ).fit([x], progress=False)
    assert found.fitted.state.num_estimated == 10
    rows = dense_factors(model, Inputs((x,), {}), Categorical(), ["2.weight", "2.bias"])
    omega = found.sketch.map.rows(0, 980, (980, 30), 0, x)
    expected = torch.einsum("bpn,bpm,mt->nt", rows, rows, omega)
    away = (found.fitted.state.tensors["y"] - expected).norm() / expected.norm()
    assert float(away) < 1e-9
    exact = float(rows.square().sum()) / 10
    assert found.basis.trace == pytest.approx(exact, rel=0.2)
