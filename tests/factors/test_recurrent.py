"""Recurrent layers and cells: unrolled on the fast path, or left to others with what to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from draws import noise
from engines import Uses, close, joined, pulled, right_rows
from scodkit import Categorical, Monitor
from scodkit.errors import CaptureError, EngineFallbackWarning
from scodkit.factors.alone import LoopEngine
from scodkit.factors.hooks import HookEngine
from scodkit.factors.rules import Layer, UnsupportedCallError
from scodkit.factors.rules.layer import Linear
from scodkit.factors.rules.recurrent import Gates
from scodkit.model.inputs import Inputs
from scodkit.model.network import Network
from scodkit.model.parameters import select_names


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bias": False},
        {"num_layers": 2},
        {"bidirectional": True},
        {"num_layers": 2, "bidirectional": True},
        {"batch_first": False},
    ],
    ids=str,
)
def test_recurrent_layers_are_unrolled(kind: type[nn.RNNBase], options: dict[str, Any]) -> None:
    options = {"batch_first": True, **options}
    first = options["batch_first"]

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        y, states = m.r(x if first else x.transpose(0, 1))
        last = states[0] if isinstance(states, tuple) else states
        y = y if first else y.transpose(0, 1)
        return m.h(y[:, -1]) + m.h(y[:, 0]) * last.sum((0, 2))[:, None]

    width = 4 * (2 if options.get("bidirectional") else 1)
    model = Uses(forward, r=kind(3, 4, **options), h=nn.Linear(width, 2))
    every = [name for name, _ in model.named_parameters()]
    for names in (every, every[:1], every[1:2], every[-1:]):
        assert right_rows(model, noise(4, 5, 3), names=names) == (HookEngine, [])


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_gates_may_be_shut_altogether(kind: type[nn.RNNBase]) -> None:
    model = Uses(
        lambda m, x: m.h(m.r(1e6 * x)[0].sum(1)),
        r=kind(3, 4, batch_first=True),
        h=nn.Linear(4, 2),
    )
    assert right_rows(model, noise(4, 5, 3)) == (HookEngine, [])


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("first", [True, False])
def test_sequences_that_no_sample_has_a_part_in(kind: type[nn.RNNBase], first: bool) -> None:
    """Names of classes, say, whose codes the features of samples are compared with."""
    names = noise(3, 5, 2)

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        codes = m.r(names if first else names.transpose(0, 1))[0]
        return m.f(x) @ (codes[:, -1] if first else codes[-1]).mT

    model = Uses(forward, r=kind(2, 4, batch_first=first), f=nn.Linear(6, 4))
    every = [name for name, _ in model.named_parameters()]
    for chosen in (every, every[:1], every[1:2], every[3:4]):
        for count in (1, 3, 4):
            assert right_rows(model, noise(count, 6), names=chosen) == (HookEngine, [])


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_wrong_rows_are_noticed_where_forward_mode_fails(
    kind: type[nn.RNNBase], monkeypatch: pytest.MonkeyPatch
) -> None:
    def doubled(self: Layer, delta: Tensor) -> Any:
        return right(self, 2 * delta)

    layer = Gates if kind is nn.LSTM else Linear
    right = layer.gradients
    model = Uses(lambda m, x: m.r(x)[0][:, -1], r=kind(3, 4, batch_first=True)).float()
    network = Network(model)
    engine = HookEngine(network, select_names(model, [n for n, _ in model.named_parameters()]))
    engine.check_every = 100
    call = Inputs((noise(4, 5, 3, dtype=torch.float32),), {})
    with network.evaluating():
        engine.linearize(call)
        monkeypatch.setattr(layer, "gradients", doubled)
        with pytest.raises(UnsupportedCallError, match=r"rows are .* off"):
            engine.afresh().linearize(call)


def test_weights_and_biases_may_have_strides() -> None:
    model = Uses(
        lambda m, x: m.h(m.r(x)[0][:, -1]),
        r=nn.LSTM(32, 64, batch_first=True),
        h=nn.Linear(64, 2),
    ).float()
    x = noise(40, 20, 32, dtype=torch.float32)  # enough for oneDNN
    for name, weight in dict(model.r.named_parameters()).items():
        wide = torch.stack([weight.detach(), torch.full_like(weight, 9.0)], -1)
        setattr(model.r, name, nn.Parameter(wide[..., 0]))
        assert not getattr(model.r, name).is_contiguous()
    found = joined(pulled(HookEngine, model, Inputs((x,), {}), 2))
    expected = joined(pulled(LoopEngine, model.double(), Inputs((x.double(),), {}), 2))
    close(found.double(), expected, 1e-5)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_rows_in_float32_are_those_of_float64(kind: type[nn.RNNBase]) -> None:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        return m.h(m.r(x)[0][:, -1])

    model = Uses(forward, r=kind(3, 64, batch_first=True), h=nn.Linear(64, 2)).double()
    x = noise(40, 5, 3)
    wide = joined(pulled(HookEngine, model, Inputs((x,), {}), 2))
    narrow = joined(pulled(HookEngine, model.float(), Inputs((x.float(),), {}), 2))
    close(narrow.double(), wide, 1e-5)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_states_may_come_from_other_layers(kind: type[nn.RNNBase]) -> None:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        states = tuple(m.s(x[:, i])[None].contiguous() for i in (0, 1))
        y, ends = m.r(x, states if kind is nn.LSTM else states[0])
        ends = ends if isinstance(ends, tuple) else (ends,)
        return m.h(y[:, -1]) + sum(m.h(end[0]) for end in ends)

    model = Uses(forward, s=nn.Linear(3, 4), r=kind(3, 4, batch_first=True), h=nn.Linear(4, 2))
    assert right_rows(model, noise(4, 5, 3)) == (HookEngine, [])


def test_a_relu_network_and_cells_are_unrolled() -> None:
    relu = Uses(
        lambda m, x: m.r(x)[0][:, -1], r=nn.RNN(3, 2, nonlinearity="relu", batch_first=True)
    )
    assert right_rows(relu, noise(4, 5, 3)) == (HookEngine, [])

    def stepped(m: nn.Module, x: Tensor) -> Tensor:
        state = None
        for step in x.unbind(1):
            state = m.c(step, state)
        return state[0] if isinstance(state, tuple) else state

    for cell in (nn.LSTMCell(3, 2), nn.GRUCell(3, 2), nn.RNNCell(3, 2)):
        assert right_rows(Uses(stepped, c=cell), noise(4, 5, 3)) == (HookEngine, [])


def test_packed_sequences_are_left_to_others_with_what_to_do() -> None:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        lengths = torch.full((len(x),), x.shape[1])
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
        return m.r(packed)[1][0]

    model = Uses(forward, r=nn.GRU(3, 2, batch_first=True))
    kind, said = right_rows(model, noise(4, 5, 3))
    assert kind is not HookEngine
    assert "pad them instead" in said[0] or "mixed up" in said[0]


class Started(nn.Module):
    """A recurrent layer whose first states are weights."""

    def __init__(self) -> None:
        super().__init__()
        self.r, self.h = nn.GRU(3, 4, batch_first=True), nn.Linear(4, 2)
        self.start = nn.Parameter(torch.full((1, 1, 4), 0.3))

    def forward(self, x: Tensor) -> Tensor:
        """Return a prediction for each sequence."""
        return self.h(self.r(x, self.start.expand(-1, len(x), -1).contiguous())[0][:, -1])  # type: ignore[no-any-return]


def test_learned_first_states_are_named_and_may_be_left_out() -> None:
    kind, said = right_rows(Started(), noise(4, 5, 3))
    assert kind is not HookEngine
    assert "a recurrent layer whose first states are weights: begin with zeros" in said[0]
    others = [name for name, _ in Started().named_parameters() if name != "start"]
    assert right_rows(Started(), noise(4, 5, 3), names=others) == (HookEngine, [])


@pytest.mark.parametrize(
    ("model", "instead"),
    [
        (Started(), "begin with zeros"),
        (
            Uses(
                lambda m, x: m.h(m.r(x)[0][:, -1]),
                r=nn.LSTM(3, 4, batch_first=True, proj_size=2),
                h=nn.Linear(2, 2),
            ),
            "leave out proj_size",
        ),
    ],
    ids=["states", "projection"],
)
@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
def test_a_compilation_that_fails_says_what_to_change(model: nn.Module, instead: str) -> None:
    model, x = model.float(), noise(6, 5, 3, dtype=torch.float32)
    with pytest.warns(EngineFallbackWarning, match=instead):
        monitor = Monitor(model, Categorical(), rank=4).fit([x], progress=False)
    with pytest.raises(CaptureError, match=f"{instead}.*; change that") as error:
        monitor.compile(x)
    assert "tracing_mode" not in str(error.value)
