"""Sweeps over one choice of the monitor: rows that one made by hand would give."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from scodbench.domain import Domain, SketchSize, Splits
from scodbench.domains import DOMAINS
from scodbench.measure import Setup, histogram
from scodbench.rows import Row, select
from scodbench.samples import Loader, TensorSamples
from scodbench.sweeps import ENSEMBLE_SWEEPS, SWEEPS, applies
from scodkit import Gaussian, LastLayers, Monitor
from scodkit.metrics import separation
from scodkit.sketch import Exact, FrequentDirections, Nystrom, TwoSided


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


@pytest.mark.parametrize("name", ["rank", "prior", "layers", "sketch", "fidelity"])
def test_rows_say_what_they_are(name: str, setup: Setup) -> None:
    rows = list(SWEEPS[name](setup))
    assert len({row["id"] for row in rows}) == len(rows)
    assert {row["ood"] for row in rows} == {"near", "far", "pooled"}
    for row in rows:
        assert (row["sweep"], row["domain"], row["seed"]) == (name, "normal", 7)
        for figure in ("auroc", "aupr", "fpr95"):
            assert 0 <= row[f"{figure}_low"] <= row[figure] <= row[f"{figure}_high"] <= 1
        assert row["captured"] > 0


def test_pooled_rows_are_over_all_unknown_sets(setup: Setup) -> None:
    """With sets of one size the pooled AUROC is the mean."""
    for name in ("prior", "layers"):
        rows = list(SWEEPS[name](setup))
        for row in select(rows, ood="pooled"):
            key = "prior_variance" if name == "prior" else "share"
            near, far = (
                next(select(rows, ood=ood, **{key: row[key]})) for ood in ("near", "far")
            )
            mean = (near["auroc"] + far["auroc"]) / 2
            assert row["auroc"] == pytest.approx(mean, abs=1e-9)


def test_large_sets_are_thinned_out_evenly(setup: Setup) -> None:
    """A set in order of its strangeness: its first thousand would be too easy."""
    x = torch.randn(3000, 3) * torch.linspace(0.1, 4, 3000)[:, None]
    ordered = TensorSamples(x, x.sum(1, keepdim=True))
    splits = replace(setup.splits, novel={"ordered": ordered})
    (row, _) = select(fidelity_rows(replace(setup, splits=splits)), sketch="Nystrom")
    monitor = Monitor(setup.networks[0], Gaussian(), 10, sketch=Nystrom(size=40))
    monitor.fit(Loader(setup.fit_on, 128), progress=False)
    known, all_of_it, first = (monitor.score(s) for s in (splits.test.read()[0], x, x[:1000]))
    whole, wrong = (separation(known, s, resamples=2).auroc for s in (all_of_it, first))
    assert row["auroc"] == pytest.approx(whole, abs=0.02)
    assert abs(wrong - whole) > 0.1


def fidelity_rows(setup: Setup) -> list[Row]:
    return list(SWEEPS["fidelity"](setup))


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
    rows = list(select(SWEEPS["layers"](setup), ood="near"))
    weights = {row["share"]: row["weights"] for row in rows}
    # of 3 layers: the last, two at least as in the paper, all; of equal ones the largest share
    assert weights == {0.0: 9, 0.5: 9 + 136, 1.0: 209}
    assert [row["layers"] for row in rows] == ["last linear layer", "last 50%", "last 100%"]
    assert [row["chosen"] for row in rows] == [True, False, False]
    for row in rows:  # with the same sketch for all
        layers = {0.0: LastLayers(count=1), 0.5: LastLayers(count=2), 1.0: "all"}[row["share"]]
        monitor = Monitor(
            setup.networks[0], Gaussian(), 6, sketch=Nystrom(size=24), parameters=layers
        )
        assert row["auroc"] == pytest.approx(by_hand(setup, monitor, "near"), abs=1e-9)
        assert row["captured"] == pytest.approx(monitor.basis.captured, abs=1e-9)


def test_the_domains_own_layers_are_among_the_shares(setup: Setup) -> None:
    domain = replace(setup.domain, last_layers=LastLayers(count=2))
    rows = list(select(SWEEPS["layers"](replace(setup, domain=domain)), ood="near"))
    assert {row["share"]: row["chosen"] for row in rows} == {0: False, 0.667: True, 1: False}


def test_sketches_are_compared_at_equal_memory(setup: Setup) -> None:
    rows = list(SWEEPS["sketch"](setup))
    sizes = {(row["sketch"], row["size"]) for row in rows}
    # with so few weights Frequent Directions holds more rows than it was asked to
    assert sizes == {(name, size) for name in ("Nystrom", "TwoSided") for size in (10, 20, 40)}
    monitor = Monitor(setup.networks[0], Gaussian(), 6, sketch=TwoSided(size=40))
    (row,) = select(rows, size=40, sketch="TwoSided", ood="near")
    assert row["auroc"] == pytest.approx(by_hand(setup, monitor, "near"), abs=1e-9)
    assert row["captured"] == pytest.approx(monitor.basis.captured, abs=1e-9)


def test_fidelity_is_against_the_exact_fisher(setup: Setup) -> None:
    rows = list(SWEEPS["fidelity"](setup))
    monitor = Monitor(setup.networks[0], Gaussian(), 10, sketch=Exact())
    (row,) = select(rows, sketch="Exact", ood="near")
    assert row["auroc"] == pytest.approx(by_hand(setup, monitor, "near"), abs=1e-9)


def test_sketches_that_hold_as_much_are_all_there(setup: Setup) -> None:
    domain = replace(setup.domain, all_layers=SketchSize(141, 20))
    rows = list(SWEEPS["sketch"](replace(setup, domain=domain)))
    full = {row["sketch"] for row in rows if row["size"] == 141}
    assert full == {"Nystrom", "TwoSided", "FrequentDirections"}
    monitor = Monitor(setup.networks[0], Gaussian(), 70, sketch=FrequentDirections(size=70))
    (row,) = select(rows, size=141, sketch="FrequentDirections", ood="near")
    assert row["auroc"] == pytest.approx(by_hand(setup, monitor, "near"), abs=1e-9)


def test_no_sketch_is_larger_than_the_matrix(setup: Setup) -> None:
    domain = replace(setup.domain, all_layers=SketchSize(300, 20))
    large = replace(setup, domain=domain)
    assert {row["size"] for row in SWEEPS["rank"](large)} == {37, 75, 150}  # 209 weights
    assert 300 not in {row["size"] for row in SWEEPS["sketch"](large)}


def test_sweeps_are_for_what_they_are_for() -> None:
    small, large = ("wine", "rotated_mnist", "binary_mnist", "mnist"), ("cifar10", "taxinet")
    for sweep in ("fidelity", "rank", "sketch"):
        assert all(applies(sweep, DOMAINS[name]) for name in small)
        assert not any(applies(sweep, DOMAINS[name]) for name in large)
    for sweep in ("layers", "prior"):
        assert all(applies(sweep, domain) for domain in DOMAINS.values())
    assert [d for d in DOMAINS if not applies("examples", DOMAINS[d])] == ["wine"]
    with_mixed = [d for d in DOMAINS if applies("errors", DOMAINS[d])]
    assert with_mixed == ["taxinet", "taxinet_tiny"]
    assert [d for d in DOMAINS if applies("size", DOMAINS[d])] == ["mnist"]
    assert set(ENSEMBLE_SWEEPS) <= set(SWEEPS)


def test_a_histogram_counts_every_score() -> None:
    known = torch.tensor([0.0, 1.0, 10.0, torch.inf])
    found = histogram(known, torch.tensor([100.0, 100.0]))
    assert sum(found["known"]) == pytest.approx(1.0, abs=1e-3)
    assert sum(found["unknown"]) == pytest.approx(1.0, abs=1e-3)
    assert len(found["edges"]) == len(found["known"]) + 1
    assert found["edges"] == sorted(found["edges"])
