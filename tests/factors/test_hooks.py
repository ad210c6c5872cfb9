"""How the hook engine watches a model: what it refuses, what it leaves alone, what it costs."""

from __future__ import annotations

import gc
import operator
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils import parametrizations
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from draws import noise
from engines import (
    Uses,
    close,
    everything,
    joined,
    pulled,
    randomised,
    right_rows,
    same_as_the_loop,
)
from scodkit import Categorical, Monitor
from scodkit.factors.alone import FunctionalEngine, LoopEngine
from scodkit.factors.hooks import HookEngine
from scodkit.factors.live_bytes import LiveBytes
from scodkit.factors.rules import UnsupportedCallError
from scodkit.model.inputs import Inputs
from scodkit.model.network import Network
from scodkit.model.parameters import select_names

# --- In-place operations -------------------------------------------------------------------


@pytest.mark.parametrize("last", [nn.ReLU(inplace=True), nn.Hardtanh(inplace=True), nn.Tanh()])
def test_in_place_activations(last: nn.Module) -> None:
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 4, 1),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(16, 3),
        last,
    )
    same_as_the_loop(model, noise(3, 2, 4, 4))
    assert right_rows(model, noise(3, 2, 4, 4)) == (HookEngine, [])


def test_outputs_of_layers_are_written_into() -> None:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        y = m.a(x)
        y[:, 0] = 0.0
        y[:, 1:].mul_(2.0)
        z = torch.zeros(len(x), 2, 4, dtype=x.dtype)
        z[:, 1] = y
        return m.b(z.add_(1.0))

    model = Uses(forward, a=nn.Linear(3, 4), b=nn.Linear(4, 2))
    same_as_the_loop(model, noise(3, 3))
    assert right_rows(model, noise(3, 3)) == (HookEngine, [])


def changes_its_input(m: nn.Module, x: Tensor) -> Tensor:
    y = torch.tanh(m.a(x))
    z = m.b(y)
    y.mul_(2.0)
    return z + y


def test_an_input_changed_after_its_use_is_refused() -> None:
    model = randomised(Uses(changes_its_input, a=nn.Linear(3, 3), b=nn.Linear(3, 3)))
    with pytest.raises(UnsupportedCallError, match="modified in place"):
        joined(pulled(HookEngine, model, Inputs((noise(3, 3),), {}), 1, ["b.weight"]))


def test_where_autograd_does_not_mind_neither_does_the_choice() -> None:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        x = x.clone()
        y = m.a(x)
        x.zero_()
        return m.b(torch.tanh(y)) + x

    model = Uses(forward, a=nn.Linear(3, 3), b=nn.Linear(3, 3)).requires_grad_(False)
    kind, said = right_rows(model, noise(3, 3), names=["a.bias", "b.weight"])
    assert kind is FunctionalEngine
    assert len(said) == 1
    assert "modified in place after the layer had used it" in said[0]


# --- What is computed from parameters alone, and shared by all samples ---------------------


def positions(m: nn.Module, x: Tensor) -> Tensor:
    return (x + m.p(torch.arange(x.shape[1]))).flatten(1)


