"""Scores on features against slow and obvious ones, and what must not change them.

The model is mostly a single Linear layer, so that the inputs are the features.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.covariance import EmpiricalCovariance
from sklearn.neighbors import NearestNeighbors
from torch import Tensor, nn

from baseline_contracts import LIKELIHOODS, network, some, training_data
from draws import noise
from scodkit import Bernoulli, Categorical, Gaussian
from scodkit.baselines.features import Moments
from scodkit.baselines.knn import KNN
from scodkit.baselines.mahalanobis import Mahalanobis
from scodkit.baselines.one_pass import GradNorm
from scodkit.baselines.residual import Residual, ViM

CLOSE = {"rtol": 1e-9, "atol": 1e-10}
few = settings(max_examples=15, deadline=None)
shapes = st.tuples(st.integers(1, 6), st.integers(2, 4), st.integers(0, 999))


def layer(width: int, outputs: int, seed: int = 0, bias: bool = True) -> nn.Linear:
    made = nn.Linear(width, outputs, bias=bias).double()
    with torch.no_grad():
        made.weight.copy_(noise(outputs, width, seed=seed))
        if bias:
            made.bias.copy_(noise(outputs, seed=seed + 1))
    return made


def batches(*tensors: Tensor, size: int = 7) -> list[tuple[Tensor, ...]]:
    return list(zip(*(tensor.split(size) for tensor in tensors), strict=True))


def rotation(width: int, seed: int = 5) -> Tensor:
    return torch.linalg.qr(noise(width, width, seed=seed)).Q


def mixing(width: int, seed: int = 5) -> Tensor:
    """Return a linear map that stretches by 0.3 to 3."""
    return rotation(width, seed) * torch.linspace(0.3, 3, width) @ rotation(width, seed + 1)


def classes_of(width: int, classes: int, seed: int, each: int = 12) -> tuple[Tensor, Tensor]:
    """Return correlated samples about class means that are apart, shuffled."""
    labels = torch.arange(classes * each) % classes
    means = 3 * noise(classes, width, seed=seed)
    inner = noise(len(labels), width, seed=seed + 2)
    return means[labels] + inner @ mixing(width, seed), labels


# --- moments


@few
@given(shapes, st.integers(1, 20))
def test_moments_do_not_depend_on_the_batches(shape: tuple[int, int, int], size: int) -> None:
    width, classes, seed = shape
    x, labels = classes_of(width, classes, seed)
    moments = Moments(classes + 1)  # one of them without samples
    for part, own in batches(x, labels, size=size):
        moments.add(part, own)
    groups = [x[labels == c] for c in range(classes)]
    means = torch.stack([*(group.mean(0) for group in groups), torch.zeros_like(x[0])])
    inner = x - means[labels]
    assert moments.counts.tolist() == [12.0] * classes + [0.0]
    torch.testing.assert_close(moments.means, means, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(
        moments.covariance(), inner.T @ inner / len(x), rtol=1e-11, atol=1e-11
    )


def test_moments_lose_no_digits_to_a_large_mean() -> None:
    x = noise(50, 3)
    x = x - x.mean(0)
    moments = Moments()
    for (part,) in batches(x):
        moments.add(part + 1e8)
    # adding 1e8 rounds to 1e-8; sums of squares would be off by about 10
    torch.testing.assert_close(moments.covariance(), x.T @ x / 50, rtol=0.0, atol=1e-7)


# --- Mahalanobis


def oracle_mahalanobis(train: Tensor, labels: Tensor, x: Tensor) -> Tensor:
    groups = [train[labels == c].numpy() for c in labels.unique()]
    means = np.stack([group.mean(0) for group in groups])
    centred = np.concatenate([group - mean for group, mean in zip(groups, means, strict=True)])
    shared = EmpiricalCovariance(assume_centered=True, store_precision=False).fit(centred)
    precision = np.linalg.pinv(shared.covariance_, rcond=1e-11, hermitian=True)
    return torch.tensor([min((s - m) @ precision @ (s - m) for m in means) for s in x.numpy()])


@few
@given(shapes)
def test_mahalanobis_is_the_least_distance_to_a_mean(shape: tuple[int, int, int]) -> None:
    width, classes, seed = shape
    train, labels = classes_of(width, classes, seed)
    x = 3 * noise(9, width, seed=seed + 3)
    method = Mahalanobis(layer(width, classes), Categorical())
    found = method.fit(batches(train, labels), progress=False).score(x)
    torch.testing.assert_close(found, oracle_mahalanobis(train, labels, x), **CLOSE)
    assert (found >= 0).all()


@pytest.mark.parametrize("kind", ["categorical", "bernoulli", "gaussian", "heteroscedastic"])
def test_mahalanobis_of_a_network(kind: str) -> None:
    model, data = network(kind), training_data(kind)
    x, y = (torch.cat(parts) for parts in zip(*data, strict=True))
    labels = y.flatten().long() if kind in ("categorical", "bernoulli") else torch.zeros(40)
    with torch.no_grad():
        wanted = oracle_mahalanobis(model[:-1](x), labels, model[:-1](some()))
    found = Mahalanobis(model, LIKELIHOODS[kind]).fit(data, progress=False).score(some())
    torch.testing.assert_close(found, wanted, **CLOSE)


@few
@given(shapes)
def test_mahalanobis_does_not_see_linear_maps(shape: tuple[int, int, int]) -> None:
    width, classes, seed = shape
    train, labels = classes_of(width, classes, seed)
    x = 3 * noise(9, width, seed=seed + 3)
    change, offset = mixing(width), 100 * noise(width, seed=seed + 4)
    method = Mahalanobis(layer(width, classes), Categorical())
    wanted = method.fit(batches(train, labels), progress=False).score(x)
    method.fit(batches(train @ change + offset, labels), progress=False)
    torch.testing.assert_close(method.score(x @ change + offset), wanted, **CLOSE)


def test_mahalanobis_of_a_mean_is_zero_and_its_mean_is_the_rank() -> None:
    train, _ = classes_of(4, 1, 0, each=30)
    train = torch.cat([train, train[:, :1] - 2 * train[:, 1:2]], dim=1)
    method = Mahalanobis(layer(5, 1), Gaussian()).fit([train], progress=False)
    assert method.score(train.mean(0)[None]).item() < 1e-20
    torch.testing.assert_close(method.score(train).mean().item(), 4.0, **CLOSE)


def test_mahalanobis_close_to_a_mean_that_is_far_from_others() -> None:
    inner = noise(30, 3)
    train = torch.cat([inner + 1e4, inner - 1e4])
    labels = torch.arange(60) // 30
    near = inner.mean(0) + 1e-3 * noise(5, 3, seed=1)
    alone = Mahalanobis(layer(3, 1), Gaussian()).fit([inner], progress=False)
    method = Mahalanobis(layer(3, 2), Categorical()).fit([(train, labels)], progress=False)
    # 1e-6, where squares of 1e4 standard deviations that cancel would leave 1e-8
    for offset in (1e4, -1e4):
        found = method.score(near + offset)
        torch.testing.assert_close(found, alone.score(near), rtol=1e-7, atol=0.0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_features_that_say_nothing_new_change_nothing(dtype: torch.dtype) -> None:
    train, labels = classes_of(3, 2, 0)
    train, x = train.to(dtype), noise(9, 3, seed=9).to(dtype)

    def more(z: Tensor) -> Tensor:  # a constant, a copy, a sum that is rounded
        return torch.cat([z, torch.full_like(z[:, :1], 7.3), z[:, :1], z @ z.new_ones(3, 1)], 1)

    plain = Mahalanobis(layer(3, 2).to(dtype), Categorical())
    wanted = plain.fit(batches(train, labels), progress=False).score(x)
    longer = Mahalanobis(layer(6, 2).to(dtype), Categorical())
    found = longer.fit(batches(more(train), labels), progress=False).score(more(x))
    rounding = 1e-9 if dtype == torch.float64 else 1e-4
    torch.testing.assert_close(found, wanted, rtol=rounding, atol=rounding)


def test_classes_without_samples_are_no_candidates() -> None:
    train, labels = classes_of(3, 2, 0)
    x = 1e-3 * noise(9, 3, seed=4)  # near zero, where an unseen mean would lie
    wanted = Mahalanobis(layer(3, 2), Categorical()).fit([(train, labels)], progress=False)
    found = Mahalanobis(layer(3, 5), Categorical()).fit([(train, 2 * labels)], progress=False)
    torch.testing.assert_close(found.score(x), wanted.score(x), **CLOSE)


def test_one_logit_has_two_means() -> None:
    train, labels = classes_of(3, 2, 0)
    wanted = Mahalanobis(layer(3, 2), Categorical()).fit([(train, labels)], progress=False)
    for targets in (labels.double()[:, None], labels.bool(), labels):
        found = Mahalanobis(layer(3, 1), Bernoulli()).fit([(train, targets)], progress=False)
        assert torch.equal(found.score(2 * train), wanted.score(2 * train))


# --- KNN


@few
@given(shapes, st.integers(1, 30), st.booleans(), st.sampled_from([1, 2000, 2**28]))
def test_knn_is_the_kth_smallest_distance(
    shape: tuple[int, int, int], k: int, normalise: bool, budget: int
) -> None:
    width, classes, seed = shape
    train, _ = classes_of(width, classes, seed, each=15)
    x = torch.cat([noise(9, width, seed=seed), train[:4]])
    method = KNN(layer(width, 1), Gaussian(), k=k, normalise=normalise)
    method.memory_budget = budget
    found = method.fit(batches(train), progress=False).score(x)
    if normalise:
        train, x = (z / z.norm(dim=1, keepdim=True) for z in (train, x))
    wanted = (x[:, None] - train).norm(dim=2).sort(1).values[:, k - 1]
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-14)
    search = NearestNeighbors(n_neighbors=k, algorithm="kd_tree").fit(train.numpy())
    theirs = torch.from_numpy(search.kneighbors(x.numpy())[0][:, -1])
    torch.testing.assert_close(found, theirs, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("normalise", [True, False])
def test_training_points_are_at_distance_zero(normalise: bool) -> None:
    train = 1e4 + noise(60, 5)  # where expanded squares leave 1e-4
    method = KNN(layer(5, 1), Gaussian(), k=1, normalise=normalise)
    assert not method.fit(batches(train), progress=False).score(train).any()


def test_neighbours_nearer_than_a_matrix_product_can_tell() -> None:
    steps = 1e-9 * torch.arange(12, dtype=torch.float64)[:, None]
    train = torch.cat([1 + steps, 2 + noise(40, 1).abs()])
    for k in (1, 4, 12):
        method = KNN(layer(1, 1), Gaussian(), k=k, normalise=False).fit([train], progress=False)
        wanted = train[k - 1] - train[0]
        torch.testing.assert_close(method.score(train[:1]), wanted, rtol=1e-12, atol=0.0)


def test_features_of_length_zero_have_a_distance() -> None:
    train = torch.tensor([[0.0, 0.0], [3.0, 4.0], [5.0, 0.0]])
    method = KNN(layer(2, 1).float(), Gaussian(), k=2).fit([train], progress=False)
    assert method.score(torch.zeros(1, 2)).tolist() == [1.0]


def test_a_choice_of_training_samples_is_random_and_repeatable() -> None:
    train = torch.arange(400.0)[:, None]

    def kept(size: int, **options: int) -> list[float]:
        method = KNN(layer(1, 1).float(), Gaussian(), k=1, normalise=False, **options)
        method.fit(batches(train, size=size), progress=False)
        return method._ready()["bank"].flatten().tolist()

    chosen = kept(7, most=100)
    assert chosen == sorted(set(chosen))
    assert len(chosen) == 100
    assert chosen == kept(400, most=100) == kept(90, most=100)
    other = kept(7, most=100, seed=1)
    assert 5 < len({*chosen} & {*other}) < 50  # 25 expected
    assert abs(sum(chosen) / 100 - 199.5) < 60  # five standard errors
    assert kept(7, most=400) == kept(7) == train.flatten().tolist()


# --- Residual, ViM


def oracle_outside(train: Tensor, x: Tensor, origin: Tensor, dim: int) -> Tensor:
    first = torch.linalg.svd(train - origin, full_matrices=False).Vh[:dim]
    return torch.stack([(z - origin - first.T @ (first @ (z - origin))).norm() for z in x])


@few
@given(st.integers(2, 7), st.data())
def test_residual_is_what_the_first_components_leave(width: int, data: st.DataObject) -> None:
    dim, seed = data.draw(st.integers(1, width - 1)), data.draw(st.integers(0, 999))
    train, _ = classes_of(width, 2, seed)
    x = noise(9, width, seed=seed + 3)
    method = Residual(layer(width, 1), Gaussian(), dim=dim).fit(batches(train), progress=False)
    found = method.score(x)
    torch.testing.assert_close(found, oracle_outside(train, x, train.mean(0), dim), **CLOSE)
    turn = rotation(width)
    method.fit(batches(train @ turn), progress=False)
    torch.testing.assert_close(method.score(x @ turn), found, **CLOSE)


def test_points_in_the_principal_space_have_no_residual() -> None:
    train = noise(30, 2) @ noise(2, 5, seed=1) + noise(5, seed=2)
    inside = 9 * noise(6, 2, seed=3) @ noise(2, 5, seed=1) + noise(5, seed=2)
    normal = torch.linalg.svd(noise(2, 5, seed=1)).Vh[2:]
    for dim in (2, 4):  # the last two of four components are no components
        method = Residual(layer(5, 1), Gaussian(), dim=dim).fit(batches(train), progress=False)
        assert method.score(inside).max() < 1e-12
        outside = inside + noise(6, 3, seed=4) @ normal
        wanted = noise(6, 3, seed=4).norm(dim=1)
        torch.testing.assert_close(method.score(outside), wanted, **CLOSE)


@few
@given(st.integers(3, 7), st.booleans(), st.integers(0, 999))
def test_vim_is_its_formula(width: int, bias: bool, seed: int) -> None:
    train, _ = classes_of(width, 3, seed)
    x, dim = noise(9, width, seed=seed + 3), width - 2
    head = layer(width, 3, seed, bias)
    with torch.no_grad():
        origin = -torch.linalg.pinv(head.weight) @ head.bias if bias else torch.zeros(width)
        lengths = oracle_outside(train, train, origin, dim)
        alpha = head(train).max(1).values.mean() / lengths.mean()
        virtual = alpha * oracle_outside(train, x, origin, dim)
        odds = torch.cat([head(x), virtual[:, None]], 1).softmax(1)[:, -1].logit()
    method = ViM(head, Categorical(), dim=dim).fit(batches(train), progress=False)
    found = method.score(x)
    torch.testing.assert_close(found, virtual - head(x).detach().logsumexp(1), **CLOSE)
    sure = odds.abs() < 10  # the paper's probability is not yet rounded there
    torch.testing.assert_close(found[sure], odds[sure], rtol=1e-6, atol=1e-8)
    turn = rotation(width)
    with torch.no_grad():
        head.weight.copy_(head.weight @ turn)
    turned = ViM(head, Categorical(), dim=dim).fit(batches(train @ turn), progress=False)
    torch.testing.assert_close(turned.score(x @ turn), found, **CLOSE)


# --- GradNorm


@few
@given(shapes)
def test_grad_norm_is_that_of_autograd(shape: tuple[int, int, int]) -> None:
    width, classes, seed = shape
    model = nn.Sequential(layer(width, 6, seed), nn.Tanh(), layer(6, classes, seed + 2))
    x = 3 * noise(5, width, seed=seed + 4)
    wanted = []
    for sample in x:
        uniform = torch.full((classes,), 1 / classes, dtype=torch.float64)
        log_probability = model(sample[None])[0].log_softmax(0)
        divergence = (uniform * (uniform.log() - log_probability)).sum()
        (slope,) = torch.autograd.grad(divergence, model[2].weight)
        wanted.append(-slope.abs().sum())
    found = GradNorm(model, Categorical()).score(x)
    torch.testing.assert_close(found, torch.stack(wanted), **CLOSE)


def test_grad_norm_of_equal_probabilities_is_zero() -> None:
    head = layer(4, 3)
    with torch.no_grad():
        head.weight.zero_()
        head.bias.fill_(2.0)
    assert not GradNorm(head, Categorical()).score(noise(5, 4)).any()


# --- options


def test_options_are_saved(tmp_path: Path) -> None:
    train, labels = classes_of(5, 3, 0)
    head = layer(5, 3)
    for kind, options in [
        (Mahalanobis, {"layer": ""}),
        (KNN, {"k": 2, "normalise": False, "most": 9, "seed": 4, "layer": ""}),
        (Residual, {"dim": 3, "layer": ""}),
        (ViM, {"dim": 3, "layer": ""}),
        (GradNorm, {"layer": ""}),
    ]:
        method = kind(head, Categorical(), **options).fit([(train, labels)], progress=False)
        method.save(tmp_path / "method")
        loaded = kind.load(tmp_path / "method", head)
        assert {name: getattr(loaded, name) for name in options} == options
