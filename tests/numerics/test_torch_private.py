"""What names of torch that are not public must do: a version may change it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.compiler import is_compiling  # by name, as models do
from torch.nn import functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint as checkpointing
from torch.utils.checkpoint import checkpoint

from scodkit.numerics import torch_private


def test_pull_back_is_grad_without_its_checks() -> None:
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    unused = nn.Parameter(torch.ones(2))
    hidden = net[1](net[0](torch.randn(2, 4).double()))
    output, row = net[2](hidden), torch.randn(2, 3).double()
    inputs = [*net.parameters(), unused, get_gradient_edge(hidden)]
    expected = torch.autograd.grad(output, inputs, row, retain_graph=True, allow_unused=True)
    for _ in range(2):  # the graph is kept
        found = torch_private.pull_back((output,), (row,), inputs=tuple(inputs))
        assert found[4] is None
        assert expected[4] is None
        pairs = zip(found, expected, strict=True)
        assert all(a is b or torch.equal(a, b) for a, b in pairs)
    assert all(parameter.grad is None for parameter in net.parameters())


@pytest.mark.parametrize("way", ["alone", "grad", "func"])
def test_a_function_is_given_the_gradients_of_all_directions(way: str) -> None:
    shapes: list[torch.Size] = []

    def times_three(one: Tensor, other: Tensor) -> list[Tensor]:
        shapes.extend([one.shape, other.shape])
        return [torch.mul(one, 3, out=torch.empty(one.shape)), other]

    class Pair(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            return x * 1, y * 1

        @staticmethod
        def backward(ctx: Any, *rows: Tensor) -> tuple[Tensor, ...]:
            return tuple(torch_private.of_all_directions(times_three, rows))

    x = torch.randn(5, requires_grad=True)
    output, _ = Pair.apply(x, x)  # the second has no gradient
    rows = torch.randn(4, 5)

    def pulled(row: Tensor, batched: bool) -> Tensor:
        return torch.autograd.grad(output, x, row, retain_graph=True, is_grads_batched=batched)[
            0
        ]

    if way == "alone":
        found, count = pulled(rows[0], False)[None], 1
    elif way == "grad":
        found, count = pulled(rows, True), 4
    else:
        found, count = torch.func.vmap(lambda row: pulled(row, False))(rows), 4
    torch.testing.assert_close(found, 3 * rows[:count])
    assert shapes == [(count, 5)] * 2


def test_a_gradient_leaves_the_map_over_directions_with_all_of_them() -> None:
    x = torch.randn(3, requires_grad=True)
    middle = 2 * x
    seen: list[Tensor] = []

    def see(gradients: tuple[Tensor, ...]) -> None:
        seen.append(torch_private.out_of_map(gradients[0], 4))

    middle.grad_fn.register_prehook(see)
    rows = torch.randn(4, 3)
    torch.autograd.grad(middle.sin(), x, rows, is_grads_batched=True)
    torch.testing.assert_close(seen[0], rows * middle.detach().cos())


class Seen(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[object] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.calls.append(func)
        return func(*args, **(kwargs or {}))


def test_modes_see_the_switch_of_gradients_and_can_be_kept_out() -> None:
    with Seen() as seen:
        with torch.no_grad():
            pass
        before = len(seen.calls)
        with torch_private.without_torch_function():
            torch.ones(1) + 1
    assert torch_private.set_grad_enabled in seen.calls
    assert len(seen.calls) == before


def test_attention_is_torch_s_own_and_shows_its_parts() -> None:
    torch.manual_seed(0)
    layer, x = nn.MultiheadAttention(8, 2), torch.randn(5, 3, 8)
    weights = (layer.in_proj_weight, layer.in_proj_bias, None, None, False, 0.0)
    rest = (layer.out_proj.weight, layer.out_proj.bias)
    expected = F.multi_head_attention_forward(x, x, x, 8, 2, *weights, *rest)
    with Seen() as seen:
        found = torch_private.attention(x, x, x, 8, 2, *weights, *rest)
    assert torch.equal(found[0], expected[0])
    assert F.multi_head_attention_forward not in seen.calls
    assert F.linear in seen.calls


def test_checkpointed_blocks_call_what_they_are_told_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = []

    def around(*args, **kwargs):
        calls.append(args)
        yield

    x = torch.ones(2, requires_grad=True)
    monkeypatch.setattr(checkpointing, torch_private.AROUND_CHECKPOINT, around)
    checkpoint(torch.sin, x, use_reentrant=False)
    assert len(calls) == 1
    monkeypatch.undo()
    checkpoint(torch.sin, x, use_reentrant=False)
    assert len(calls) == 1


def test_only_this_thread_is_told_that_it_is_traced() -> None:
    def elsewhere() -> bool:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(is_compiling).result()

    assert not is_compiling()
    with torch_private.as_if_traced(), torch_private.as_if_traced():
        assert is_compiling() is True
        assert elsewhere() is False
        assert torch.compiler._is_compiling_flag is False
    assert is_compiling() is False


def test_whoever_compiles_meanwhile_is_not_disturbed() -> None:
    """A compiler sets a flag and puts back what it found, perhaps after we have left."""
    compiling, left = threading.Event(), threading.Event()

    def backend(graph: Any, _: object) -> Any:
        compiling.set()
        left.wait()
        return graph

    compiled: Any = torch.compile(lambda x: 2 * x + is_compiling(), backend=backend)
    with ThreadPoolExecutor(1) as pool:
        with torch_private.as_if_traced():
            found = pool.submit(compiled, torch.ones(2))
            assert compiling.wait(60)
        left.set()
        assert torch.equal(found.result(), torch.full((2,), 3.0))
    assert is_compiling() is False


def test_an_error_ends_what_was_as_if_traced() -> None:
    with pytest.raises(KeyError), torch_private.as_if_traced():
        raise KeyError
    assert is_compiling() is False


@pytest.mark.skipif(torch_private.onednn_linear is None, reason="torch without oneDNN")
def test_onednn_s_product_takes_a_transposed_weight_and_more_axes() -> None:
    x, weight, bias = torch.randn(2, 3, 50), torch.randn(50, 7).mT, torch.randn(7)
    found = torch_private.onednn_linear(x, weight, bias, "none", [], "")
    torch.testing.assert_close(found, F.linear(x, weight, bias))
    assert not found.requires_grad


def test_the_rest_is_what_its_name_says() -> None:
    parts = [torch.randn(2, 3), torch.randn(4, 5).T, torch.randn(())]
    joined = torch.cat([part.reshape(-1) for part in parts])
    assert torch.equal(torch_private.flattened(parts), joined)
    own, others = [torch.zeros(2), torch.zeros(3)], [torch.ones(2), torch.ones(3)]
    torch_private.foreach_copy(own, others)
    assert all(map(torch.equal, own, others))
    for kind in (nn.Conv1d, nn.Conv3d, nn.ConvTranspose2d):
        assert issubclass(kind, torch_private.Convolution)
    assert isinstance(torch.ops.aten.add, torch_private.OPERATORS)
    assert isinstance(torch.ops.aten.add.Tensor, torch_private.OPERATORS)
    assert torch_private.get_proxy_mode() is None
