"""The model is as it was found, at every moment and for every thread: its twin is run."""

from __future__ import annotations

import copy
import functools
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune, weight_norm

from cases import conv_batchnorm, mlp
from engines import Uses, noise
from scodkit import Categorical, Gaussian, Monitor
from scodkit.errors import CaptureWarning
from scodkit.network import Inputs, Network
from scodkit.sketch import Exact

WAIT_S = 20.0


def contents(model: nn.Module) -> list[tuple[int, dict[str, int]]]:
    """What a model is made of, by identity: modules, attributes, weights, hooks, modes."""
    found = []
    for module in model.modules():
        own = vars(module)
        inner = [{k: id(v) for k, v in d.items()} for d in own.values() if isinstance(d, dict)]
        found.append((id(module), {name: id(value) for name, value in own.items()}, inner))
    return found


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# --- Models that have a twin ---------------------------------------------------------------


class Listed(nn.Module):
    """Uses its layers through containers, a table and a function of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 2)
        self.steps = [self.a, (torch.tanh, self.b)]
        self.table = {"first": {"layer": self.a}}
        self.call_last = functools.partial(self.last, scale=2.0)

    def last(self, x: Tensor, scale: float) -> Tensor:
        return scale * self.steps[1][1](x)

    def forward(self, x: Tensor) -> Tensor:
        return self.call_last(self.steps[1][0](self.table["first"]["layer"](x)))


class Child(nn.Linear):
    """Knows its parent."""

    def __init__(self, parent: nn.Module) -> None:
        super().__init__(3, 2)
        object.__setattr__(self, "parent", parent)
        self.by_reference = weakref.ref(parent)

    def forward(self, x: Tensor) -> Tensor:
        assert self.by_reference() is self.parent
        return super().forward(x) * self.parent.scale


class Parent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.child = Child(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.child(x)


class SharedLayer(nn.Module):
    """One layer that two parents hold."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(3, 3))
        self.right = nn.Sequential(self.left[0])

    def forward(self, x: Tensor) -> Tensor:
        return self.right(torch.tanh(self.left(x)))


class Doubles(nn.Linear):
    """Doubles what it returns, by a hook that is its own method."""

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.factor = nn.Parameter(torch.tensor(2.0))
        self.register_forward_hook(self.double)

    def double(self, module: nn.Module, _: object, output: Tensor) -> Tensor:
        assert module is self
        return output * self.factor


def patched() -> nn.Module:
    model = nn.Linear(3, 2)
    other = nn.Linear(3, 2)
    model.other = other
    model.forward = functools.partial(forward_twice, model)
    return model


def forward_twice(module: nn.Module, x: Tensor) -> Tensor:
    return nn.Linear.forward(module, x) + module.other(x)


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    model[2].weight = model[0].weight
    return model


def pruned() -> nn.Module:
    model = mlp(2)
    prune.l1_unstructured(model[0], "weight", amount=2)
    return model


def parametrised() -> nn.Module:
    model = mlp(2)
    parametrizations.weight_norm(model[0])
    parametrizations.spectral_norm(model[2])
    return model


def normed() -> nn.Module:
    with pytest.warns(FutureWarning):
        return nn.Sequential(weight_norm(nn.Linear(3, 2)))


class Many(nn.Module):
    """Parameters in lists and dicts."""

    def __init__(self) -> None:
        super().__init__()
        self.each = nn.ParameterList([torch.randn(3) for _ in range(2)])
        self.named = nn.ParameterDict({"w": torch.randn(3, 2)})

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.each[0] + self.each[1]) @ self.named["w"]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(3, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.cell(x[:, None])[0][:, 0]


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(3, 1, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x[:, None])[:, 0]


WITH_TWIN: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: mlp(2),
    "norm": lambda: nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, 2)),
    "containers": Listed,
    "parent": Parent,
    "shared-layer": SharedLayer,
    "tied": tied,
    "hook": Doubles,
    "patched": patched,
    "pruned": pruned,
    "parametrised": parametrised,
    "weight-norm": normed,
    "parameter-list": Many,
    "recurrent": Recurrent,
    "attention": Attends,
}


