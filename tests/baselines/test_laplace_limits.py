"""What the Laplace approximation takes, what it refuses and why, and how it is tuned."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Bernoulli as TorchBernoulli
from torch.distributions import Categorical as TorchCategorical
from torch.distributions import Normal
from torch.utils.data import DataLoader, TensorDataset

from baseline_contracts import LIKELIHOODS, network, some, training_data
from draws import noise
from laplace_oracles import dense_covariances, dense_precision
from scodkit import Bernoulli, Categorical, Gaussian
from scodkit.baselines.kfac_laplace import GRID, KFACLaplace
from scodkit.cli.demo import load_digits, train
from scodkit.errors import (
    BatchError,
    MissingPeerError,
    NonFiniteError,
    NotFittedError,
    OptionError,
)
from scodkit.metrics import separation

CLOSE = {"rtol": 1e-10, "atol": 1e-12}


def small_net(outputs: int = 2) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, outputs)).double()


def linear_fit(model: nn.Module, data: object, **options: object) -> KFACLaplace:
    options = {"prior_precision": 1.0, **options}
    return KFACLaplace(model, Categorical(), **options).fit(data, progress=False)


# --- What it takes -------------------------------------------------------------------------


def test_outputs_of_any_shape_are_numbers() -> None:
    model = nn.Sequential(small_net(6), nn.Unflatten(1, (2, 3)))
    flat = small_net(6)
    x = noise(20, 3)
    for samples in (None, 4):
        options = {"samples": samples, "prior_precision": 1.0}
        found = KFACLaplace(model, Gaussian(0.5), **options).fit([x], progress=False)(x)
        wanted = KFACLaplace(flat, Gaussian(0.5), **options).fit([x], progress=False)(x)
        torch.testing.assert_close(found.score, wanted.score, **CLOSE)
        torch.testing.assert_close(found.output.flatten(1), wanted.output, **CLOSE)


def test_neither_targets_nor_a_second_pass_are_needed() -> None:
    model, x = small_net(), noise(20, 3)
    wanted = linear_fit(model, [(x, torch.zeros(20))])
    found = linear_fit(model, (part for part in x.split(6)))
    torch.testing.assert_close(found.score(x), wanted.score(x), **CLOSE)


class Named(nn.Module):
    """Takes two tensors and a switch, and returns a dict."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, left: Tensor, right: Tensor, *, negate: bool = False) -> dict:
        out = self.net(left + right)
        return {"out": -out if negate else out}


@pytest.mark.parametrize("samples", [None, 4])
def test_several_inputs_and_outputs_are_picked(samples: int | None) -> None:
    net, x, y = small_net(), noise(20, 3), noise(20, 3, seed=1)
    plain = linear_fit(net, [x + y], samples=samples)(x + y)
    method = KFACLaplace(
        Named(net),
        Categorical(),
        samples=samples,
        prior_precision=1.0,
        inputs=lambda batch: {"left": batch["l"], "right": batch["r"], "negate": True},
        outputs=lambda out: -out["out"],
    )
    method.fit([{"l": x, "r": y}], progress=False)
    torch.testing.assert_close(method({"l": x, "r": y}).score, plain.score, **CLOSE)


def test_frozen_weights_count() -> None:
    model, x = small_net(), noise(20, 3)
    wanted = linear_fit(model, [x]).score(x)
    frozen = small_net().requires_grad_(False)
    torch.testing.assert_close(linear_fit(frozen, [x]).score(x), wanted, **CLOSE)


def test_models_that_begin_in_place_leave_the_data_alone() -> None:
    model, x = nn.Sequential(nn.ReLU(inplace=True), small_net()), noise(20, 3)
    wanted = linear_fit(nn.Sequential(nn.ReLU(), small_net()), [x], samples=4).score(x)
    method = linear_fit(model, [x], samples=4)
    for _ in range(2):
        torch.testing.assert_close(method.score(x), wanted, **CLOSE)
    assert torch.equal(x, noise(20, 3))


