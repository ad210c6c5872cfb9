"""How the Laplace approximation chooses its prior precision: by evidence or held-out data."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributions import Bernoulli as TorchBernoulli
from torch.distributions import Categorical as TorchCategorical
from torch.distributions import Normal
from torch.utils.data import DataLoader, TensorDataset

from baseline_contracts import LIKELIHOODS, network, some, training_data
from laplace_oracles import dense_fisher_blocks, log_evidence
from scodkit import Bernoulli, Categorical, Gaussian
from scodkit.baselines.kfac_laplace import GRID, KFACLaplace
from scodkit.baselines.predictive import Predictive
from scodkit.baselines.prior_precision import excess_surprise, most_evident, surprise
from scodkit.errors import BatchError, NonFiniteError, NotFittedError, OptionError

KINDS = ("categorical", "bernoulli", "gaussian", "scaled")


def precision_of(method: KFACLaplace) -> float:
    return float(method._state["prior_precision"])


# --- Evidence ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_the_evidence_is_largest_among_all_on_a_grid(kind: str) -> None:
    model, data = network(kind), training_data(kind)
    x = torch.cat([x for x, _ in data])
    names = [name for name, _ in model.named_parameters()]
    fisher = torch.block_diag(*dense_fisher_blocks(model, x, LIKELIHOODS[kind], names))
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    chosen = precision_of(KFACLaplace(model, LIKELIHOODS[kind]).fit(data, progress=False))
    best = log_evidence(fisher, weights, chosen)
    grid = [chosen * factor for factor in (1e-4, 1e-2, 0.1, 0.5, 0.99, 1.01, 2, 10, 1e2, 1e4)]
    assert all(log_evidence(fisher, weights, other) < best for other in grid)
    # a thousandth away the evidence is lower by a millionth, by far more than it is rounded
    for other in (chosen * 1.001, chosen / 1.001):
        assert 1e-8 < best - log_evidence(fisher, weights, other) < 1e-2


@pytest.mark.parametrize("kind", ["categorical", "gaussian"])
def test_laplace_torch_finds_no_better_one(kind: str) -> None:
    laplace = pytest.importorskip("laplace")
    model, data = network(kind), training_data(kind)
    x, y = map(torch.cat, zip(*data, strict=True))
    task = "classification" if kind == "categorical" else "regression"
    peer = laplace.Laplace(
        copy.deepcopy(model), task, subset_of_weights="all", hessian_structure="kron"
    )
    peer.fit(DataLoader(TensorDataset(x, y), batch_size=8))
    chosen = precision_of(KFACLaplace(model, LIKELIHOODS[kind]).fit(data, progress=False))
    best = float(peer.log_marginal_likelihood(torch.tensor(chosen)))
    for other in torch.logspace(-3, 3, 61).double() * chosen:
        found = float(peer.log_marginal_likelihood(other))
        assert found <= best + 1e-9 * abs(best)


@settings(max_examples=15, deadline=None)
@given(
    logs=st.lists(st.floats(-20, 20), min_size=1, max_size=6),
    zeros=st.integers(0, 3),
    log_norm=st.floats(-20, 20),
)
def test_the_evidence_is_stationary_where_it_is_largest(
    logs: list[float], zeros: int, log_norm: float
) -> None:
    values = torch.tensor([*map(math.exp, logs), *[0.0] * zeros], dtype=torch.float64)
    squared_norm = math.exp(log_norm)
    found = most_evident(values, squared_norm)
    determined = float((values / (values + found)).sum())
    assert math.isclose(determined, found * squared_norm, rel_tol=1e-9)


def test_without_curvature_there_is_no_evidence() -> None:
    for values, norm in [
        (torch.zeros(3), 1.0),
        (torch.ones(3), 0.0),
        (torch.ones(3), math.inf),
    ]:
        with pytest.raises(NonFiniteError, match=r"prior_precision=1\.0"):
            most_evident(values, norm)


# --- Held-out targets ----------------------------------------------------------------------


@pytest.mark.parametrize("samples", [5, None])
@pytest.mark.parametrize("kind", KINDS)
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
    assert math.isclose(precision_of(method), best)
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


def test_negative_log_likelihoods_are_those_of_torch() -> None:
    generator = torch.Generator().manual_seed(0)
    output = torch.randn(5, 3, generator=generator, dtype=torch.float64)
    variance = output.exp()
    classes = torch.tensor([0, 2, 1, 1, 0])
    labels = (output > 0).double()
    for likelihood, targets, wanted in [
        (Categorical(), classes, TorchCategorical(logits=output).log_prob(classes)),
        (Categorical(), classes[:, None], TorchCategorical(logits=output).log_prob(classes)),
        (Bernoulli(), labels, TorchBernoulli(logits=output).log_prob(labels).sum(1)),
        (Bernoulli(), labels.long(), TorchBernoulli(logits=output).log_prob(labels).sum(1)),
        (Gaussian(), labels, Normal(output, variance.sqrt()).log_prob(labels).sum(1)),
    ]:
        predictive = Predictive(likelihood, output, variance)
        found = surprise(predictive, targets)
        torch.testing.assert_close(found, -wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_in_excess_of_the_best_is_never_negative(kind: str) -> None:
    likelihood, data = LIKELIHOODS[kind], training_data(kind)
    method = KFACLaplace(network(kind), likelihood).fit(data, progress=False)
    off = []
    for x, y in data:
        with method._network.evaluating():
            predictive = method._predict(method._network.inputs_of(x), method._ready())
        excess = excess_surprise(predictive, y)
        assert excess.min() >= 0
        off.append(surprise(predictive, y) - excess)
    torch.testing.assert_close(torch.cat(off), off[0][:1].expand(40), rtol=1e-12, atol=1e-12)


def test_weights_are_drawn_once_for_all_precisions(monkeypatch: pytest.MonkeyPatch) -> None:
    model, data, x = network("categorical"), training_data("categorical"), some()
    drawn: list[int] = []
    randn = torch.randn

    def counted(*args: object, **options: object) -> Tensor:
        numbers = randn(*args, **options)
        drawn.append(numbers.numel())
        return numbers

    monkeypatch.setattr(torch, "randn", counted)
    method = KFACLaplace(model, Categorical(), samples=7).fit(data, progress=False)
    method.tune(data, GRID, progress=False).score(x)
    method.score(x)
    assert sum(drawn) == 7 * sum(p.numel() for p in model.parameters())


def test_a_precision_is_given_up_once_another_is_better() -> None:
    model, batches = network("gaussian"), training_data("gaussian")

    class Counted:
        batches = 0

        def __iter__(self):
            for x, _ in batches:
                self.batches += 1
                yield x, model(x).detach()

    data = Counted()
    method = KFACLaplace(model, Gaussian()).fit(batches, progress=False)
    method.tune(data, [1e-9, 1e9], progress=False)
    assert precision_of(method) == 1e9
    assert data.batches == 5 + 1  # all for the second, one for the first
    data.batches = 0
    method.tune(data, [1e9, 1e9], progress=False)
    assert data.batches == 10


def test_targets_that_do_not_fit_are_refused() -> None:
    method = KFACLaplace(network("gaussian"), Gaussian())
    method.fit(training_data("gaussian"), progress=False)
    with pytest.raises(BatchError, match=r"1 target\(s\) a sample.*shape \(6, 2\)"):
        method.tune([(some(), torch.zeros(6, 2))], progress=False)
    with pytest.raises(BatchError, match="6 targets beside"):
        method.tune([some()], progress=False)


def test_one_target_per_sample_may_be_flat() -> None:
    method = KFACLaplace(network("gaussian"), Gaussian())
    data = training_data("gaussian")
    method.fit(data, progress=False).tune(data, progress=False)
    first = precision_of(method)
    method.tune([(x, y[:, 0]) for x, y in data], progress=False)
    assert precision_of(method) == first


def test_targets_are_picked() -> None:
    method = KFACLaplace(
        network("categorical"),
        Categorical(),
        targets=lambda batch: batch["deep"]["y"],
        inputs=lambda batch: batch["x"],
    )
    data = [{"x": x, "deep": {"y": y}} for x, y in training_data("categorical")]
    method.fit(data, progress=False).tune(data, [0.1, 1.0], progress=False)


def test_tuning_that_fails_changes_nothing() -> None:
    method = KFACLaplace(network("categorical"), Categorical())
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
    method = KFACLaplace(model, Gaussian()).fit(data, progress=False)
    method.tune(data, [1e-38, 1.0, 1e-38], progress=False)
    assert precision_of(method) == 1.0


def test_what_was_tuned_is_saved(tmp_path: Path) -> None:
    model, data = network("categorical"), training_data("categorical")
    method = KFACLaplace(model, Categorical()).fit(data, progress=False)
    method.tune(data, [123.0], progress=False).save(tmp_path / "method")
    loaded = KFACLaplace.load(tmp_path / "method", model)
    assert precision_of(loaded) == 123.0
    assert torch.equal(loaded.score(some()), method.score(some()))
    # and can be tuned again
    again = loaded.tune(data, [1.0], progress=False).score(some())
    assert torch.equal(again, method.tune(data, [1.0], progress=False).score(some()))


def test_the_default_grid_spans_eight_decades() -> None:
    assert GRID[0] == 1e-4
    assert GRID[-1] == 1e4
    assert 1.0 in GRID
    assert sorted(GRID) == list(GRID)


def test_a_given_precision_is_used() -> None:
    data = training_data("gaussian")
    method = KFACLaplace(network("gaussian"), Gaussian(), prior_precision=5.0)
    assert precision_of(method.fit(data, progress=False)) == 5.0
    for bad in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(OptionError, match="positive, finite prior precisions"):
            KFACLaplace(nn.Linear(2, 1), Gaussian(), prior_precision=bad)
