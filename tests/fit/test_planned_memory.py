"""What `plan` tells, against what fits and scores take."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from peaks import peak_of
from scodkit import Categorical, Gaussian, LastLayers, Monitor, Plan, Projected
from scodkit.factors.live_bytes import LiveBytes
from scodkit.factors.products import ProductSource
from scodkit.likelihoods import Likelihood
from scodkit.sketch import (
    SRFT,
    Exact,
    Fold,
    FrequentDirections,
    Nystrom,
    Sketch,
    SparseSign,
    TwoSided,
    maps,
)
from scodkit.sketch.base import FlatFactors

pytestmark = pytest.mark.slow


def picture_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 16, 200),
        nn.ReLU(),
        nn.Linear(200, 120),
    )


SKETCHES: list[Sketch] = [
    Nystrom(size=30),
    TwoSided(size=34, map=SparseSign()),
    FrequentDirections(size=16),
]
WAYS = [
    (sketch, likelihood, products)
    for sketch in SKETCHES[:2]  # what the last one copies depends on how full it happens to be
    for likelihood, products in [
        (Gaussian(), True),
        (Gaussian(), False),
        (Categorical(directions=3), False),
    ]
]


@pytest.mark.parametrize(("sketch", "likelihood", "products"), WAYS, ids=str)
def test_a_fit_takes_what_was_planned(
    sketch: Sketch, likelihood: Likelihood, products: bool
) -> None:
    monitor = Monitor(picture_net(), likelihood, 5, sketch=sketch)
    monitor.memory_budget = 10 * 2**20  # so that batches are cut
    x = torch.randn(9, 3, 8, 8)
    plan = monitor.plan(x, products=products)
    assert plan.by_products is products
    options = {"progress": False, "check_deterministic": False, "products": products}
    peak = peak_of(lambda: monitor.fit([x, x], **options))
    assert peak == pytest.approx(plan.fit_bytes, rel=0.15)
    peak = peak_of(lambda: monitor.score(x))
    assert plan.basis_bytes + peak == pytest.approx(plan.score_bytes, rel=0.15)


@pytest.mark.parametrize("mapping", [SRFT(), maps.Gaussian(), Fold(), SparseSign()], ids=str)
@pytest.mark.parametrize("kind", [Nystrom, TwoSided])
@pytest.mark.parametrize("batch", [16, 256])
def test_maps_count(kind: Any, mapping: maps.Map, batch: int) -> None:
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 3))
    monitor = Monitor(model, Gaussian(), 20, sketch=kind(map=mapping))
    monitor.memory_budget = 64 * 2**20
    x = torch.randn(batch, 64)
    plan = monitor.plan(x)
    peak = peak_of(lambda: monitor.fit([x, x], progress=False, check_deterministic=False))
    assert peak == pytest.approx(plan.fit_bytes, rel=0.15)


@pytest.mark.parametrize("size", [300, 600])
@pytest.mark.parametrize("kind", [Nystrom, TwoSided])
def test_small_matrices_count_where_there_are_few_weights(kind: Any, size: int) -> None:
    model = nn.Sequential(nn.Linear(20, 400), nn.Tanh(), nn.Linear(400, 3))  # 9603 weights
    sketch, rank = kind(size=size), size // 20
    batches = torch.randn(100, 20).split(20)
    plan = Monitor(model, Gaussian(), rank, sketch=sketch).plan(batches[0])
    monitor = Monitor(model, Gaussian(), rank, sketch=sketch)
    peak = peak_of(lambda: monitor.fit(batches, progress=False, check_deterministic=False))
    assert peak == pytest.approx(plan.fit_bytes, rel=0.15)


@pytest.mark.parametrize("samples", [40, 130, 300, 400])
def test_an_exact_fit_takes_what_was_planned(samples: int) -> None:
    model = nn.Sequential(nn.Linear(20, 40), nn.Tanh(), nn.Linear(40, 3))  # 963 weights
    batches = torch.randn(samples, 20).split(5)
    plan = Monitor(model, Gaussian(), 5, sketch=Exact()).plan(batches[0], num_data=samples)
    monitor = Monitor(model, Gaussian(), 5, sketch=Exact())
    peak = peak_of(lambda: monitor.fit(batches, progress=False, check_deterministic=False))
    assert peak == pytest.approx(plan.fit_bytes, rel=0.15)


def test_a_fit_in_half_precision_takes_what_was_planned() -> None:
    monitor = Monitor(picture_net(), Categorical(directions=3), 1, sketch=Nystrom(size=2))
    monitor.memory_budget = 20 * 2**20
    x = torch.randn(30, 3, 8, 8)
    plan = monitor.plan(x, precision=torch.bfloat16)
    assert plan.working_bytes > 0.5 * monitor.memory_budget
    options = {"progress": False, "check_deterministic": False, "precision": torch.bfloat16}
    peak = peak_of(lambda: monitor.fit([x, x], **options))
    assert peak == pytest.approx(plan.fit_bytes, rel=0.15)


@pytest.mark.parametrize(
    ("width", "rank", "projected"),
    [
        (2000, 4, Projected(rank=16)),
        (2000, 4, Projected(rank=2, moments="random")),
        (60, 100, Projected(rank=16)),
    ],
    ids=["while projections are learnt", "while engines are tried", "in the fit itself"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_fit_of_projected_weights_takes_what_was_planned(
    width: int, rank: int, projected: Projected, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    sizes = [width, 300, 300, 300, 3]
    layers = [nn.Linear(a, b) for a, b in itertools.pairwise(sizes)]
    model = nn.Sequential(*layers).to(dtype)
    monitor = Monitor(model, Gaussian(), rank, parameters=projected)
    monitor.memory_budget = 2**20
    x = torch.randn(64, width, dtype=dtype)
    plan = monitor.plan(x)
    assert (plan.first_bytes == plan.fit_bytes) == (rank == 4)
    peak = peak_of(lambda: monitor.fit([x], progress=False, check_deterministic=False))
    assert 0.8 * plan.fit_bytes <= peak <= 1.15 * plan.fit_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("outputs", [1, 10])
@pytest.mark.parametrize(("batch", "rank"), [(512, 100), (64, 20), (8, 100)])
def test_scores_take_what_was_planned(
    batch: int, rank: int, outputs: int, dtype: torch.dtype
) -> None:
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, outputs)).to(dtype)
    monitor = Monitor(model, Gaussian() if outputs == 1 else Categorical(), rank)
    x = torch.randn(batch, 64, dtype=dtype)
    plan = monitor.plan(x)
    monitor.fit([x], progress=False)
    peak = peak_of(lambda: monitor.score(x))
    assert plan.basis_bytes + peak == pytest.approx(plan.score_bytes, rel=0.15)


@pytest.mark.parametrize(("batch", "directions"), [(1, 3), (1, 1), (7, 1)])
def test_the_first_score_of_a_shape_takes_what_was_planned(batch: int, directions: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 200), nn.GELU(), nn.Linear(200, 5)).eval()
    monitor = Monitor(model, Categorical(directions=directions), rank=60)
    plan = monitor.plan(torch.randn(batch, 40))
    monitor.fit([torch.randn(64, 40)], progress=False)
    monitor.score(torch.randn(batch + 1, 40))
    assert peak_of(lambda: monitor.score(torch.randn(batch, 40))) == pytest.approx(
        plan.score_working_bytes, rel=0.02
    )


@pytest.mark.parametrize("megabytes", [1, 100])
def test_scores_of_a_head_take_what_was_planned(megabytes: int) -> None:
    features = [
        nn.Conv2d(3, 64, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
    ]
    model = nn.Sequential(*features, nn.Linear(64 * 16, 500))
    monitor = Monitor(model, Categorical(), 6, parameters=LastLayers(count=1))
    monitor.memory_budget = megabytes * 2**20
    x = torch.randn(24, 3, 48, 48)
    plan = monitor.plan(x)
    monitor.fit([x], progress=False, check_deterministic=False)
    peak = peak_of(lambda: monitor.score(x))
    assert plan.basis_bytes + peak == pytest.approx(plan.score_bytes, rel=0.15)
    # the features are made without gradients, and let go
    assert plan.score_working_bytes < 24 * 64 * 48**2 * 4 * 2.5


def test_large_activations_count() -> None:
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.Tanh(),
        nn.Conv2d(8, 1, 3, padding=1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )
    x = torch.randn(32, 1, 128, 128)
    monitor = Monitor(model, Gaussian(), 3)
    monitor.memory_budget = 20 * 2**20  # of some samples, while all rows are a few kilobytes
    plan = monitor.plan(x)
    assert plan.working_bytes <= monitor.memory_budget
    peak = peak_of(lambda: monitor.fit([x], progress=False, check_deterministic=False))
    assert peak <= 1.15 * monitor.memory_budget


@pytest.mark.parametrize("sketch", SKETCHES, ids=lambda s: type(s).__name__)
def test_a_basis_takes_what_was_planned(sketch: Sketch) -> None:
    size, rank = 600_000, 5
    state = sketch.zero(size, rank, torch.float32, "cpu")
    for seed in range(4):
        rows = torch.randn(10, size, generator=torch.Generator().manual_seed(seed))
        sketch.update(state, FlatFactors(rows), rows.square().sum(), 10)
    state.matrices.clear()
    columns = sketch.columns(size, rank)
    found: list[Tensor] = []

    def solve() -> None:
        found.append(sketch.eigenbasis(state, rank).vectors)

    memory = sketch.memory(size, columns, torch.device("cpu"))
    copies = memory.solve_columns
    if "filled" in state.numbers:
        copies = int(state.numbers["filled"])  # the plan's is when that is all
    planned = copies * size * 4 + max(memory.kept_bytes + memory.solve_bytes, rank * size * 4)
    assert peak_of(solve) == pytest.approx(planned, rel=0.15)
    assert found[0].is_contiguous()
    assert found[0].untyped_storage().nbytes() == found[0].nbytes


class Shy(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        watching = torch.utils._python_dispatch._get_current_dispatch_mode()
        if isinstance(watching, LiveBytes):
            raise RuntimeError("not while someone watches")
        return super().forward(x)


@pytest.mark.parametrize("products", [False, True])
def test_a_model_that_cannot_be_watched_is_fitted_all_the_same(products: bool) -> None:
    monitor, x = Monitor(Shy(nn.Linear(4, 150)), Gaussian(), 2), torch.randn(6, 4)
    plan = monitor.plan(x, products=products)
    assert 0 < plan.working_bytes < 2**30
    monitor.fit([x], progress=False, products=products)
    assert monitor.basis.num_data == 6
    # columns go together even so
    portions = ProductSource(
        monitor._network, monitor.fitted.parameters, True, Gaussian(), 4, 2**20
    ).portions(6)
    assert (portions.samples, portions.columns) == (1, 4)


def test_products_are_counted_as_their_own_weights_are() -> None:
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frozen = nn.Parameter(torch.ones(4, dtype=torch.int8), requires_grad=False)
            self.head = nn.Linear(4, 150)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x * self.frozen)

    monitor = Monitor(Head(), Categorical(), 2, parameters=["head.*"])
    plan = monitor.plan(torch.randn(6, 4))
    assert plan.by_products
    assert plan.costs is not None
    assert plan.costs.products.passes < 6 * 20  # all columns in one round


def test_rows_of_every_pixel_are_told_and_not_tried() -> None:
    model = nn.Conv2d(1, 6, 3, padding=1)
    monitor = Monitor(model, Categorical(class_dim=1), 2)
    monitor.memory_budget = 8 * 2**20
    x = torch.randn(4, 1, 24, 24)
    at_output = (5 * 24 * 24) * (6 * 24 * 24) * 4
    plans = []
    peak = peak_of(lambda: plans.append(monitor.plan(x)))
    assert peak < at_output
    assert plans[0].score_working_bytes > at_output


def test_the_last_layers_of_a_vision_transformer_are_its_last() -> None:
    layers = [nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True) for _ in range(4)]
    first = nn.Sequential(nn.Conv2d(3, 8, 4, 4), nn.Flatten(2))

    class Transformer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.rest = first, nn.Sequential(*layers)
            self.head = nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.rest(self.first(x).mT)[:, 0])

    monitor = Monitor(Transformer(), Categorical(), 2, parameters=LastLayers(fraction=0.15))
    monitor.fit([torch.randn(4, 3, 8, 8)], progress=False)
    names = monitor.fitted.parameters.names
    assert "head.weight" in names
    assert all(name.startswith(("rest.3", "head")) for name in names)


def test_a_piece_that_may_not_fit_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monitor, x = Monitor(picture_net(), Gaussian(), 5), torch.randn(9, 3, 8, 8)
    limit = monitor.plan(x, products=False).working_bytes // 2
    monkeypatch.setattr(Plan, "fits", property(lambda plan: plan.working_bytes <= limit))
    bounds: list[Plan] = []
    peak = peak_of(lambda: bounds.append(monitor.plan(x, products=False)))
    assert peak < limit < bounds[0].working_bytes
