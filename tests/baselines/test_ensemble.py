"""Deep ensembles, against explicit mixtures, one network after the other."""

from __future__ import annotations

import copy
import math
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributions import Bernoulli as TorchBernoulli
from torch.distributions import Categorical as TorchCategorical
from torch.distributions import MixtureSameFamily, Normal

from baseline_contracts import (
    LIKELIHOODS,
    OUTPUTS,
    BaselineContract,
    cases,
    network,
    parametrised,
    some,
)
from draws import noise
from scodkit import Bernoulli, Categorical, Gaussian
from scodkit.baselines import deep_ensemble
from scodkit.baselines.deep_ensemble import DeepEnsemble
from scodkit.baselines.predictions import mixture
from scodkit.errors import BatchError, EngineFallbackWarning, OptionError
from scodkit.likelihoods import HeteroscedasticGaussian, Likelihood

EVERY = tuple(OUTPUTS)
EXACT = {"rtol": 1e-12, "atol": 1e-12}


def members(kind: str, count: int = 3) -> list[nn.Module]:
    return [network(kind, seed=seed) for seed in range(count)]


@parametrised(
    cases(DeepEnsemble, "categorical", "bernoulli", model=members, rises="unsure"),
    cases(DeepEnsemble, "gaussian", "scaled", "heteroscedastic", model=members),
)
class TestContract(BaselineContract):
    pass


# --- The mixture ---------------------------------------------------------------------------


def equal_mixture(outputs: Tensor, scale: Tensor) -> MixtureSameFamily:
    """The mixture of Gaussians of each output, components last: outputs (K, B, d)."""
    weights = TorchCategorical(torch.ones(*outputs.shape[1:], len(outputs)).double())
    return MixtureSameFamily(weights, Normal(outputs.movedim(0, -1), scale.movedim(0, -1)))


def by_distributions(likelihood: Likelihood, outputs: Tensor) -> tuple[Tensor, Tensor]:
    """Mean prediction, as probabilities or moments, and the score."""
    if isinstance(likelihood, Categorical):
        mean = sum(TorchCategorical(logits=own).probs for own in outputs) / len(outputs)
        return mean, TorchCategorical(probs=mean).entropy()
    if isinstance(likelihood, Bernoulli):
        mean = sum(TorchBernoulli(logits=own).probs for own in outputs) / len(outputs)
        return mean, TorchBernoulli(probs=mean).entropy().sum(1)
    if isinstance(likelihood, HeteroscedasticGaussian):
        means, logs = outputs.chunk(2, dim=2)
        both = equal_mixture(means, (0.5 * logs).exp())
        return torch.cat([both.mean, both.variance.log()], 1), both.variance.sum(1)
    variance = torch.as_tensor(likelihood.variance, dtype=torch.float64)
    both = equal_mixture(outputs, variance.sqrt().expand_as(outputs))
    return both.mean, both.variance.sum(1)


def as_probabilities(likelihood: Likelihood, output: Tensor) -> Tensor:
    if isinstance(likelihood, Categorical):
        return output.softmax(1)
    return output.sigmoid() if isinstance(likelihood, Bernoulli) else output