SHARED = {
    "weight_norm": (parametrizations.weight_norm(nn.Linear(3, 4)), (4, 3)),
    "spectral norm": (parametrizations.spectral_norm(nn.Linear(3, 4)).eval(), (4, 3)),
    "transposed": (Uses(lambda m, x: F.linear(x, m.w.t()), w=(3, 4)), (4, 3)),
    "columns": (Uses(lambda m, x: F.linear(x, m.w[:, :3]), w=(2, 5)), (4, 3)),
    "copy": (Uses(lambda m, x: F.linear(x, m.w.clone()), w=(2, 3)), (4, 3)),
    "stacked": (Uses(lambda m, x: F.linear(x, torch.cat([m.w, m.w])), w=(2, 3)), (4, 3)),
    "scaled": (Uses(lambda m, x: x + m.w * 2.0, w=(3,)), (4, 3)),
    "squared": (Uses(lambda m, x: x + m.w * m.w, w=(3,)), (4, 3)),
    "squared, as many as samples": (Uses(lambda m, x: x + m.w * m.w, w=(3,)), (3, 3)),
    "positions": (Uses(positions, p=nn.Embedding(7, 3)), (4, 5, 3)),
    "positions in a row": (
        Uses(lambda m, x: (x + m.p(torch.arange(5)[None])).flatten(1), p=nn.Embedding(7, 3)),
        (4, 5, 3),
    ),
    "as many positions as samples": (Uses(positions, p=nn.Embedding(7, 3)), (4, 4, 3)),
    "positions through a layer": (
        Uses(
            lambda m, x: (x * m.f(m.p(torch.arange(5)))).flatten(1),
            p=nn.Embedding(7, 2),
            f=nn.Linear(2, 3),
        ),
        (4, 5, 3),
    ),
    "used twice": (Uses(lambda m, x: F.linear(x * m.w, (m.w * 2).outer(m.w)), w=(3,)), (4, 3)),
    "also as it is": (Uses(lambda m, x: F.linear(F.linear(x, m.w), m.w.t()), w=(2, 3)), (4, 3)),
    "product": (Uses(lambda m, x: x @ m.w, w=(3, 4)), (4, 3)),
    "product of sequences": (Uses(lambda m, x: (x @ m.w).flatten(1), w=(3, 4)), (4, 5, 3)),
    "product and bias": (
        Uses(lambda m, x: torch.addmm(m.b, x, m.w), w=(3, 4), b=(4,)),
        (4, 3),
    ),
    "added in place": (Uses(lambda m, x: (x * 1).add_(m.w), w=(3,)), (4, 3)),
}


@pytest.mark.parametrize("case", SHARED)
def test_what_parameters_alone_give_is_taken_for_a_parameter(case: str) -> None:
    model, shape = SHARED[case]
    for part in (2, 1):  # all parameters, and some of these
        names = [name for name, _ in model.named_parameters()][::part]
        assert right_rows(model, noise(*shape), names=names) == (HookEngine, [])


@pytest.mark.parametrize("case", SHARED)
def test_shared_tensors_follow_their_parameters(case: str) -> None:
    """A later batch is replayed: nothing of the earlier one's weights may be left in it."""
    model, shape = SHARED[case]
    model = randomised(model)
    network = Network(model)
    parameters = select_names(model, [name for name, _ in model.named_parameters()])
    hooks, loop = HookEngine(network, parameters), LoopEngine(network, parameters)
    with network.evaluating():
        for seed in range(3):
            call = Inputs((noise(*shape),), {})
            linear = hooks.linearize(call)
            rows = torch.randn(shape[0], 2, linear.output[0].numel()).to(linear.output)
            found = joined(linear.pull_back(rows))
            torch.testing.assert_close(found, joined(loop.linearize(call).pull_back(rows)))
            with torch.no_grad():
                for weight in model.parameters():
                    weight.add_(0.1 * (seed + 1))


IN_PLACE: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "multiplied": lambda m, x: F.linear(x, (m.w * 2).mul_(3)),
    "added": lambda m, x: F.linear(x, (m.w * 2).add_(1)),
    "by an operator": lambda m, x: F.linear(x, operator.iadd(m.w * 2, 1)),
    "an entry": lambda m, x: F.linear(x, with_an_entry(m.w * 2)),
}


def with_an_entry(weight: Tensor) -> Tensor:
    weight[0] = 1.0
    return weight


@pytest.mark.parametrize("case", IN_PLACE)
def test_what_parameters_give_and_is_then_modified_is_left_to_others(case: str) -> None:
    kind, said = right_rows(Uses(IN_PLACE[case], w=(2, 3)), noise(4, 3))
    assert kind is FunctionalEngine
    assert "modifies in place what parameters alone give" in said[0]


