"""The Kronecker-factored Laplace approximation, against dense matrices."""

from __future__ import annotations

import copy
import itertools
import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from baseline_contracts import (
    LIKELIHOODS,
    OUTPUTS,
    BaselineContract,
    cases,
    network,
    parametrised,
    some,
    training_data,
)
from laplace_oracles import dense_covariances, dense_precision, factors_of
from scodkit import Bernoulli, Categorical, Gaussian
from scodkit.baselines.entropy import entropy
from scodkit.baselines.kfac_laplace import KFACLaplace
from scodkit.baselines.kronecker import Block
from scodkit.likelihoods import Likelihood

KINDS = ("categorical", "bernoulli", "gaussian", "scaled")
PRIOR = 0.7


def method_of(**options: object):
    return lambda model, likelihood: KFACLaplace(model, likelihood, **options)


@parametrised(
    cases(method_of(), "categorical", "bernoulli", rises="unsure"),
    cases(method_of(), "gaussian", "scaled"),
    cases(method_of(samples=None), "categorical", "bernoulli", rises="unsure"),
    cases(method_of(samples=None), "gaussian", "scaled"),
    cases(method_of(last_layer=True), "categorical", rises="unsure"),
    cases(method_of(last_layer=True, samples=None, prior_precision=2.0), "gaussian"),
)
class TestContract(BaselineContract):
    pass


def names_of(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_parameters()]


def fitted(
    model: nn.Module, likelihood: Likelihood, x: Tensor, **options: object
) -> KFACLaplace:
    options = {"prior_precision": PRIOR, **options}
    return KFACLaplace(model, likelihood, **options).fit(x.split(8), progress=False)


def probabilities(likelihood: Likelihood, output: Tensor) -> Tensor:
    return output.softmax(1) if isinstance(likelihood, Categorical) else output.sigmoid()


def linearised_by_hand(
    model: nn.Module, likelihood: Likelihood, x: Tensor, covariances: Tensor
) -> tuple[Tensor, Tensor]:
    """Mean prediction and score, from dense covariances of the outputs."""
    output = model(x).detach()
    variances = covariances.diagonal(dim1=1, dim2=2)
    if isinstance(likelihood, Gaussian):
        noise = torch.as_tensor(likelihood.variance).double().expand(output.shape[1])
        return output, covariances.diagonal(dim1=1, dim2=2).sum(1) + noise.sum()
    logits = output / (1 + math.pi * variances / 8).sqrt()
    mean = probabilities(likelihood, logits)
    each = -mean * mean.log()
    if isinstance(likelihood, Bernoulli):
        each = each - (1 - mean) * (1 - mean).log()
    return logits, each.sum(1)


# --- Linearised ----------------------------------------------------------------------------


