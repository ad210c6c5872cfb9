"""What docs/reference/stability.md says a saved file has, and what anyone can tell from it."""

from __future__ import annotations

import fnmatch
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from scodkit import Categorical, Fused, Monitor
from scodkit.fit.data import digests_of
from scodkit.model.inputs import Inputs
from scodkit.numerics import artifact

PAGE = (Path(__file__).parents[1] / "docs" / "reference" / "stability.md").read_text(
    encoding="utf-8"
)
NAMED = {
    name
    for line in re.findall(r"^\| (`[^|]*) \|", PAGE, re.MULTILINE)
    for name in re.findall(r"`([\w.*]+)`", line)
}
# of the header: what says which file this is, and of what
PLAIN = {"format", "kind", "digest", "scodkit_version", "torch_version"}


@pytest.fixture(scope="module")
def data() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    return net, torch.randn(200, 4), torch.randn(100, 4)


def unnamed(tensors: dict[str, Tensor]) -> list[str]:
    return [n for n in tensors if not any(fnmatch.fnmatch(n, name) for name in NAMED)]


def test_every_tensor_of_a_monitor_is_named(data, path: Path) -> None:
    net, x, heldout = data
    monitor = Monitor(net, Categorical()).fit(x, progress=False)
    monitor.calibrate(heldout, by=lambda logits: logits.argmax(1), progress=False).save(path)
    header, tensors = artifact.read(path, "monitor")
    assert {"samples", "calibration", "calibration_groups", "vectors"} <= tensors.keys()
    assert unnamed(tensors) == []
    assert {"notes", "input_range", "parameters"} <= header.keys() & NAMED
    low, high = header["input_range"].popitem()[1]
    assert (low, high) == (float(x.min()), float(x.max()))


def test_every_tensor_of_fused_is_named(data, path: Path) -> None:
    net, x, heldout = data
    fused = Fused(net, Categorical()).fit(x, progress=False)
    fused.calibrate(heldout, progress=False).save(path)
    _, tensors = artifact.read(path, "fused")
    assert unnamed(tensors) == []
    assert len(tensors["features.samples"]) == len(x)
    (ranges,) = (tensor for name, tensor in tensors.items() if name.startswith("range."))
    for column, summary in enumerate(ranges.T):
        assert float(summary[3]) == pytest.approx(float(x[:, column].min()))
        assert float(summary[4]) == pytest.approx(float(x[:, column].max()))


def test_a_sample_is_recognised_by_its_digest(data, path: Path) -> None:
    net, x, heldout = data
    monitor = Monitor(net, Categorical()).fit(x, progress=False)
    monitor.save(path)
    _, tensors = artifact.read(path, "monitor")
    kept = set(tensors["samples"].tolist())
    fitted, others = (digests_of(Inputs((batch,), {})).tolist() for batch in (x, heldout))
    assert kept.issuperset(fitted)
    assert kept.isdisjoint(others)
    monitor.save(path, sketch=False)
    _, tensors = artifact.read(path, "monitor")
    assert not [name for name in tensors if name == "samples" or name.startswith("sketch.")]
