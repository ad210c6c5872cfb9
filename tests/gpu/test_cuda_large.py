"""Beyond one GPU: a basis that is not on it, and processes that share it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from peaks import peak_of
from scodkit import Categorical, Monitor
from scodkit.errors import CaptureError
from scodkit.fit.processes import _add_up, _device
from scodkit.sketch import FrequentDirections, Nystrom
from together import digits, network, run

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("in_file", [False, True])
def test_an_offloaded_basis_scores_as_before(in_file: bool, tmp_path: Path) -> None:
    model = network(torch.float32).cuda()
    x = digits(dtype=torch.float32).cuda()
    monitor = Monitor(model, Categorical(), rank=12).fit([x], progress=False)
    before, held = monitor.score(x), torch.cuda.memory_allocated()
    features = monitor.features(x)
    monitor.offload(tmp_path / "basis" if in_file else None)
    assert torch.cuda.memory_allocated() < held
    assert monitor.basis.vectors.device.type == "cpu"
    assert torch.allclose(monitor.score(x), before, rtol=1e-5)
    assert torch.allclose(monitor.features(x), features, atol=1e-6)
    monitor.explain(x[:2], saliency=True)
    with pytest.raises(CaptureError, match="was offloaded"):
        monitor.compile(x)
    monitor.update([x + 1], progress=False)
    assert monitor.basis.num_data == 2 * len(x)


class Tokens(nn.Module):
    """Linear layers over several places of each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))
        self.head = nn.Linear(256, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits ``(B, 10)``."""
        return self.head(self.body(x).mean(1))


@pytest.mark.parametrize(("batch", "directions"), [(64, 5), (1, 5), (1, 1), (7, 1)])
def test_scores_take_what_was_planned(batch: int, directions: int) -> None:
    """With few rows at a time a kernel of its own multiplies them, in other memory."""
    torch.manual_seed(0)
    monitor = Monitor(Tokens().cuda().eval(), Categorical(directions=directions), rank=100)
    x = torch.randn(batch, 16, 256, device="cuda")
    plan = monitor.plan(x)
    monitor.fit([torch.randn(64, 16, 256, device="cuda")], progress=False)
    monitor.score(torch.cat([x, x[:1]]))  # takes what libraries keep for themselves
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    counted = peak_of(lambda: monitor.score(x))  # the first of this shape, which is checked
    peak = torch.cuda.max_memory_allocated() - before
    assert plan.basis_bytes + peak == pytest.approx(plan.score_bytes, rel=0.15)
    # the allocator gives up to a megabyte more for each tensor: beside the basis that counts
    assert counted == pytest.approx(plan.score_working_bytes, rel=0.15)


def fit_on_the_gpu(rank: int, count: int, folder: Path) -> None:
    for name, sketch in {"n": Nystrom(size=30), "f": FrequentDirections(size=30)}.items():
        own = Monitor(network().cuda(), Categorical(), 10, sketch=sketch)
        own.fit([digits(20 + rank, seed=rank).cuda()], progress=False)
        own.save(folder / f"{name}.{rank}")


def test_processes_on_a_gpu_are_as_one(tmp_path: Path) -> None:
    run(2, fit_on_the_gpu, tmp_path)
    model = network().cuda()
    parts = [digits(20 + rank, seed=rank).cuda() for rank in range(2)]
    alone = Monitor(model, Categorical(), 10, sketch=Nystrom(size=30)).fit(
        parts, progress=False
    )
    for rank in range(2):
        found = Monitor.load(tmp_path / f"n.{rank}", model)
        assert found.basis.num_data == 41
        assert torch.allclose(found.score(parts[0]), alone.score(parts[0]), rtol=1e-6)
        assert Monitor.load(tmp_path / f"f.{rank}", model).basis.num_data == 41


def use_nccl(rank: int, count: int, folder: Path) -> None:
    assert _device() == torch.device("cuda", 0)
    for device in ("cpu", "cuda"):  # what is on the CPU goes by way of the GPU
        numbers = torch.arange(5.0, dtype=torch.float64, device=device)
        _add_up(numbers)
        assert numbers.device.type == device
        assert numbers.tolist() == [0, 1, 2, 3, 4]


def test_nccl_takes_tensors_of_either_device(tmp_path: Path) -> None:
    run(1, use_nccl, tmp_path, backend="nccl")  # one process a GPU is all it allows
