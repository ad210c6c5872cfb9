"""A model's twin: which models have one, and that it is always what the model is."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune, weight_norm

from cases import Helper, conv_batchnorm, mlp
from draws import noise
from engines import Uses
from scodkit import Gaussian, Monitor
from scodkit.errors import CaptureWarning
from scodkit.model.inputs import Inputs
from scodkit.model.network import Network


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
        self.known = {self.a, self.b, "more", *range(20)}
        self.call_last = functools.partial(self.last, scale=2.0)

    def last(self, x: Tensor, scale: float) -> Tensor:
        assert self.known >= {self.a, self.b}
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
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
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
        zero = network.at(
            {first: torch.zeros_like(dict(model.named_parameters())[first])}, call
        )
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


# --- The first call ------------------------------------------------------------------------


class Counts(nn.Module):
    """Counts its calls in a list, which is the same in the twin."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(3, 2), [0]

    def forward(self, x: Tensor) -> Tensor:
        self.calls[0] += 1
        return self.layer(x)


@pytest.mark.parametrize("precision", [None, torch.bfloat16])
def test_a_first_call_without_gradients_is_one_pass(precision: torch.dtype | None) -> None:
    model = Counts()
    network, call = Network(model).at_precision(precision), Inputs((torch.randn(4, 3),), {})
    with network.evaluating(), torch.no_grad():
        first = network(call)
        assert model.calls == [1]
        assert torch.equal(network(call), first)


def test_a_first_call_with_gradients_has_them() -> None:
    model = Counts()
    network, call = Network(model), Inputs((torch.randn(4, 3),), {})
    with network.evaluating():
        network(call).sum().backward()
    assert model.layer.weight.grad is not None
    assert model.calls == [2]  # one of them shows, once, that the twin can be run


def test_a_first_call_takes_the_same_kernels_as_the_next() -> None:
    torch.manual_seed(0)
    network = Network(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True))
    call = Inputs((torch.randn(16, 5, 32),), {})
    with network.evaluating(), torch.no_grad():
        assert torch.equal(network(call), network(call))


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


@pytest.mark.parametrize("kind", [k for k in WITH_TWIN if k != "weight-norm"])
def test_an_unchanged_model_keeps_its_twin(kind: str) -> None:
    network, call = Network(WITH_TWIN[kind]()), Inputs((torch.randn(4, 3),), {})
    found = []
    for _ in range(3):
        with network.evaluating():
            network(call)
            found.append((network.running(call), network.storage()))
    assert found[1:] == found[:-1]


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
    assert (outputs[1] > outputs[0]).all()


# --- Recordings ----------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*torch.jit.*")
def test_a_recording_follows_buffers_and_is_dropped_for_a_changed_attribute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = iter([0.0, 1.0])
    monkeypatch.setattr("scodkit.scoring.compiled._seconds", lambda _: next(times))
    torch.manual_seed(0)
    model, x = Scaled(), torch.randn(4, 3)
    monitor = Monitor(model, Gaussian(), rank=3).fit([torch.randn(16, 3)], progress=False)
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
