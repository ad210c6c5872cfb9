"""Shares of scores against the dense posterior; they sum to the score, however it is cut."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from cases import CASES, Case, conv_batchnorm, mlp
from contracts import Blocks, fit, power, rows_with
from engines import ENGINES, INF, NAN, close, everything
from oracles import dense_factors
from scodkit import Bernoulli, Categorical, Gaussian, LastLayers, Monitor, MonteCarlo, Task
from scodkit.eigenbasis import Eigenbasis
from scodkit.errors import BatchError, OptionError, ScodError
from scodkit.explain import Shares, Split, shares_of
from scodkit.factors import Engine, FactorSource, Linearization, LoopEngine, choose_engine
from scodkit.factors.pieces import Piece, sample_keys
from scodkit.likelihoods import Likelihood
from scodkit.network import Inputs, Network
from scodkit.sketch import Exact, TwoSided

OUTPUTS = 3
LIKELIHOODS = {
    "gaussian": Gaussian((0.5, 1.0, 2.0)),
    "bernoulli": Bernoulli(),
    "categorical": Categorical(),
    "one direction": Categorical(directions=1),
    "monte carlo": MonteCarlo(lambda out: torch.distributions.Poisson(out.exp()), samples=2),
    "task": Task(lambda out: out[:, :2].square(), Gaussian(0.1)),
}


def dense_pairs(rows: Tensor, basis: Eigenbasis, prior_scale: float) -> Tensor:
    """``L * (Sigma L)`` for rows ``(B, p, N)``: what a weight has in the score."""
    c = 1 / (2 * max(1, basis.num_data) * prior_scale**2)
    values, vectors = basis.values.double(), basis.vectors.double()
    identity = torch.eye(rows.shape[2], dtype=torch.float64)
    sigma = prior_scale**2 * (identity - vectors * (values / (values + c)) @ vectors.mT)
    return rows.double() * (rows.double() @ sigma)


def same_as_dense(
    split: Split, source: FactorSource, rows: Tensor, basis: Eigenbasis, prior_scale: float
) -> None:
    """Check every share by its definition, and every sum."""
    pairs = dense_pairs(rows, basis, prior_scale)
    blocks = source.engine.parameters.blocks
    by_parameter = [pairs[:, :, block.columns].sum((1, 2)) for block in blocks]
    allowed = 1e-11 * prior_scale**2 * float(rows.square().sum((1, 2)).max()) + 1e-300
    close(split.parameters.values, torch.stack(by_parameter, 1), allowed)
    close(split.directions.values, pairs.sum(2), allowed)
    close(split.features, rows @ basis.vectors, 1e-11)
    assert (split.directions.values >= 0).all()
    sums_are_the_score(split, split.score, 1e-10)


def source_of(
    model: nn.Module, call: Inputs, likelihood: Likelihood, kind: type[Engine] | None = None
) -> FactorSource:
    """A source with all the memory there is; with the engine of choice, or as chosen."""
    network = Network(model)
    parameters = everything(network)
    with network.evaluating():
        shape = network(call).shape[1:]
        engine = kind(network, parameters) if kind else choose_engine(network, parameters, call)
    return FactorSource(engine, likelihood, likelihood.num_directions(shape), 2**30)


def basis_of(rows: Tensor, rank: int = 6) -> Eigenbasis:
    return fit(Exact(), rows, rank=rank)


def sums_are_the_score(split, score: Tensor, relative: float) -> None:
    for shares in (split.parameters, split.layers, split.directions):
        assert shares.values.dtype == torch.float64
        assert shares.values.shape == (len(score), len(shares.names))
        torch.testing.assert_close(
            shares.values.sum(1), score.double(), rtol=relative, atol=1e-300
        )


# --- By definition -------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::scodkit.errors.EngineFallbackWarning")
@pytest.mark.parametrize("likelihood", LIKELIHOODS.values(), ids=LIKELIHOODS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_shares_of_every_network(case: Case, likelihood: Likelihood) -> None:
    model, train = case.model(OUTPUTS), case.inputs(12, OUTPUTS, seed=1)
    test = case.inputs(4, OUTPUTS, seed=2)
    basis = basis_of(dense_factors(model, train, likelihood, keys=sample_keys(train)))
    source = source_of(model, test, likelihood)
    rows = dense_factors(model, test, likelihood, keys=sample_keys(test))
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
    rows = dense_factors(model, test, likelihood)
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
    return FactorSource(engine, Gaussian(), rows.shape[1], budget), call


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
                torch.testing.assert_close(told.score.to(dtype), score, rtol=relative, atol=0)
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


# --- Names ---------------------------------------------------------------------------------


class Nested(nn.Module):
    """Parameters at the top, two floors down, behind a parametrization, and tied."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.shift = nn.Parameter(torch.zeros(3))
        self.body = nn.Sequential(weight_norm(nn.Linear(3, 3)), nn.Sequential(nn.Linear(3, 3)))
        self.again = nn.Linear(3, 3, bias=False)
        self.again.weight = self.body[1][0].weight

    def forward(self, x: Tensor) -> Tensor:
        return self.again(torch.tanh(self.body(x * self.scale + self.shift)))


