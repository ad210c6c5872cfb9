"""The monitor against the dense posterior, for every likelihood and kind of network."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from cases import CASES, Case, mlp
from oracles import dense_factors, dense_fisher, dense_score
from scodkit import (
    Bernoulli,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    LastLayers,
    Monitor,
    MonteCarlo,
)
from scodkit.errors import EngineFallbackWarning, NotFittedError, OptionError
from scodkit.factors.pieces import sample_keys
from scodkit.model.inputs import Inputs
from scodkit.sketch import Exact, FrequentDirections, Nystrom, TwoSided

LIKELIHOODS = {
    "gaussian": Gaussian(0.3),
    "gaussian, per output": Gaussian((0.5, 1.0, 2.0, 4.0)),
    "heteroscedastic": HeteroscedasticGaussian(),
    "bernoulli": Bernoulli(),
    "categorical": Categorical(),
    "categorical, two directions": Categorical(directions=2),
    "monte carlo": MonteCarlo(
        lambda out: torch.distributions.Categorical(logits=out), samples=3
    ),
}
OUTPUTS = 4


def batches(call: Inputs, size: int) -> list[object]:
    """Cut a batch into loader-like batches."""
    parts = [call.samples(slice(i, i + size)) for i in range(0, call.batch_size, size)]
    return [dict(p.kwargs) if p.kwargs else p.args[0] for p in parts]


@pytest.fixture(params=CASES, ids=lambda case: case.name)
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


@pytest.mark.filterwarnings("ignore::scodkit.errors.EngineFallbackWarning")
@pytest.mark.parametrize("likelihood", LIKELIHOODS.values(), ids=LIKELIHOODS)
def test_full_rank_score_is_the_dense_posterior(case: Case, likelihood) -> None:
    model = case.model(OUTPUTS)
    train, test = case.inputs(14, OUTPUTS, seed=1), case.inputs(5, OUTPUTS, seed=2)
    monitor = Monitor(model, likelihood, rank=10_000, sketch=Exact(), prior_scale=0.7)
    monitor.fit(batches(train, 4), progress=False)

    rows = dense_factors(model, train, likelihood, keys=sample_keys(train))
    own = dense_factors(model, test, likelihood, keys=sample_keys(test))
    expected = dense_score(dense_fisher(rows), 14, own, 0.7)

    (whole,) = batches(test, 5)
    torch.testing.assert_close(monitor.score(whole), expected, rtol=1e-8, atol=0)
    assert monitor.basis.num_data == 14
    assert monitor.basis.captured == pytest.approx(1.0, abs=1e-10)


@pytest.mark.parametrize(
    "sketch",
    [Exact(), Nystrom(size=12), TwoSided(size=24), FrequentDirections(size=10)],
    ids=lambda s: type(s).__name__,
)
def test_batch_size_changes_the_score_by_rounding_only(sketch) -> None:
    model = mlp(3)
    torch.manual_seed(3)
    x, test = torch.randn(30, 3), torch.randn(9, 3)
    monitor = Monitor(model, Categorical(), rank=8, sketch=sketch)
    monitor.fit(DataLoader(TensorDataset(x), batch_size=7), progress=False)
    together = monitor.score(test)
    alone = torch.cat([monitor.score(row[None]) for row in test])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-6 * float(together.max()))
    monitor.memory_budget = 1  # one row at a time
    torch.testing.assert_close(
        monitor.score(test), together, rtol=1e-4, atol=1e-6 * float(together.max())
    )


@pytest.mark.parametrize("sketch", [Nystrom(size=16), TwoSided(size=24), Exact()], ids=str)
def test_linear_fits_do_not_depend_on_order_or_batches(sketch) -> None:
    model = mlp(2).double()
    torch.manual_seed(4)
    x, test = torch.randn(40, 3).double(), torch.randn(6, 3).double()
    scores = []
    for order, size in ((torch.arange(40), 40), (torch.randperm(40), 7)):
        monitor = Monitor(model, Gaussian(), rank=8, sketch=sketch)
        monitor.fit(list(x[order].split(size)), progress=False)
        scores.append(monitor.score(test))
    torch.testing.assert_close(scores[0], scores[1], rtol=1e-7, atol=0)


@pytest.mark.parametrize("sketch", [Nystrom(size=16), TwoSided(size=24), Exact()], ids=str)
def test_update_and_merge_equal_a_fit_on_everything(sketch) -> None:
    model = mlp(2).double()
    torch.manual_seed(5)
    x, test = torch.randn(50, 3).double(), torch.randn(6, 3).double()

    def fitted(data: torch.Tensor) -> Monitor:
        return Monitor(model, Gaussian(), rank=8, sketch=sketch).fit([data], progress=False)

    expected = fitted(x).score(test)
    updated = fitted(x[:20]).update([x[20:]], progress=False)
    merged = fitted(x[:35]).merge(fitted(x[35:]))
    torch.testing.assert_close(updated.score(test), expected, rtol=1e-7, atol=0)
    torch.testing.assert_close(merged.score(test), expected, rtol=1e-7, atol=0)
    assert updated.basis.num_data == merged.basis.num_data == 50


def test_features_are_the_projected_factors() -> None:
    case = CASES[0]
    model, train, test = case.model(3), case.inputs(20, 3, 1), case.inputs(4, 3, 2)
    monitor = Monitor(model, Categorical(), rank=6).fit(batches(train, 8), progress=False)
    expected = dense_factors(model, test, Categorical().named()) @ monitor.basis.vectors
    found = monitor.features(test.args[0])
    assert found.shape == (4, 3, 6)
    torch.testing.assert_close(found, expected)
    monitor.memory_budget = 1
    torch.testing.assert_close(monitor.features(test.args[0]), expected)


def test_call_returns_the_models_own_output_with_its_score() -> None:
    model, x = mlp(3), torch.randn(20, 3)
    monitor = Monitor(model, Categorical(), rank=5).fit([x], progress=False)
    scored = monitor(x[:4])
    torch.testing.assert_close(scored.output, model(x[:4]).detach())
    torch.testing.assert_close(scored.score, monitor.score(x[:4]))
    assert scored.p_value is None
    assert not scored.score.requires_grad
    monitor.calibrate([torch.randn(39, 3)], progress=False)
    scored = monitor(x[:4])
    assert scored.p_value is not None
    assert bool(((scored.p_value >= 1 / 40) & (scored.p_value <= 1)).all())
    flags = monitor.flag(x[:4], false_alarm=0.1)
    assert torch.equal(flags, scored.p_value <= 0.1)


def test_certificate_encloses_the_exact_score() -> None:
    case = CASES[1]
    model, train, test = case.model(3), case.inputs(40, 3, 1), case.inputs(8, 3, 2)
    exact = Monitor(model, Categorical(), rank=10_000, sketch=Exact())
    expected = exact.fit(batches(train, 40), progress=False).score(test.args[0])
    for sketch in (Nystrom(size=12), FrequentDirections(size=6), Exact()):
        monitor = Monitor(model, Categorical(), rank=6, sketch=sketch)
        bounds = monitor.fit(batches(train, 9), progress=False).certify(test.args[0])
        torch.testing.assert_close(bounds.score, monitor.score(test.args[0]))
        assert bool((bounds.lower <= expected).all())
        assert bool((expected <= bounds.upper).all())
        assert bool((bounds.score - bounds.paper_gap <= expected).all())
        assert bool((bounds.score - bounds.lower <= bounds.paper_gap * (1 + 1e-9)).all())


def test_last_layers_ignore_the_rest_of_the_network() -> None:
    case = CASES[1]
    model, train, test = case.model(3), case.inputs(20, 3, 1), case.inputs(4, 3, 2)
    monitor = Monitor(
        model, Categorical(), 500, sketch=Exact(), parameters=LastLayers(count=1)
    ).fit(batches(train, 8), progress=False)
    names = ["4.weight", "4.bias"]
    rows = dense_factors(model, train, Categorical(), names)
    own = dense_factors(model, test, Categorical(), names)
    expected = dense_score(dense_fisher(rows), 20, own, 1.0)
    torch.testing.assert_close(monitor.score(test.args[0]), expected, rtol=1e-8, atol=0)


def test_segmentation_outputs_are_flattened() -> None:
    torch.manual_seed(0)
    model = nn.Conv2d(1, 3, 3, padding=1).double()
    x, test = torch.randn(6, 1, 4, 4).double(), torch.randn(2, 1, 4, 4).double()
    likelihood = Categorical(class_dim=1)
    monitor = Monitor(model, likelihood, rank=1000, sketch=Exact()).fit([x], progress=False)
    rows = dense_factors(model, Inputs((x,), {}), likelihood)
    own = dense_factors(model, Inputs((test,), {}), likelihood)
    assert own.shape[1] == 2 * 16
    expected = dense_score(dense_fisher(rows), 6, own, 1.0)
    torch.testing.assert_close(monitor.score(test), expected, rtol=1e-8, atol=0)


class Packed(nn.Module):
    """A GRU of packed sequences, which no fast engine follows."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRU(3, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        lengths = torch.full((len(x),), x.shape[1])
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
        return self.cell(packed)[1][0]


