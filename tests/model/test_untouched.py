"""The model is as it was found, at every moment and for every thread: its twin is run."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cases import Helper
from draws import noise
from engines import Uses
from scodkit import Categorical, Gaussian, Monitor
from scodkit.model.inputs import Inputs
from scodkit.model.network import Network
from scodkit.sketch import Exact

WAIT_S = 20.0


# --- What a forward pass writes ------------------------------------------------------------


class Late(nn.Module):
    """Changes a buffer on unusual inputs only."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.a = nn.Linear(4, 3)
        self.in_place = in_place
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        if x.abs().max() > 5:
            if self.in_place:
                self.scale.mul_(0.5)
            else:
                self.scale = self.scale * 0.5
        return self.a(x) * self.scale


@pytest.mark.filterwarnings("ignore::scodkit.errors.SuspiciousInputWarning")
@pytest.mark.filterwarnings("ignore::scodkit.errors.EngineFallbackWarning")
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("twin", [True, False])
def test_buffers_that_a_later_input_changes_are_put_back(in_place: bool, twin: bool) -> None:
    torch.manual_seed(0)
    model = Late(in_place)
    if not twin:
        model.helper = Helper(model)
    own = model.scale
    monitor = Monitor(model, Gaussian(), rank=3)
    monitor.fit([torch.rand(16, 4)], progress=False)
    assert not monitor._network.volatile
    x = torch.rand(3, 4)
    before = monitor.score(x)
    for _ in range(2):
        monitor.score(torch.full((1, 4), 9.0))
    assert model.scale is own
    assert float(own) == 1.0
    assert torch.equal(monitor.score(x), before)
    assert monitor._network.volatile == {"scale"}


class Grows(nn.Module):
    """Keeps a table as long as the longest input so far, registered when it is needed."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(2, 2)
        self.register_buffer("table", None)

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None or len(self.table) < x.shape[1]:
            self.table = torch.linspace(0, 1, x.shape[1]).to(x)
        return self.a(x * self.table[: x.shape[1], None]).sum(1)


@pytest.mark.filterwarnings("ignore::scodkit.errors.EngineFallbackWarning")
@pytest.mark.parametrize("twin", [True, False])
def test_a_table_that_a_longer_input_makes_is_not_kept(twin: bool) -> None:
    model = Grows()
    if not twin:
        model.helper = Helper(model)
    monitor = Monitor(model, Gaussian(), rank=2).fit([torch.randn(8, 3, 2)], progress=False)
    x = torch.randn(2, 3, 2)
    before = monitor.score(x)
    monitor.score(torch.randn(2, 7, 2))
    assert torch.equal(monitor.score(x), before)
    assert model.table is None
    assert monitor._network.volatile == {"table"}


class Remembers(nn.Module):
    """Writes to attributes, of which the next output depends."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 2)
        self.last: Tensor | None = None
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.last = self.a(x)
        return self.last / self.calls


def test_attributes_that_a_forward_pass_writes_are_those_of_the_model_at_each_call() -> None:
    model = Remembers()
    network, call = Network(model), Inputs((torch.randn(2, 3),), {})
    outputs = []
    for _ in range(3):
        with network.evaluating():
            outputs.append(network(call))
    assert (model.calls, model.last) == (0, None)
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[1], outputs[2])
    with network.evaluating():
        assert torch.equal(network(call), network(call))


def test_what_weights_gave_in_one_pass_is_not_found_by_the_next() -> None:
    """Later rows would be zero: it has no graph to weights that replace the first ones."""

    class Caches(nn.Linear):
        scaled: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            if self.scaled is None:
                self.scaled = self.weight.exp()
            return x @ self.scaled.T

    torch.manual_seed(0)
    model, loader = Caches(3, 2, bias=False), [torch.randn(4, 3) for _ in range(3)]
    monitor = Monitor(model, Gaussian(), 1).fit(loader, progress=False)
    assert monitor.score(torch.randn(5, 3)).min() > 0
    assert model.scaled is None


# --- Threads -------------------------------------------------------------------------------


class Head(nn.Module):
    """A backbone that others have too, and a product that no layer rule covers."""

    def __init__(self, backbone: nn.Module, outputs: int) -> None:
        super().__init__()
        self.backbone = backbone
        self.w = nn.Parameter(torch.randn(8, outputs))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.backbone(x)) @ self.w


@pytest.mark.parametrize("twin", [True, False])
def test_two_models_with_one_backbone_do_not_disturb_each_other(twin: bool) -> None:
    torch.manual_seed(0)
    backbone = nn.Linear(4, 8)
    own = dict(backbone._parameters)
    one, other = Head(backbone, 2), Head(backbone, 3)
    if not twin:
        one.helper = Helper(one)
    inside, go_on = threading.Event(), threading.Event()
    call = Inputs((torch.randn(6, 4),), {})
    networks = [Network(one), Network(other)]
    outputs = []
    for network in networks:
        with network.evaluating():
            outputs.append(network(call))
            assert (network.running(call) is one) == (network.model is one and not twin)

    def wait(*_: object) -> None:
        inside.set()
        assert go_on.wait(WAIT_S)

    def at_zero() -> Tensor:
        with networks[0].evaluating():
            handle = networks[0].running(call).register_forward_hook(wait)
            zero = networks[0].at({"backbone.weight": torch.zeros(8, 4)}, call)
            handle.remove()
        return zero

    def as_it_is() -> Tensor:
        with networks[1].evaluating():
            return networks[1](call)

    with ThreadPoolExecutor(2) as pool:
        found = pool.submit(at_zero)
        try:
            assert inside.wait(WAIT_S)
            untouched = all(backbone._parameters[name] is own[name] for name in own)
            meanwhile = pool.submit(as_it_is)
            if twin:  # where the backbone itself is run, others wait for it
                meanwhile.result(WAIT_S)
        finally:
            go_on.set()
        assert torch.equal(found.result()[0], found.result()[1])
        assert torch.equal(meanwhile.result(), outputs[1])
    assert untouched == twin
    assert all(backbone._parameters[name] is own[name] for name in own)


