"""Sweeps: rows over one choice, each what a monitor made by hand would give."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from scodkit import Gaussian, LastLayers, Monitor
from scodkit.bench.domain import Domain, SketchSize, Splits
from scodkit.bench.domains import DOMAINS
from scodkit.bench.measure import Setup, histogram
from scodkit.bench.metrics import separation
from scodkit.bench.rows import select
from scodkit.bench.samples import Loader, TensorSamples
from scodkit.bench.sweeps import SWEEPS, applies
from scodkit.sketch import Exact, Nystrom, TwoSided


def normal(count: int, seed: int, shift: float = 0.0) -> TensorSamples:
    x = torch.randn(count, 3, generator=torch.Generator().manual_seed(seed)) + shift
    return TensorSamples(x, x.sum(1, keepdim=True))


def build() -> nn.Module:
    return nn.Sequential(
        nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 1)
    )


DOMAIN = Domain(
    name="normal",
    title="Normal",
    likelihood=Gaussian(),
    build=build,
    splits=lambda folder: Splits(
        normal(60, 0),
        normal(30, 1),
        normal(50, 2),
        {"near": normal(40, 3, 0.5), "far": normal(40, 4, 3.0)},
    ),
    all_layers=SketchSize(40, 10),
    last_layers=LastLayers(count=1),
    last=SketchSize(24, 6),
    local_rank=5,
)


@pytest.fixture(scope="module")
def setup() -> Setup:
    torch.manual_seed(0)
    device = torch.device("cpu")
    return Setup(DOMAIN, DOMAIN.splits(None), 7, [build().eval()], device)


def by_hand(setup: Setup, monitor: Monitor, ood: str) -> float:
    monitor.fit(Loader(setup.fit_on, 128), progress=False)
    return again(setup, monitor, ood)


def again(setup: Setup, monitor: Monitor, ood: str) -> float:
    known, novel = (s.read()[0] for s in (setup.splits.test, setup.splits.novel[ood]))
    return separation(monitor.score(known), monitor.score(novel), resamples=2).auroc


@pytest.mark.parametrize("name", SWEEPS)
def test_rows_say_what_they_are(name: str, setup: Setup) -> None:
    rows = list(SWEEPS[name](setup))
    assert len({row["id"] for row in rows}) == len(rows)
    assert {row["ood"] for row in rows} == {"near", "far"}
    for row in rows:
        assert (row["sweep"], row["domain"], row["seed"]) == (name, "normal", 7)
        assert 0 <= row["auroc_low"] <= row["auroc"] <= row["auroc_high"] <= 1


def test_ranks_go_up_to_the_sketch(setup: Setup) -> None:
    rows = list(SWEEPS["rank"](setup))
    assert {row["size"] for row in rows} == {10, 20, 40}
    ranks = sorted({row["rank"] for row in select(rows, size=20)})
    assert ranks == [1, 2, 4, 8, 16, 20]
    for rank in (1, 20):
        monitor = Monitor(setup.networks[0], Gaussian(), rank, sketch=Nystrom(size=20))
        wanted = by_hand(setup, monitor, "near")
        (row,) = select(rows, size=20, rank=rank, ood="near")
        assert row["auroc"] == pytest.approx(wanted, abs=1e-9)


def test_priors_are_variances(setup: Setup) -> None:
    rows = list(SWEEPS["prior"](setup))
    assert {row["prior_variance"] for row in rows} == {10.0**e for e in range(-8, 9)}
    monitor = Monitor(
        setup.networks[0], Gaussian(), 10, sketch=Nystrom(size=40), prior_scale=0.1
    )
    (row,) = select(rows, prior_variance=10.0**-2, ood="far")
    assert row["auroc"] == pytest.approx(by_hand(setup, monitor, "far"), abs=1e-9)


def test_layers_are_counted_from_the_output(setup: Setup) -> None:
    rows = list(SWEEPS["layers"](setup))
    weights = {row["share"]: row["weights"] for row in rows}
    assert weights[0.05] == 9 + 136  # two layers at least, as in the paper
    assert weights[1.0] == sum(p.numel() for p in setup.networks[0].parameters())
    assert sorted(weights.values()) == [weights[share] for share in sorted(weights)]
    monitor = Monitor(setup.networks[0], Gaussian(), 10, sketch=Nystrom(size=40))
    (row,) = select(rows, share=1.0, ood="near")
    assert row["auroc"] == pytest.approx(by_hand(setup, monitor, "near"), abs=1e-9)


def test_sketches_are_compared_at_equal_memory(setup: Setup) -> None:
    rows = list(SWEEPS["sketch"](setup))
    assert {row["sketch"] for row in rows} == {"Nystrom", "TwoSided", "FrequentDirections"}
    monitor = Monitor(setup.networks[0], Gaussian(), 6, sketch=TwoSided(size=40))
    (row,) = select(rows, size=40, sketch="TwoSided", ood="near")
    assert row["auroc"] == pytest.approx(by_hand(setup, monitor, "near"), abs=1e-9)


def test_fidelity_is_against_the_exact_fisher(setup: Setup) -> None:
    rows = list(SWEEPS["fidelity"](setup))
    monitor = Monitor(setup.networks[0], Gaussian(), 10, sketch=Exact())
    (row,) = select(rows, sketch="Exact", ood="near")
    assert row["auroc"] == pytest.approx(by_hand(setup, monitor, "near"), abs=1e-9)


def test_large_networks_are_left_out_where_it_would_not_end() -> None:
    assert applies("fidelity", DOMAINS["mnist"])
    assert applies("layers", DOMAINS["cifar10"])
    assert not applies("fidelity", DOMAINS["cifar10"])
    assert not applies("rank", replace(DOMAINS["taxinet"]))


def test_a_histogram_counts_every_score() -> None:
    known = torch.tensor([0.0, 1.0, 10.0, torch.inf])
    found = histogram(known, torch.tensor([100.0, 100.0]))
    assert sum(found["known"]) == pytest.approx(1.0, abs=1e-3)
    assert sum(found["unknown"]) == pytest.approx(1.0, abs=1e-3)
    assert len(found["edges"]) == len(found["known"]) + 1
    assert found["edges"] == sorted(found["edges"])
