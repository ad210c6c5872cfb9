"""Shares of scores: their names, what is left alone, refused, and drawn."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from cases import CASES, conv_batchnorm, mlp
from engines import INF, NAN, close
from oracles import dense_factors
from parts import (
    OUTPUTS,
    basis_of,
    dense_pairs,
    same_as_dense,
    source_of,
    sums_are_the_score,
)
from scodkit import Categorical, Gaussian, LastLayers, Monitor
from scodkit.errors import BatchError, OptionError, ScodError
from scodkit.explain import Shares, shares_of
from scodkit.factors.pieces import FactorSource, Piece
from scodkit.model.inputs import Inputs

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
    layers = ("scale", "shift", "body.0: Linear (3->3)", "body.1.0: Linear (3->3)")
    assert told.layers.names == layers
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
    known = monitor.references([x], progress=False)
    expected, broken = monitor.explain(x), x.clone()
    broken[2, 1] = bad
    told = monitor.explain(broken, references=known)
    good = torch.tensor([0, 1, 3, 4])
    assert told.score[2] == INF
    assert told.nearest.index[:, 0].tolist() == [0, 1, -1, 3, 4]
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
    rows = dense_factors(model, call, Categorical().named())
    basis, one_row = basis_of(rows), source.engine.row_bytes(held=True)
    for allowed in (1, 2, 7, 100):
        seen.clear()
        watched = Watched(source.engine, Categorical(), (OUTPUTS,), allowed * one_row)
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


def test_a_source_may_be_asked_in_any_mode() -> None:
    call, model = CASES[1].inputs(3, OUTPUTS), CASES[1].model(OUTPUTS)
    source = source_of(model, call, Gaussian())
    basis = basis_of(dense_factors(model, call, Gaussian()))
    expected = shares_of(source, call, basis, 1.0)
    model.train()  # batch norm by the batch's own statistics
    with torch.no_grad():
        found = shares_of(source, call, basis, 1.0)
    assert torch.equal(found.parameters.values, expected.parameters.values)


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