def test_rows_of_derived_tensors_are_counted() -> None:
    """Of a low-rank adapter they are as large as the matrix that is adapted."""
    torch.manual_seed(0)
    model = Uses(lambda m, x: F.linear(x, m.w + m.b @ m.a), w=(64, 64), a=(1, 64), b=(64, 1))
    network = Network(randomised(model))
    engine = HookEngine(network, everything(network, ["a", "b"]))
    with network.evaluating():
        engine.linearize(Inputs((noise(4, 64),), {}))
    assert engine.row_bytes(held=False) >= 64 * 64 * 8


# --- What no rule covers -------------------------------------------------------------------


def raw(function: Callable[..., Tensor], *shape: int) -> nn.Module:
    return Uses(function, w=shape)


UNKNOWN = {
    "prelu": (nn.Sequential(nn.Linear(3, 4), nn.PReLU(4)), "prelu"),
    "bilinear": (Uses(lambda m, x: m.f(x, x), f=nn.Bilinear(3, 3, 2)), "bilinear"),
    "from the left": (
        raw(lambda m, x: (m.w @ x.T).T, 4, 3),
        "a parameter as the input of a layer",
    ),
    "scaled product": (
        Uses(lambda m, x: torch.addmm(m.b, x, m.w, alpha=2), w=(3, 4), b=(4,)),
        "a product that is scaled",
    ),
    "subtracted": (raw(lambda m, x: x - m.w, 3), "no rule for torch.Tensor.sub"),
    "alpha": (raw(lambda m, x: torch.add(x, m.w, alpha=2), 3), "an addition with a factor"),
    "by frequency": (
        Uses(lambda m, x: m.e((x > 0).long()), e=nn.Embedding(2, 2, scale_grad_by_freq=True)),
        "scale_grad_by_freq",
    ),
    "one sample": (
        Uses(lambda m, x: torch.stack([m.c(one[None]) for one in x]), c=nn.Conv1d(1, 1, 2)),
        "without a batch axis",
    ),
    "other rows": (
        Uses(lambda m, x: x + m.f(noise(5, 3)).sum(0), f=nn.Linear(3, 3)),
        "may be given several samples at a time",
    ),
    "custom": (raw(lambda m, x: Doubling.apply(x, m.w), 3), "differ from plain autograd's"),
}


