"""A monitor answers for the model it was fitted on, and for no other."""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from scodkit import Gaussian, Monitor
from scodkit.errors import CalibrationWarning, MismatchError, ScodError, StaleMonitorError
from scodkit.model.parameters import LastLayers, state_fingerprint
from scodkit.numerics import artifact
from scodkit.sharded import ShardedMonitor

X = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
TRAIN, HELDOUT, NEW = [X[:10], X[10:20]], [X[20:35]], X[35:]


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 2))
    net(X)  # so that its buffers are its own
    return net.eval()


def signs(output: Tensor) -> Tensor:
    return (output[:, 0] > 0).long()


def fitted(model: nn.Module | None = None, **options) -> Monitor:
    monitor = Monitor(network() if model is None else model, Gaussian(), rank=5, **options)
    return monitor.fit(TRAIN, progress=False).calibrate(HELDOUT, progress=False)


def train(net: nn.Module) -> None:
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    net(X).square().sum().backward()
    optimizer.step()


def half_a_weight(net: nn.Module) -> None:
    with torch.no_grad():
        net[3].weight[0] *= 0.5


def steal(net: nn.Module) -> None:
    net[1].running_mean = torch.ones(6)


# --- What is refused -----------------------------------------------------------------------

CALLS: dict[str, Callable[[Monitor], object]] = {
    "score": lambda monitor: monitor.score(NEW),
    "call": lambda monitor: monitor(NEW),
    "flag": lambda monitor: monitor.flag(NEW, 0.2),
    "calibrate": lambda monitor: monitor.calibrate(HELDOUT, progress=False),
    "certify": lambda monitor: monitor.certify(NEW),
    "explain": lambda monitor: monitor.explain(NEW),
    "features": lambda monitor: monitor.features(NEW),
    "references": lambda monitor: monitor.references(TRAIN, progress=False),
    "summary": lambda monitor: monitor.summary(NEW),
    "selftest": lambda monitor: monitor.selftest(NEW),
    "compile": lambda monitor: monitor.compile(NEW),
    "update": lambda monitor: monitor.update([X + 1], progress=False),
    "merge": lambda monitor: monitor.merge(fitted()),
}


@pytest.mark.parametrize("call", CALLS)
def test_every_call_refuses_changed_weights(call: str) -> None:
    monitor = fitted()
    calibration = monitor.calibration
    monitor.model.load_state_dict(network(seed=1).state_dict())
    with pytest.raises(StaleMonitorError, match=r"chosen weights differ.*monitor\.renew\("):
        CALLS[call](monitor)
    assert monitor.calibration is calibration


