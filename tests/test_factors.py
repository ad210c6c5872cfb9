"""Engines against dense Jacobians, pieces against the whole, and the choice of an engine."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributions import Poisson

from cases import CASES, Case, conv_batchnorm
from oracles import dense_factors
from scodkit.errors import EngineFallbackWarning
from scodkit.factors import (
    Engine,
    Factors,
    FactorsOf,
    FactorSource,
    FunctionalEngine,
    HeldFactors,
    HookEngine,
    Linearization,
    LoopEngine,
    choose_engine,
    squared_norms,
)
from scodkit.factors import choose as choose_module
from scodkit.factors.pieces import sample_keys
from scodkit.likelihoods import Categorical, Gaussian, Likelihood, MonteCarlo
from scodkit.network import Inputs, Network
from scodkit.parameters import ParameterSet, select_names

BY_NAME = {case.name: case for case in CASES}
MLP = BY_NAME["mlp"]
NAN, INF = float("nan"), float("inf")
ENGINES = [HookEngine, FunctionalEngine, LoopEngine]
ENGINE_CASES = [
    pytest.param(engine, case, id=f"{engine.__name__}-{case.name}")
    for engine in ENGINES
    for case in CASES
    if case.batched or engine is LoopEngine
]
POISSON = MonteCarlo(lambda out: Poisson(out.exp()), samples=2, seed=3)
LIKELIHOODS = [Gaussian((0.5, 1.0, 2.0)), Categorical(), Categorical(directions=1), POISSON]


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-13)


def joined(factors: Factors) -> Tensor:
    """Rows (b, q, N), put together by the columns the blocks claim."""
    parts = list(factors.blocks())
    width = sum(rows.shape[2] for _, rows in parts)
    whole = parts[0][1].new_full((*parts[0][1].shape[:2], width), NAN)
    for columns, rows in parts:
        whole[:, :, columns] = rows
    assert factors.num_rows == whole.shape[0] * whole.shape[1]
    return whole


def everything(network: Network, names: list[str] | None = None) -> ParameterSet:
    return select_names(network.model, names or list(dict(network.model.named_parameters())))


def engine_rows(
    kind: type[Engine], network: Network, call: Inputs, likelihood: Likelihood, names=None
) -> Tensor:
    with network.evaluating():
        linear = kind(network, everything(network, names)).linearize(call)
        return joined(linear.pull_back(likelihood.factor(linear.output)))


# --- Engines -------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "case"), ENGINE_CASES)
def test_engines_agree_with_the_dense_jacobian(kind: type[Engine], case: Case) -> None:
    network, call = Network(case.model(3)), case.inputs(3, 3)
    expected = dense_factors(network.model, call, Categorical())
    with network.evaluating():
        linear = kind(network, everything(network)).linearize(call)
        close(joined(linear.pull_back(Categorical().factor(linear.output))), expected)
    assert not linear.output.requires_grad
    close(linear.output, network(call).detach())


@pytest.mark.parametrize(("kind", "case"), ENGINE_CASES)
def test_some_frozen_weights_give_their_columns(kind: type[Engine], case: Case) -> None:
    model, call = case.model(2).requires_grad_(False), case.inputs(2, 2)
    names = list(dict(model.named_parameters()))[::-2]
    expected = dense_factors(model, call, Gaussian((0.5, 2.0)), names)
    close(engine_rows(kind, Network(model), call, Gaussian((0.5, 2.0)), names), expected)


class WithUnused(nn.Module):
    """Has a layer that no output depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(3, 2)
        self.unused = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


@pytest.mark.parametrize("kind", ENGINES)
def test_unused_parameters_have_zero_rows(kind: type[Engine]) -> None:
    model, call = WithUnused().double(), MLP.inputs(2, 2)
    rows = engine_rows(kind, Network(model), call, Gaussian())
    close(rows, dense_factors(model, call, Gaussian()))
    for trained in (True, False):
        network = Network(model.requires_grad_(trained))
        only_unused = engine_rows(kind, network, call, Gaussian(), ["unused.weight"])
        assert torch.equal(only_unused, torch.zeros(2, 2, 6, dtype=torch.float64))