def test_packed_sequences_fall_back_once_and_work() -> None:
    train = list(torch.randn(12, 5, 3).split(4))
    monitor = Monitor(Packed().eval(), Gaussian(), rank=5)
    with pytest.warns(EngineFallbackWarning, match="Packed is left to LoopEngine") as caught:
        monitor.fit(train, progress=False)
    assert sum(w.category is EngineFallbackWarning for w in caught) == 1
    assert monitor.score(train[0]).isfinite().all()


def test_empty_batches_score_to_nothing() -> None:
    monitor = Monitor(mlp(3), Categorical(), rank=5).fit([torch.randn(20, 3)], progress=False)
    scored = monitor(torch.empty(0, 3))
    assert scored.output.shape == (0, 3)
    assert scored.score.shape == (0,)
    assert monitor.features(torch.empty(0, 3)).shape == (0, 3, 5)


def test_everything_asks_for_a_fit_first() -> None:
    monitor = Monitor(mlp(3), Categorical())
    x = torch.randn(4, 3)
    for call in (monitor, monitor.score, monitor.features, monitor.certify):
        with pytest.raises(NotFittedError, match=r"monitor\.fit\(train_loader\)"):
            call(x)
    with pytest.raises(NotFittedError, match="fit"):
        monitor.calibrate([x])
    with pytest.raises(NotFittedError, match="fit"):
        monitor.update([x])
    with pytest.raises(NotFittedError, match="fit"):
        monitor.save("nowhere.scod")
    monitor.fit([x], progress=False)
    with pytest.raises(NotFittedError, match=r"monitor\.calibrate\(heldout_loader\)"):
        monitor.flag(x)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"rank": 0}, "rank >= 1"),
        ({"prior_scale": 0.0}, "positive, finite prior_scale"),
        ({"prior_scale": float("nan")}, "positive, finite prior_scale"),
        ({"likelihood": "categorical"}, r"Categorical\(\)"),
    ],
)
def test_bad_options_are_refused(options: dict[str, object], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        Monitor(**{"model": mlp(2), "likelihood": Categorical(), **options})


def test_the_prior_can_be_changed_without_a_fit_but_not_without_calibrating() -> None:
    torch.manual_seed(0)
    model, x = mlp(3), torch.randn(20, 3)
    monitor = Monitor(model, Categorical(), rank=5).fit([x], progress=False)
    monitor.calibrate([torch.randn(20, 3)], progress=False)
    other = Monitor(model, Categorical(), rank=5, prior_scale=0.1).fit([x], progress=False)
    monitor.prior_scale = 0.1
    assert monitor.calibration is None
    assert torch.equal(monitor.score(x), other.score(x))
    with pytest.raises(OptionError, match="positive, finite prior_scale"):
        monitor.prior_scale = -1.0
    assert monitor.prior_scale == 0.1


def test_repr_says_what_is_known() -> None:
    monitor = Monitor(mlp(3), Categorical(), rank=5)
    assert "not fitted" in repr(monitor)
    monitor.fit([torch.randn(20, 3)], progress=False)
    assert "20 samples" in repr(monitor)
    assert "captured=" in repr(monitor)


def test_a_basis_of_fewer_vectors_than_asked_for_scores_large_layers() -> None:
    net = nn.Sequential(nn.Linear(600, 600), nn.Tanh(), nn.Linear(600, 1))
    monitor = Monitor(net, Gaussian(), rank=8).fit([torch.randn(4, 600)], progress=False)
    assert monitor.basis.vectors.is_contiguous()
    assert monitor.score(torch.randn(64, 600)).isfinite().all()


def test_inputs_of_no_width_are_finite() -> None:
    class Extra(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 1)

        def forward(self, x: Tensor, extra: Tensor) -> Tensor:
            return self.layer(torch.cat([x, extra], dim=1))

    pair = (torch.randn(6, 3), torch.empty(6, 0))
    monitor = Monitor(Extra(), Gaussian(), rank=2, inputs=lambda batch: batch)
    assert monitor.fit([pair], progress=False).score(pair).isfinite().all()
