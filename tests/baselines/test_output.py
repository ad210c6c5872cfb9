"""Baselines that look at the output alone, and the squared length without a sketch."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.distributions import Bernoulli as TorchBernoulli
from torch.distributions import Categorical as TorchCategorical
from torch.distributions import Normal

from baseline_contracts import (
    LIKELIHOODS,
    OUTPUTS,
    BaselineContract,
    cases,
    network,
    parametrised,
    some,
)
from oracles import dense_factors
from scodkit import Bernoulli, Categorical, Gaussian, LastLayers, Monitor
from scodkit.baselines import Energy, IdentityCurvature, MaxLogit, MaxSoftmax, Naive
from scodkit.errors import BatchError, OptionError
from scodkit.likelihoods import HeteroscedasticGaussian, Likelihood
from scodkit.model.inputs import Inputs

EVERY = tuple(OUTPUTS)


def hot_energy(model: nn.Module, family: Likelihood) -> Energy:
    return Energy(model, family, temperature=2.0)


@parametrised(
    cases(Naive, "categorical", "bernoulli", "heteroscedastic", rises="unsure"),
    cases(Naive, "gaussian", "scaled", rises=""),
    cases(MaxSoftmax, "categorical", "bernoulli", rises="unsure"),
    cases(Energy, "categorical", rises="unsure"),
    cases(hot_energy, "categorical", rises="unsure"),
    cases(MaxLogit, "categorical", rises="unsure"),
    cases(IdentityCurvature, *EVERY),
)
class TestContract(BaselineContract):
    pass


def test_entropies_are_those_of_torch() -> None:
    output = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    pairs = [
        (Categorical(), TorchCategorical(logits=output).entropy()),
        (Bernoulli(), TorchBernoulli(logits=output).entropy().sum(1)),
        (Gaussian(4.0), Normal(output, 2.0).entropy().sum(1)),
        (Gaussian((1.0, 2.0, 3.0, 4.0)), None),
        (
            HeteroscedasticGaussian(),
            Normal(output[:, :2], (0.5 * output[:, 2:]).exp()).entropy().sum(1),
        ),
    ]
    spread = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64).sqrt().expand(5, 4)
    for likelihood, wanted in pairs:
        wanted = Normal(output, spread).entropy().sum(1) if wanted is None else wanted
        found = Naive(nn.Identity(), likelihood).score(output)
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_entropy_of_certain_predictions_is_zero() -> None:
    output = torch.tensor([[1e5, 0.0, -1e5]])
    assert Naive(nn.Identity(), Categorical()).score(output).tolist() == [0.0]
    assert Naive(nn.Identity(), Bernoulli()).score(output[:, [0, 2]]).tolist() == [0.0]


@pytest.mark.parametrize("family", [Bernoulli(), Categorical()], ids=str)
def test_entropies_keep_their_order_in_float32(family: Likelihood) -> None:
    """Where 1 - q is rounded away, twice the surer prediction still has the lower entropy."""
    margin = torch.linspace(0, 80, 641)
    outputs = {1.0: margin, -1.0: -margin}
    found = []
    for z in outputs.values():
        output = z[:, None] if isinstance(family, Bernoulli) else torch.stack([z, -0 * z], 1)
        found.append(Naive(nn.Identity(), family).score(output))
        wanted = Naive(nn.Identity(), family).score(output.double())
        torch.testing.assert_close(found[-1].double(), wanted, rtol=2e-5, atol=1e-38)
        assert (found[-1].diff() < 0).all()
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("method", [Naive, MaxSoftmax, Energy, MaxLogit])
def test_half_precision_ties_nothing_more_than_it_must(method: type) -> None:
    logits = torch.linspace(-3, 3, 50)[:, None] * torch.tensor([1.0, -0.4, 0.3])
    found = method(nn.Identity(), Categorical()).score(logits.bfloat16())
    assert found.dtype == torch.float32
    coarse = method(nn.Identity(), Categorical()).score(logits.bfloat16().float())
    assert torch.equal(found, coarse)


@pytest.mark.parametrize(
    ("likelihood", "outputs", "said"),
    [
        (HeteroscedasticGaussian(), 3, "even number"),
        (HeteroscedasticGaussian(), 1, "even number"),
        (Gaussian((0.5, 2.0)), 3, "expected 2 outputs"),
    ],
)
def test_outputs_that_do_not_fit_are_refused(
    likelihood: Likelihood, outputs: int, said: str
) -> None:
    with pytest.raises(BatchError, match=said):
        Naive(nn.Identity(), likelihood).score(torch.zeros(2, outputs))


def test_entropy_of_maps_is_the_sum_over_positions() -> None:
    output = torch.randn(2, 3, 4, 5, dtype=torch.float64)
    wanted = TorchCategorical(logits=output.movedim(1, -1)).entropy().sum((1, 2))
    found = Naive(nn.Identity(), Categorical(class_dim=1)).score(output)
    torch.testing.assert_close(found, wanted)


def test_max_softmax_tells_confident_predictions_apart() -> None:
    # in float32, 1 - q is zero from a margin of 17 on
    found = MaxSoftmax(nn.Identity(), Categorical()).score(torch.tensor([[20.0, 0], [30.0, 0]]))
    assert found[0] > found[1] > 0
    torch.testing.assert_close(found, torch.tensor([math.exp(-20.0), math.exp(-30.0)]))


def test_one_logit_is_two_classes() -> None:
    z = torch.tensor([[-2.0], [0.5]])
    found = MaxSoftmax(nn.Identity(), Bernoulli()).score(z)
    torch.testing.assert_close(found, torch.minimum(z.sigmoid(), (-z).sigmoid())[:, 0])


@pytest.mark.parametrize("method", [MaxSoftmax, MaxLogit, Energy])
def test_several_variables_are_refused(method: type) -> None:
    with pytest.raises(BatchError, match="one variable"):
        method(nn.Identity(), Categorical(class_dim=1)).score(torch.zeros(2, 3, 4))


def test_several_logits_are_refused() -> None:
    with pytest.raises(BatchError, match="one variable"):
        MaxSoftmax(nn.Identity(), Bernoulli()).score(torch.zeros(2, 3))


def test_energy_of_one_temperature_is_not_that_of_another() -> None:
    x = torch.tensor([[1.0, 2.0]])
    hot = Energy(nn.Identity(), Categorical(), temperature=4.0).score(x)
    torch.testing.assert_close(hot, -4 * (x / 4).exp().sum(1).log())
    for bad in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(OptionError, match="temperature"):
            Energy(nn.Identity(), Categorical(), temperature=bad)


@pytest.mark.parametrize("kind", EVERY)
def test_identity_curvature_is_the_dense_squared_length(kind: str) -> None:
    model, x = network(kind), some()
    rows = dense_factors(model, Inputs((x,), {}), LIKELIHOODS[kind])
    found = IdentityCurvature(model, LIKELIHOODS[kind]).score(x)
    torch.testing.assert_close(found, rows.square().sum((1, 2)), rtol=1e-9, atol=1e-12)


def test_identity_curvature_is_a_monitor_without_data() -> None:
    """With little data and a small prior, the data determines nothing."""
    model, x = network("categorical"), some()
    monitor = Monitor(model, Categorical(), rank=5, prior_scale=1e-6)
    monitor.fit([some(seed=9)], progress=False)
    found = IdentityCurvature(model, Categorical()).score(x)
    torch.testing.assert_close(monitor.score(x) / 1e-12, found, rtol=1e-6, atol=0.0)


def test_a_part_of_the_weights_gives_a_part_of_the_length() -> None:
    model, x = network("categorical"), some()
    both = [LastLayers(count=1), lambda name, _: not name.startswith("5.")]
    parts = [IdentityCurvature(model, Categorical(), parameters=p).score(x) for p in both]
    torch.testing.assert_close(sum(parts), IdentityCurvature(model, Categorical()).score(x))


def test_a_choice_that_needs_a_batch_is_settled_before_saving(tmp_path) -> None:
    model = network("categorical")
    method = IdentityCurvature(model, Categorical(), parameters=LastLayers(count=1))
    assert "LastLayers" in repr(method)
    with pytest.raises(OptionError, match="before saving"):
        method.save(tmp_path / "method")
    wanted = method.score(some())
    method.save(tmp_path / "method")
    loaded = IdentityCurvature.load(tmp_path / "method", model)
    assert torch.equal(loaded.score(some()), wanted)