@pytest.mark.parametrize("kind", ENGINES)
def test_engines_pull_back_the_prediction_that_is_picked(kind: type[Engine]) -> None:
    model, call = MLP.model(2), MLP.inputs(3, 2)
    picking = Network(model, outputs=lambda out: out[:, 1])
    expected = dense_factors(model, call, Gaussian())[:, 1:]
    close(engine_rows(kind, picking, call, Gaussian()), expected)


# a handful of roundings, of 2^-24 and 2^-9 each
@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("name", ["mlp", "conv_batchnorm", "attention", "dict"])
@pytest.mark.parametrize("kind", ENGINES)
def test_narrow_models(kind: type[Engine], name: str, dtype: torch.dtype, most: float) -> None:
    case = BY_NAME[name]
    model, call = case.model(3, dtype), case.inputs(3, 3, dtype=dtype)
    actual = engine_rows(kind, Network(model), call, Gaussian())
    assert actual.dtype == dtype
    wide = call.map(lambda t: t.double() if t.is_floating_point() else t)
    exact = dense_factors(model.double(), wide, Gaussian())
    assert (actual.double() - exact).norm() <= most * exact.norm()


@pytest.mark.parametrize("names", [None, ["0.weight", "0.bias"]], ids=["all", "subset"])
@pytest.mark.parametrize("name", ["mlp", "conv_batchnorm"])
@pytest.mark.parametrize("kind", ENGINES)
def test_models_made_in_inference_mode(kind: type[Engine], name: str, names: list) -> None:
    case = BY_NAME[name]
    with torch.inference_mode():
        model = case.model(2)
    call = case.inputs(2, 2)
    expected = dense_factors(case.model(2), call, Gaussian(), names)
    close(engine_rows(kind, Network(model), call, Gaussian(), names), expected)


@pytest.mark.parametrize(
    "kind", [*ENGINES, None], ids=["hooks", "functional", "loop", "choose"]
)
def test_the_model_is_left_as_it_was(kind: type[Engine] | None) -> None:
    model = conv_batchnorm(2).double().train()
    model[1].eval()
    model[0].weight.requires_grad_(False)
    model[4].weight.grad = torch.full_like(model[4].weight, 7.0)

    def state() -> list:
        parameters = list(model.parameters())
        grads = [None if p.grad is None else (id(p.grad), p.grad.tolist()) for p in parameters]
        flags = [(id(p), p.requires_grad, p.is_leaf) for p in parameters]
        values = [value.tolist() for value in model.state_dict().values()]
        return [grads, flags, values, [m.training for m in model.modules()]]

    before = state()
    network, call = Network(model), BY_NAME["conv_batchnorm"].inputs(3, 2)
    with network.evaluating():
        build = kind or partial(choose_engine, example=call)
        engine = build(network, everything(network))
        engine.linearize(call).pull_back(torch.ones(3, 1, 2, dtype=torch.float64))
    assert state() == before


@pytest.mark.parametrize("kind", ENGINES)
def test_threads_share_a_model(kind: type[Engine]) -> None:
    network, call = Network(MLP.model(3)), MLP.inputs(4, 3)
    own = list(network.model.parameters())

    def work(_: int = 0) -> Tensor:
        return engine_rows(kind, network, call, Categorical())

    expected = work()
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(work, range(200)))
    assert all(a is b for a, b in zip(network.model.parameters(), own, strict=True))
    assert all(torch.equal(rows, expected) for rows in found)


# --- Pieces --------------------------------------------------------------------------------


def source_of(
    likelihood: Likelihood, budget_rows: float, kind: type[Engine] = LoopEngine
) -> FactorSource:
    """A source whose budget is so many rows (or one byte)."""
    network = Network(MLP.model(3))
    engine = kind(network, everything(network))
    budget = max(1, int(budget_rows * engine.row_bytes(held=False)))
    return FactorSource(engine, likelihood, likelihood.num_directions((3,)), budget)


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
    source = source_of(Categorical(), budget_rows)
    with source.engine.network.evaluating():
        pieces = list(source.pieces(MLP.inputs(2, 3)))
    assert [(len(p.output), p.factors.num_rows, p.complete) for p in pieces] == expected


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


