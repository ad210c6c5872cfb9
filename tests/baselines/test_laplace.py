"""The Kronecker-factored Laplace approximation, against dense matrices."""

from __future__ import annotations

import copy
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
from laplace_oracles import (
    dense_covariances,
    dense_fisher_blocks,
    dense_precision,
    log_evidence,
)
from oracles import dense_jacobian
from scodkit import Bernoulli, Categorical, Gaussian
from scodkit.baselines.kfac_laplace import KFACLaplace
from scodkit.baselines.predictions import entropy
from scodkit.errors import NonFiniteError
from scodkit.likelihoods import Likelihood
from scodkit.model.inputs import Inputs

KINDS = ("categorical", "bernoulli", "gaussian", "scaled")
PRIOR = 0.7
CLOSE = {"rtol": 1e-10, "atol": 1e-12}


def method_of(**options: object):
    return lambda model, likelihood: KFACLaplace(model, likelihood, **options)


@parametrised(
    cases(method_of(), "categorical", "bernoulli", rises="unsure"),
    cases(method_of(), "gaussian", "scaled"),
    cases(method_of(samples=30), "categorical", "bernoulli", rises="unsure"),
    cases(method_of(samples=30), "gaussian", "scaled"),
    cases(method_of(last_layer=True, samples=30), "categorical", rises="unsure"),
    cases(method_of(last_layer=True, prior_precision=2.0), "gaussian"),
)
class TestContract(BaselineContract):
    pass


def names_of(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_parameters()]


def inputs(kind: str) -> Tensor:
    return torch.cat([x for x, _ in training_data(kind)])


def fitted(
    model: nn.Module, likelihood: Likelihood, x: Tensor, **options: object
) -> KFACLaplace:
    options = {"prior_precision": PRIOR, **options}
    return KFACLaplace(model, likelihood, **options).fit(x.split(8), progress=False)


def probabilities(likelihood: Likelihood, output: Tensor) -> Tensor:
    """Of all classes, ``(B, C)``."""
    if isinstance(likelihood, Categorical):
        return output.softmax(1)
    return torch.cat([1 - output.sigmoid(), output.sigmoid()], dim=1)


def noise_of(kind: str) -> Tensor:
    return torch.as_tensor(LIKELIHOODS[kind].variance).double().expand(OUTPUTS[kind])


# --- Closed form ---------------------------------------------------------------------------


