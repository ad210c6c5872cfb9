"""A batch cut into pieces against the whole, and factors of some samples."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributions import Poisson

from engines import BY_NAME, ENGINES, INF, MLP, NAN, close, everything, joined
from oracles import dense_factors
from scodkit.factors.alone import LoopEngine
from scodkit.factors.engine import Engine, FactorsOf
from scodkit.factors.pieces import FactorSource, sample_keys
from scodkit.likelihoods import Categorical, Gaussian, Likelihood, MonteCarlo
from scodkit.model.inputs import Inputs
from scodkit.model.network import Network
from scodkit.numerics.matmul import squared_norms

POISSON = MonteCarlo(lambda out: Poisson(out.exp()), samples=2, seed=3)
LIKELIHOODS = [Gaussian((0.5, 1.0, 2.0)), Categorical(), Categorical(directions=1), POISSON]


# --- Pieces --------------------------------------------------------------------------------


def source_of(
    likelihood: Likelihood, budget_rows: float, kind: type[Engine] = LoopEngine
) -> FactorSource:
    """A source whose budget is so many rows (or one byte)."""
    network = Network(MLP.model(3))
    engine = kind(network, everything(network))
    budget = max(1, int(budget_rows * engine.row_bytes(held=False)))
    return FactorSource(engine, likelihood, (3,), budget)


def assembled(source: FactorSource, call: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, outputs and finite flags of a batch; checks order, completeness and budget."""
    rows, outputs, finite, waiting = [], [], [], []
    start, network = 0, source.engine.network
    most = max(1, source.budget // source.engine.row_bytes(held=False))
    with network.evaluating():
        for piece in source.pieces(call):
            assert piece.samples.start == start
            waiting.append(joined(piece.factors))
            size = piece.samples.stop - piece.samples.start
            assert len(waiting[-1]) == len(piece.output) == len(piece.finite) == size
            assert piece.factors.num_rows <= most
            if piece.complete:
                rows.append(torch.cat(waiting, 1))
                outputs.append(piece.output)
                finite.append(piece.finite)
                waiting, start = [], piece.samples.stop
    assert not waiting
    assert start == call.batch_size
    return torch.cat(rows), torch.cat(outputs), torch.cat(finite)


@settings(deadline=None, max_examples=60)
@given(
    size=st.integers(1, 6),
    budget_rows=st.sampled_from([0.0, 0.99]) | st.floats(1, 20) | st.just(1e9),
    likelihood=st.sampled_from(LIKELIHOODS),
    kind=st.sampled_from(ENGINES),
)
def test_pieces_of_any_size_give_the_same_rows(
    size: int, budget_rows: float, likelihood: Likelihood, kind: type[Engine]
) -> None:
    source, call = source_of(likelihood, budget_rows, kind), MLP.inputs(size, 3)
    rows, outputs, finite = assembled(source, call)
    model = source.engine.network.model
    close(rows, dense_factors(model, call, likelihood, keys=sample_keys(call)))
    close(outputs, model(*call.args).detach())
    assert finite.all()


@pytest.mark.parametrize(
    ("budget_rows", "expected"),
    [
        (0.0, [(1, 1, False), (1, 1, False), (1, 1, True)] * 2),  # one byte
        (2.5, [(1, 2, False), (1, 1, True)] * 2),
        (5.0, [(1, 3, True)] * 2),
        (1e9, [(2, 6, True)]),
    ],
)
def test_pieces_are_as_large_as_the_budget_allows(budget_rows: float, expected: list) -> None:
    source = source_of(Gaussian(), budget_rows)
    with source.engine.network.evaluating():
        pieces = list(source.pieces(MLP.inputs(2, 3)))
    assert [(len(p.output), p.factors.num_rows, p.complete) for p in pieces] == expected


def test_rows_at_the_output_are_kept_within_the_budget() -> None:
    source = replace(source_of(POISSON, 1e9), shape=(10, 1000))  # two draws, three copies
    assert replace(source, budget=7 * 2 * 3 * 40_000).samples_at_once(hold=False) == 7
    assert replace(source, budget=1).samples_at_once(hold=False) == 1
    exact = replace(source_of(Gaussian(), 1e9), shape=(1000,))  # a thousand rows
    exact = replace(exact, budget=3 * 1000 * 3 * 4000)
    assert exact.whole(MLP.inputs(4, 3)) is None
    assert exact.samples_at_once(hold=True) == 3


@pytest.mark.parametrize("likelihood", LIKELIHOODS, ids=lambda one: type(one).__name__)
@pytest.mark.parametrize("budget_rows", [0.0, 7.0, 1e9])
@pytest.mark.parametrize("kind", ENGINES)
@pytest.mark.parametrize("bad", [{1: NAN, 3: INF}, {0: -INF}, dict.fromkeys(range(5), NAN)])
def test_non_finite_samples_are_marked_and_disturb_no_other(
    kind: type[Engine], budget_rows: float, likelihood: Likelihood, bad: dict[int, float]
) -> None:
    call = MLP.inputs(5, 3)
    source = source_of(likelihood, budget_rows, kind)
    model = source.engine.network.model
    model[1] = nn.Identity()  # and positive weights: an infinity stays one
    for parameter in model.parameters():
        parameter.data.abs_()
    expected, _, _ = assembled(source, call)
    x = call.args[0].clone()
    for i, value in bad.items():
        x[i, 0] = value
    rows, _, finite = assembled(source, Inputs((x,), {}))
    assert finite.tolist() == [i not in bad for i in range(5)]
    close(rows[finite], expected[finite])


def test_sample_keys_depend_on_the_sample_alone() -> None:
    call = BY_NAME["dict"].inputs(6, 3, seed=1)
    keys = sample_keys(call)
    order = torch.tensor([4, 0, 5])
    assert torch.equal(sample_keys(call.map(lambda t: t[order])), keys[order])
    changed = call.map(torch.clone)
    changed.kwargs["attention_mask"][2, 1] += 1
    assert (sample_keys(changed) != keys).tolist() == [i == 2 for i in range(6)]


# --- Factors of some samples ---------------------------------------------------------------


@pytest.mark.parametrize("kept", [[True, False, True], [False] * 3, [True] * 3])
def test_factors_of_some_samples(kept: list[bool]) -> None:
    source = source_of(Categorical(), 1e9)
    with source.engine.network.evaluating():
        (piece,) = source.pieces(MLP.inputs(3, 3))
    mask, whole = torch.tensor(kept), joined(piece.factors)
    some = FactorsOf(piece.factors, mask)
    assert some.num_rows == 2 * sum(kept)
    for _ in range(2):  # blocks may be asked for more than once
        assert torch.equal(joined(some), whole[mask])
    close(some.squared_norms(), whole[mask].square().sum((1, 2)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_squared_norms_are_summed_wide(dtype: torch.dtype) -> None:
    rows = torch.full((2, 3, 1000), 0.1).to(dtype)
    rows[1, 0, 0] = NAN
    norms = squared_norms(rows)
    assert norms.dtype == torch.float64
    torch.testing.assert_close(norms[0], rows[0].double().square().sum(), rtol=1e-5, atol=0.0)
    assert norms[1].isnan()


def test_norms_of_long_rows_are_accurate_in_float32() -> None:
    rows = torch.rand(2, 1, 3_000_001, generator=torch.Generator().manual_seed(0))
    exact = rows.double().square().sum((1, 2))
    torch.testing.assert_close(squared_norms(rows), exact, rtol=1e-6, atol=0.0)
