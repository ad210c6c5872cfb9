"""The study of `Fused`: rows that add up, and tables of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from scodbench.domain import Domain, SketchSize, Splits
from scodbench.figures.fused import draw_fused
from scodbench.measure import Setup, measure
from scodbench.rows import Row, select
from scodbench.samples import TensorSamples
from scodbench.sweeps.aggregations import aggregation_sweep
from scodbench.sweeps.fused import COMBINED, area_under_risk, fused_sweep, middle_p_values
from scodbench.tables import fused as tables
from scodkit import Categorical, Gaussian, LastLayers

FILE = Path("rows.jsonl")

# absurd inputs are meant to be
pytestmark = pytest.mark.filterwarnings("ignore::scodkit.errors.SuspiciousInputWarning")


def images(count: int, seed: int, shift: float = 0.0) -> TensorSamples:
    x = torch.rand(count, 1, 4, 4, generator=torch.Generator().manual_seed(seed)) + shift
    return TensorSamples(x, (x.mean((1, 2, 3)) > 0.5).long())


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 2))


def setup_of(name: str, likelihood: Categorical | Gaussian) -> Setup:
    domain = Domain(
        name=name,  # a name that tables know
        title=name,
        likelihood=likelihood,
        build=build,
        splits=lambda folder: Splits(
            images(200, 0),
            images(120, 1),
            images(150, 2),
            {"near": images(100, 3, 0.3), "far": images(100, 4, 3.0)},
        ),
        all_layers=SketchSize(40, 10),
        last_layers=LastLayers(count=2),
        last=SketchSize(24, 6),
        local_rank=5,
    )
    network = build().eval()
    return Setup(domain, domain.splits(None), 0, [network], torch.device("cpu"))


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return [
        *fused_sweep(setup_of("mnist", Categorical())),
        *fused_sweep(setup_of("binary_mnist", Categorical())),
        *fused_sweep(setup_of("wine", Gaussian())),
        *fused_sweep(setup_of("rotated_mnist", Gaussian())),
    ]


def test_rows_are_of_every_choice_of_parts(rows: list[Row]) -> None:
    assert len({row["id"] for row in rows}) == len(rows)
    found = list(select(rows, domain="mnist", study="separation", ood="pooled"))
    assert len(found) == 1 + 31  # the score, and every set of five parts that is not empty
    assert all(0 <= row["auroc_low"] <= row["auroc"] <= row["auroc_high"] <= 1 for row in found)
    assert len(list(select(rows, domain="wine", study="separation", ood="pooled"))) == 8


def test_p_values_are_those_counted_by_hand() -> None:
    held = torch.tensor([[1.0, 5.0], [2.0, 5.0], [2.0, 7.0]])
    found = middle_p_values(torch.tensor([[2.0, 9.0], [0.0, 5.0]]), held)
    # above, and half of those at the value and of the sample itself, of m + 1
    expected = torch.tensor([[1.5, 0.5], [3.5, 2.5]], dtype=torch.float64) / 4
    torch.testing.assert_close(found, expected)


def test_combined_scores_grow_as_p_values_fall() -> None:
    p = torch.tensor([[0.01, 0.2], [0.01, 0.5], [0.4, 0.5]], dtype=torch.float64)
    for name, rule in COMBINED.items():
        score = rule(p)
        assert score[1] > score[2], name
        assert score[0] > score[1] or name in ("Simes", "smallest")
    torch.testing.assert_close(COMBINED["Simes"](p), -torch.tensor([0.01, 0.01, 0.25]).double())


def test_rows_of_other_ways_stand_beside_it(rows: list[Row]) -> None:
    for domain in ("mnist", "wine"):
        found = list(select(rows, domain=domain, study="combination"))
        assert [row["name"] for row in found] == list(COMBINED)
        assert all(row["auroc"] > 0.5 for row in found)
    assert len(list(select(rows, domain="mnist", study="backward passes"))) == 1
    assert not list(select(rows, domain="wine", study="backward passes"))


def test_rates_are_those_asked_for(rows: list[Row]) -> None:
    for row in select(rows, study="false alarms", confidence=None):
        assert abs(row["mean"] - row["expected"]) < 5 * row["standard_error"] + 1e-9
        assert row["held_out"] == 135


def test_absurd_inputs_are_those_of_classifiers(rows: list[Row]) -> None:
    own = list(select(rows, study="absurd inputs"))
    assert {row["domain"] for row in own} == {"mnist", "binary_mnist"}
    (far,) = select(own, domain="mnist", name="known x 255")
    assert far["fused"] > 0.9
    assert {row["domain"] for row in select(rows, study="failures")} == {
        "mnist",
        "binary_mnist",
    }


def test_area_under_risk_is_least_for_a_perfect_order() -> None:
    wrong = torch.tensor([False, False, True, True])
    best = area_under_risk(torch.arange(4.0), wrong)
    assert best == pytest.approx((0 + 0 + 1 / 3 + 1 / 2) / 4)
    assert area_under_risk(-torch.arange(4.0), wrong) > best


def test_tables_have_a_line_for_everything(rows: list[Row], tmp_path: Path) -> None:
    parts = tables.parts_table(rows, FILE)
    assert {"fused", "scod", "energy", "without energy"} <= {
        line["score"] for line in parts.lines
    }
    left_out = tables.left_out_table(rows, FILE)
    assert len(left_out.lines) == 4
    for line in left_out.lines:
        difference = float(line["default"]) - float(line["AUROC"])
        assert float(line["difference"]) == pytest.approx(difference, abs=2e-4)
    alarms = tables.alarms_table(rows, FILE)
    assert "1%, surely" not in alarms.lines[0]  # too few held-out samples in all domains
    assert float(alarms.lines[0]["10%"].rstrip("%")) < 12
    assert "→" in tables.absurd_table(rows, FILE).lines[0]["MNIST"]
    assert len(tables.failures_table(rows, FILE).lines) == 8
    methods = [
        row
        for method in ("fused", "energy", "max_softmax")
        for row in measure(setup_of("mnist", Categorical()), method)
    ]
    cost = tables.cost_table(methods, FILE)
    assert [line["method"] for line in cost.lines] == ["Fused", "Max softmax", "Energy"]
    svg, png = draw_fused(methods, tmp_path)
    assert svg.stat().st_size > 0
    assert png.stat().st_size > 0


def test_rules_of_the_detectors_library_are_larger_for_unknown_inputs() -> None:
    rows = list(aggregation_sweep(setup_of("wine", Gaussian())))
    assert len({row["id"] for row in rows}) == len(rows) == 14
    assert min(row["auroc"] for row in rows) > 0.9  # a wrong sign gives less than a half
    fisher = next(row for row in rows if row["name"] == "p-values, fisher")
    ours = next(
        row
        for row in fused_sweep(setup_of("wine", Gaussian()))
        if (row["study"], row["name"]) == ("combination", "Fisher")
    )
    # both count ranks; theirs interpolates between them
    assert abs(fisher["auroc"] - ours["auroc"]) < 0.01
    table = tables.ways_table(rows, FILE)
    assert any(line["way"] == "detectors, mahalanobis" for line in table.lines)
