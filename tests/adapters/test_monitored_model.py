"""Models that return their scores, and the same in closed form, against the monitor."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from draws import noise
from scodkit import (
    Bernoulli,
    Categorical,
    Fused,
    Gaussian,
    HeteroscedasticGaussian,
    LastLayers,
    Likelihood,
    Monitor,
    MonteCarlo,
    Task,
    predicted_class,
)
from scodkit.adapters import Monitored, MonitoredModel
from scodkit.errors import MismatchError, NotFittedError, OptionError, StaleMonitorError

LAST = LastLayers(count=1)
LIKELIHOODS = [Categorical(), Gaussian(0.3), Bernoulli(), HeteroscedasticGaussian()]
ByClass = Callable[[Tensor], Tensor]


def network(outputs: int = 4) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = [nn.Linear(4, 16), nn.Tanh(), nn.Dropout(0.5), nn.Linear(16, outputs)]
        return nn.Sequential(*layers).eval()


def some(count: int, seed: int) -> Tensor:
    return noise(count, 4, seed=seed, dtype=torch.float32)


def fitted(model: nn.Module, likelihood: Likelihood, **options: Any) -> Monitor:
    options = {"parameters": LAST, **options}
    return Monitor(model, likelihood, 6, **options).fit([some(60, 0)], progress=False)


def calibrated(
    likelihood: Likelihood | None = None, by: ByClass | None = None, **options: Any
) -> Monitor:
    model = options.pop("model", None) or network()
    monitor = fitted(model, likelihood or Categorical(), **options)
    return monitor.calibrate([some(99, 2)], by=by, progress=False)


def odd_batch() -> Tensor:
    """Known inputs, one farther away, and one that is not a number."""
    x = some(9, 1)
    x[3] *= 2
    x[5, 0] = torch.nan
    return x


def check(actual: Monitored, monitor: Monitor, x: Tensor) -> None:
    """Compare with the monitor: scores to rounding, p-values as those scores have them."""
    expected = monitor(x)
    torch.testing.assert_close(actual.output, expected.output, equal_nan=True)
    torch.testing.assert_close(actual.score, expected.score, rtol=2e-5, atol=1e-7)
    assert monitor.calibration is not None
    groups = None if monitor._by is None else monitor._by(actual.output)
    p_value = monitor.calibration.p_value(actual.score, groups)
    torch.testing.assert_close(actual.p_value, p_value, rtol=1e-15, atol=0)
    assert bool((actual.score[5] == torch.inf) & (actual.score[[0, 1]] < torch.inf).all())


# --- Any monitor ---


@pytest.mark.parametrize("parameters", [LAST, "all"], ids=str)
def test_a_call_returns_what_the_monitor_does(parameters: Any) -> None:
    monitor = calibrated(parameters=parameters)
    monitored, x = MonitoredModel(monitor), odd_batch()
    found, expected = monitored(x), monitor(x)
    assert expected.p_value is not None
    torch.testing.assert_close(found.output, expected.output, equal_nan=True)
    assert torch.equal(found.score, expected.score)
    assert torch.equal(found.p_value, expected.p_value)
    assert not found.score.requires_grad


def test_a_fused_score_is_taken() -> None:
    fused = Fused(network(), Categorical()).fit([some(90, 0)], progress=False)
    with pytest.raises(NotFittedError, match="calibrate"):
        MonitoredModel(fused)
    fused.calibrate([some(99, 2)], progress=False)
    x = odd_batch()
    assert torch.equal(MonitoredModel(fused)(x).p_value, fused.p_value(x))


def test_picks_of_the_monitor_are_those_of_batches() -> None:
    monitor = calibrated(inputs=lambda batch: batch, outputs=lambda output: output[:, :4])
    x = odd_batch()
    assert torch.equal(MonitoredModel(monitor)(x).score, monitor.score(x))


@pytest.mark.parametrize("thing", [network(), None], ids=["a model", "None"])
def test_what_is_no_monitor_is_refused(thing: Any) -> None:
    with pytest.raises(OptionError, match="expected a Monitor or a Fused"):
        MonitoredModel(thing)


def test_a_monitor_without_p_values_is_refused() -> None:
    with pytest.raises(NotFittedError, match=r"monitor\.calibrate"):
        MonitoredModel(fitted(network(), Categorical()))


def test_it_moves_as_a_module_and_is_stale_as_a_monitor() -> None:
    monitored, x = MonitoredModel(calibrated()), odd_batch()
    before = monitored(x)
    assert torch.equal(monitored.to("cpu")(x).score, before.score)
    assert torch.equal(copy.deepcopy(monitored)(x).score, before.score)
    with pytest.raises(StaleMonitorError):
        monitored.double()(x.double())


def test_a_state_loads_with_the_same_monitor_only(path: Path) -> None:
    monitored, x = MonitoredModel(calibrated()), odd_batch()
    monitored.monitor.save(path)
    again = MonitoredModel(Monitor.load(path, network()))
    again.load_state_dict(monitored.state_dict())
    assert torch.equal(again(x).score, monitored(x).score)
    other = MonitoredModel(calibrated(Gaussian()))
    before = copy.deepcopy(other.model.state_dict())
    state = monitored.state_dict()
    state["model.0.bias"] = state["model.0.bias"] + 1
    with pytest.raises(MismatchError, match=r"monitor\.save"):
        other.load_state_dict(state)
    assert torch.equal(other.model.state_dict()["0.bias"], before["0.bias"])


# --- Closed form ---


@pytest.mark.parametrize("by", [None, predicted_class], ids=["together", "by class"])
@pytest.mark.parametrize("likelihood", LIKELIHOODS, ids=str)
def test_the_closed_form_is_the_monitor(likelihood: Likelihood, by: ByClass | None) -> None:
    monitor, x = calibrated(likelihood, by), odd_batch()
    closed = MonitoredModel(monitor).closed_form(some(3, 7))
    check(closed(x), monitor, x)
    check(copy.deepcopy(closed)(x), monitor, x)


@pytest.mark.filterwarnings("ignore:expected enough held-out samples of every group")
def test_a_group_never_held_out_is_judged_by_all() -> None:
    model, x = network(), odd_batch()
    limit = float(model(some(99, 2)).detach().amax())
    by: ByClass = lambda output: (output.amax(1) > limit).long()  # noqa: E731
    monitor = calibrated(Gaussian(), by, model=model)
    x = torch.cat([x, 2 * some(400, 4)])
    new = by(monitor(x).output)
    assert 0 < int(new.sum()) < len(x)
    check(MonitoredModel(monitor).closed_form(x[:4])(x), monitor, x)


@pytest.mark.parametrize("chosen", [["3.weight"], ["3.bias"]])
def test_part_of_the_last_layer_will_do(chosen: list[str]) -> None:
    monitor, x = calibrated(parameters=chosen), odd_batch()
    check(MonitoredModel(monitor).closed_form(x)(x), monitor, x)


def test_an_exported_program_takes_any_batch() -> None:
    monitor, x = calibrated(), odd_batch()
    program = MonitoredModel(monitor).export(some(3, 7)).module()
    check(Monitored(*program(x)), monitor, x)
    torch.testing.assert_close(program(x[:1])[1], monitor.score(x[:1]), rtol=2e-5, atol=0)


class TwoInputs(nn.Module):
    """Takes a tensor and a scale by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def forward(self, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        """Return logits."""
        return self.net(x * scale + shift)


def two_inputs() -> tuple[Monitor, dict[str, Tensor]]:
    def inputs(seed: int, count: int) -> dict[str, Tensor]:
        scale, shift = some(count, seed + 50).exp(), some(count, seed + 90)
        return {"x": some(count, seed), "shift": shift, "scale": scale}

    monitor = Monitor(TwoInputs().eval(), Categorical(), 6, parameters=LAST)
    monitor.fit([inputs(0, 60)], progress=False)
    return monitor.calibrate([inputs(2, 99)], progress=False), inputs(1, 5)


def test_a_program_takes_keywords() -> None:
    monitor, x = two_inputs()
    program = MonitoredModel(monitor).export(**{k: v[:3] for k, v in x.items()}).module()
    torch.testing.assert_close(program(*x.values())[1], monitor.score(x), rtol=2e-5, atol=0)


def test_a_rounded_closed_form_is_refused() -> None:
    closed, x = MonitoredModel(calibrated()).closed_form(some(3, 7)), odd_batch()
    with pytest.raises(OptionError, match="rounded"):
        copy.deepcopy(closed).half()(x.half())
    other = MonitoredModel(calibrated(prior_scale=2.0)).closed_form(some(3, 7))
    with pytest.raises(MismatchError):
        other.load_state_dict(closed.state_dict())


class Careless(nn.Module):
    """Writes to its input, and calls its last layer by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.last = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits of half the input."""
        return self.last(input=self.body(x.div_(2)).tanh())


def test_a_model_may_write_to_its_input() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        monitor, x = calibrated(model=Careless().eval()), odd_batch()
    closed = MonitoredModel(monitor).closed_form(x)
    assert torch.equal(x.nan_to_num(), odd_batch().nan_to_num())
    check(closed(x.clone()), monitor, x)


def test_a_single_layer_is_a_last_layer() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        monitor, x = calibrated(model=nn.Linear(4, 3).eval()), odd_batch()
    check(Monitored(*MonitoredModel(monitor).export(x).module()(x)), monitor, x)


class OwnLinear(nn.Linear):
    """A layer with a forward pass of its own."""

    def forward(self, input: Tensor) -> Tensor:
        """Return what a Linear layer does, of inputs twice as large."""
        return nn.functional.linear(2 * input, self.weight, self.bias)


def ends_in_own_linear() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), OwnLinear(16, 4)).eval()


