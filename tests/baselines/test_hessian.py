"""The training loss's Hessian and its top eigenspace, against dense ones."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from baseline_contracts import LIKELIHOODS, OUTPUTS, network, training_data
from hessians import dense_hessian, loss_of
from scodkit import Bernoulli, Categorical, Gaussian
from scodkit.baselines.baseline import TrainingData
from scodkit.baselines.local_ensemble import LocalEnsemble, LossHessian, top_eigenspace
from scodkit.baselines.predictions import negative_log_likelihood
from scodkit.errors import BatchError, NondeterministicError, NonFiniteError, OptionError
from scodkit.likelihoods import HeteroscedasticGaussian, Likelihood
from scodkit.model.network import Network
from scodkit.model.parameters import select_names

EVERY = tuple(OUTPUTS)


def hessian_of(kind: str, model: nn.Module, batch: int = 7) -> LossHessian:
    net = Network(model)
    parameters = select_names(model, [n for n, _ in model.named_parameters()])
    data = TrainingData(net, training_data(kind, batch=batch))
    return LossHessian(net, parameters, LIKELIHOODS[kind], data)


@pytest.mark.parametrize("kind", EVERY)
def test_losses_are_those_of_torch(kind: str) -> None:
    (x, y), *_ = training_data(kind)
    output = (3 * network(kind)(x)).detach().requires_grad_()
    found = negative_log_likelihood(LIKELIHOODS[kind], output, y)
    assert found.shape == (8,)
    wanted = loss_of(kind, output, y)
    torch.testing.assert_close(found.mean(), wanted)
    ours, theirs = (torch.autograd.grad(v, output)[0] for v in (found.mean(), wanted))
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


def test_losses_sum_over_positions() -> None:
    output = torch.randn(2, 3, 4, 5, dtype=torch.float64)
    targets = torch.randint(0, 3, (2, 4, 5))
    found = negative_log_likelihood(Categorical(class_dim=1), output, targets)
    wanted = nn.functional.cross_entropy(output, targets, reduction="none").sum((1, 2))
    torch.testing.assert_close(found, wanted)
    last = negative_log_likelihood(Categorical(class_dim=-1), output.movedim(1, -1), targets)
    torch.testing.assert_close(last, wanted)


@pytest.mark.parametrize("family", [Categorical(), Bernoulli()])
def test_slopes_of_confident_predictions_keep_their_digits(family: Likelihood) -> None:
    z = torch.tensor(
        [[40.0, 0.0], [0.0, 50.0]] if family == Categorical() else [[40.0], [-50.0]]
    )
    z.requires_grad_()
    y = torch.tensor([0, 1]) if family == Categorical() else torch.tensor([[1.0], [0.0]])
    (slope,) = torch.autograd.grad(negative_log_likelihood(family, z, y).sum(), z)
    wanted = torch.tensor([-40.0, -50.0], dtype=torch.float64).exp().float()
    torch.testing.assert_close(slope.abs().amax(1), wanted, rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("kind", EVERY)
def test_products_are_those_of_the_dense_hessian(kind: str) -> None:
    model = network(kind)
    hessian = hessian_of(kind, model)  # batches of seven, and a last one of five
    dense = dense_hessian(kind)
    assert hessian.parameters.num_parameters == len(dense)
    vector = torch.randn(len(dense), dtype=torch.float64)
    torch.testing.assert_close(hessian.times(vector), dense @ vector, rtol=1e-10, atol=1e-12)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize(
    ("kind", "loss"), [("categorical", nn.CrossEntropyLoss()), ("gaussian", nn.MSELoss())]
)
def test_products_are_those_of_curvlinops(kind: str, loss: nn.Module) -> None:
    curvlinops = pytest.importorskip("curvlinops")
    model, data = network(kind), training_data(kind, batch=7)
    theirs = curvlinops.HessianLinearOperator(model, loss, list(model.parameters()), data)
    vector = torch.randn(theirs.shape[0], dtype=torch.float64)
    half = 1.0 if kind == "categorical" else 0.5
    found = hessian_of(kind, model).times(vector)
    torch.testing.assert_close(found, half * (theirs @ vector), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("rank", [6, 90])  # with 90 the whole matrix is made
def test_the_eigenspace_is_that_of_the_largest_magnitudes(rank: int) -> None:
    model = network("categorical")
    values, vectors = torch.linalg.eigh(dense_hessian("categorical"))
    order = values.abs().argsort(descending=True)
    top = vectors[:, order[:rank]]
    chosen, left = values[order[:rank]], values[order[rank]]
    assert chosen.min() < 0 < chosen.max()  # the largest alone would be others
    assert chosen.abs().min() > 1.001 * abs(left)  # or the space would not be defined
    method = LocalEnsemble(model, Categorical(), rank=rank, tolerance=1e-12)
    found = method.fit(training_data("categorical", batch=40), progress=False)._ready()[
        "vectors"
    ]
    torch.testing.assert_close(found @ found.mT, top @ top.mT, rtol=0.0, atol=1e-7)


@given(size=st.integers(3, 30), share=st.floats(0.05, 0.95), seed=st.integers(0, 99))
@settings(max_examples=15, deadline=None)
def test_eigenspaces_of_matrices_of_any_size(size: int, share: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    turn = torch.linalg.qr(torch.randn(size, size, dtype=torch.float64, generator=generator)).Q
    values = torch.arange(1, size + 1, dtype=torch.float64) ** 2
    values[::2] *= -1
    matrix = turn * values @ turn.mT
    rank = min(size - 1, max(1, int(share * size)))
    start = torch.randn(size, dtype=torch.float64, generator=generator)
    found = top_eigenspace(lambda v: matrix @ v, start, rank, 1e-12)
    top = turn[:, size - rank :]
    torch.testing.assert_close(found @ found.mT, top @ top.mT, rtol=0.0, atol=1e-8)


def test_fewer_directions_of_curvature_than_asked_for_are_all_found() -> None:
    """Three of them among fifty weights: the other vectors are any."""
    torch.manual_seed(0)
    x = torch.randn(3, 50, dtype=torch.float64)
    model = nn.Linear(50, 1, bias=False).double()
    method = LocalEnsemble(model, Gaussian(), rank=8)
    method.fit([(x, torch.zeros(3, 1))], progress=False)
    assert method.score(x).max() < 1e-8
    assert method.score(torch.randn(4, 50, dtype=torch.float64)).min() > 1.0


def test_no_curvature_at_all_is_refused() -> None:
    model = nn.Sequential(nn.Linear(20, 5), nn.ReLU(), nn.Linear(5, 1))
    with torch.no_grad():
        model[0].bias.fill_(-1e3)  # nothing gets through
    method = LocalEnsemble(model, Gaussian(), rank=3, parameters=["0.weight"])
    with pytest.raises(OptionError, match="3 directions of curvature"):
        method.fit([(torch.randn(4, 20), torch.zeros(4, 1))], progress=False)


def test_a_weight_without_a_part_in_the_loss_has_no_curvature() -> None:
    class Extra(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.unused = nn.Parameter(torch.ones(2))
            self.line = nn.Linear(2, 1, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.line(x)

    net = Network(Extra())
    data = TrainingData(net, [(torch.eye(2), torch.zeros(2))])
    parameters = select_names(net.model, ["unused", "line.weight"])
    hessian = LossHessian(net, parameters, Gaussian(), data)
    assert hessian.times(torch.ones(4)).tolist() == [0.0, 0.0, 0.5, 0.5]
    alone = LossHessian(net, select_names(net.model, ["unused"]), Gaussian(), data)
    assert alone.times(torch.ones(2)).tolist() == [0.0, 0.0]


def test_attention_can_be_differentiated_twice() -> None:
    model = nn.Sequential(
        nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True),
        nn.Flatten(),
        nn.Linear(12, 1),
    )
    x = torch.randn(6, 3, 4)
    method = LocalEnsemble(model, Gaussian(), rank=2).fit([(x, x[:, 0, :1])], progress=False)
    assert method.score(x).isfinite().all()


def test_float32_finds_about_the_same_space() -> None:
    model = network("categorical")
    wide = LocalEnsemble(model, Categorical(), rank=4).fit(
        training_data("categorical"), progress=False
    )
    data = [(x.float(), y) for x, y in training_data("categorical")]
    narrow = LocalEnsemble(network("categorical").float(), Categorical(), rank=4)
    found = narrow.fit(data, progress=False)._ready()["vectors"]
    assert found.dtype == torch.float32
    a, b = found.double(), wide._ready()["vectors"]
    torch.testing.assert_close(a @ a.mT, b @ b.mT, rtol=0.0, atol=1e-3)


class Changing:
    """Batches that differ from pass to pass."""

    def __init__(self, kind: str, drop: bool) -> None:
        self._data, self._drop, self._passes = training_data(kind), drop, 0

    def __iter__(self):
        self._passes += 1
        for x, y in self._data[: -1 if self._drop and self._passes > 3 else None]:
            yield (x if self._drop else x + 0.1 * self._passes), y


@pytest.mark.parametrize("drop", [True, False])
def test_data_that_changes_between_passes_is_refused(drop: bool) -> None:
    method = LocalEnsemble(network("categorical"), Categorical(), rank=4)
    with pytest.raises(NondeterministicError, match="same data in every pass"):
        method.fit(Changing("categorical", drop), progress=False)


def test_a_pass_with_fewer_samples_of_the_same_loss_is_refused() -> None:
    class Shrinking:
        passes = 0

        def __iter__(self):
            self.passes += 1
            return iter([training_data("gaussian")[0]] * (3 if self.passes < 4 else 2))

    method = LocalEnsemble(network("gaussian"), Gaussian(), rank=4)
    with pytest.raises(NondeterministicError, match="24 samples of mean loss"):
        method.fit(Shrinking(), progress=False)


@pytest.mark.parametrize("where", [0, 1])
def test_training_data_without_a_loss_is_refused(where: int) -> None:
    data = training_data("gaussian")
    data[2][where][1] = torch.nan
    method = LocalEnsemble(network("gaussian"), Gaussian(), rank=4)
    with pytest.raises(NonFiniteError, match="row 1"):
        method.fit(data, progress=False)


@pytest.mark.parametrize(
    ("kind", "targets", "wanted"),
    [
        ("categorical", torch.tensor([0, 3]), "class indices from 0 to 2"),
        ("categorical", torch.tensor([-1, 0]), "class indices from 0 to 2"),
        ("categorical", torch.tensor([0.0, 1.0]), "class indices from 0 to 2"),
        ("categorical", torch.zeros(2, 3, dtype=torch.int64), "expected 1 target"),
        ("bernoulli", torch.tensor([0.0, 1.5]), "numbers from 0 to 1"),
        ("bernoulli", torch.tensor([-1.0, 1.0]), "numbers from 0 to 1"),
        ("gaussian", torch.zeros(2, 2), "expected 1 target"),
        ("scaled", torch.zeros(2, 1), "expected 2 target"),
        ("heteroscedastic", torch.zeros(2, 2), "expected 1 target"),
    ],
)
def test_targets_that_do_not_fit_are_refused(kind: str, targets: Tensor, wanted: str) -> None:
    x = training_data(kind)[0][0][:2]
    method = LocalEnsemble(network(kind), LIKELIHOODS[kind], rank=2)
    with pytest.raises(BatchError, match=wanted):
        method.fit([(x, targets)], progress=False)


def test_outputs_that_do_not_fit_are_refused() -> None:
    x, y = training_data("gaussian")[0]
    with pytest.raises(BatchError, match="even number of outputs"):
        LocalEnsemble(network("gaussian"), HeteroscedasticGaussian(), rank=2).fit(
            [(x, y)], progress=False
        )
    with pytest.raises(BatchError, match="expected 3 outputs"):
        LocalEnsemble(network("scaled"), Gaussian((1.0, 1.0, 1.0)), rank=2).fit(
            [(x, torch.zeros(8, 2))], progress=False
        )
