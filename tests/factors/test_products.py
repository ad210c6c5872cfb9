"""Products with the curvature against rows and dense matrices, in float64."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributions import Poisson

from cases import CASES, Case
from draws import noise
from engines import BY_NAME, MLP, close, everything
from oracles import dense_factors, dense_jacobian
from own_derivatives import Custom, OnceOnly, WithoutTangents
from scodkit import Bernoulli, Categorical, Gaussian, HeteroscedasticGaussian, MonteCarlo
from scodkit.factors.choose import choose_jacobian
from scodkit.factors.live_bytes import Memory
from scodkit.factors.products import Jacobian, Passes, Portions, ProductSource, count_passes
from scodkit.likelihoods import Likelihood
from scodkit.model.inputs import Inputs
from scodkit.model.network import Network
from scodkit.sketch import SRFT, Fold, Map, Nystrom, Sketch, SparseSign, TwoSided
from scodkit.sketch import Gaussian as GaussianMap
from scodkit.sketch.base import FlatFactors
from scodkit.sketch.maps import SeededMatrix

TOGETHER = [True, False]


# --- The Fisher information of the output, times vectors -----------------------------------


class Unit(Likelihood):
    """A likelihood of one's own, which says nothing of products."""

    def factor(self, output: Tensor, keys: Tensor | None = None) -> Tensor:
        return output.flatten(1)[:, None] * torch.tensor([[1.0], [2.0]], dtype=output.dtype)

    def num_directions(self, shape: object) -> int:
        return 2


LIKELIHOODS = [
    Gaussian(0.3),
    HeteroscedasticGaussian(),
    Bernoulli(),
    Categorical(class_dim=1),
    Categorical(class_dim=-1),
    Categorical(class_dim=1, directions=1),
    Categorical(class_dim=-1, directions=2),
    MonteCarlo(lambda out: Poisson(out.exp()), samples=3),
    Unit(),
]


@settings(deadline=None, max_examples=80)
@given(
    likelihood=st.sampled_from(LIKELIHOODS),
    shape=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    batch=st.integers(1, 3),
    count=st.integers(1, 3),
    seed=st.integers(0, 100),
)
def test_curvature_times_is_what_rows_give(
    likelihood: Likelihood, shape: list[int], batch: int, count: int, seed: int
) -> None:
    if isinstance(likelihood, HeteroscedasticGaussian):
        shape = [2 * shape[0], *shape[1:]]
    output = 2 * noise(batch, *shape, seed=seed)
    vectors = noise(batch, count, math.prod(shape), seed=seed + 1)
    keys = torch.arange(batch) + seed
    rows = likelihood.factor(output, keys)
    fisher = rows.mT @ rows
    found = likelihood.curvature_times(output, vectors, keys)
    close(found, vectors @ fisher, atol=1e-12)


def test_variances_of_their_own_are_divided_by() -> None:
    vectors = noise(2, 5, 3)
    found = Gaussian((0.5, 1.0, 4.0)).curvature_times(noise(2, 3), vectors)
    close(found, vectors / torch.tensor([0.5, 1.0, 4.0]))


@pytest.mark.parametrize("ahead", [12.0, 25.0, 60.0])
def test_confident_predictions_keep_their_digits_in_float32(ahead: float) -> None:
    logits = noise(1, 6, seed=3)
    logits[0, 2] += ahead
    vectors = noise(1, 4, 6, seed=4)
    exact = torch.zeros(1, 4, 6, dtype=torch.float64)
    q = logits.softmax(-1)[0]
    for a in range(6):
        for b in range(6):  # no difference of near-equal numbers
            exact[..., a] += q[a] * q[b] * (vectors[..., a] - vectors[..., b])
    found = Categorical().curvature_times(logits.float(), vectors.float())
    torch.testing.assert_close(found.double(), exact, rtol=3e-5, atol=0.0)


# --- The Jacobian, from both sides ---------------------------------------------------------