def test_models_made_in_inference_mode() -> None:
    with torch.inference_mode():
        model, x = small_net(), noise(20, 3)
        found = [linear_fit(model, [x], samples=samples).score(x) for samples in (None, 4)]
    model, x = small_net(), noise(20, 3)
    for score, samples in zip(found, (None, 4), strict=True):
        torch.testing.assert_close(score, linear_fit(model, [x], samples=samples).score(x))


def test_weights_are_the_models_own() -> None:
    """Changed in place, as by an optimiser: no copy of them is looked at."""
    model, x = small_net(), noise(20, 3)
    methods = [
        linear_fit(model, [x], samples=samples, last_layer=True) for samples in (None, 4)
    ]
    before = [method.score(x) for method in methods]
    with torch.no_grad():
        model[0].weight *= 2
    for method, old in zip(methods, before, strict=True):
        assert not torch.allclose(method.score(x), old)


def test_a_fit_needs_its_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    method = linear_fit(small_net(), [noise(20, 3)], samples=4)
    monkeypatch.setitem(sys.modules, "laplace", None)
    method.score(noise(2, 3))  # at weights that have been drawn
    with pytest.raises(MissingPeerError, match=r"pip install .*; then: pip install --no-deps"):
        method.fit([noise(20, 3)], progress=False)


# --- Layers without factors ----------------------------------------------------------------


class Used(nn.Module):
    """Two layers and a head, put together by a function."""

    def __init__(self, forward, head: int = 3, *, tied: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3).double(), nn.Linear(3, 3).double()
        self.head = nn.Linear(head, 2).double()
        self.function = forward
        if tied:
            self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.function(self, x))


def before_a_head(layer: nn.Module, size: int) -> nn.Module:
    return nn.Sequential(layer, nn.Flatten(), nn.Linear(size, 2)).double()


IMAGES = (4, 2, 3, 3)
WITHOUT = {
    "norm": (before_a_head(nn.BatchNorm1d(3), 3), (4, 3), r"0 \(BatchNorm1d with 3"),
    "conv1d": (before_a_head(nn.Conv1d(2, 2, 1), 6), (4, 2, 3), r"0 \(Conv1d"),
    "groups": (before_a_head(nn.Conv2d(2, 2, 1, groups=2), 18), IMAGES, "groups=2"),
    "circular": (
        before_a_head(nn.Conv2d(2, 1, 3, padding=1, padding_mode="circular"), 9),
        IMAGES,
        "padding_mode=circular",
    ),
    "single": (before_a_head(nn.Linear(1, 1, bias=False), 3), (4, 3, 1), r"0 \(Linear with"),
    "normed": (
        before_a_head(nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)), 3),
        (4, 3),
        r"0\.parametrizations\.weight \(ParametrizationList",
    ),
    "twice": (
        Used(lambda net, x: net.second(net.first(net.first(x)))),
        (4, 3),
        r"first \(Linear called 2 times\)",
    ),
    "unused": (
        Used(lambda net, x: net.second(x) + 0 * net.first(x).detach()),
        (4, 3),
        r"first \(Linear without influence",
    ),
    "regrouped": (
        Used(
            lambda net, x: net.second(net.first(x.flatten(0, 1)).reshape(x.shape)).flatten(1), 6
        ),
        (4, 2, 3),
        r"first \(Linear called with something else",
    ),
    "tied": (
        Used(lambda net, x: net.second(net.first(x)), tied=True),
        (4, 3),
        r"first \(Linear with weights in common",
    ),
}


@pytest.mark.parametrize("kind", WITHOUT)
def test_layers_without_factors_are_named_or_left_as_they_are(kind: str) -> None:
    model, shape, match = WITHOUT[kind]
    x = noise(*shape)
    with pytest.raises(OptionError, match=match) as caught:
        linear_fit(model.eval(), [x])
    assert "skip_unsupported=True" in str(caught.value)
    if kind == "normed":  # its weight is none of the model's own parameters for the oracle
        return
    method = linear_fit(model, [x], skip_unsupported=True)
    names = method._uncertain(method._state).names
    assert 0 < len(names) < len(list(model.parameters()))
    precision = dense_precision(model, x, Categorical(), 1.0, names)
    variances = dense_covariances(model, precision, x, names).diagonal(dim1=1, dim2=2)
    logits = model(x).detach() / (1 + math.pi * variances / 8).sqrt()
    found = method(x).output.log_softmax(1)
    torch.testing.assert_close(found, logits.log_softmax(1), rtol=1e-9, atol=1e-12)
    sampled = linear_fit(model, [x], skip_unsupported=True, samples=3)._ready()
    drawn = {key for key in sampled if key.startswith("samples:")}
    assert drawn == {f"samples:{name}" for name in names}