@pytest.mark.filterwarnings("ignore::scodkit.errors.EngineFallbackWarning")
def test_a_training_step_in_another_thread_is_not_disturbed() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(4), Head(nn.Linear(4, 8), 2)).train()
    monitor = Monitor(model, Gaussian(), rank=3).fit([torch.randn(16, 4)], progress=False)
    monitor.score(torch.randn(2, 4))
    stop, failures = threading.Event(), []

    def train() -> None:
        while not stop.is_set():
            try:
                model(torch.randn(8, 4)).sum().backward()
                assert all(module.training for module in model.modules())
                assert all(isinstance(p, nn.Parameter) for p in model.parameters())
            except Exception as error:
                failures.append(repr(error))

    thread = threading.Thread(target=train)
    thread.start()
    try:
        for _ in range(60):
            monitor.score(torch.randn(2, 4))
    finally:
        stop.set()
        thread.join(WAIT_S)
    assert not failures
    assert all(p.grad is not None for p in model.parameters())


# --- The caller's context ------------------------------------------------------------------


def fitted(rank: int = 4, sketch: Any = None) -> Monitor:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))
    found = Monitor(model, Categorical(), rank=rank, sketch=sketch)
    return found.fit([torch.randn(64, 4)], progress=False)


def low() -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16)


def test_autocast_around_our_calls_does_not_reach_the_model() -> None:
    x = torch.randn(5, 4)
    outside, monitor = fitted(), fitted()
    with low():
        inside = fitted()
        assert torch.equal(monitor.score(x), outside.score(x))
        assert torch.equal(monitor(x).output, outside(x).output)
        assert monitor.certify(x).upper.equal(outside.certify(x).upper)
        assert torch.is_autocast_enabled("cpu")
    assert torch.equal(inside.score(x), outside.score(x))
    assert not torch.is_autocast_enabled("cpu")


def test_a_certificate_under_autocast_holds() -> None:
    x = torch.randn(200, 4)
    wanted, monitor = fitted(131, Exact()).score(x), fitted(20)
    with low():
        certificate = monitor.certify(x)
    assert (certificate.lower <= wanted * (1 + 1e-5)).all()
    assert (wanted <= certificate.upper * (1 + 1e-5)).all()


def test_the_fit_in_half_precision_has_its_own_autocast() -> None:
    torch.manual_seed(0)
    seen = set()
    model = nn.Sequential(nn.Linear(4, 3))
    model[0].register_forward_hook(lambda _, __, out: seen.add(out.dtype))
    monitor = Monitor(model, Gaussian(), rank=2)
    with torch.autocast("cpu", torch.float16):
        monitor.fit([torch.randn(8, 4)], progress=False, precision=torch.bfloat16)
    assert seen == {torch.float32, torch.bfloat16}


def test_anomaly_detection_is_suspended() -> None:
    monitor, x = fitted(), torch.randn(3, 4)
    expected = monitor.score(x)
    with torch.autograd.set_detect_anomaly(True), ThreadPoolExecutor(4) as pool:
        for found in pool.map(monitor.score, [x] * 12):
            assert torch.equal(found, expected)
        assert torch.is_anomaly_enabled()
        assert torch.is_anomaly_check_nan_enabled()


# --- Inputs --------------------------------------------------------------------------------


def first_in_place(m: nn.Module, x: Tensor) -> Tensor:
    return m.b(torch.tanh(m.a(x.sub_(1.0).div_(2.0))))


def first_apart(m: nn.Module, x: Tensor) -> Tensor:
    return m.b(torch.tanh(m.a(x.sub(1.0).div(2.0))))


def with_product(forward: Any) -> Callable[[nn.Module, Tensor], Tensor]:
    return lambda m, x: forward(m, x) @ m.w


@pytest.mark.filterwarnings("ignore::scodkit.errors.EngineFallbackWarning")
@pytest.mark.filterwarnings("ignore::scodkit.errors.CaptureWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.*")
@pytest.mark.parametrize(
    ("functional", "compiled"), [(False, False), (True, False), (False, True)]
)
def test_a_model_that_normalises_in_place_is_scored_on_inputs_as_they_are(
    functional: bool, compiled: bool
) -> None:
    batches = [noise(16, 4), noise(5, 4, seed=1)]
    kept, scores = copy.deepcopy(batches), []
    for forward in (first_in_place, first_apart):
        torch.manual_seed(0)
        layers = {"a": nn.Linear(4, 8), "b": nn.Linear(8, 3), "w": (3, 2)}
        model = Uses(with_product(forward) if functional else forward, **layers).double()
        monitor = Monitor(model, Gaussian(), rank=5).fit(batches[:1], progress=False)
        if compiled:
            monitor.compile(batches[1])
        scores.append(monitor.score(batches[1]))
        scores.append(monitor.score(batches[1]))
    for score in scores[1:]:
        torch.testing.assert_close(score, scores[0])
    assert all(map(torch.equal, batches, kept))