@pytest.mark.filterwarnings("ignore::scodkit.errors.EngineFallbackWarning")
def test_layers_are_modules_that_own_parameters() -> None:
    torch.manual_seed(0)
    x = torch.randn(9, 3, dtype=torch.float64)
    monitor = Monitor(Nested().double(), Gaussian(), rank=4).fit([x], progress=False)
    told = monitor.explain(x)
    names = told.parameters.names
    assert names == (
        "scale",
        "shift",
        "body.0.bias",
        "body.0.parametrizations.weight.original0",
        "body.0.parametrizations.weight.original1",
        "body.1.0.weight",
        "body.1.0.bias",
    )
    assert told.layers.names == ("scale", "shift", "body.0", "body.1.0")
    values = told.parameters.values
    summed = [part.sum(1) for part in values.split([1, 1, 3, 2], dim=1)]
    close(told.layers.values, torch.stack(summed, 1))
    sums_are_the_score(told, monitor.score(x), 1e-10)


@pytest.mark.parametrize(
    ("chosen", "names"),
    [
        (LastLayers(count=1), ("2.weight", "2.bias")),
        (["0.bias", "2.*"], ("0.bias", "2.weight", "2.bias")),
        ("all", ("0.weight", "0.bias", "2.weight", "2.bias")),
    ],
)
def test_chosen_and_frozen_parameters(chosen, names: tuple[str, ...]) -> None:
    model, x = mlp(2).double(), torch.randn(9, 3, dtype=torch.float64)
    model[2].requires_grad_(False)
    model[0].bias.requires_grad_(False)
    monitor = Monitor(model, Gaussian(), rank=4, parameters=chosen).fit([x], progress=False)
    told = monitor.explain(x)
    assert told.parameters.names == names
    sums_are_the_score(told, monitor.score(x), 1e-10)
    rows = dense_factors(model, Inputs((x,), {}), Gaussian(), list(names))
    pairs = dense_pairs(rows, monitor.basis, 1.0)
    close(told.directions.values, pairs.sum(2))
    last = model[2].weight.numel() + model[2].bias.numel()
    close(told.layers.values[:, -1], pairs[:, :, -last:].sum((1, 2)))


# --- What is left alone, and what is refused -----------------------------------------------