def test_nothing_but_layers_without_factors() -> None:
    method = KFACLaplace(nn.Conv1d(2, 2, 1), Gaussian(), skip_unsupported=True)
    with pytest.raises(OptionError, match=r"the model \(Conv1d.*\); compare with another"):
        method.fit([torch.zeros(3, 2, 4)], progress=False)


def test_a_model_without_gradients() -> None:
    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        @torch.no_grad()
        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x)

    with pytest.raises(OptionError, match="without influence on the output"):
        KFACLaplace(Constant(), Categorical()).fit([torch.zeros(3, 3)], progress=False)


def test_half_precision_is_refused() -> None:
    method = KFACLaplace(nn.Linear(3, 2).bfloat16(), Categorical())
    with pytest.raises(OptionError, match=r"Linear with .* in torch.bfloat16"):
        method.fit([torch.zeros(3, 3).bfloat16()], progress=False)


# --- Other refusals ------------------------------------------------------------------------


def test_several_variables_are_refused() -> None:
    for likelihood, model in [
        (Bernoulli(), small_net(2)),
        (Categorical(class_dim=1), nn.Sequential(small_net(6), nn.Unflatten(1, (2, 3)))),
    ]:
        with pytest.raises(BatchError, match="one variable"):
            KFACLaplace(model, likelihood).fit([noise(5, 3)], progress=False)


