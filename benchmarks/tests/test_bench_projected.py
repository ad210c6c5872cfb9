"""The study of projected weights: its rows, and the table of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from scodbench.domain import Domain, SketchSize, Splits
from scodbench.measure import POOLED, Setup
from scodbench.rows import Row, select
from scodbench.samples import TensorSamples
from scodbench.sweeps import SWEEPS
from scodbench.sweeps.projected import (
    NONE,
    PROJECTED,
    PROJECTED_KFAC,
    PROJECTED_RANDOM,
    RANKS,
    WHOLE,
)
from scodbench.tables.projected import projected_table
from scodkit import Categorical, LastLayers


def images(count: int, seed: int, shift: float = 0.0) -> TensorSamples:
    x = torch.rand(count, 1, 4, 4, generator=torch.Generator().manual_seed(seed)) + shift
    return TensorSamples(x, (x.mean((1, 2, 3)) > 0.5).long())


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 30), nn.ReLU(), nn.Linear(30, 2))


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    domain = Domain(
        name="mnist",  # a name that tables know
        title="MNIST",
        likelihood=Categorical(),
        build=build,
        splits=lambda folder: Splits(
            images(200, 0), images(120, 1), images(150, 2), {"far": images(100, 4, 3.0)}
        ),
        all_layers=SketchSize(40, 10),
        last_layers=LastLayers(count=2),
        last=SketchSize(24, 6),
        local_rank=5,
    )
    setups = [
        Setup(domain, domain.splits(None), seed, [build().eval()], torch.device("cpu"))
        for seed in range(2)
    ]
    names = (PROJECTED, PROJECTED_KFAC, PROJECTED_RANDOM)
    return [row for setup in setups for name in names for row in SWEEPS[name](setup)]


def test_every_point_has_a_row(rows: list[Row]) -> None:
    own = list(select(rows, ood=POOLED, seed=0))
    assert len(own) == 2 + 3 * len(RANKS)
    assert len({row["id"] for row in rows}) == len(rows)
    (whole,) = select(own, projections=WHOLE)
    assert whole["inside"] == 1.0
    assert whole["weights"] == 16 * 30 + 30 + 60 + 2
    assert {row["sweep"] for row in select(own, projections="kfac")} == {PROJECTED_KFAC}
    assert {row["sweep"] for row in select(own, projections="random")} == {PROJECTED_RANDOM}
    for row in select(own, projections="gradient"):
        assert row["captured"] <= row["inside"] + 1e-6 <= 1 + 2e-6
        assert row["weights"] <= whole["weights"]


def test_whole_weights_and_wide_projections_agree(rows: list[Row]) -> None:
    own = list(select(rows, ood=POOLED, seed=0))
    (whole,), (wide,) = (
        select(own, projections=kind, projection_rank=rank)
        for kind, rank in ((WHOLE, None), ("gradient", 32))
    )
    assert wide["auroc"] == pytest.approx(whole["auroc"], abs=1e-6)


def test_the_table_has_differences_by_network(rows: list[Row]) -> None:
    table = projected_table(rows, Path("rows.jsonl"))
    assert len(table.lines) == 2 + 3 * len(RANKS)
    assert table.lines[0]["weights"] == "whole"
    assert table.lines[1]["weights"] == "no curvature"
    assert "±" in str(table.lines[2]["AUROC"])
    assert "projected_rank" not in table.lines[0]
    assert not projected_table(list(select(rows, projections=NONE)), Path("x")).lines