def ends_in_softplus() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 4), nn.Softplus()).eval()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"parameters": "all"}, "one Linear layer"),
        ({"parameters": ["0.*"]}, "one Linear layer"),
        ({"model": ends_in_own_linear()}, "a OwnLinear"),
        ({"likelihood": Categorical(directions=1)}, "likelihood in closed form"),
        ({"task": Task(lambda output: output[:, :1])}, "a task"),
    ],
    ids=["all", "first layer", "own layer", "directions", "task"],
)
def test_other_monitors_are_refused_with_what_to_type(
    options: dict[str, Any], reason: str
) -> None:
    monitored = MonitoredModel(calibrated(**options))
    with pytest.raises(OptionError, match=reason) as refused:
        monitored.export(some(3, 7))
    assert "parameters=LastLayers(count=1)" in str(refused.value)


def test_a_layer_whose_output_is_changed_is_refused_for_that() -> None:
    words = "those of '2', whose output is not what the model returns: .* end in a Linear"
    with pytest.raises(OptionError, match=words):
        MonitoredModel(calibrated(model=ends_in_softplus())).export(some(3, 7))


def test_scores_in_half_precision_are_refused_for_that() -> None:
    monitor = calibrated()
    monitor.precision = torch.bfloat16
    monitor.calibrate([some(99, 2)], progress=False)
    with pytest.raises(
        OptionError, match=r"in torch.bfloat16, .* type monitor.precision = None"
    ):
        MonitoredModel(monitor).export(some(3, 7))