class Doubling(torch.autograd.Function):
    """A function that no one who watches torch functions can see."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return 2 * x * w

    @staticmethod
    def backward(ctx: Any, delta: Tensor) -> tuple[None, Tensor]:
        return None, (2 * delta * ctx.saved_tensors[0]).sum(0)


@pytest.mark.parametrize("case", UNKNOWN)
def test_an_unknown_function_of_a_chosen_parameter_is_left_to_others(case: str) -> None:
    model, says = UNKNOWN[case]
    kind, said = right_rows(model, noise(4, 3))
    assert kind is not HookEngine
    assert len(said) == 1
    assert (
        f"passed over: HookEngine ({'its gradients' if case == 'custom' else 'it raised'}"
        in said[0]
    )
    assert says in said[0]


@pytest.mark.parametrize("case", ["prelu", "bilinear", "from the left", "custom"])
def test_an_unknown_function_of_other_parameters_does_no_harm(case: str) -> None:
    unknown = UNKNOWN[case][0]
    width = randomised(unknown)(noise(1, 3)).shape[1]
    model = nn.Sequential(nn.Linear(3, 3), unknown, nn.Linear(width, 2))
    names = ["0.weight", "2.weight", "2.bias"]
    for chosen in (names[1:], names[:1]) if case != "custom" else (names[1:],):
        assert right_rows(model, noise(4, 3), names=chosen) == (HookEngine, [])


def test_what_is_asked_of_a_parameter_besides_its_values_does_no_harm() -> None:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        assert m.w.is_floating_point()
        x = x.to(m.w.dtype).to(m.w.device) * m.w.shape[0] * m.w.dim() * len(m.w)
        return F.linear(x, m.w.contiguous().to(torch.float64)) * m.w.size(1)

    assert right_rows(raw(forward, 2, 3), noise(3, 3)) == (HookEngine, [])


# --- Constants -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "constant", [lambda w: w.detach(), lambda w: w.data], ids=["detach", "data"]
)
@pytest.mark.parametrize("chosen", [None, ["a.weight"], ["b.weight"]])
def test_detached_parameters_are_constants(
    constant: Callable, chosen: list[str] | None
) -> None:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        y = torch.tanh(m.a(x)) + F.linear(x, 2.0 * constant(m.a.weight))
        return m.b(y) * F.linear(y, constant(m.b.weight))

    model = Uses(forward, a=nn.Linear(3, 4), b=nn.Linear(4, 2))
    same_as_the_loop(model, noise(3, 3), names=chosen)
    assert right_rows(model, noise(3, 3), names=chosen) == (HookEngine, [])


def test_parts_of_the_model_without_gradients_have_zero_rows() -> None:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            trunk = torch.tanh(m.trunk(x) * (2 * m.out.weight[0, 0]))
        return m.out(trunk) * m.twice(x) + torch.no_grad()(m.twice)(trunk[:, :3])

    model = Uses(forward, trunk=nn.Linear(3, 4), out=nn.Linear(4, 2), twice=nn.Linear(3, 2))
    same_as_the_loop(model, noise(3, 3))
    assert right_rows(model, noise(3, 3)) == (HookEngine, [])
    rows = joined(pulled(HookEngine, model, Inputs((noise(3, 3),), {}), 2))
    assert not rows[:, :, :16].any()
    assert rows[:, :, 16:].all()


def test_a_model_without_gradients_has_zero_rows() -> None:
    model = Uses(torch.no_grad()(lambda m, x: m.layer(x)), layer=nn.Linear(3, 2))
    assert right_rows(model, noise(3, 3)) == (HookEngine, [])
    assert not joined(pulled(HookEngine, model, Inputs((noise(3, 3),), {}), 2)).any()


# --- The model is watched, not touched -----------------------------------------------------


class Probe(nn.Module):
    """Writes down whether what passes has a graph, and whether one could be recorded."""

    def __init__(self, seen: list[tuple[bool, bool]]) -> None:
        super().__init__()
        self.seen = seen

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append((x.requires_grad, torch.is_grad_enabled()))
        return x


@pytest.mark.parametrize(
    ("chosen", "recorded"),
    [
        ("1.weight", [True, True, True]),
        ("3.bias", [False, True, True]),
        ("5.weight", [False, False, True]),
    ],
)
def test_layers_before_the_first_chosen_one_record_no_graph(
    chosen: str, recorded: list[bool]
) -> None:
    seen: list[tuple[bool, bool]] = []
    layers = (nn.Linear(3, 3), nn.Conv1d(1, 1, 3, padding=1), nn.LayerNorm(3))
    model = nn.Sequential(
        *(module for layer in layers for module in (Probe(seen), layer)), Probe(seen)
    )
    model = randomised(model)
    close(
        joined(pulled(HookEngine, model, Inputs((noise(3, 1, 3),), {}), 2, [chosen])),
        joined(pulled(LoopEngine, model, Inputs((noise(3, 1, 3),), {}), 2, [chosen])),
    )
    # the first pass is one to see whether the model can have a twin
    assert seen[4:8] == [(False, True), *((one, True) for one in recorded)]


def test_hooks_of_the_model_run_and_stay() -> None:
    model, called = randomised(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))), []
    model[0].register_forward_pre_hook(lambda *_: called.append("before"))
    model[0].register_forward_hook(lambda _, __, out: called.append("after") or 2.0 * out)
    model[2].weight.register_hook(lambda _: called.append("gradient of a weight"))
    before = [dict(m._forward_hooks) for m in model.modules()]
    call = Inputs((noise(3, 3),), {})
    rows = joined(pulled(HookEngine, model, call, 2))
    # the first pass is one to see whether the model can have a twin
    assert called == ["before", "after"] * 2
    assert [dict(m._forward_hooks) for m in model.modules()] == before
    close(rows, joined(pulled(LoopEngine, model, call, 2)), 1e-12)
    assert all(p.grad is None and p.requires_grad and p.is_leaf for p in model.parameters())


def test_many_threads_watch_one_model_without_a_lock() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv1d(2, 4, 2),
        nn.BatchNorm1d(4),
        nn.ReLU(inplace=True),
        nn.TransformerEncoderLayer(4, 2, 5, batch_first=True),
        nn.Linear(4, 2),
    )
    network = Network(randomised(model))
    engine = HookEngine(network, everything(network))
    batches = [noise(2 + i, 2, 5, seed=i) for i in range(4)]
    matrix = noise(engine.parameters.num_parameters, 2)

    def work(i: int) -> list[Tensor]:
        linear = engine.linearize(Inputs((batches[i % 4],), {}))
        factors = linear.pull_back(noise(len(linear.output), 2, 8))
        return [linear.output, joined(factors), *factors.project(matrix)]

    expected = [work(i) for i in range(4)]
    with ThreadPoolExecutor(8) as pool:
        for i, found in enumerate(pool.map(work, range(80))):
            assert all(torch.equal(a, b) for a, b in zip(found, expected[i % 4], strict=True))


# --- Memory --------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """Notes the bytes of the largest tensor that is made, views aside."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {
            t.untyped_storage().data_ptr() for t in tree_leaves(args) if isinstance(t, Tensor)
        }
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in given:
                self.bytes = max(self.bytes, tensor.nbytes)
        return result