@pytest.mark.parametrize("together", TOGETHER)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("last", [False, True])
def test_products_with_the_jacobian(together: bool, case: Case, last: bool) -> None:
    model, call = case.model(4), case.inputs(5, 4)
    names = list(dict(model.named_parameters()))
    names = names[-1:] if last else names
    network = Network(model)
    parameters = everything(network, names)
    dense = dense_jacobian(model, call, names)
    tangents, cotangents = noise(3, dense.shape[2]), noise(3, 5, 4, seed=1)
    with network.evaluating():
        jacobian = Jacobian(network, parameters, call, together)
        for _ in range(2):  # may be asked more than once
            close(jacobian.push(tangents), torch.einsum("bdn,tn->tbd", dense, tangents))
            pulled = torch.zeros_like(tangents)
            for columns, some in jacobian.pull(cotangents):
                pulled[:, columns] = some.flatten(1)
            close(pulled, torch.einsum("bdn,tbd->tn", dense, cotangents))
    close(jacobian.output, model(*call.args, **call.kwargs).detach())
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("together", TOGETHER)
def test_inputs_are_left_alone(together: bool) -> None:
    network = Network(nn.Sequential(nn.ELU(inplace=True), nn.Linear(3, 2)).double())
    x, ones = noise(4, 3), torch.ones(1, 8, dtype=torch.float64)
    with network.evaluating():
        jacobian = Jacobian(network, everything(network), Inputs((x,), {}), together)
        first, second = jacobian.push(ones), jacobian.push(ones)
    close(first, nn.functional.elu(noise(4, 3)).sum(1)[None, :, None].expand(1, 4, 2) + 1)
    assert torch.equal(first, second)
    assert torch.equal(x, noise(4, 3))


class Unused(nn.Module):
    """Half of its weights do nothing, and the rest only if it is asked to."""

    def __init__(self, used: bool) -> None:
        super().__init__()
        self.idle = nn.Parameter(torch.ones(2, dtype=torch.float64))
        self.scale = nn.Parameter(torch.ones(3, dtype=torch.float64))
        self.used = used

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale if self.used else x * 2


@pytest.mark.parametrize("together", TOGETHER)
@pytest.mark.parametrize("used", [True, False])
def test_weights_without_effect_have_no_share(together: bool, used: bool) -> None:
    network = Network(Unused(used))
    x = noise(2, 3)
    with network.evaluating():
        jacobian = Jacobian(network, everything(network), Inputs((x,), {}), together)
        pushed = jacobian.push(torch.ones(1, 5, dtype=torch.float64))
        pulled = dict((s.start, v) for s, v in jacobian.pull(torch.ones_like(pushed)))
    close(pushed, x[None] * used)
    assert 0 not in pulled or not pulled[0].any()
    assert (2 in pulled) is used


@pytest.mark.parametrize(
    ("model", "expected", "words"),
    [
        (MLP.model(3), True, ""),
        (Custom(WithoutTangents).double(), None, "one after the other (it raised"),
        (Custom(OnceOnly).double(), None, "one after the other (it raised"),
    ],
    ids=["plain", "no tangents", "one derivative"],
)
def test_the_first_way_that_agrees_is_taken(model, expected, words: str) -> None:
    network = Network(model)
    with network.evaluating():
        call = Inputs((noise(4, 3),), {})
        together, passed_over = choose_jacobian(network, everything(network), call)
    assert together is expected
    assert words in passed_over


