"""The same scores as pytorch-ood's detectors, where the definitions are the same.

Where they are not, the test says what differs: a factor, a sign, a constant, a ridge.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from scipy.stats import spearmanr
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from baseline_contracts import network, some, training_data
from pytorch_ood_detectors import detectors
from scodkit import Categorical, Gaussian
from scodkit.baselines import Energy, MaxLogit, MaxSoftmax, Naive
from scodkit.baselines.baseline import Baseline
from scodkit.baselines.knn import KNN
from scodkit.baselines.mahalanobis import Mahalanobis
from scodkit.baselines.one_pass import GradNorm
from scodkit.baselines.residual import ViM

COUNT = 40
X = some(50)


def loader(kind: str = "categorical") -> DataLoader:
    x, y = (torch.cat(parts) for parts in zip(*training_data(kind, COUNT), strict=True))
    labels = y if kind == "categorical" else torch.zeros(COUNT, dtype=torch.long)
    return DataLoader(TensorDataset(x, labels), batch_size=8)


def ours(method: Baseline) -> Tensor:
    return method.fit(loader(), progress=False).score(X)


def theirs(detector) -> Tensor:
    with torch.no_grad():
        return detector.fit(loader()).predict(X)


def assert_same(found: Tensor, wanted: Tensor, rounding: float = 1e-6) -> None:
    torch.testing.assert_close(found, wanted.to(found.dtype), rtol=rounding, atol=rounding)
    assert_same_order(found, wanted)


def assert_same_order(found: Tensor, wanted: Tensor) -> None:
    assert spearmanr(found, wanted).statistic == pytest.approx(1.0, abs=1e-12)


@pytest.fixture
def peer() -> Iterator[ModuleType]:
    with detectors() as module:
        yield module


@pytest.fixture
def model() -> nn.Sequential:
    return network("categorical")


def test_mahalanobis(peer: ModuleType, model: nn.Sequential) -> None:
    """Theirs: half the distance, by the scatter instead of its mean, with a ridge of 1e-6."""
    detector = peer.Mahalanobis(model[:-1])
    found, wanted = ours(Mahalanobis(model, Categorical())), theirs(detector)
    assert_same_order(found, wanted)
    # the smallest eigenvalue of the scatter bounds what the ridge changes
    ridge = 1e-6 / torch.linalg.eigvalsh(detector.cov)[0].item()
    torch.testing.assert_close(found, 2 * COUNT * wanted, rtol=1.01 * ridge, atol=0.0)
    detector.precision = torch.linalg.inv(detector.cov - 1e-6 * torch.eye(5))
    assert_same(found, 2 * COUNT * detector.predict(X).detach(), rounding=1e-9)


def test_mahalanobis_of_regression_is_that_of_one_class(peer: ModuleType) -> None:
    model = network("gaussian")
    found = Mahalanobis(model, Gaussian()).fit(loader("gaussian"), progress=False).score(X)
    detector = peer.Mahalanobis(model[:-1]).fit(loader("gaussian"))
    with torch.no_grad():
        assert_same_order(found, detector.predict(X))


@pytest.mark.parametrize("k", [1, 3, 40])
@pytest.mark.parametrize("normalise", [True, False])
def test_knn(peer: ModuleType, model: nn.Sequential, k: int, normalise: bool) -> None:
    found = ours(KNN(model, Categorical(), k=k, normalise=normalise))
    assert_same(found, theirs(peer.KNN(model[:-1], k=k, normalize=normalise)), 1e-12)


def test_knn_has_the_same_default(peer: ModuleType, model: nn.Sequential) -> None:
    default = peer.KNN(None)
    mine = KNN(model, Categorical())
    assert (mine.k, mine.normalise) == (default.k, default.normalize)


@pytest.mark.parametrize("dim", [1, 2, 4])
def test_vim(peer: ModuleType, model: nn.Sequential, dim: int) -> None:
    """Theirs is computed in float32, whatever the model's dtype."""
    head = model[-1]
    detector = peer.ViM(model[:-1], d=dim, w=head.weight, b=head.bias)
    found, wanted = ours(ViM(model, Categorical(), dim=dim)), theirs(detector)
    assert_same(found, wanted, rounding=2e-5)


def test_grad_norm(peer: ModuleType, model: nn.Sequential) -> None:
    detector = peer.GradNorm(model, param_filter=lambda name: name == "5.weight")
    assert_same(ours(GradNorm(model, Categorical())), theirs(detector), 1e-12)


@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_energy(peer: ModuleType, model: nn.Sequential, temperature: float) -> None:
    found = ours(Energy(model, Categorical(), temperature=temperature))
    assert_same(found, theirs(peer.EnergyBased(model, t=temperature)), 1e-12)


def test_max_logit(peer: ModuleType, model: nn.Sequential) -> None:
    assert_same(ours(MaxLogit(model, Categorical())), theirs(peer.MaxLogit(model)))


def test_max_softmax(peer: ModuleType, model: nn.Sequential) -> None:
    """Theirs is the negative probability itself, without the 1."""
    found = ours(MaxSoftmax(model, Categorical()))
    assert_same(found, 1 + theirs(peer.MaxSoftmax(model)), 1e-12)


def test_entropy(peer: ModuleType, model: nn.Sequential) -> None:
    assert_same(ours(Naive(model, Categorical())), theirs(peer.Entropy(model)), 1e-12)