DEEP = {
    "linear": ([layer for _ in range(10) for layer in (nn.Linear(64, 64), nn.ReLU())], (64,)),
    "tokens": ([layer for _ in range(10) for layer in (nn.Linear(64, 64), nn.ReLU())], (3, 64)),
    "convolution": ([nn.Conv1d(32, 32, 3, padding=1) for _ in range(10)], (32, 6)),
}


@pytest.mark.parametrize("directions", [1, 4])
@pytest.mark.parametrize("kind", DEEP)
def test_no_tensor_spans_all_parameters(kind: str, directions: int) -> None:
    layers, shape = DEEP[kind]
    model = randomised(nn.Sequential(*layers))
    factors = pulled(HookEngine, model, Inputs((noise(64, *shape),), {}), directions)
    widest = max(p.numel() for p in model.parameters())
    matrix = noise(sum(p.numel() for p in model.parameters()), 2)
    for ask in (lambda: factors.project(matrix), factors.squared_norms):
        with Largest() as largest:
            ask()
        assert 0 < largest.bytes <= 2 * widest * factors.num_rows * 8


def test_outer_products_of_several_directions_are_never_formed() -> None:
    layers, shape = DEEP["linear"]
    model = randomised(nn.Sequential(*layers))
    factors = pulled(HookEngine, model, Inputs((noise(64, *shape),), {}), 4)
    matrix = noise(sum(p.numel() for p in model.parameters()), 2)
    with Largest() as largest:
        factors.project(matrix)
    assert largest.bytes <= 64 * 64 * factors.num_rows * 8 // 4


def test_no_pass_outlives_its_score() -> None:
    """Activations in a reference cycle would pile up until the collector comes by."""
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(144, 3))
    monitor = Monitor(model, Categorical(), 4).fit([torch.randn(9, 1, 8, 8)], progress=False)
    x = torch.randn(5, 1, 8, 8)
    monitor.score(x)
    live, after_each = LiveBytes(), []
    gc.collect()
    gc.disable()
    try:
        with live:
            for _ in range(4):  # the first pass is followed, later ones are compared with it
                monitor.score(x)
                after_each.append(live.now)
    finally:
        gc.enable()
    assert after_each == [0] * 4