@pytest.mark.parametrize("last_layer", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_linearised_predictions_are_those_of_dense_matrices(
    kind: str, last_layer: bool
) -> None:
    model, likelihood = network(kind), LIKELIHOODS[kind]
    data = torch.cat([x for x, _ in training_data(kind)])
    names = [name for name in names_of(model) if not last_layer or name.startswith("5.")]
    precision = dense_precision(model, data, likelihood, PRIOR, names)
    covariances = dense_covariances(model, precision, some(), names)
    output, score = linearised_by_hand(model, likelihood, some(), covariances)
    method = fitted(model, likelihood, data, samples=None, last_layer=last_layer)
    scored = method(some())
    torch.testing.assert_close(scored.output, output, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(scored.score, score, rtol=1e-10, atol=1e-12)


@settings(max_examples=15, deadline=None)
@given(
    channels=st.tuples(st.integers(1, 2), st.integers(1, 3)),
    kernel=st.tuples(st.integers(1, 3), st.integers(1, 2)),
    stride=st.integers(1, 2),
    padding=st.tuples(st.integers(0, 1), st.integers(0, 1)),
    dilation=st.integers(1, 2),
    bias=st.booleans(),
    batch=st.integers(1, 7),
)
def test_factors_of_convolutions(
    channels: tuple[int, int],
    kernel: tuple[int, int],
    stride: int,
    padding: tuple[int, int],
    dilation: int,
    bias: bool,
    batch: int,
) -> None:
    assume(bias or math.prod(channels + kernel) > 1)  # a single weight is refused
    torch.manual_seed(0)
    layer = nn.Conv2d(*channels, kernel, stride, padding, dilation, bias=bias)
    model = nn.Sequential(layer, nn.Tanh(), nn.Flatten(), nn.LazyLinear(2)).double()
    data = torch.randn(7, channels[0], 5, 4, dtype=torch.float64)
    model(data)
    state = (
        KFACLaplace(model, Categorical(), prior_precision=1.0, samples=None)
        .fit(data.split(batch), progress=False)
        ._state
    )
    for name, owner in (("0.weight", layer), ("3.weight", model[3])):
        a, g = factors_of(model, owner, data, Categorical())
        found = dense_product(state, name)
        torch.testing.assert_close(found, torch.kron(g, a), rtol=1e-10, atol=1e-12)
    if bias:
        _, g = factors_of(model, layer, data, Categorical())
        torch.testing.assert_close(dense_product(state, "0.bias"), g, rtol=1e-10, atol=1e-12)


def dense_product(state: dict[str, Tensor], name: str) -> Tensor:
    """The Kronecker product that a state's eigenpairs stand for."""
    parts = []
    for side in ("output", "input"):
        vectors, values = state[f"{side}_vectors:{name}"], state[f"{side}_values:{name}"]
        parts.append(vectors @ values.diag() @ vectors.T)
    return torch.kron(*parts)


@settings(max_examples=15, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 4), min_size=2, max_size=4),
    positions=st.lists(st.integers(1, 3), max_size=2),
    batch=st.integers(1, 5),
)
def test_factors_of_linear_layers(sizes: list[int], positions: list[int], batch: int) -> None:
    """Also of those that take several positions of a sample."""
    torch.manual_seed(1)
    layers = [
        part for i, o in itertools.pairwise(sizes) for part in (nn.Linear(i, o), nn.Tanh())
    ]
    model = nn.Sequential(*layers).double()
    data = torch.randn(5, *positions, sizes[0], dtype=torch.float64)
    likelihood = Gaussian(0.3)
    method = KFACLaplace(model, likelihood, prior_precision=1.0, samples=None)
    state = method.fit(data.split(batch), progress=False)._state
    for name in names_of(model):
        a, g = factors_of(model, model[int(name[0])], data, likelihood)
        wanted = torch.kron(g, a) if name.endswith("weight") else g
        torch.testing.assert_close(dense_product(state, name), wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("last_layer", [False, True])
@pytest.mark.parametrize("kind", ["classification", "regression"])
def test_it_is_what_laplace_torch_itself_gives(kind: str, last_layer: bool) -> None:
    case = "categorical" if kind == "classification" else "gaussian"
    likelihood = Categorical() if kind == "classification" else Gaussian(0.3)
    model = network(case)
    x, y = map(torch.cat, zip(*training_data(case), strict=True))
    method = fitted(model, likelihood, x, samples=None, last_layer=last_layer)
    laplace = pytest.importorskip("laplace")
    peer = laplace.Laplace(
        copy.deepcopy(model),
        kind,
        subset_of_weights="last_layer" if last_layer else "all",
        hessian_structure="kron",
        prior_precision=PRIOR,
        **({"sigma_noise": math.sqrt(0.3)} if kind == "regression" else {}),
    )
    peer.fit(DataLoader(TensorDataset(x, y), batch_size=7))
    if kind == "classification":
        wanted = entropy(Categorical(), peer(some()).log())
    else:
        wanted = peer(some())[1].flatten() + 0.3
    torch.testing.assert_close(method.score(some()), wanted, rtol=1e-10, atol=1e-12)


def test_directions_come_in_pieces_where_memory_is_short() -> None:
    model, data = network("scaled"), torch.cat([x for x, _ in training_data("scaled")])
    method = fitted(model, LIKELIHOODS["scaled"], data, samples=None)
    wanted = method.score(some())
    method.memory_budget = 1
    method._last_source = None
    torch.testing.assert_close(method.score(some()), wanted, rtol=1e-12, atol=0)


def test_layers_too_large_to_be_read_together() -> None:
    """Rows of large layers come apart from those of their neighbours."""
    torch.manual_seed(0)
    layers = [nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 3), nn.Tanh(), nn.Linear(3, 2)]
    model = nn.Sequential(*layers).double()
    data = torch.randn(60, 40, dtype=torch.float64)
    names = names_of(model)
    precision = dense_precision(model, data, Gaussian(), PRIOR, names)
    wanted = dense_covariances(model, precision, data, names).diagonal(dim1=1, dim2=2).sum(1)
    found = fitted(model, Gaussian(), data, samples=None).score(data) - 2.0
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


# --- Sampled -------------------------------------------------------------------------------