@pytest.mark.parametrize("last_layer", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_linearised_predictions_are_those_of_dense_matrices(
    kind: str, last_layer: bool
) -> None:
    model, likelihood, data = network(kind), LIKELIHOODS[kind], inputs(kind)
    names = [name for name in names_of(model) if not last_layer or name.startswith("5.")]
    precision = dense_precision(model, data, likelihood, PRIOR, names)
    covariances = dense_covariances(model, precision, some(), names)
    variances = covariances.diagonal(dim1=1, dim2=2)
    scored = fitted(model, likelihood, data, last_layer=last_layer)(some())
    output = model(some()).detach()
    if isinstance(likelihood, Gaussian):
        torch.testing.assert_close(scored.output, output, **CLOSE)
        wanted = (variances + noise_of(kind)).sum(1)
    else:
        mean = probabilities(likelihood, output / (1 + math.pi * variances / 8).sqrt())
        found = probabilities(likelihood, scored.output)
        torch.testing.assert_close(found, mean, **CLOSE)
        wanted = -(mean * mean.log()).sum(1)
    torch.testing.assert_close(scored.score, wanted, **CLOSE)


def test_one_layer_and_one_sample_have_the_exact_posterior() -> None:
    """The factors are those of the whole Fisher information of weights, and of biases."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2, bias=False).double()
    data, x = torch.randn(1, 3).double(), torch.randn(4, 3).double()
    jacobian = dense_jacobian(model, Inputs((data,), {}), ["weight"])[0]
    precision = jacobian.T @ jacobian / 0.5 + PRIOR * torch.eye(6).double()
    wanted = dense_covariances(model, precision, x, ["weight"]).diagonal(dim1=1, dim2=2)
    found = fitted(model, Gaussian(0.5), data).score(x) - 1.0
    torch.testing.assert_close(found, wanted.sum(1), **CLOSE)


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
def test_convolutions(
    channels: tuple[int, int],
    kernel: tuple[int, int],
    stride: int,
    padding: tuple[int, int],
    dilation: int,
    bias: bool,
    batch: int,
) -> None:
    """Also before a layer that takes several positions of a sample."""
    assume(bias or math.prod(channels + kernel) > 1)  # a single weight is refused
    torch.manual_seed(0)
    layer = nn.Conv2d(*channels, kernel, stride, padding, dilation, bias=bias)
    head = [nn.Flatten(2), nn.LazyLinear(2), nn.Tanh(), nn.Flatten(), nn.LazyLinear(2)]
    model = nn.Sequential(layer, nn.Tanh(), *head).double()
    data = torch.randn(7, channels[0], 5, 4, dtype=torch.float64)
    model(data)
    names = names_of(model)
    precision = dense_precision(model, data, Gaussian(0.3), PRIOR, names)
    wanted = dense_covariances(model, precision, data, names).diagonal(dim1=1, dim2=2).sum(1)
    method = KFACLaplace(model, Gaussian(0.3), prior_precision=PRIOR)
    found = method.fit(data.split(batch), progress=False).score(data) - 0.6
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("last_layer", [False, True])
@pytest.mark.parametrize("kind", ["classification", "regression"])
def test_it_is_what_laplace_torch_itself_gives(kind: str, last_layer: bool) -> None:
    """By its own fit, of all weights and of its last layer, in one batch."""
    case = "categorical" if kind == "classification" else "gaussian"
    likelihood = Categorical() if kind == "classification" else Gaussian(0.3)
    model = network(case)
    x, y = map(torch.cat, zip(*training_data(case), strict=True))
    method = fitted(model, likelihood, x, last_layer=last_layer)
    import laplace

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
    torch.testing.assert_close(method.score(some()), wanted, **CLOSE)


def test_float32_keeps_small_eigenvalues() -> None:
    """Beside that of the inputs' mean; decomposed in float32 the variances are 5e-3 off."""
    torch.manual_seed(0)
    model = nn.Linear(100, 1).double()
    data, x = torch.randn(200, 100).double() + 10, torch.randn(10, 100).double()
    wanted = fitted(model, Gaussian(1e-3), data).score(x) - 1e-3
    single = fitted(copy.deepcopy(model).float(), Gaussian(1e-3), data.float())
    found = single.score(x.float()).double() - 1e-3
    torch.testing.assert_close(found, wanted, rtol=5e-4, atol=0)


# --- Sampled -------------------------------------------------------------------------------


def test_drawn_weights_have_the_posterior_as_their_distribution() -> None:
    """4000 draws; each entry of the covariance within 6 of its standard errors."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 2)).double()
    data = torch.randn(20, 3, dtype=torch.float64)
    names = names_of(model)
    wanted = dense_precision(model, data, Categorical(), PRIOR, names).inverse()
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


@pytest.mark.parametrize("last_layer", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_sampled_predictions_are_averages_over_the_drawn_weights(
    kind: str, last_layer: bool
) -> None:
    model, likelihood, x = network(kind), LIKELIHOODS[kind], some()
    method = fitted(model, likelihood, inputs(kind), samples=5, last_layer=last_layer)
    outputs = []
    for k in range(5):
        other = copy.deepcopy(model)
        for name, parameter in other.named_parameters():
            assert (f"samples:{name}" in method._ready()) == (
                name.startswith("5.") or not last_layer
            )
            if f"samples:{name}" in method._ready():
                parameter.data.copy_(method._ready()[f"samples:{name}"][k])
        outputs.append(other(x).detach())
    scored = method(x)
    if isinstance(likelihood, Gaussian):
        both = torch.stack(outputs)
        torch.testing.assert_close(scored.output, both.mean(0), **CLOSE)
        wanted = (both.var(0, correction=0) + noise_of(kind)).sum(1)
    else:
        mean = torch.stack([probabilities(likelihood, output) for output in outputs]).mean(0)
        torch.testing.assert_close(probabilities(likelihood, scored.output), mean, **CLOSE)
        wanted = -(mean * mean.log()).sum(1)
    torch.testing.assert_close(scored.score, wanted, **CLOSE)
    other = fitted(model, likelihood, inputs(kind), samples=5, last_layer=last_layer, seed=1)
    assert not torch.isclose(other.score(x), wanted).any()


# --- The prior precision of the largest evidence -------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_the_evidence_is_largest_among_all_on_a_grid(kind: str) -> None:
    model, data = network(kind), training_data(kind)
    fisher = torch.block_diag(
        *dense_fisher_blocks(model, inputs(kind), LIKELIHOODS[kind], names_of(model))
    )
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    chosen = KFACLaplace(model, LIKELIHOODS[kind]).fit(data, progress=False).chosen_precision
    best = log_evidence(fisher, weights, chosen)
    for factor in (1e-4, 1e-2, 0.1, 0.5, 0.99, 0.999, 1.001, 1.01, 2, 10, 1e2, 1e4):
        # a thousandth away the evidence is lower by a millionth, far more than it is rounded
        assert best - log_evidence(fisher, weights, chosen * factor) > 1e-8


def test_without_weights_or_curvature_there_is_no_evidence() -> None:
    zero = nn.Linear(2, 1).double()
    nn.init.zeros_(zero.weight)
    nn.init.zeros_(zero.bias)
    flat = nn.Sequential(nn.Linear(2, 2), nn.Threshold(1e9, 0.0), nn.Linear(2, 1, bias=False))
    for model in (zero, flat.double()):
        with pytest.raises(NonFiniteError, match=r"prior_precision=1\.0"):
            KFACLaplace(model, Gaussian()).fit([torch.ones(3, 2).double()], progress=False)


def test_one_logit_is_two_classes() -> None:
    class Two(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Tensor) -> Tensor:
            z = self.model(x)
            return torch.cat([torch.zeros_like(z), z], dim=1)

    model, data = network("bernoulli"), training_data("bernoulli")
    for samples in (None, 4):
        one = KFACLaplace(model, Bernoulli(), samples=samples).fit(data, progress=False)
        two = KFACLaplace(Two(model), Categorical(), samples=samples).fit(data, progress=False)
        first, second = one(some()), two(some())
        torch.testing.assert_close(first.score, second.score, **CLOSE)
        odds = second.output[:, 1:] - second.output[:, :1]
        torch.testing.assert_close(first.output, odds, **CLOSE)