def test_training_data_must_have_finite_gradients() -> None:
    class Root(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.abs().sqrt()

    model = nn.Sequential(nn.Linear(3, 2, bias=False), Root()).double()
    with pytest.raises(NonFiniteError, match="Kronecker factors"):
        KFACLaplace(model, Gaussian()).fit([torch.zeros(2, 3).double()], progress=False)


def test_training_data_must_be_finite() -> None:
    x = noise(5, 3)
    x[3, 1] = torch.nan
    with pytest.raises(NonFiniteError, match=r"outputs.*row 3"):
        KFACLaplace(small_net(), Categorical()).fit([x], progress=False)


def test_options_out_of_range() -> None:
    for bad in (1, 0, -3):
        with pytest.raises(OptionError, match="two samples or more, or None"):
            KFACLaplace(small_net(), Categorical(), samples=bad)
    for bad in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(OptionError, match="positive, finite prior precisions"):
            KFACLaplace(nn.Linear(2, 1), Gaussian(), prior_precision=bad)


# --- Tuned by held-out targets -------------------------------------------------------------


@pytest.mark.parametrize("samples", [5, None])
@pytest.mark.parametrize("kind", ["categorical", "bernoulli", "gaussian", "scaled"])
def test_tuning_takes_what_predicts_the_targets_best(kind: str, samples: int | None) -> None:
    model, likelihood, data = network(kind), LIKELIHOODS[kind], training_data(kind)
    grid = [1e-3, 1.0, 3.0, 1e3]
    losses = []
    for precision in grid:
        method = KFACLaplace(model, likelihood, samples=samples, prior_precision=precision)
        method.fit(data, progress=False)
        losses.append(sum(by_distributions(method, x, y) for x, y in data[:3]))
    best = grid[losses.index(min(losses))]
    method = KFACLaplace(model, likelihood, samples=samples).fit(data, progress=False)
    assert method.tune(data[:3], grid, progress=False) is method
    assert math.isclose(method.chosen_precision, best)
    wanted = KFACLaplace(model, likelihood, samples=samples, prior_precision=best)
    wanted.fit(data, progress=False)
    assert torch.equal(method.score(some()), wanted.score(some()))


def by_distributions(method: KFACLaplace, x: Tensor, y: Tensor) -> float:
    """The negative log-likelihood of the targets, from what a call returns."""
    scored, likelihood = method(x), method.likelihood
    if isinstance(likelihood, Categorical):
        return float(-TorchCategorical(logits=scored.output).log_prob(y).sum())
    if isinstance(likelihood, Bernoulli):
        return float(-TorchBernoulli(logits=scored.output).log_prob(y).sum())
    with method._network.evaluating():
        variance = method._predict(method._network.inputs_of(x), method._state).variance
    torch.testing.assert_close(variance.sum(1), scored.score)
    return float(-Normal(scored.output, variance.sqrt()).log_prob(y).sum())


def test_targets_of_tuning() -> None:
    data = training_data("gaussian")
    method = KFACLaplace(network("gaussian"), Gaussian()).fit(data, progress=False)
    first = method.tune(data, progress=False).chosen_precision
    assert first in [float(value) for value in torch.tensor(GRID, dtype=torch.float64)]
    method.tune([(x, y[:, 0]) for x, y in data], progress=False)  # they may be flat
    assert method.chosen_precision == first
    with pytest.raises(BatchError, match=r"1 target\(s\) a sample.*shape \(6, 2\)"):
        method.tune([(some(), torch.zeros(6, 2))], progress=False)
    with pytest.raises(BatchError, match="6 targets beside"):
        method.tune([some()], progress=False)


def test_tuning_that_fails_changes_nothing() -> None:
    method = KFACLaplace(network("categorical"), Categorical(), samples=3)
    data = training_data("categorical")
    with pytest.raises(NotFittedError, match="fit"):
        method.tune(data)
    method.fit(data, progress=False)
    before = method.score(some())
    for loader, grid, error, match in [
        (iter(data), [1.0], OptionError, "more than once"),
        (data, [], OptionError, "positive, finite"),
        (data, [1.0, 0.0], OptionError, "positive, finite"),
        (data, [math.inf], OptionError, "positive, finite"),
        ([(data[0][0] * torch.nan, data[0][1])], [1.0], NonFiniteError, "validation"),
        ([], [1.0], BatchError, "batch"),
    ]:
        with pytest.raises(error, match=match):
            method.tune(loader, grid, progress=False)
    assert torch.equal(method.score(some()), before)


def test_precisions_that_cannot_be_computed_with_are_passed_over() -> None:
    """Weights of 1e19 make squares that overflow, then differences of infinities."""

    class Square(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.square() - 2 * x.square()

    model = nn.Sequential(nn.Linear(3, 4), Square(), nn.Linear(4, 1))
    data = [(torch.ones(5, 3), torch.zeros(5, 1))]
    method = KFACLaplace(model, Gaussian(), samples=3).fit(data, progress=False)
    method.tune(data, [1e-38, 1.0, 1e-38], progress=False)
    assert method.chosen_precision == 1.0


def test_what_was_tuned_is_saved(tmp_path: Path) -> None:
    model, data = network("categorical"), training_data("categorical")
    for samples in (None, 3):
        method = KFACLaplace(model, Categorical(), samples=samples).fit(data, progress=False)
        method.tune(data, [123.0], progress=False).save(tmp_path / "method")
        loaded = KFACLaplace.load(tmp_path / "method", model)
        assert loaded.chosen_precision == 123.0
        assert torch.equal(loaded.score(some()), method.score(some()))
        # and can be tuned again
        again = loaded.tune(data, [1.0], progress=False).score(some())
        assert torch.equal(again, method.tune(data, [1.0], progress=False).score(some()))


def test_its_defaults_tell_unseen_digits_from_known_ones() -> None:
    digits = load_digits()
    net = train(digits.train_x, digits.train_y)
    loader = DataLoader(TensorDataset(digits.train_x, digits.train_y), batch_size=100)
    method = KFACLaplace(net, Categorical()).fit(loader, progress=False)
    known, unseen = method.score(digits.test_x), method.score(digits.novel_x)
    assert separation(known, unseen, resamples=2).auroc > 0.9  # 0.5 is chance