def test_drawn_weights_have_the_posterior_as_their_distribution() -> None:
    """4000 draws; each entry of the covariance within 6 of its standard errors."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 2)).double()
    data = torch.randn(20, 3, dtype=torch.float64)
    names = names_of(model)
    precision = dense_precision(model, data, Categorical(), PRIOR, names)
    wanted = precision.inverse()
    count = 4000
    state = fitted(model, Categorical(), data, samples=count)._ready()
    drawn = torch.cat([state[f"samples:{name}"].flatten(1) for name in names], dim=1)
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    spread = wanted.diagonal()
    errors = ((spread[:, None] * spread + wanted.square()) / count).sqrt()
    off = drawn - weights
    assert ((off.T @ off / count - wanted).abs() < 6 * errors).all()
    assert (off.mean(0).abs() < 6 * (spread / count).sqrt()).all()
    # not a diagonal one, which would pass as well if the entries were small
    assert (wanted.abs() > 12 * errors).sum() > len(weights)


def test_sampled_variance_of_a_linear_model_is_the_linearised_one() -> None:
    """4000 draws: the variance of a Gaussian within 6 sqrt(2 / 4000), relative."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2).double()
    data = torch.randn(20, 4, dtype=torch.float64)
    x = torch.randn(3, 4, dtype=torch.float64)
    exact = fitted(model, Gaussian(0.5), data, samples=None).score(x) - 1.0
    found = fitted(model, Gaussian(0.5), data, samples=4000).score(x) - 1.0
    assert ((found - exact).abs() / exact < 6 * math.sqrt(2 / 4000)).all()


@pytest.mark.parametrize("last_layer", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_sampled_predictions_are_averages_over_the_drawn_weights(
    kind: str, last_layer: bool
) -> None:
    model, likelihood = network(kind), LIKELIHOODS[kind]
    data = torch.cat([x for x, _ in training_data(kind)])
    method = fitted(model, likelihood, data, samples=5, last_layer=last_layer)
    x = some(60)  # times 5: more than are run at once
    outputs = []
    for k in range(5):
        other = copy.deepcopy(model)
        for name, parameter in other.named_parameters():
            if f"samples:{name}" in method._ready():
                parameter.data.copy_(method._ready()[f"samples:{name}"][k])
        outputs.append(other(x).detach())
    both = torch.stack(outputs)
    if isinstance(likelihood, Gaussian):
        noise = torch.as_tensor(likelihood.variance).double().expand(OUTPUTS[kind])
        mean, score = both.mean(0), (both.var(0, correction=0) + noise).sum(1)
    else:
        mean = probabilities(likelihood, both.flatten(0, 1)).reshape(both.shape).mean(0)
        full = mean if kind == "categorical" else torch.cat([mean, 1 - mean], 1)
        score = -(full * full.log()).sum(1)
    for count in (2, 60):
        scored = method(x[:count])
        found = scored.output
        if not isinstance(likelihood, Gaussian):
            found = probabilities(likelihood, found)
        torch.testing.assert_close(found, mean[:count], rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(scored.score, score[:count], rtol=1e-10, atol=1e-12)


def test_draws_do_not_depend_on_the_signs_of_eigenvectors() -> None:
    """Which another machine may choose otherwise."""
    values = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    vectors = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64)).Q
    signs = torch.tensor([1.0, -1.0, -1.0], dtype=torch.float64)
    noise, prior = torch.randn(4, 9, dtype=torch.float64), torch.tensor(0.5).double()
    first = Block(vectors, values, vectors, values)
    second = Block(vectors * signs, values, vectors, values)
    first, second = (own.deviations(own.turned(noise), prior) for own in (first, second))
    torch.testing.assert_close(second, first, rtol=1e-12, atol=1e-12)


def test_the_state_lies_in_memory_as_it_will_after_a_file() -> None:
    """Products of matrices that lie otherwise may be rounded otherwise."""
    data = torch.cat([x for x, _ in training_data("gaussian")])
    state = fitted(network("gaussian"), Gaussian(), data)._ready()
    assert all(tensor.is_contiguous() for tensor in state.values())


def test_another_seed_draws_other_weights_of_the_same_posterior() -> None:
    model, data = network("gaussian"), torch.cat([x for x, _ in training_data("gaussian")])
    first, second = (fitted(model, Gaussian(), data, seed=seed)._ready() for seed in (0, 1))
    assert all(
        torch.equal(first[name], second[name]) != name.startswith("samples") for name in first
    )


def test_layers_before_the_last_are_run_once() -> None:
    model, data = network("categorical"), training_data("categorical")
    ran: list[int] = []
    model[0].register_forward_hook(lambda _m, _i, out: ran.append(len(out)))
    method = KFACLaplace(model, Categorical(), last_layer=True).fit(data, progress=False)
    method.score(some(100))  # tries it
    ran.clear()
    method.score(some(100))
    assert ran == [100]
