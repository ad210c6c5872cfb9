"""Local Ensembles against the dense Hessian and one backward pass at a time."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import one_hot

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
from hessians import dense_hessian, loss_of
from oracles import dense_jacobian
from scodkit import Bernoulli, Categorical, Gaussian, LastLayers
from scodkit.baselines.local_ensemble import LabelGradients, LocalEnsemble, lengths_outside
from scodkit.errors import BatchError, OptionError
from scodkit.factors.engine import HeldFactors
from scodkit.factors.pieces import sample_keys
from scodkit.likelihoods import HeteroscedasticGaussian, Likelihood
from scodkit.model.inputs import Inputs

EVERY = tuple(OUTPUTS)


def fitted(kind: str, model: nn.Module, **options: object) -> LocalEnsemble:
    method = LocalEnsemble(model, LIKELIHOODS[kind], tolerance=1e-12, **options)  # type: ignore[arg-type]
    return method.fit(training_data(kind, batch=40), progress=False)


def outside(rows: Tensor, hessian: Tensor, rank: int) -> Tensor:
    """Lengths of rows (..., N) without their part in the top eigenspace, densely."""
    values, vectors = torch.linalg.eigh(hessian)
    top = vectors[:, values.abs().argsort(descending=True)[:rank]]
    return (rows - rows @ top @ top.mT).norm(dim=-1)


def last_layer(model: nn.Module, family: Likelihood) -> LocalEnsemble:
    return LocalEnsemble(model, family, rank=4, parameters=["5.*"])


@parametrised(
    cases(last_layer, "categorical", "bernoulli", "gaussian"),
    cases(last_layer, "scaled", "heteroscedastic", draws=True),
    cases(
        lambda model, family: LocalEnsemble(model, family, rank=4, tolerance=1e-2, labels=2),
        "categorical",
        draws=True,
    ),
)
class TestContract(BaselineContract):
    pass


def test_regression_with_one_output_uses_the_prediction() -> None:
    model, x = network("gaussian"), some()
    gradients = dense_jacobian(model, Inputs((x,), {}))[:, 0]
    wanted = outside(gradients, dense_hessian("gaussian"), 5)
    # whatever the noise level is: it scales the loss, not the prediction
    for variance in (1.0, 4.0):
        method = LocalEnsemble(model, Gaussian(variance), rank=5, tolerance=1e-12)
        found = method.fit(training_data("gaussian", batch=40), progress=False).score(x)
        torch.testing.assert_close(found, wanted, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("kind", ["categorical", "bernoulli"])
def test_classes_are_listed_and_the_shortest_loss_gradient_counts(kind: str) -> None:
    model, x = network(kind), some()
    each = []
    for label in range(max(2, OUTPUTS[kind])):
        gradients = []
        for sample in x:
            target = (
                torch.tensor([label]) if kind == "categorical" else torch.full((1, 1), label)
            )
            loss = loss_of(kind, model(sample[None]), target)
            found = torch.autograd.grad(loss, list(model.parameters()))
            gradients.append(torch.cat([g.flatten() for g in found]))
        each.append(outside(torch.stack(gradients), dense_hessian(kind), 5))
    assert len({int(i) for i in torch.stack(each).argmin(0)}) > 1 or kind == "bernoulli"
    found = fitted(kind, model, rank=5).score(x)
    torch.testing.assert_close(found, torch.stack(each).amin(0), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("kind", ["scaled", "heteroscedastic", "categorical"])
def test_other_labels_are_drawn_for_each_sample(kind: str) -> None:
    model, x = network(kind), some()
    call = Inputs((x,), {})
    rows = LabelGradients(LIKELIHOODS[kind], 2, 3).factor(model(x).detach(), sample_keys(call))
    assert rows.shape == (6, 2, OUTPUTS[kind])
    gradients = rows @ dense_jacobian(model, call)
    wanted = outside(gradients, dense_hessian(kind), 5).amin(1)
    method = fitted(kind, model, rank=5, labels=2, seed=3)
    torch.testing.assert_close(method.score(x), wanted, rtol=1e-7, atol=1e-9)
    method.memory_budget = 1  # one row at a time
    method._last_source = None
    torch.testing.assert_close(method.score(x), wanted, rtol=1e-7, atol=1e-9)
    other = fitted(kind, model, rank=5, labels=2, seed=4).score(x)
    assert not torch.allclose(other, wanted)


@pytest.mark.parametrize("kind", EVERY)
def test_drawn_loss_gradients_have_the_fisher_information_as_their_mean_square(
    kind: str,
) -> None:
    torch.manual_seed(0)
    family, draws = LIKELIHOODS[kind], 40_000
    if kind == "bernoulli":
        output = torch.randn(2, 17, dtype=torch.float64)  # too many labels to list
    else:
        output = torch.randn(2, 6, dtype=torch.float64)
    if kind == "scaled":
        family = Gaussian((0.5, 2.0, 1.0, 1.0, 3.0, 0.1))
    if kind == "categorical":
        family, output = Categorical(class_dim=1), torch.randn(2, 3, 12, dtype=torch.float64)
    rows = LabelGradients(family, draws, 0).factor(output, torch.tensor([5, 6]))
    assert rows.shape == (2, draws, output[0].numel())
    squares = rows.mT @ rows / draws
    root = family.factor(output)
    # entries are means of products of scores: their spread over the root of the draws
    spread = (rows.square().mT @ rows.square() / draws).sqrt() / math.sqrt(draws)
    assert ((squares - root.mT @ root).abs() <= 6 * spread + 1e-12).all()
    mean_spread = squares.diagonal(dim1=1, dim2=2).sqrt() / math.sqrt(draws)
    assert (rows.mean(1).abs() <= 6 * mean_spread + 1e-12).all()


def test_draws_depend_on_the_key_and_the_seed_alone() -> None:
    output = torch.randn(3, 2, dtype=torch.float64)
    keys = torch.tensor([7, 8, 7])
    rows = LabelGradients(Gaussian(), 4, 0).factor(output, keys)
    alone = LabelGradients(Gaussian(), 4, 0).factor(output[1:2], keys[1:2])
    assert torch.equal(rows[1:2], alone)
    torch.testing.assert_close(rows[0], rows[2])  # a Gaussian's do not depend on its mean
    assert not torch.allclose(rows[0], rows[1])
    assert not torch.allclose(rows, LabelGradients(Gaussian(), 4, 1).factor(output, keys))


def test_draws_beside_a_large_mean_keep_their_digits() -> None:
    family, keys = LabelGradients(Gaussian(), 4, 0), torch.tensor([7])
    far, near = (family.factor(torch.full((1, 2), mean), keys) for mean in (1e6, 0.0))
    assert far.dtype == torch.float32
    torch.testing.assert_close(far, near)


@pytest.mark.parametrize(
    ("family", "shape", "labels", "wanted"),
    [
        (Gaussian(), (1,), 10, 1),
        (Gaussian(), (2,), 10, 10),
        (HeteroscedasticGaussian(), (2,), 10, 10),
        (Bernoulli(), (1,), 10, 2),
        (Bernoulli(), (3,), 8, 8),
        (Bernoulli(), (3,), 7, 7),
        (Categorical(), (10,), 10, 10),
        (Categorical(), (11,), 10, 10),
        (Categorical(), (3,), 10, 3),
        (Categorical(class_dim=1), (2, 3), 10, 8),
        (Categorical(class_dim=-1), (2, 3), 10, 9),
        (Categorical(class_dim=1), (5, 999, 999), 10, 10),
    ],
)
def test_labels_are_listed_where_they_are_few(
    family: Likelihood, shape: tuple[int, ...], labels: int, wanted: int
) -> None:
    assert LabelGradients(family, labels, 0).num_directions(shape) == wanted


def test_several_variables_are_listed_in_all_their_combinations() -> None:
    output = torch.randn(2, 3, 2, dtype=torch.float64)  # two positions of three classes
    rows = LabelGradients(Categorical(class_dim=1), 9, 0).factor(output, torch.zeros(2))
    q = output.softmax(1)
    for i in range(2):
        wanted = []
        for a in range(3):
            for b in range(3):
                chosen = one_hot(torch.tensor([a, b]), 3).T
                wanted.append((q[i] - chosen).flatten())
        torch.testing.assert_close(rows[i], torch.stack(wanted))


def test_confident_predictions_keep_their_order() -> None:
    """In float32, 1 - q is zero for all of them."""
    model = nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, 1.0], [0.0, 0.0]]))
    method = LocalEnsemble(model, Categorical(), rank=1)
    data = [(torch.tensor([[0.5, 0.0], [-0.5, 0.0]]), torch.tensor([0, 1]))]
    x = torch.tensor([[0.0, 30.0], [0.0, 50.0], [0.0, 60.0]])  # a direction without data
    scores = method.fit(data, progress=False).score(x)
    assert scores[0] > scores[1] > scores[2] > 0
    assert scores[0] < 1e-6


def test_only_the_chosen_weights_count() -> None:
    model, x = network("gaussian"), some()
    method = fitted("gaussian", model, rank=3, parameters=LastLayers(count=1))
    gradients = dense_jacobian(model, Inputs((x,), {}), ["5.weight", "5.bias"])[:, 0]
    wanted = outside(gradients, dense_hessian("gaussian", "5."), 3)
    torch.testing.assert_close(method.score(x), wanted, rtol=1e-7, atol=1e-9)


@given(
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    shape=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    seed=st.integers(0, 99),
)
@settings(max_examples=15, deadline=None)
def test_lengths_outside_are_those_of_the_dense_projection(
    sizes: list[int], shape: tuple[int, int], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(*shape, sum(sizes), dtype=torch.float64, generator=generator)
    rank = max(1, sum(sizes) // 2)
    tall = torch.randn(sum(sizes), rank, dtype=torch.float64, generator=generator)
    basis = torch.linalg.qr(tall).Q
    stops = torch.tensor(sizes).cumsum(0).tolist()
    cut = [slice(stop - n, stop) for stop, n in zip(stops, sizes, strict=True)]
    held = HeldFactors([(where, rows[:, :, where]) for where in reversed(cut)])
    wanted = (rows - rows @ basis @ basis.mT).norm(dim=-1)
    torch.testing.assert_close(lengths_outside(held, basis), wanted, rtol=1e-9, atol=1e-14)


def test_what_little_is_outside_keeps_its_digits() -> None:
    torch.manual_seed(0)
    basis = torch.linalg.qr(torch.randn(50, 5, dtype=torch.float64)).Q
    other = torch.linalg.qr(torch.randn(50, 45, dtype=torch.float64)).Q[:, :1]
    other = torch.linalg.qr(other - basis @ (basis.mT @ other)).Q[:, 0]
    row = basis.sum(1) + 1e-10 * other  # whose square is lost beside 1
    found = lengths_outside(HeldFactors([(slice(0, 50), row[None, None])]), basis)
    torch.testing.assert_close(
        found, torch.full((1, 1), 1e-10, dtype=torch.float64), rtol=1e-4, atol=0.0
    )


def test_options_out_of_range_are_refused() -> None:
    model = network("gaussian")
    for bad, wanted in (
        ({"rank": 0}, "rank >= 1"),
        ({"labels": 0}, "labels >= 1"),
        ({"tolerance": -1.0}, "tolerance"),
        ({"tolerance": math.nan}, "tolerance"),
    ):
        with pytest.raises(OptionError, match=wanted):
            LocalEnsemble(model, Gaussian(), **bad)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="rank < 6, the number of weights"):
        LocalEnsemble(model, Gaussian(), rank=6, parameters=["5.*"]).fit(
            training_data("gaussian"), progress=False
        )


def test_data_that_cannot_be_read_twice_or_has_no_targets_is_refused() -> None:
    method = LocalEnsemble(network("gaussian"), Gaussian(), rank=2)
    with pytest.raises(OptionError, match="more than once"):
        method.fit(iter(training_data("gaussian")), progress=False)
    with pytest.raises(BatchError, match="targets beside its inputs"):
        method.fit([x for x, _ in training_data("gaussian")], progress=False)
