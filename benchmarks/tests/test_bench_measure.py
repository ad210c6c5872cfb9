"""Costs: what a method keeps, and how it is timed."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from scodbench import measure
from scodbench.measure import Setup, kept_bytes
from scodbench.methods import METHODS, Case
from scodbench.samples import Loader, Samples
from scodkit import Monitor, baselines
from scodkit.sketch import Nystrom
from toy_bench import TOY, build, normal

CPU = torch.device("cpu")


@pytest.fixture
def setup() -> Setup:
    torch.manual_seed(0)
    return Setup(TOY, TOY.splits(None), 0, [build().eval()], CPU)


@dataclass
class Clock:
    """A clock that is set by hand."""

    now: float = 0.0


@pytest.fixture
def clock(monkeypatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(time, "perf_counter", lambda: found.now)
    return found


class TestBytes:
    def fitted(self, name: str, setup: Setup) -> Any:
        detector = METHODS[name](Case(setup.domain, setup.networks))
        return detector.fit(Loader(setup.fit_on, 20), progress=False)

    def test_of_a_monitor_it_is_the_basis(self, setup: Setup) -> None:
        monitor = Monitor(setup.networks[0], TOY.likelihood, 4, sketch=Nystrom(size=12))
        monitor.fit(Loader(setup.fit_on, 20), progress=False)
        assert kept_bytes(monitor) == 4 * (4 * (4 * 3 + 4 + 4 + 1) + 4)

    def test_what_learns_nothing_keeps_nothing(self, setup: Setup) -> None:
        assert kept_bytes(self.fitted("naive", setup)) == 0

    def test_of_a_baseline_it_is_the_tensors_it_learnt(self, setup: Setup) -> None:
        """KNN keeps the features of every training sample, four numbers each."""
        detector = baselines.KNN(setup.networks[0], TOY.likelihood, k=5)
        detector.fit(Loader(setup.fit_on, 20), progress=False)
        state = sum(tensor.nbytes for tensor in detector._ready().values())
        assert kept_bytes(detector) == state >= 40 * 4 * 4

    def test_other_networks_count_with_their_buffers(self, setup: Setup) -> None:
        others = [torch.nn.Sequential(build(), torch.nn.BatchNorm1d(1)) for _ in range(2)]
        detector = baselines.DeepEnsemble([setup.networks[0], *others], TOY.likelihood)
        weights, normal_ = 4 * (4 * 3 + 4 + 4 + 1), 4 * 4 + 8  # the counter has eight
        assert kept_bytes(detector) == 2 * (weights + normal_)


@dataclass(frozen=True)
class CountingSamples(Samples):
    """Samples that count how often they are read."""

    own: Samples
    reads: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.own)

    def take(self, which: Any) -> CountingSamples:
        return replace(self, own=self.own.take(which))

    def read(self, device: Any = "cpu") -> Any:
        self.reads.append(len(self))
        return self.own.read(device)

    def digest(self) -> str:
        return self.own.digest()


class TestFitting:
    def detector(self, seen: list[Any]) -> Any:
        class Watching(baselines.Naive):
            def fit(self, loader: Any, *, progress: bool = True) -> Any:
                seen.append("fit")
                seen.append([x.clone() for x, _ in loader])
                return self

        return Watching(build(), TOY.likelihood)

    @pytest.mark.parametrize("held", [2**30, 0])
    def test_data_is_read_before_the_clock_starts(
        self, held: int, setup: Setup, monkeypatch
    ) -> None:
        """All of it is in memory; or, where it is too much, was read once to be made."""
        monkeypatch.setattr(measure, "_HELD", held)
        monkeypatch.setattr(measure, "_BATCH", 16)
        seen: list[Any] = []
        samples = CountingSamples(normal(40, 0), seen)
        watched = replace(setup, splits=replace(setup.splits, train=samples))
        measure.fit(self.detector(seen), watched, "naive")
        before, after = seen[: seen.index("fit")], seen[seen.index("fit") + 1 :]
        assert before == [1, 16, 16, 8]
        assert after[:-1] == ([] if held else [16, 16, 8])
        assert torch.equal(torch.cat(after[-1]), normal(40, 0).inputs)

    def test_the_hessian_is_of_fewer_samples(self, setup: Setup) -> None:
        few = replace(setup, domain=replace(TOY, fit_on=30, hessian_on=10))
        for method, count in (("local_ensemble", 10), ("naive", 30)):
            seen: list[Any] = []
            measure.fit(self.detector(seen), few, method)
            assert len(torch.cat(seen[-1])) == count

    def test_tuning_counts(self, setup: Setup, clock: Clock) -> None:
        class Slow(baselines.KFACLaplace):
            def fit(self, loader: Any, *, progress: bool = True) -> Any:
                clock.now += 2.0
                return self

            def tune(self, loader: Any, *args: Any, progress: bool = True) -> Any:
                clock.now += 3.0
                assert sum(len(x) for x, _ in loader) == 20
                return self

        detector = Slow(build(), TOY.likelihood)
        assert measure.fit(detector, setup, "kfac_laplace") == 5.0
        assert measure.fit(detector, setup, "kfac_laplace_glm") == 2.0


def test_every_row_tells_the_network_and_the_machine(setup: Setup) -> None:
    about = measure.description(replace(setup, processes=3))
    assert about["processes"] == 3
    assert about["device"] == "cpu"
    other = replace(setup, networks=[build()])
    assert about["network"] == measure.description(setup)["network"]
    assert about["network"] != measure.description(other)["network"]
