"""Engines against dense Jacobians, and the choice of an engine."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from cases import CASES, Case, conv_batchnorm
from engines import (
    BY_NAME,
    ENGINES,
    MLP,
    NAN,
    chosen_engine,
    close,
    engine_rows,
    everything,
    joined,
)
from oracles import dense_factors
from scodkit.errors import EngineFallbackWarning
from scodkit.factors import choose as choose_module
from scodkit.factors.alone import FunctionalEngine, LoopEngine
from scodkit.factors.choose import choose_engine
from scodkit.factors.engine import Engine, Factors, HeldFactors, Linearization
from scodkit.factors.hooks import HookEngine
from scodkit.likelihoods import Categorical, Gaussian
from scodkit.model.inputs import Inputs
from scodkit.model.network import Network

ENGINE_CASES = [
    pytest.param(engine, case, id=f"{engine.__name__}-{case.name}")
    for engine in ENGINES
    for case in CASES
    if (case.batched or engine is LoopEngine)
    # torch's own kernels for these cannot be batched by a transform
    and (engine is not FunctionalEngine or case.name not in ("lstm", "gru"))
]


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
    assert message.startswith("Sequential is left to LoopEngine")
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