CHANGES: dict[str, tuple[Callable[[nn.Module], object], str]] = {
    "trained": (train, r"touched since: 0\.weight, 0\.bias, 1\.weight, 1\.bias \.\.\."),
    "in place": (half_a_weight, r"the chosen weights differ \(touched since: 3\.weight\)"),
    "one weight": (
        lambda net: setattr(net[0], "weight", nn.Parameter(net[0].weight * 2)),
        r"touched since: 0\.weight\)",
    ),
    "data": (lambda net: setattr(net[0].weight, "data", torch.ones(6, 3)), r"0\.weight\)"),
    "layer": (lambda net: net.__setitem__(0, nn.Linear(3, 6)), r"0\.weight, 0\.bias\)"),
    "activation": (
        lambda net: net.__setitem__(2, nn.ReLU()),
        r"the layer 2 was Tanh\(\) and is ReLU\(\)",
    ),
    "option of a layer": (
        lambda net: net.__setitem__(1, copy.deepcopy(net[1])) or setattr(net[1], "eps", 1.0),
        r"the layer 1 was BatchNorm1d",
    ),
    "more layers": (lambda net: net.append(nn.ReLU()), "the layer 4 is new"),
    "fewer layers": (lambda net: net.__delitem__(2), r"the layer 2 was Tanh\(\) and is Linear"),
    "bias": (lambda net: setattr(net[3], "bias", None), r"3\.bias"),
    "buffer": (lambda net: net[1].running_mean.add_(1), r"buffers differ.*1\.running_mean\)"),
    "another buffer": (steal, r"buffers differ.*1\.running_mean\)"),
    "training mode": (lambda net: net.train()(X), "buffers differ"),
    "half": (lambda net: net.half(), "the chosen weights differ"),
    "double": (lambda net: net.double(), "the chosen weights differ"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_is_noticed(change: str) -> None:
    monitor = fitted()
    act, words = CHANGES[change]
    act(monitor.model)
    for _ in range(2):  # and goes on being noticed
        with pytest.raises(StaleMonitorError, match=words):
            monitor.score(NEW)


def test_the_error_is_one_of_ours_and_a_mismatch() -> None:
    assert issubclass(StaleMonitorError, (ScodError, RuntimeError))
    assert issubclass(StaleMonitorError, MismatchError)


def test_divided_monitors_refuse_too(path: Path) -> None:
    monitor = ShardedMonitor(network(), Gaussian(), rank=5).fit(TRAIN, progress=False)
    monitor.score(NEW)
    train(monitor._network.model)
    for call in (monitor.score, monitor.certify):
        with pytest.raises(StaleMonitorError, match=r"fit again: monitor\.fit\("):
            call(NEW)
    with pytest.raises(StaleMonitorError):
        monitor.save(path)


def test_weights_that_change_during_a_fit_are_noticed() -> None:
    model = network()

    def batches():
        yield X[:20]
        half_a_weight(model)
        yield X[20:]

    monitor = Monitor(model, Gaussian(), rank=5)
    with pytest.raises(StaleMonitorError, match=r"3\.weight"):
        monitor.fit(batches(), progress=False)
    assert "not fitted" in repr(monitor)


# --- What is no alarm ----------------------------------------------------------------------


def reload(net: nn.Module) -> None:
    net.load_state_dict(copy.deepcopy(net.state_dict()))


NO_CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "reloaded": reload,
    "assigned": lambda net: net.load_state_dict(copy.deepcopy(net.state_dict()), assign=True),
    "moved": lambda net: [setattr(p, "data", p.data.clone()) for p in net.parameters()],
    "double and back": lambda net: net.double().float(),
    "copied layer": lambda net: net.__setitem__(0, copy.deepcopy(net[0])),
    "copied activation": lambda net: net.__setitem__(2, nn.Tanh()),
    "trained and put back": lambda net: (
        kept := copy.deepcopy(net.state_dict()),
        train(net),
        net.load_state_dict(kept),
    ),
    "modes": lambda net: net.train(),
    "frozen": lambda net: net.requires_grad_(False),
    "gradients": lambda net: net(X).sum().backward(),
}


@pytest.mark.parametrize("change", NO_CHANGES)
def test_the_same_contents_are_no_alarm(change: str, path: Path) -> None:
    monitor = fitted()
    expected = monitor(NEW)
    for _ in range(2):
        NO_CHANGES[change](monitor.model)
        found = monitor(NEW)
        assert torch.equal(found.score, expected.score)
        assert torch.equal(found.p_value, expected.p_value)
    monitor.save(path)


def test_several_threads_that_notice_equal_weights_at_once() -> None:
    monitor = fitted()
    expected = monitor.score(NEW)
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            reload(monitor.model)
            found = list(pool.map(monitor.score, [NEW] * 8))
            assert all(torch.equal(one, expected) for one in found)


def test_the_weights_of_the_fit_bring_it_back() -> None:
    monitor = fitted()
    expected, kept = monitor.score(NEW), copy.deepcopy(monitor.model.state_dict())
    train(monitor.model)
    with pytest.raises(StaleMonitorError):
        monitor.score(NEW)
    monitor.model.load_state_dict(kept)
    assert torch.equal(monitor.score(NEW), expected)


def test_layers_that_take_the_place_of_equal_ones_are_differentiated() -> None:
    monitor = fitted()
    expected = monitor.features(NEW)
    monitor.model[0] = copy.deepcopy(monitor.model[0])
    monitor.model[3] = copy.deepcopy(monitor.model[3])
    assert torch.equal(monitor.features(NEW), expected)


class Counting(nn.Module):
    """Changes a buffer whenever it is called: in place, or by a new one."""

    def __init__(self, new: bool) -> None:
        super().__init__()
        self.layer, self.new = nn.Linear(3, 2), new
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.new:
            self.calls = self.calls + 1
        else:
            self.calls += 1
        return self.scale * self.layer(x)


@pytest.mark.parametrize("new", [True, False], ids=["new", "in place"])
def test_buffers_that_the_model_changes_itself_are_no_alarm(new: bool, path: Path) -> None:
    model = Counting(new)
    monitor = fitted(model)
    expected = monitor.score(NEW)
    model(X)
    assert torch.equal(monitor.score(NEW), expected)
    monitor.calibrate(HELDOUT, progress=False).save(path)
    model(X)
    loaded = Monitor.load(path, model)
    model(X)
    assert torch.equal(loaded.score(NEW), expected)
    assert model.calls == 3
    with torch.no_grad():
        model.scale *= 2
    for each in (monitor, loaded):
        with pytest.raises(StaleMonitorError, match=r"buffers differ \(touched since: scale\)"):
            each.score(NEW)


@pytest.mark.filterwarnings("ignore::scodkit.errors.NoProbesWarning")
def test_files_that_do_not_know_of_such_buffers(tmp_path: Path) -> None:
    model, path = Counting(new=False), tmp_path / "m.scod"
    fitted(model).save(path)
    model.calls.zero_()
    header, tensors = artifact.read(path, "monitor")
    # as an earlier version wrote them
    assert header.pop("exempt") == ["calls"]
    header["fingerprints"]["model"] = state_fingerprint(model)
    del header["probes"]
    artifact.write(path, "monitor", header, tensors)
    monitor = Monitor.load(path, model)
    expected = monitor.score(NEW)
    model(X)
    assert torch.equal(monitor.score(NEW), expected)
    monitor.save(path)
    monitor.update([X + 1], progress=False)
    other = Monitor.load(path, model)
    other.score(NEW)
    other.update([X + 1], progress=False)
    assert torch.equal(monitor.score(NEW), other.score(NEW))


def test_weights_made_in_inference_mode() -> None:
    with torch.inference_mode():
        model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2))
    monitor = Monitor(model, Gaussian(), rank=5).fit(TRAIN, progress=False)
    monitor.score(NEW)
    model[0] = nn.Linear(3, 6)
    with pytest.raises(StaleMonitorError, match=r"0\.weight"):
        monitor.score(NEW)