@pytest.mark.parametrize("kind", EVERY)
@settings(max_examples=15, deadline=None)
@given(
    count=st.integers(2, 5),
    batch=st.integers(1, 4),
    scale=st.sampled_from([0.1, 1.0, 10.0]),
    seed=st.integers(0, 99),
)
def test_mixtures_are_those_of_torch(
    kind: str, count: int, batch: int, scale: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    outputs = scale * torch.randn(count, batch, 4, generator=generator, dtype=torch.float64)
    likelihood = Gaussian((0.5, 1.0, 2.0, 3.0)) if kind == "scaled" else LIKELIHOODS[kind]
    mean, score = by_distributions(likelihood, outputs)
    found = mixture(likelihood, outputs)
    close = {"rtol": 1e-9, "atol": 1e-11}
    torch.testing.assert_close(as_probabilities(likelihood, found.output), mean, **close)
    torch.testing.assert_close(found.score, score, **close)


@pytest.mark.parametrize("kind", EVERY)
def test_an_ensemble_is_the_mixture_of_its_networks(kind: str) -> None:
    models, x = members(kind), some()
    outputs = torch.stack([model(x).detach() for model in models])
    mean, score = by_distributions(LIKELIHOODS[kind], outputs)
    found = DeepEnsemble(models, LIKELIHOODS[kind])(x)
    torch.testing.assert_close(
        as_probabilities(LIKELIHOODS[kind], found.output), mean, rtol=1e-9, atol=1e-12
    )
    torch.testing.assert_close(found.score, score, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", EVERY)
def test_equal_networks_are_one_network(kind: str) -> None:
    model, x = network(kind), some()
    scored = DeepEnsemble([model, copy.deepcopy(model)], LIKELIHOODS[kind])(x)
    own = model(x).detach()
    if kind == "categorical":
        own = own.log_softmax(1)
    torch.testing.assert_close(scored.output, own, rtol=1e-9, atol=1e-12)


def test_confident_networks_keep_their_precision() -> None:
    """Probabilities of 1e-44 do not fit float32, nor does their logit by way of them."""
    outputs = torch.tensor([[[100.0, 0.0]], [[100.0, -300.0]]])
    found = mixture(Categorical(), outputs)
    torch.testing.assert_close(
        found.output, torch.tensor([[0.0, -100.0 - math.log(2)]]), rtol=1e-6, atol=1e-6
    )
    assert 0 <= float(found.score) < 1e-40
    found = mixture(Bernoulli(), outputs[:, :, :1])
    torch.testing.assert_close(found.output, torch.tensor([[100.0]]))
    # even odds of certainties: the most uncertain there is
    found = mixture(Bernoulli(), torch.tensor([[[200.0]], [[-200.0]]]))
    torch.testing.assert_close(found.score, torch.tensor([math.log(2)]))


def test_large_means_do_not_hide_small_variances() -> None:
    outputs = 1e6 + torch.tensor([[[0.0]], [[2.0]]])
    assert mixture(Gaussian(0.5), outputs).score.tolist() == [1.5]


def test_maps_are_summed_over_positions() -> None:
    generator = torch.Generator().manual_seed(0)
    outputs = torch.randn(3, 2, 4, 5, 6, generator=generator, dtype=torch.float64)
    mean = outputs.softmax(2).mean(0)
    wanted = TorchCategorical(probs=mean.movedim(1, -1)).entropy().sum((1, 2))
    found = mixture(Categorical(class_dim=1), outputs)
    torch.testing.assert_close(found.score, wanted, **EXACT)
    torch.testing.assert_close(found.output.softmax(1), mean, **EXACT)
    last = mixture(Categorical(class_dim=-1), outputs.movedim(2, -1))
    torch.testing.assert_close(last.score, wanted, **EXACT)
    torch.testing.assert_close(last.output, found.output.movedim(1, -1), **EXACT)


def test_maps_of_means_and_variances() -> None:
    generator = torch.Generator().manual_seed(0)
    outputs = torch.randn(3, 2, 4, 5, generator=generator, dtype=torch.float64)
    means, logs = outputs[:, :, :2], outputs[:, :, 2:]
    total = means.var(0, correction=0) + logs.exp().mean(0)
    found = mixture(HeteroscedasticGaussian(), outputs)
    torch.testing.assert_close(found.score, total.sum((1, 2)), **EXACT)
    torch.testing.assert_close(found.output, torch.cat([means.mean(0), total.log()], 1))
    plain = mixture(Gaussian(0.25), means)
    torch.testing.assert_close(
        plain.score, means.var(0, correction=0).sum((1, 2)) + 10 * 0.25, **EXACT
    )


def test_outputs_that_do_not_fit_the_likelihood_are_refused() -> None:
    with pytest.raises(BatchError, match="even number"):
        mixture(HeteroscedasticGaussian(), torch.zeros(2, 3, 5))
    with pytest.raises(BatchError, match="2 outputs, one per variance"):
        mixture(Gaussian((1.0, 2.0)), torch.zeros(2, 3, 5))
    with pytest.raises(BatchError, match="class_dim"):
        mixture(Categorical(), torch.zeros(2, 3, 5, 6))


# --- All networks at once ------------------------------------------------------------------


class Remembers(nn.Module):
    """Keeps a running statistic that eval mode changes, which it should not."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2).double()
        self.norm = nn.BatchNorm1d(2).double()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return self.norm(self.layer(x))


def linear_members(count: int = 3) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(3, 2).double() for _ in range(count)]


def passes_of(method: DeepEnsemble, model: nn.Module, x: Tensor) -> int:
    """How often a network's own hooks are called for a batch."""
    ran = []
    handle = model.register_forward_hook(lambda *_: ran.append(1))
    method.score(x)
    handle.remove()
    return len(ran)


def test_small_batches_are_run_at_once_and_large_ones_one_by_one() -> None:
    models = linear_members()
    method = DeepEnsemble(models, Categorical())
    small, large = noise(85, 3), noise(86, 3)  # times 3 networks: 255 and 258
    method.score(small)
    assert passes_of(method, models[1], small) == 0
    assert passes_of(method, models[1], large) == 1
    torch.testing.assert_close(
        method.score(large)[:85], method.score(large[:85]), rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("batch", [2, 300])
def test_new_weights_are_noticed(batch: int) -> None:
    models, x = linear_members(), noise(batch, 3)
    method = DeepEnsemble(models, Categorical())
    method.score(x)
    others = [nn.Linear(3, 2).double() for _ in models]
    wanted = DeepEnsemble(others, Categorical()).score(x)
    for model, other in zip(models, others, strict=True):
        model.load_state_dict(other.state_dict())
    torch.testing.assert_close(method.score(x), wanted, **EXACT)
    models[1].weight = nn.Parameter(models[1].weight * 2)
    assert not torch.allclose(method.score(x), wanted)


def test_buffers_are_each_networks_own_and_left_as_found() -> None:
    models = [Remembers(), Remembers()]
    models[0].norm.running_mean += 5.0
    before = [copy.deepcopy(model.state_dict()) for model in models]
    with torch.no_grad():
        outputs = torch.stack([copy.deepcopy(m).eval()(noise(4, 3)) for m in models])
    method = DeepEnsemble(models, Gaussian())
    for x in (noise(4, 3), noise(300, 3)):
        method.score(x)
    torch.testing.assert_close(
        method(noise(4, 3)).score, by_distributions(Gaussian(), outputs)[1], **EXACT
    )
    for model, state in zip(models, before, strict=True):
        assert all(
            torch.equal(value, state[name]) for name, value in model.state_dict().items()
        )


def same_as_one_by_one(models: list[nn.Module], x: Tensor, reason: str) -> None:
    method = DeepEnsemble(models, Gaussian())
    with pytest.warns(EngineFallbackWarning, match=reason):
        found = method.score(x)
    with torch.no_grad():
        outputs = torch.stack([model(x) for model in models])
    torch.testing.assert_close(found, mixture(Gaussian(), outputs).score, **EXACT)
    method.score(x)  # said once: warnings are errors here


def test_other_architectures_are_run_one_by_one() -> None:
    layers = [nn.Linear(3, 2).double(), nn.Linear(3, 2, bias=False).double()]
    same_as_one_by_one(layers, noise(4, 3), "differ in name, shape or dtype")


def test_other_functions_of_the_same_weights_are_run_one_by_one() -> None:
    layers = [nn.Sequential(nn.Linear(3, 2), kind()).double() for kind in (nn.Tanh, nn.ReLU)]
    same_as_one_by_one(layers, noise(4, 3), "off, relative")


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2).double()

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return y if bool(y.sum() > 0) else -y


def test_what_cannot_be_vectorised_is_run_one_by_one() -> None:
    same_as_one_by_one([Branches(), Branches()], noise(1, 3), "it raised")


def test_a_first_batch_of_nan_decides_nothing() -> None:
    models = linear_members()
    method = DeepEnsemble(models, Categorical())
    assert method.score(torch.full((2, 3), torch.nan).double()).tolist() == [torch.inf] * 2
    method.score(noise(4, 3))
    assert passes_of(method, models[1], noise(4, 3)) == 0


@pytest.mark.parametrize("batch", [2, 300])
def test_networks_that_begin_in_place_do_not_disturb_each_other(batch: int) -> None:
    models = [nn.Sequential(nn.Tanh(), model) for model in linear_members()]
    changed = copy.deepcopy(models)
    for model in changed:
        model[0].forward = torch.tanh_
    x = noise(batch, 3)
    wanted = DeepEnsemble(models, Categorical()).score(x)
    found = DeepEnsemble(changed, Categorical()).score(x)
    torch.testing.assert_close(found, wanted, **EXACT)
    assert torch.equal(x, noise(batch, 3))


def test_inputs_and_outputs_are_picked_for_every_network() -> None:
    class Named(nn.Module):
        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor, shift: Tensor) -> dict[str, Tensor]:
            return {"out": self.layer(x) + shift}

    models, x, shift = linear_members(), noise(4, 3), noise(4, 1)
    method = DeepEnsemble(
        [Named(model) for model in models],
        Gaussian(),
        inputs=lambda batch: (batch["x"], batch["s"]),
        outputs=lambda out: out["out"],
    )
    wanted = DeepEnsemble(models, Gaussian())(x)
    for repeat in (1, 100):
        scored = method({"x": x.repeat(repeat, 1), "s": shift.repeat(repeat, 1)})
        torch.testing.assert_close(scored.score, wanted.score.repeat(repeat), **EXACT)
        torch.testing.assert_close(scored.output[:4], wanted.output + shift, **EXACT)


def test_all_networks_are_moved() -> None:
    models = linear_members()
    method = DeepEnsemble(models, Categorical())
    models[1].to("meta")
    with pytest.raises(OptionError, match=r"one device, got them on cpu, meta; type \.to"):
        method.score(noise(4, 3))
    method.to("meta")
    assert {p.device.type for model in models for p in model.parameters()} == {"meta"}


# --- Refusals ------------------------------------------------------------------------------


def test_less_than_two_networks_are_refused() -> None:
    model = nn.Linear(3, 2)
    for models, match in [
        (model, "a list of two or more trained networks, .* got Linear, of which 1 differ"),
        (nn.Sequential(model, nn.Tanh()), "got Sequential, of which 1 differ"),
        ([], "got none, of which 0 differ"),
        ([model], "got Linear, of which 1 differ"),
        ([model, model], "got Linear, Linear, of which 1 differ"),
        ([model, "another"], "got Linear, str, of which 1 differ"),
    ]:
        with pytest.raises(OptionError, match=match):
            DeepEnsemble(models, Categorical())  # type: ignore[arg-type]


def test_a_module_list_is_a_list() -> None:
    models = linear_members()
    found = DeepEnsemble(nn.ModuleList(models), Categorical()).score(noise(4, 3))
    assert torch.equal(found, DeepEnsemble(models, Categorical()).score(noise(4, 3)))


def test_networks_that_predict_other_things_are_refused() -> None:
    models = [nn.Linear(3, 2), nn.Linear(3, 4)]
    with pytest.raises(BatchError, match=r"one shape.*got \(2,\), \(4,\)"):
        DeepEnsemble(models, Categorical()).score(torch.zeros(5, 3))


def test_the_limit_is_on_samples_times_networks() -> None:
    assert deep_ensemble._TOGETHER == 256  # what the tests above are made for


def test_ensembles_that_share_networks_do_not_wait_for_each_other() -> None:
    models = [network("gaussian", seed=s) for s in range(2)]
    orders = (models, models[::-1])
    found: list[Tensor] = []

    def score(members: list[nn.Module]) -> None:
        method = DeepEnsemble(members, Gaussian())
        found.extend(method.score(some()) for _ in range(30))

    threads = [threading.Thread(target=score, args=(o,), daemon=True) for o in orders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert len(found) == 60