# --- Models that have none -----------------------------------------------------------------


def closed_over() -> nn.Module:
    model = nn.Linear(3, 2)
    model.forward = lambda x: 2.0 * nn.Linear.forward(model, x)
    return model


class Helper:
    """No module, but knows one."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer


class Helped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.5))
        self.helper = Helper(self.layer)

    def forward(self, x: Tensor) -> Tensor:
        return self.helper.layer(x)


class Registered(nn.Module):
    """Finds its layer in a register of its class."""

    known: ClassVar[list[nn.Module]] = []

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.5))
        self.known[:] = [self.layer]

    def forward(self, x: Tensor) -> Tensor:
        return self.known[0](x)


class Slotted(nn.Linear):
    __slots__ = ("scale",)

    def __init__(self) -> None:
        super().__init__(3, 2)
        object.__setattr__(self, "scale", 2.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * super().forward(x)


class Proxied(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 2)
        object.__setattr__(self, "me", weakref.proxy(self))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.me.weight)


WITHOUT_TWIN: dict[str, Callable[[], nn.Module]] = {
    "closure": closed_over,
    "helper": Helped,
    "register": Registered,
    "slots": Slotted,
    "proxy": Proxied,
    "script": lambda: nn.Sequential(torch.jit.script(nn.Linear(3, 2))),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", [*WITH_TWIN, *WITHOUT_TWIN])
def test_outputs_and_replaced_weights_are_those_of_the_model(kind: str) -> None:
    torch.manual_seed(0)
    model = {**WITH_TWIN, **WITHOUT_TWIN}[kind]().train()
    network, call = Network(model), Inputs((torch.randn(4, 3),), {})
    reference = nn.Module() if kind in ("register", "proxy", "script") else model
    before, state = contents(model), values(model)
    first = next(iter(dict(model.named_parameters())))
    with network.evaluating():
        plain = network(call)
        zero = network.at({first: torch.zeros_like(dict(model.named_parameters())[first])}, call)
        again = network(call)
        assert (network.running(call) is model) == (kind in WITHOUT_TWIN)
    assert contents(model) == before
    assert same(values(model), state)
    assert torch.equal(plain, again)
    assert torch.equal(plain, model.eval()(*call.args))
    if reference is model:
        with torch.no_grad():
            dict(model.named_parameters())[first].zero_()
        torch.testing.assert_close(zero, model(*call.args))


@pytest.mark.parametrize("kind", WITH_TWIN)
def test_nothing_of_the_model_changes_while_it_is_looked_at(kind: str) -> None:
    torch.manual_seed(0)
    model = WITH_TWIN[kind]().train()
    network, call = Network(model), Inputs((torch.randn(4, 3),), {})
    before, during = contents(model), []
    watched = Network(
        model, outputs=lambda out: during.append(contents(model) == before) or out
    )
    chosen = {name: p.detach() + 1 for name, p in model.named_parameters()}
    with watched.evaluating(), network.evaluating():
        watched(call)
        watched.at(chosen, call)
        twin = watched.running(call)
        assert twin is not model
        assert not any(module.training for module in twin.modules())
        assert [*map(id, twin.parameters())] == [*map(id, model.parameters())]
        own = {id(m) for m in model.modules()}
        assert not any(id(m) in own for m in twin.modules())
    assert during == [True] * len(during)
    assert all(module.training for module in model.modules())


def test_layers_with_two_parents_keep_their_parameters() -> None:
    model = SharedLayer()
    Monitor(model, Gaussian(), rank=2).fit([torch.randn(8, 3)], progress=False)
    assert all(isinstance(p, nn.Parameter) for p in model.left[0]._parameters.values())


# --- The twin follows ----------------------------------------------------------------------


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.k = 1.0
        self.layers = [nn.Linear(3, 2)]
        self.norm = nn.BatchNorm1d(2)
        self.head = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.k * self.head(self.norm(self.layers[0](x)))


def set_attribute(model: Scaled) -> None:
    model.k = 3.0


def replace_layer(model: Scaled) -> None:
    model.head = nn.Linear(2, 2)


def replace_in_list(model: Scaled) -> None:
    model.layers[0] = nn.Linear(3, 2)


def replace_parameter(model: Scaled) -> None:
    model.head.weight = nn.Parameter(torch.ones(2, 2))


def write_parameter(model: Scaled) -> None:
    model.head.weight.data.fill_(0.3)


def add_hook(model: Scaled) -> None:
    model.head.register_forward_hook(lambda _, __, out: out + 1)


def replace_buffer(model: Scaled) -> None:
    model.norm.running_mean = torch.ones(2)


def load_state(model: Scaled) -> None:
    model.load_state_dict({name: t + 1 for name, t in model.state_dict().items()})


def write_past_the_counter(model: Scaled) -> None:
    model.norm.running_mean.data.fill_(0.7)


def train_a_step(model: Scaled) -> None:
    model.train()(torch.randn(5, 3) + 2)  # which no counter of the running mean tells


def change_class(model: Scaled) -> None:
    model.head.__class__ = type("Other", (nn.Linear,), {"forward": lambda self, x: 2 * x})


CHANGES = [
    set_attribute,
    replace_layer,
    replace_in_list,
    replace_parameter,
    write_parameter,
    add_hook,
    replace_buffer,
    load_state,
    write_past_the_counter,
    train_a_step,
    change_class,
]


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_in_the_model_is_seen_at_the_next_call(
    change: Callable[[Scaled], None],
) -> None:
    torch.manual_seed(0)
    model = Scaled()
    network, call = Network(model), Inputs((torch.randn(4, 3),), {})
    with network.evaluating():
        before = network(call)
        assert network.running(call) is not model
    change(model)
    with network.evaluating():
        after = network(call)
    assert torch.equal(after, model.eval()(*call.args))
    assert not torch.equal(after, before)


def test_modes_alone_make_no_new_twin() -> None:
    model = conv_batchnorm(2)
    network, call = Network(model), Inputs((noise(2, 1, 4, 4).float(),), {})
    twins = set()
    for mode in (True, False, True):
        model.train(mode)
        with network.evaluating():
            twins.add(id(network.running(call)))
    assert len(twins) == 1


def test_a_large_buffer_follows_too() -> None:
    model = Uses(lambda m, x: m.a(x) + m.table.sum(), a=nn.Linear(3, 2))
    model.register_buffer("table", torch.zeros(1 << 16))
    network, call = Network(model), Inputs((torch.zeros(2, 3),), {})
    outputs = []
    for _ in range(2):
        with network.evaluating():
            outputs.append(network(call))
        model.table[0] += 1
    torch.testing.assert_close(outputs[1], outputs[0] + 1)


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


def test_a_table_that_a_longer_input_makes_is_not_kept() -> None:
    model = Grows()
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
    assert torch.equal(outputs[1], outputs[2])


# --- Threads -------------------------------------------------------------------------------


class Head(nn.Module):
    """A backbone that others have too, and a product that no layer rule covers."""

    def __init__(self, backbone: nn.Module, outputs: int) -> None:
        super().__init__()
        self.backbone = backbone
        self.w = nn.Parameter(torch.randn(8, outputs))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.backbone(x)) @ self.w


@pytest.mark.filterwarnings("ignore::scodkit.errors.EngineFallbackWarning")
@pytest.mark.parametrize("twin", [True, False])
def test_two_models_with_one_backbone_do_not_disturb_each_other(twin: bool) -> None:
    torch.manual_seed(0)
    backbone = nn.Linear(4, 8)
    own = dict(backbone._parameters)
    models = [Head(backbone, 2), Head(backbone, 3)]
    if not twin:
        models[0].helper = Helper(models[0])
    x = torch.randn(6, 4)
    monitors = [
        Monitor(model, Gaussian(), rank=3).fit([torch.randn(16, 4)], progress=False)
        for model in models
    ]
    expected = [monitor.score(x) for monitor in monitors]

    def work(i: int) -> bool:
        return all(torch.equal(monitors[i].score(x), expected[i]) for _ in range(60))

    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(work, range(2)))
    assert all(backbone._parameters[name] is own[name] for name in own)


@pytest.mark.filterwarnings("ignore::scodkit.errors.EngineFallbackWarning")
def test_a_training_step_in_another_thread_is_not_disturbed() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(4), Head(nn.Linear(4, 8), 2)).train()
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


def fitted(sketch: Any = None) -> Monitor:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))
    found = Monitor(model, Categorical(), rank=4, sketch=sketch)
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
    x = torch.randn(5, 4)
    exact, monitor = fitted(Exact()), fitted()
    exact.rank = exact.basis.rank
    with low():
        certificate = monitor.certify(x)
        wanted = exact.score(x)
    assert (certificate.lower <= wanted * (1 + 1e-4)).all()
    assert (wanted <= certificate.upper * (1 + 1e-4)).all()


def test_the_fit_in_half_precision_has_its_own_autocast() -> None:
    torch.manual_seed(0)
    seen = set()
    model = nn.Sequential(nn.Linear(4, 3))
    model[0].register_forward_hook(lambda _, __, out: seen.add(out.dtype))
    monitor = Monitor(model, Gaussian(), rank=2)
    with torch.autocast("cpu", torch.float16):
        monitor.fit([torch.randn(8, 4)], progress=False, precision=torch.bfloat16)
    assert seen == {torch.float32, torch.bfloat16}


@pytest.mark.filterwarnings("ignore::scodkit.errors.EngineFallbackWarning")
def test_anomaly_detection_is_suspended() -> None:
    torch.manual_seed(0)
    model, x = Head(nn.Linear(4, 8), 2), torch.randn(3, 4)
    monitor = Monitor(model, Gaussian(), rank=3).fit([torch.randn(16, 4)], progress=False)
    expected = monitor.score(x)
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        for found in ThreadPoolExecutor(4).map(monitor.score, [x] * 12):
            assert torch.equal(found, expected)
        assert torch.is_anomaly_enabled()
        assert not torch.is_anomaly_check_nan_enabled()
    assert not torch.is_anomaly_enabled()


# --- Inputs --------------------------------------------------------------------------------


def first_in_place(m: nn.Module, x: Tensor) -> Tensor:
    return m.b(torch.tanh(m.a(x.sub_(1.0).div_(2.0))))


def first_apart(m: nn.Module, x: Tensor) -> Tensor:
    return m.b(torch.tanh(m.a(x.sub(1.0).div(2.0))))


def with_product(forward: Any) -> Callable[[nn.Module, Tensor], Tensor]:
    return lambda m, x: forward(m, x) @ m.w


@pytest.mark.filterwarnings("ignore::scodkit.errors.EngineFallbackWarning")
@pytest.mark.filterwarnings("ignore::scodkit.errors.CaptureWarning")
@pytest.mark.parametrize("functional", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
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


# --- Recordings ----------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:the compiled scored")
def test_a_recording_follows_buffers_and_is_dropped_for_a_changed_attribute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("scodkit.capture._seconds", lambda _: 0.0 if monkeypatch else 1.0)
    times = iter([0.0, 1.0])
    monkeypatch.setattr("scodkit.capture._seconds", lambda _: next(times))
    torch.manual_seed(0)
    model = Scaled().double()
    monitor = Monitor(model, Gaussian(), rank=3).fit([noise(16, 3)], progress=False)
    x = noise(4, 3)
    monitor.compile(x)
    assert monitor._scorer._captured is not None
    model.norm.running_mean.data.fill_(0.7)
    torch.testing.assert_close(monitor(x).output, model.eval()(x).detach())
    model.train()
    assert monitor._scorer._captured is not None
    model.k = 3.0
    with pytest.warns(CaptureWarning, match="attributes"):
        output = monitor(x).output
    torch.testing.assert_close(output, model.eval()(x).detach())
