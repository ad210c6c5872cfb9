"""Shares of scores against the dense posterior; they sum to the score, however it is cut."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from cases import CASES, Case, conv_batchnorm, mlp
from contracts import Blocks, power, rows_with
from engines import ENGINES, close, everything
from oracles import dense_factors
from parts import (
    LIKELIHOODS,
    OUTPUTS,
    basis_of,
    dense_pairs,
    same_as_dense,
    source_of,
    sums_are_the_score,
)
from scodkit import Bernoulli, Categorical, Gaussian, Monitor
from scodkit.explain import shares_of
from scodkit.factors.alone import LoopEngine
from scodkit.factors.engine import Linearization
from scodkit.factors.pieces import FactorSource, sample_keys
from scodkit.likelihoods import Likelihood
from scodkit.model.inputs import Inputs
from scodkit.model.network import Network
from scodkit.sketch import Exact, TwoSided
from scodkit.sketch.eigenbasis import Eigenbasis

# --- By definition -------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::scodkit.errors.EngineFallbackWarning")
@pytest.mark.parametrize("likelihood", LIKELIHOODS.values(), ids=LIKELIHOODS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_shares_of_every_network(case: Case, likelihood: Likelihood) -> None:
    model, train = case.model(OUTPUTS), case.inputs(12, OUTPUTS, seed=1)
    test = case.inputs(4, OUTPUTS, seed=2)
    basis = basis_of(dense_factors(model, train, likelihood, keys=sample_keys(train)))
    source = source_of(model, test, likelihood)
    rows = dense_factors(model, test, likelihood.named(), keys=sample_keys(test))
    for budget in (1, 5000, 2**30):
        split = shares_of(replace(source, budget=budget), test, basis, 0.7)
        same_as_dense(split, source, rows, basis, 0.7)
        assert split.parameters.names == source.engine.parameters.names
        assert split.directions.names == tuple(f"direction {q}" for q in range(rows.shape[1]))


@settings(deadline=None, max_examples=60)
@given(
    widths=st.lists(st.integers(1, 5), min_size=2, max_size=4),
    batch=st.integers(1, 5),
    rank=st.integers(0, 8),
    prior_scale=st.sampled_from([1e-3, 0.3, 1.0, 50.0]),
    budget_rows=st.sampled_from([0.0, 1.5]) | st.floats(1, 20) | st.just(1e6),
    likelihood=st.sampled_from([Gaussian(0.3), Categorical(), Bernoulli()]),
    kind=st.sampled_from(ENGINES),
    seed=st.integers(0, 99),
)
def test_shares_of_any_shape(
    widths, batch, rank, prior_scale, budget_rows, likelihood, kind, seed
) -> None:
    torch.manual_seed(seed)
    layers = [
        part
        for first, second in pairwise(widths)
        for part in (nn.Linear(first, second), nn.Tanh())
    ]
    model = nn.Sequential(*layers).double()
    train, test = (
        Inputs((torch.randn(size, widths[0], dtype=torch.float64),), {}) for size in (9, batch)
    )
    basis = basis_of(dense_factors(model, train, likelihood), rank)
    source = source_of(model, test, likelihood, kind)
    budget = max(1, int(budget_rows * source.engine.row_bytes(held=True)))
    split = shares_of(replace(source, budget=budget), test, basis, prior_scale)
    rows = dense_factors(model, test, likelihood.named())
    same_as_dense(split, source, rows, basis, prior_scale)
    of_layers = split.parameters.values.view(batch, -1, 2).sum(2)  # weight and bias
    close(split.layers.values, of_layers)


class CutEngine(LoopEngine):
    """Gives rows that were made up, cut where it is told to."""

    def __init__(self, rows: Tensor, widths: list[int], cuts: list[int]) -> None:
        blocks = nn.ParameterDict(
            {f"p{i}": nn.Parameter(torch.zeros(width)) for i, width in enumerate(widths)}
        )
        network = Network(nn.Module())
        network.model.p = blocks
        super().__init__(network, everything(network))
        self.rows, self.cuts = rows, cuts

    def linearize(self, call: Inputs) -> Linearization:
        return Cut(self.rows[call.args[0][:, 0].long()], self.cuts)


class Cut(Linearization):
    def __init__(self, rows: Tensor, cuts: list[int]) -> None:
        self.rows, self.cuts = rows, cuts
        self.output = torch.zeros(rows.shape[:2], dtype=torch.float64)

    def pull_back(self, rows: Tensor) -> Blocks:
        first = int(rows[0, 0].argmax())  # of the directions asked for
        return Shuffled(self.rows[:, first : first + rows.shape[1]], self.cuts)


class Shuffled(Blocks):
    def blocks(self):
        return reversed(list(super().blocks()))


def cut_source(rows: Tensor, widths: list[int], cuts: list[int], budget: int = 2**30):
    engine = CutEngine(rows, widths, cuts)
    call = Inputs((torch.arange(len(rows), dtype=torch.float64)[:, None],), {})
    return FactorSource(engine, Gaussian(), (rows.shape[1],), budget), call


@settings(deadline=None, max_examples=60)
@given(
    widths=st.lists(st.integers(0, 6), min_size=1, max_size=5).filter(any),
    shape=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    budget_rows=st.integers(0, 20),
    data=st.data(),
)
def test_blocks_may_be_cut_anywhere(widths, shape, budget_rows, data) -> None:
    width = sum(widths)
    cuts = sorted(data.draw(st.lists(st.integers(0, width), max_size=5)))
    rows = rows_with(power(1.0), (shape[0] + 5, shape[1], width), seed=width)
    basis = basis_of(rows[shape[0] :])
    source, call = cut_source(rows[: shape[0]], widths, cuts)
    budget = max(1, budget_rows * source.engine.row_bytes(held=True))
    split = shares_of(replace(source, budget=budget), call, basis, 0.8)
    same_as_dense(split, source, rows[: shape[0]], basis, 0.8)


def test_weights_that_make_up_for_one_another_have_a_negative_share() -> None:
    u = torch.tensor([[0.5**0.5], [0.5**0.5]], dtype=torch.float64)
    basis = Eigenbasis(u.new_tensor([1e6]), u, 100, 1e6, True, 0.0, 0)
    source, call = cut_source(u.new_tensor([[[1.0, 0.2]]]), [1, 1], [1])
    first, second = shares_of(source, call, basis, 1.0).parameters.values[0].tolist()
    assert first == pytest.approx(1.0 - 0.6)
    assert second == pytest.approx(0.2 * (0.2 - 0.6))


# --- Sums, in float32 ----------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::scodkit.errors.SuspiciousInputWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("prior_scale", [0.1, 30.0])
@pytest.mark.parametrize("likelihood", [Categorical(), Gaussian()], ids=lambda one: repr(one))
def test_sums_equal_the_monitors_score(dtype, prior_scale: float, likelihood) -> None:
    torch.manual_seed(0)
    model = conv_batchnorm(OUTPUTS).to(dtype)
    train, test = torch.randn(40, 2, 5, 5, dtype=dtype), torch.randn(9, 2, 5, 5, dtype=dtype)
    for sketch in (Exact(), TwoSided(60)):
        monitor = Monitor(model, likelihood, rank=9, sketch=sketch, prior_scale=prior_scale)
        monitor.fit([train], progress=False)
        # a training sample's score is what is left of near-equal sums
        for batch in (test, train[:7], 1e3 * test, torch.zeros_like(test[:1])):
            for budget in (1, 2**30):
                monitor.memory_budget = budget
                score, told = monitor.score(batch), monitor.explain(batch)
                relative = 1e-6 if dtype == torch.float32 else 1e-10
                torch.testing.assert_close(told.score, score, rtol=relative, atol=0)
                sums_are_the_score(told, told.score, relative)
                assert (told.directions.values >= 0).all()


def test_samples_inside_the_basis() -> None:
    # the energy outside is rounding, below zero as often as not
    torch.manual_seed(0)
    model, train = nn.Linear(4, 2), torch.randn(50, 4)
    monitor = Monitor(model, Gaussian(), rank=100, sketch=Exact()).fit([train], progress=False)
    assert monitor.basis.rank == 10
    told = monitor.explain(train)
    sums_are_the_score(told, monitor.score(train), 1e-6)
    assert (told.directions.values >= 0).all()
    rows = dense_factors(model, Inputs((train,), {}), Gaussian())
    pairs = dense_pairs(rows, monitor.basis, 1.0)
    by_parameter = torch.stack([pairs[:, :, :8].sum((1, 2)), pairs[:, :, 8:].sum((1, 2))], 1)
    allowed = 4e-7 * rows.square().sum((1, 2))[:, None]
    assert ((told.parameters.values - by_parameter).abs() <= allowed).all()


@pytest.mark.parametrize("half", ["model", "basis"])
def test_half_precision(half: str) -> None:
    torch.manual_seed(0)
    model, x = mlp(OUTPUTS), torch.randn(20, 3)
    if half == "model":
        model, x = model.bfloat16(), x.bfloat16()
    monitor = Monitor(model, Categorical(), rank=8).fit([x], progress=False)
    if half == "basis":
        monitor.compress()
    sums_are_the_score(monitor.explain(x), monitor.score(x), 1e-6)


def test_no_curvature_no_shares() -> None:
    monitor = Monitor(nn.Linear(3, 2, bias=False), Gaussian(), rank=2)
    monitor.fit([torch.randn(9, 3)], progress=False)
    told = monitor.explain(torch.zeros(2, 3))
    for values in (told.score, told.parameters.values, told.directions.values):
        assert not values.any()
