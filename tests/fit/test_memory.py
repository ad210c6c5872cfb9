"""Fitting takes the same memory for a thousand samples as for two hundred thousand."""

from __future__ import annotations

import sys

import pytest

from own_process import printed_by

pytestmark = pytest.mark.slow

PROGRAM = """
    import sys, torch
    from torch import nn
    from scodkit import Categorical, Monitor
    from scodkit.sketch import FrequentDirections, Nystrom, TwoSided

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    sketch = {"Nystrom": Nystrom(40), "TwoSided": TwoSided(64),
              "FrequentDirections": FrequentDirections(20)}[sys.argv[1]]

    def peak_kib():
        with open("/proc/self/status") as status:
            return next(int(l.split()[1]) for l in status if l.startswith("VmHWM"))

    peaks = []
    def batches(size=1000, total=200_000):
        for seen in range(0, total, size):
            if seen in (20_000, total - size):
                peaks.append(peak_kib())
            yield torch.randn(size, 8)

    monitor = Monitor(model, Categorical(), rank=10, sketch=sketch)
    monitor.fit(batches(), progress=False)
    assert monitor.basis.num_data == 200_000
    print(peaks[1] - peaks[0])
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/status")
@pytest.mark.parametrize("sketch", ["Nystrom", "TwoSided", "FrequentDirections"])
def test_peak_memory_does_not_grow_with_the_data(sketch: str) -> None:
    grown_kib = int(printed_by(PROGRAM, sketch))
    assert grown_kib < 20 * 1024