@pytest.mark.parametrize("budget", [1, 2**30])
@pytest.mark.parametrize("chosen", ["all", LastLayers(count=1)])  # whose rows stay finite
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_samples_with_a_nan_have_no_shares(bad: float, chosen, budget: int) -> None:
    torch.manual_seed(0)
    model, x = mlp(OUTPUTS).double(), torch.randn(5, 3, dtype=torch.float64)
    monitor = Monitor(model, Categorical(), rank=4, parameters=chosen).fit([x], progress=False)
    monitor.memory_budget = budget
    expected, broken = monitor.explain(x), x.clone()
    broken[2, 1] = bad
    told = monitor.explain(broken)
    good = torch.tensor([0, 1, 3, 4])
    assert told.score[2] == INF
    for found, wanted in (
        (told.parameters, expected.parameters),
        (told.layers, expected.layers),
        (told.directions, expected.directions),
    ):
        assert found.values[2].isnan().all()
        close(found.values[good], wanted.values[good])


class Watched(FactorSource):
    """Remembers the pieces it gave."""

    def pieces(self, call: Inputs, *, hold: bool = False):
        for piece in super().pieces(call, hold=hold):
            if hold:
                seen.append(piece)
            yield piece


seen: list[Piece] = []


def test_rows_stay_within_the_budget() -> None:
    model, call = mlp(OUTPUTS).double(), CASES[0].inputs(6, OUTPUTS)
    source = source_of(model, call, Categorical())
    rows = dense_factors(model, call, Categorical())
    basis, one_row = basis_of(rows), source.engine.row_bytes(held=True)
    for allowed in (1, 2, 7, 100):
        seen.clear()
        watched = Watched(source.engine, Categorical(), OUTPUTS, allowed * one_row)
        split = shares_of(watched, call, basis, 1.0)
        same_as_dense(split, source, rows, basis, 1.0)
        assert max(piece.factors.num_rows for piece in seen) <= allowed


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_the_model_is_left_as_it_was(mode) -> None:
    model = conv_batchnorm(OUTPUTS).train()
    monitor = Monitor(model, Categorical(), rank=4)
    monitor.fit([torch.randn(9, 2, 5, 5)], progress=False)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    with mode():
        told = monitor.explain(torch.randn(3, 2, 5, 5))
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert not told.parameters.values.requires_grad


def test_an_empty_batch_is_refused() -> None:
    call = CASES[0].inputs(3, OUTPUTS)
    source = source_of(CASES[0].model(OUTPUTS), call, Gaussian())
    basis = basis_of(dense_factors(source.engine.network.model, call, Gaussian()))
    with pytest.raises(BatchError, match=r"expected samples .* empty batch"):
        shares_of(source, call.samples(slice(0, 0)), basis, 1.0)


def test_names_and_values_must_agree() -> None:
    with pytest.raises(OptionError, match=r"expected values of shape \(B, 2\).*got \(3, 4\)"):
        Shares(("a", "b"), torch.zeros(3, 4))


# --- Pictures ------------------------------------------------------------------------------


def bars(shares: Shares, **options) -> dict[str, float]:
    (axes,) = shares.plot(**options).axes
    labels = [text.get_text() for text in axes.get_yticklabels()]
    return dict(zip(labels, [bar.get_width() for bar in axes.patches], strict=True))


def test_bars_are_sorted_and_the_rest_is_summed() -> None:
    values = torch.tensor([[0.0] * 5, [0.5, -3.0, 1.0, 0.25, 2.0]])
    shares = Shares(("a", "b", "c", "d", "e"), values)
    assert list(bars(shares, sample=1, top=2).items()) == [
        ("b", -3.0),
        ("e", 2.0),
        ("others (3)", 1.75),
    ]
    assert list(bars(shares, sample=-1)) == ["b", "e", "c", "a", "d"]
    assert set(bars(shares).values()) == {0.0}


def test_what_cannot_be_drawn_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    shares = Shares(("a",), torch.tensor([[1.0], [NAN]]))
    with pytest.raises(OptionError, match="expected a sample from 0 to 1, got 2"):
        shares.plot(2)
    with pytest.raises(BatchError, match=r"finite score .* sample 1, .*plot\(sample="):
        shares.plot(1)
    with pytest.raises(OptionError, match=r"expected top >= 1 .* got 0"):
        shares.plot(top=0)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ScodError, match=r'pip install "scodkit\[plots\]"'):
        shares.plot()