class WrongTangents(torch.autograd.Function):
    """A double whose slope is off by a hundredth, where vectors go forward."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return 2 * x

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient

    @staticmethod
    def jvp(ctx, tangent):
        return 2.02 * tangent


class WrongInCompany(WrongTangents):
    """A double whose gradient is off, but not for a sample alone."""

    @staticmethod
    def backward(ctx, gradient):
        return (2 if len(gradient) == 1 else 2.02) * gradient

    @staticmethod
    def jvp(ctx, tangent):
        return 2 * tangent


@pytest.mark.parametrize("function", [WrongTangents, WrongInCompany])
def test_wrong_products_are_noticed(function) -> None:
    network = Network(Custom(function).double())
    with network.evaluating():
        call = Inputs((noise(4, 3),), {})
        together, passed_over = choose_jacobian(network, everything(network), call)
    assert together is None
    assert passed_over.count("(its products differ from plain autograd's by") == 2


# --- What the sketch adds up ---------------------------------------------------------------

MAPS = [SparseSign(), Fold(), GaussianMap(), SRFT()]
SKETCHES: list[Sketch] = [Nystrom(size=7, map=m, seed=2) for m in MAPS]
SKETCHES += [TwoSided(size=10, map=m, seed=2) for m in MAPS]


@pytest.mark.parametrize("mapping", MAPS, ids=lambda m: type(m).__name__)
def test_columns_are_those_of_the_test_matrix(mapping: Map) -> None:
    like = torch.empty(0, dtype=torch.float64)
    matrix = SeededMatrix(mapping, (50, 9), 4, torch.device("cpu"))
    whole = mapping.rows(0, 50, (50, 9), 4, like)
    close(matrix.columns(slice(0, 9), like), whole.mT)
    close(matrix.columns(slice(3, 5), like), whole[:, 3:5].mT)


def absorbed(case: Case, sketch: Sketch, likelihood: Likelihood, budget: int = 2**30):
    """A state from products, one from dense rows, and those rows."""
    model, call = case.model(5), case.inputs(6, 5)
    network = Network(model)
    parameters = everything(network)
    size = parameters.num_parameters
    states = [sketch.zero(size, 3, torch.float64, "cpu") for _ in range(2)]
    with network.evaluating():
        kind, _ = choose_jacobian(network, parameters, call)
        about = (kind, likelihood, sketch.columns(size, 3), budget)
        source = ProductSource(network, parameters, *about)
        for piece in replace(source, memory=source.counted(call)).pieces(call):
            assert piece.curvature is not None
            sketch.update_by_products(states[0], piece.curvature)
    rows = dense_factors(model, call, likelihood).flatten(0, 1)
    sketch.update(states[1], FlatFactors(rows), rows.square().sum(), call.batch_size)
    return *states, rows


def same_sums(one, other) -> None:
    for name, expected in other.tensors.items():
        away = (one.tensors[name] - expected).norm() / expected.norm()
        assert float(away) < 1e-9, name
    assert (one.num_data, one.num_rows) == (other.num_data, other.num_rows)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("sketch", [SKETCHES[0], SKETCHES[-1]], ids=["nystrom", "two_sided"])
@pytest.mark.parametrize("likelihood", [Categorical(), Gaussian(0.5)], ids=["class", "mean"])
def test_products_give_the_sketch_of_rows(
    case: Case, sketch: Sketch, likelihood: Likelihood
) -> None:
    found, expected, _ = absorbed(case, sketch, likelihood)
    same_sums(found, expected)
    assert (found.num_estimated, expected.num_estimated) == (6, 0)


@pytest.mark.parametrize("sketch", SKETCHES, ids=lambda s: f"{type(s).__name__}-{s.map}")
@pytest.mark.parametrize("budget", [1, 4000, 2**30])
def test_maps_and_memory_make_no_difference(sketch: Sketch, budget: int) -> None:
    found, expected, _ = absorbed(BY_NAME["attention"], sketch, Categorical(), budget)
    same_sums(found, expected)
    whole, _, _ = absorbed(BY_NAME["attention"], sketch, Categorical())
    assert float(found.squared_norm) == pytest.approx(float(whole.squared_norm), rel=1e-12)


def test_passes_are_counted_from_the_chosen_weights_on() -> None:
    network = Network(nn.Sequential(nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 5)).double())
    call = Inputs((noise(4, 7),), {})
    with network.evaluating():
        last = count_passes(network, everything(network, ["2.weight", "2.bias"]), call)
        whole = count_passes(network, everything(network), call)
    forward = 2 * (7 * 6 + 6 * 5)
    assert last == Passes(forward, max(2 * 6 * 5, 2 * 35))
    assert whole == Passes(forward, forward + 2 * 6 * 5)


def test_portions_stay_within_the_memory() -> None:
    # a sample, a column, a sample for a column
    memory = Memory(torch.tensor([[0, 5000, 12_000, 3000]]).double())
    for budget in (1, 10**5, 10**6, 10**8):
        portions = Portions.of(memory, budget, 64, 100)
        assert portions.bytes <= budget or (portions.samples, portions.columns) == (1, 1)
    assert Portions.of(memory, 10**9, 64, 100) == Portions(64, 100, memory.at(64, 100))
    columns = Memory(torch.tensor([[4, 0, 12_000, 16]]).double())
    assert Portions.of(columns, 150_000, 64, 100).columns == 11


@pytest.mark.parametrize("kind", [Nystrom, TwoSided])
@pytest.mark.parametrize("mapping", [SparseSign(), GaussianMap()], ids=["signs", "normal"])
def test_the_trace_is_estimated_without_bias_and_within_its_error(
    kind: type[Nystrom | TwoSided], mapping: Map
) -> None:
    estimates = []
    for seed in range(60):
        sketch = kind(size=10, map=mapping, seed=seed)
        found, expected, rows = absorbed(MLP, sketch, Categorical())
        estimates.append(float(found.squared_norm))
    exact, curvature = float(expected.squared_norm), rows.mT @ rows
    found, spread = torch.tensor(estimates).mean(), torch.tensor(estimates).std()
    stated = math.sqrt(2 / 10) * float(curvature.norm())
    assert float(spread) < 1.3 * stated  # the spread of 60 is known to a tenth
    assert abs(float(found) - exact) < 4 * stated / math.sqrt(60)


def test_the_trace_is_exact_where_every_direction_is_a_column() -> None:
    size = everything(Network(MLP.model(5))).num_parameters
    found, expected, _ = absorbed(MLP, Nystrom(size=size), Categorical())
    assert float(found.squared_norm) == pytest.approx(float(expected.squared_norm), rel=1e-12)
