"""Scores of a layer at the network's end in closed form, against those by rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from draws import noise
from peaks import peak_of
from scodkit import Bernoulli, Categorical, Gaussian, LastLayers, Monitor, Task
from scodkit.factors.pieces import FactorSource
from scodkit.likelihoods import HeteroscedasticGaussian, Likelihood

OUTPUTS = 120
LIKELIHOODS = [
    Categorical(),
    Gaussian(0.3),
    Bernoulli(),
    HeteroscedasticGaussian(),
    Categorical(class_dim=1),
]


def network(bias: bool = True, outputs: int = OUTPUTS) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = [nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, outputs, bias=bias)]
        return nn.Sequential(*layers).double()


def source_of(monitor: Monitor) -> FactorSource:
    source = monitor._ready().source
    assert source is not None
    return source


def by_rows(monitor: Monitor, x: Tensor, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    with monkeypatch.context() as patch:
        patch.setattr(FactorSource, "ends_in_head", False)
        return monitor.score(x)


@pytest.mark.parametrize("likelihood", LIKELIHOODS, ids=str)
@pytest.mark.parametrize("chosen", [["2.*"], ["2.weight"], ["2.bias"]])
def test_scores_are_those_of_rows(
    likelihood: Likelihood, chosen: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monitor = Monitor(network(), likelihood, 6, parameters=chosen)
    monitor.fit([noise(30, 4)], progress=False)
    x = 3 * noise(9, 4, seed=1)
    assert source_of(monitor).ends_in_head
    expected = by_rows(monitor, x, monkeypatch)
    torch.testing.assert_close(monitor.score(x), expected, rtol=1e-9, atol=1e-12)
    bounds = monitor.fit([noise(30, 4)], progress=False, products=False).certify(x)
    assert bool((bounds.lower <= bounds.upper).all())


def test_confident_predictions_keep_their_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    model = network()
    monitor = Monitor(model, Categorical(), 6, parameters=LastLayers(count=1))
    monitor.fit([noise(30, 4)], progress=False)
    with torch.no_grad():
        model[2].bias[3] += 25.0  # of one class, up to 1e-11
    monitor.fit([noise(30, 4)], progress=False)
    x = noise(5, 4, seed=1)
    expected = by_rows(monitor, x, monkeypatch)
    assert float(expected.max()) < 1e-6
    torch.testing.assert_close(monitor.score(x), expected, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("budget", [1, 40_000, 2**30])
def test_memory_makes_no_difference(budget: int) -> None:
    monitor = Monitor(network(), Categorical(), 6, parameters=LastLayers(count=1))
    monitor.fit([noise(30, 4)], progress=False)
    x = noise(9, 4, seed=1)
    expected = monitor.score(x)
    monitor.memory_budget = budget
    torch.testing.assert_close(monitor.score(x), expected, rtol=1e-12, atol=0.0)


def test_bad_samples_are_infinite_and_their_outputs_as_they_are() -> None:
    monitor = Monitor(network(), Categorical(), 6, parameters=LastLayers(count=1))
    monitor.fit([noise(30, 4)], progress=False)
    x = noise(4, 4, seed=1)
    expected = monitor.score(x)
    x[1, 2] = torch.nan
    scored = monitor(x)
    assert scored.score.isinf().tolist() == [False, True, False, False]
    assert torch.equal(scored.score[[0, 2, 3]], expected[[0, 2, 3]])
    assert scored.output[1].isnan().all()


class Scaled(nn.Module):
    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.inside(x)


OTHERS = [
    (network(), {"parameters": "all"}),
    (network(outputs=90), {"parameters": ["2.*"]}),  # few
    (Scaled(network()), {"parameters": ["inside.2.*"]}),  # not the end
    (network(), {"parameters": ["2.*"], "likelihood": Categorical(directions=110)}),
    (network(), {"parameters": ["2.*"], "task": Task(lambda out: out[:, :110])}),
]


@pytest.mark.parametrize(("model", "options"), OTHERS)
def test_others_are_left_to_rows(model: nn.Module, options: dict[str, object]) -> None:
    options = {"likelihood": Gaussian(), "rank": 6, **options}
    monitor = Monitor(model, **options).fit([noise(30, 4)], progress=False)
    scorer = monitor._ready()
    call = monitor._network.inputs_of(noise(3, 4))
    assert not scorer._source_for(call, 2**30, monitor.basis).ends_in_head


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.*")
def test_it_can_be_recorded_saved_and_moved_to_the_cpu(tmp_path) -> None:
    monitor = Monitor(network().float(), Categorical(), 6, parameters=LastLayers(count=1))
    monitor.fit([noise(30, 4).float()], progress=False)
    x = noise(5, 4, seed=1).float()
    expected = monitor.score(x)
    monitor.save(tmp_path / "m.scod")
    loaded = Monitor.load(tmp_path / "m.scod", monitor.model)
    torch.testing.assert_close(loaded.score(x), expected)
    monitor.offload(tmp_path / "basis")
    torch.testing.assert_close(monitor.score(x), expected)
    loaded.compile(x)
    torch.testing.assert_close(loaded.score(x), expected, rtol=1e-4, atol=0.0)


@pytest.mark.slow
def test_thousands_of_classes_take_as_much_memory_as_planned() -> None:
    model = nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, 3100))
    monitor = Monitor(model, Categorical(), 20, parameters=LastLayers(count=1))
    monitor.fit([torch.randn(8, 16)], progress=False)
    x = torch.randn(16, 16)
    peak = peak_of(lambda: monitor.score(x))
    plan = monitor.plan(x)
    # rows at the output alone would be 16 x 3099 x 3100 numbers
    assert peak < 16 * 3099 * 3100
    assert plan.basis_bytes + peak == pytest.approx(plan.score_bytes, rel=0.15)