# --- The choice of an engine ---------------------------------------------------------------


def tampered(change: Callable[[Tensor], Tensor]) -> type[Engine]:
    """An engine whose rows are not what they should be."""

    class TamperedEngine(LoopEngine):
        def linearize(self, call: Inputs) -> Linearization:
            linear = super().linearize(call)
            exact = linear.pull_back

            def pull_back(rows: Tensor) -> Factors:
                return HeldFactors([(c, change(own)) for c, own in exact(rows).blocks()])

            linear.pull_back = pull_back
            return linear

    return TamperedEngine


def raising(rows: Tensor) -> Tensor:
    raise RuntimeError("no batching rule\nand a long trace")


def chosen_engine(model: nn.Module, call: Inputs, names=None) -> Engine:
    network = Network(model)
    with network.evaluating():
        return choose_engine(network, everything(network, names), call)


@pytest.mark.parametrize("case", [c for c in CASES if c.batched], ids=lambda c: c.name)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_batched_models_get_the_fast_engine(case: Case, dtype: torch.dtype) -> None:
    call = case.inputs(4, 3, dtype=dtype)
    assert type(chosen_engine(case.model(3, dtype), call)) is HookEngine


@pytest.mark.parametrize("case", [c for c in CASES if not c.batched], ids=lambda c: c.name)
def test_a_model_no_transform_supports_gets_the_loop(case: Case) -> None:
    with pytest.warns(EngineFallbackWarning) as caught:
        engine = chosen_engine(case.model(3), case.inputs(4, 3))
    assert type(engine) is LoopEngine
    message = str(caught.pop().message)
    assert message.startswith("Recurrent is left to LoopEngine")
    assert "HookEngine (it raised UnsupportedCallError: there is no rule for torch." in message
    assert "FunctionalEngine (it raised" in message


@pytest.mark.parametrize(
    ("change", "names", "says"),
    [
        (lambda rows: rows * (1 + 1e-6), None, r"differ from plain autograd's by 1\.0e-06"),
        (lambda rows: rows.flip(0), None, "differ from plain autograd's by"),
        (lambda rows: rows * NAN, None, "differ from plain autograd's by inf"),
        (lambda rows: rows + 1.0, ["unused.bias"], "differ from plain autograd's by"),
        (lambda rows: rows * NAN, ["unused.bias"], "differ from plain autograd's by"),
        (raising, None, r"it raised RuntimeError: no batching rule\)"),
    ],
    ids=["scaled", "mixed-up", "nan", "nonzero-for-zero", "nan-for-zero", "raises"],
)
@pytest.mark.parametrize("others", [(), (FunctionalEngine,)], ids=["loop", "functional"])
def test_an_engine_that_does_not_agree_is_passed_over(
    monkeypatch: pytest.MonkeyPatch,
    change: Callable,
    names: list[str],
    says: str,
    others: tuple,
) -> None:
    monkeypatch.setattr(choose_module, "_FAST_ENGINES", (tampered(change), *others))
    with pytest.warns(EngineFallbackWarning, match=says) as caught:
        engine = chosen_engine(WithUnused().double(), MLP.inputs(4, 2), names)
    assert type(engine) is (*others, LoopEngine)[0]
    assert len(caught) == 1


def test_a_sample_that_is_bad_for_both_engines_is_no_disagreement() -> None:
    call = MLP.inputs(4, 2)
    call.args[0][1, 0] = NAN
    assert type(chosen_engine(MLP.model(2), call)) is HookEngine


# --- Factors of some samples ---------------------------------------------------------------


@pytest.mark.parametrize("kept", [[True, False, True], [False] * 3, [True] * 3])
def test_factors_of_some_samples(kept: list[bool]) -> None:
    source = source_of(Categorical(), 1e9)
    with source.engine.network.evaluating():
        (piece,) = source.pieces(MLP.inputs(3, 3))
    mask, whole = torch.tensor(kept), joined(piece.factors)
    some = FactorsOf(piece.factors, mask)
    assert some.num_rows == 3 * sum(kept)
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
