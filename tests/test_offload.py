"""A basis that stays in the CPU's memory or in a file: the same scores."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from own_process import printed_by
from scodkit import Categorical, Monitor, predicted_class
from scodkit.errors import OptionError


def fitted() -> tuple[Monitor, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 30), nn.ReLU(),
        nn.Linear(30, 3),
    )  # fmt: skip
    x = torch.randn(40, 1, 8, 8)
    monitor = Monitor(model, Categorical(), rank=12).fit([x], progress=False)
    return monitor.calibrate([torch.randn(30, 1, 8, 8)], by=predicted_class, progress=False), x


@pytest.mark.parametrize("in_file", [False, True])
def test_everything_is_said_as_before(in_file: bool, tmp_path: Path) -> None:
    monitor, x = fitted()
    before, bound, why = monitor(x), monitor.certify(x), monitor.explain(x[:3], saliency=True)
    features = monitor.features(x)
    assert monitor.offload(tmp_path / "basis" if in_file else None) is monitor
    after, again = monitor(x), monitor.explain(x[:3], saliency=True)
    assert torch.equal(after.score, before.score)
    assert after.p_value is not None
    assert before.p_value is not None
    assert torch.equal(after.p_value, before.p_value)
    assert torch.equal(monitor.certify(x).lower, bound.lower)
    assert torch.equal(monitor.features(x), features)
    assert torch.equal(again.layers.values, why.layers.values)
    assert why.saliency is not None
    assert again.saliency is not None
    assert torch.equal(again.saliency.gradient, why.saliency.gradient)
    monitor.save(tmp_path / "monitor.scod")
    loaded = Monitor.load(tmp_path / "monitor.scod", monitor.model, by=predicted_class)
    assert torch.equal(loaded.score(x), before.score)
    assert not loaded.basis.offloaded
    monitor.update([x + 1], progress=False)
    assert monitor.basis.num_data == 80


PROGRAM = """
    import sys, torch
    from torch import nn
    from scodkit import Gaussian, Monitor

    def anonymous():
        with open("/proc/self/status") as status:
            return next(int(l.split()[1]) for l in status if l.startswith("RssAnon")) // 1024

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1000, 300), nn.ReLU(), nn.Linear(300, 1))
    monitor = Monitor(model, Gaussian(), rank=60).fit([torch.randn(90, 1000)], progress=False)
    before = anonymous()
    monitor.offload(sys.argv[1])
    print(before - anonymous(), monitor.basis.vectors.nbytes >> 20)
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/status")
def test_a_basis_in_a_file_takes_no_memory_of_its_own(tmp_path: Path) -> None:
    printed = printed_by(PROGRAM, tmp_path / "basis", MALLOC_TRIM_THRESHOLD_="0")
    given_back, basis = map(int, printed.split())
    assert given_back > 0.8 * basis


def test_it_stays_so_after_an_update() -> None:
    monitor, x = fitted()
    monitor.offload()
    monitor.update([x + 1], progress=False)
    assert monitor.basis.offloaded
    alone = fitted()[0].update([x + 1], progress=False)
    assert torch.equal(monitor.score(x), alone.score(x))


def test_a_saved_monitor_is_not_written_over(tmp_path: Path) -> None:
    monitor, _ = fitted()
    monitor.save(tmp_path / "m.scod")
    with pytest.raises(OptionError, match="a path of its own"):
        monitor.offload(tmp_path / "m.scod")
    with pytest.raises(OptionError, match="got a folder"):
        monitor.offload(tmp_path)
    assert not monitor.basis.offloaded
    Monitor.load(tmp_path / "m.scod", monitor.model, by=predicted_class)
    monitor.offload(tmp_path / "basis").offload(tmp_path / "basis")  # which is not


CHANGED = """
    import sys, torch
    from pathlib import Path
    from test_offload import fitted
    monitor, x = fitted()
    before = monitor.score(x)
    folder = Path(sys.argv[1])
    monitor.offload(folder / "basis")
    for change in (lambda file: file.write(bytes(10**5)), lambda file: file.truncate(100)):
        for path in folder.rglob("*"):
            with open(path, "r+b") as file:
                change(file)
        print(torch.equal(monitor.score(x), before))
    monitor.to("cpu").update([x + 1], progress=False)
"""


def test_nobody_can_change_a_basis_in_a_file_or_cut_it_off(tmp_path: Path) -> None:
    # in a process of its own: reading what was cut off ends it
    said = printed_by(CHANGED, tmp_path, PYTHONPATH=os.pathsep.join(sys.path))
    assert said.split() == ["True", "True"]
    assert not list(tmp_path.iterdir())