def test_a_fused_score_is_not_exported() -> None:
    fused = Fused(network(), Categorical()).fit([some(90, 0)], progress=False)
    fused.calibrate([some(99, 2)], progress=False)
    with pytest.raises(OptionError, match=r"LastLayers\(count=1\)"):
        MonitoredModel(fused).export(some(3, 7))


def test_a_likelihood_that_draws_is_not_exported() -> None:
    family = torch.distributions.Poisson
    likelihood = MonteCarlo(lambda output: family(output.exp()), samples=3)
    with pytest.raises(OptionError, match="likelihood in closed form"):
        MonitoredModel(calibrated(likelihood)).export(some(3, 7))


def test_traces_and_single_samples_are_refused() -> None:
    monitored, x = MonitoredModel(calibrated()), some(3, 7)
    with pytest.raises(OptionError, match="at least 2 samples"):
        monitored.export(x[:1])
    with pytest.raises(OptionError, match=r"monitored\.export"):
        torch.export.export(monitored, (x,), strict=False)
    monitored.train()
    with pytest.raises(OptionError, match=r"model\.eval\(\)"):
        monitored.export(x)


def test_an_example_that_disagrees_is_refused() -> None:
    """A layer that is run twice, of which a hook sees the first: the example tells."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                x = self.last(x)
            return self.last(self.body(x))

    monitored = MonitoredModel(calibrated(Gaussian(), model=Twice().eval()))
    with pytest.raises(OptionError):
        monitored.closed_form(some(3, 7))


# --- ONNX ---


def answers(file: Path, inputs: dict[str, Tensor]) -> Monitored:
    runtime = pytest.importorskip("onnxruntime", reason="of make test-hosts")
    session = runtime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    assert {given.name for given in session.get_inputs()} == set(inputs)
    assert [made.name for made in session.get_outputs()] == list(Monitored._fields)
    found = session.run(None, {name: x.numpy() for name, x in inputs.items()})
    return Monitored(*map(torch.from_numpy, found))


@pytest.fixture
def onnx_file(tmp_path: Path) -> Path:
    pytest.importorskip("onnxscript", reason="of make test-hosts")
    pytest.importorskip("onnx", reason="of make test-hosts")
    return tmp_path / "model.onnx"


onnx = [
    pytest.mark.hosts,
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),  # torch's own
]


def with_onnx(test: Callable[..., None]) -> Callable[..., None]:
    for mark in onnx:
        test = mark(test)
    return test


@with_onnx
@pytest.mark.parametrize("likelihood", LIKELIHOODS, ids=str)
def test_onnx_answers_as_the_monitor_does(likelihood: Likelihood, onnx_file: Path) -> None:
    monitor, x = calibrated(likelihood), odd_batch()
    MonitoredModel(monitor).save_onnx(onnx_file, some(3, 7))
    check(answers(onnx_file, {"input": x}), monitor, x)
    single = answers(onnx_file, {"input": x[:1]}).score
    torch.testing.assert_close(single, monitor.score(x[:1]), rtol=2e-5, atol=0)


@with_onnx
def test_onnx_knows_groups(onnx_file: Path) -> None:
    monitor, x = calibrated(by=predicted_class), odd_batch()
    MonitoredModel(monitor).save_onnx(onnx_file, some(3, 7))
    check(answers(onnx_file, {"input": x}), monitor, x)


@with_onnx
def test_onnx_names_inputs_as_the_model_does(onnx_file: Path) -> None:
    monitor, x = two_inputs()
    rest = {name: x[name][:3] for name in ("shift", "scale")}
    MonitoredModel(monitor).save_onnx(onnx_file, x["x"][:3], **rest)
    found = answers(onnx_file, x)
    torch.testing.assert_close(found.score, monitor.score(x), rtol=2e-5, atol=0)


@with_onnx
def test_a_convolutional_network_in_onnx(onnx_file: Path) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        body = [nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(2)]
        model = nn.Sequential(*body, nn.Flatten(), nn.Linear(32, 5)).eval()

    def images(count: int, seed: int) -> Tensor:
        return noise(count, 1, 9, 9, seed=seed, dtype=torch.float32)

    monitor = Monitor(model, Categorical(), 6, parameters=LAST)
    monitor.fit([images(60, 0)], progress=False).calibrate([images(99, 2)], progress=False)
    MonitoredModel(monitor).save_onnx(onnx_file, images(2, 3))
    x = images(7, 1)
    x[5, 0, 0, 0] = torch.inf
    check(answers(onnx_file, {"input": x}), monitor, x)


@with_onnx
def test_an_onnx_file_is_whole_or_none(
    onnx_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scodkit.adapters.monitored_model._LARGEST", 1000)
    with pytest.raises(OptionError, match="external_data=True"):
        MonitoredModel(calibrated()).save_onnx(onnx_file, some(3, 7))
    assert not onnx_file.exists()