# --- What the counters do not see ----------------------------------------------------------

PAST_THE_COUNTERS: dict[str, Callable[[nn.Module], object]] = {
    "data": lambda net: net[0].weight.data.mul_(2),
    "numpy": lambda net: net[0].weight.detach().numpy().fill(2),
}


@pytest.mark.parametrize("write", PAST_THE_COUNTERS)
def test_writes_past_the_counters_are_seen_by_a_look_at_the_contents(
    write: str, path: Path
) -> None:
    monitor, other = fitted(), fitted()
    PAST_THE_COUNTERS[write](monitor.model)
    monitor.score(NEW)  # nothing tells it
    for call in (
        lambda: monitor.calibrate(HELDOUT, progress=False),
        lambda: monitor.save(path),
        lambda: monitor.update([X + 1], progress=False),
        lambda: monitor.merge(other),
        lambda: monitor.selftest(NEW),
    ):
        with pytest.raises(StaleMonitorError, match="the chosen weights differ"):
            call()


# --- Renewing ------------------------------------------------------------------------------


def test_a_renewed_monitor_is_one_that_was_fitted_now() -> None:
    model = network()
    options = {"parameters": LastLayers(count=2), "prior_scale": 0.3}
    monitor = fitted(model, **options)
    monitor.calibrate(HELDOUT, by=signs, progress=False)
    train(model)
    assert monitor.renew(TRAIN, HELDOUT, progress=False) is monitor
    other = fitted(model, **options).calibrate(HELDOUT, by=signs, progress=False)
    found, expected = monitor(NEW), other(NEW)
    assert torch.equal(found.score, expected.score)
    assert torch.equal(found.p_value, expected.p_value)
    assert torch.equal(monitor.calibration.groups, other.calibration.groups)


def test_without_held_out_data_it_says_that_it_is_not_calibrated_any_more() -> None:
    monitor = fitted()
    train(monitor.model)
    with pytest.warns(CalibrationWarning, match=r"not calibrated any more.*\.calibrate\("):
        monitor.renew(TRAIN, progress=False)
    assert monitor(NEW).p_value is None
    monitor.renew(TRAIN, progress=False)  # nothing was lost this time


@pytest.mark.parametrize("loaders", [([], HELDOUT), (TRAIN, [])], ids=["fit", "calibrate"])
def test_a_renewal_that_fails_leaves_the_monitor_as_it_was(loaders) -> None:
    monitor = fitted()
    expected = monitor(NEW)
    with pytest.raises(ScodError):
        monitor.renew(*loaders, progress=False)
    assert torch.equal(monitor(NEW).score, expected.score)
    assert torch.equal(monitor(NEW).p_value, expected.p_value)


def test_a_loaded_monitor_is_renewed_for_layers_of_another_size(path: Path) -> None:
    model = network()
    fitted(model, parameters=["3.*"]).save(path)
    monitor = Monitor.load(path, model)
    model[3] = nn.Linear(6, 4)
    monitor.renew(TRAIN, HELDOUT, progress=False)
    assert monitor.fitted.parameters.names == ("3.weight", "3.bias")
    expected = fitted(model, parameters=["3.*"]).score(NEW)
    assert torch.equal(monitor.score(NEW), expected)
