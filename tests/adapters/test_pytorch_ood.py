"""Our detectors in a benchmark of pytorch-ood, and its metrics of their scores."""

from __future__ import annotations

import doctest
import importlib
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader, TensorDataset

from pytorch_ood_detectors import package
from scodkit import Categorical, Fused, Monitor
from scodkit.baselines import KNN, Energy, MaxSoftmax
from scodkit.errors import MissingPeerError, OptionError
from scodkit.metrics import separation

PAGE = (Path(__file__).parents[2] / "docs" / "guides" / "adapters.md").read_text("utf-8")


@pytest.fixture
def host() -> ModuleType:
    return package()


@pytest.fixture
def adapter(host: ModuleType) -> Any:
    return importlib.import_module("scodkit.adapters.pytorch_ood")


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3)).eval()


def samples(count: int, *, seed: int, scale: float = 1.0, label: int = 0) -> TensorDataset:
    x = scale * torch.randn(count, 4, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, torch.full((count,), label))


def loader(*parts: TensorDataset) -> DataLoader:
    return DataLoader(ConcatDataset(parts), batch_size=32)


DETECTORS = [Monitor, Fused, KNN, MaxSoftmax]


@pytest.mark.parametrize("kind", DETECTORS)
def test_a_benchmark_gives_the_figures_of_our_own_metrics(
    host: ModuleType, adapter: Any, kind: Any
) -> None:
    known = samples(300, seed=3)
    novel = {
        "near": samples(200, seed=4, scale=2.0, label=-1),
        "far": samples(100, seed=5, scale=4.0, label=-1),
    }

    class Toy(host.benchmark.Benchmark):
        ood_names = list(novel)

        def train_set(self) -> TensorDataset:
            return samples(400, seed=1)

        def test_sets(self, known_too: bool = True, unknown: bool = True) -> list[Any]:
            return [ConcatDataset([known, own]) for own in novel.values()]

    detector = adapter.PytorchOODDetector(
        kind(network(), Categorical()), loader(samples(200, seed=2))
    )
    toy = Toy()
    detector.fit(DataLoader(toy.train_set(), batch_size=32))
    energy = host.detector.EnergyBased(network())
    rows = toy.evaluate([detector, energy], loader_kwargs={"batch_size": 64})
    assert [row["Detector"] for row in rows[:2]] == ["PytorchOODDetector", "EnergyBased"]
    inner = detector.detector
    theirs = Energy(network(), Categorical())
    for row in rows:
        own = inner if row["Detector"] == "PytorchOODDetector" else theirs
        parts = known.tensors[0], novel[row["Dataset"]].tensors[0]
        found = separation(*(own.score(x) for x in parts), resamples=2)
        assert row["AUROC"] == pytest.approx(found.auroc, abs=1e-12)
        assert row["FPR95TPR"] == pytest.approx(found.fpr95, abs=1e-12)


def test_unknown_samples_are_left_out_of_a_fit(adapter: Any) -> None:
    known, unknown = samples(100, seed=1), samples(100, seed=2, scale=9.0, label=-1)
    held_out = samples(200, seed=3)
    mixed = loader(unknown, known), loader(held_out, unknown)
    plain = loader(known), loader(held_out)
    found, alone = (
        adapter.PytorchOODDetector(Fused(network(), Categorical()), held).fit(train)
        for train, held in (mixed, plain)
    )
    assert found.detector.monitor.basis.num_data == 100
    x = samples(20, seed=4).tensors[0]
    torch.testing.assert_close(found(x), alone(x), rtol=1e-5, atol=1e-5)


def test_scores_are_those_of_the_detector(adapter: Any) -> None:
    monitor = Monitor(network(), Categorical(), rank=5)
    detector = adapter.PytorchOODDetector(monitor).fit(loader(samples(100, seed=1)))
    x = samples(20, seed=2).tensors[0]
    with torch.no_grad():
        assert torch.equal(detector.to("cpu").predict(x), monitor.score(x))
    assert detector.device == torch.device("cpu")
    assert monitor.calibration is None
    assert detector.get_hyperparameters() == {}


def test_what_is_missing_is_said(host: ModuleType, adapter: Any) -> None:
    x: Tensor = torch.zeros(1, 4)
    monitor = adapter.PytorchOODDetector(Monitor(network(), Categorical()))
    with pytest.raises(
        host.api.RequiresFittingException, match=r"monitor\.fit\(train_loader\)"
    ):
        monitor(x)
    fused = adapter.PytorchOODDetector(Fused(network(), Categorical()))
    with pytest.raises(
        OptionError, match=r"got none; type PytorchOODDetector\(fused, held_out"
    ):
        fused.fit(loader(samples(100, seed=1)))
    with pytest.raises(
        OptionError, match="expected a Monitor, a Fused or a baseline, got a Sequ"
    ):
        adapter.PytorchOODDetector(network())


@pytest.mark.parametrize("found", ["nothing", "a torchvision of another torch"])
def test_the_hint_is_what_the_page_says_to_type(
    found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "scodkit.adapters.pytorch_ood", raising=False)
    if found == "nothing":
        monkeypatch.setitem(sys.modules, "pytorch_ood", None)
    else:
        monkeypatch.delitem(sys.modules, "pytorch_ood", raising=False)
        (tmp_path / "pytorch_ood.py").write_text("raise RuntimeError('no operator nms')")
        monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(MissingPeerError) as caught:
        importlib.import_module("scodkit.adapters.pytorch_ood")
    assert PAGE.count("\npip install") == 2
    for line in re.findall("^pip install .*", PAGE, re.MULTILINE):
        assert line in str(caught.value)


def test_the_example_in_the_docstring_runs(adapter: Any) -> None:
    assert doctest.testmod(adapter) == doctest.TestResults(failed=0, attempted=8)
