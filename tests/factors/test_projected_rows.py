"""Projected rows against projections of plain autograd's gradients, for every kind of layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from cases import CASES, Case, Recurrent, TiedEmbedding
from oracles import dense_jacobian
from scodkit import Projected
from scodkit.factors.alone import FunctionalEngine, LoopEngine
from scodkit.factors.choose import choose_engine
from scodkit.factors.engine import Engine
from scodkit.factors.hooks import HookEngine
from scodkit.factors.rules.rows import LookedUp, Outer, Several, Summed
from scodkit.model.inputs import Inputs
from scodkit.model.network import Network
from scodkit.model.parameters import select
from scodkit.model.projected import Pair, ProjectedSet, Projections

EXACT = {"rtol": 1e-9, "atol": 1e-11}


class LowRank(nn.Module):
    """A frozen linear layer with an adapter, as LoRA makes them."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(12, 12)
        self.down = nn.Linear(12, 3, bias=False)
        self.up = nn.Linear(3, 12, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 0.5 * self.up(self.down(x))


class Positions(nn.Module):
    """Adds a table of positions, and is scaled by a matrix that is normalised first."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(1, 5, 9))
        self.linear = nn.utils.parametrizations.weight_norm(nn.Linear(9, 7))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x + self.table).tanh()


class Twice(nn.Module):
    """Uses one layer twice, and a part of its weight again."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        again = self.linear(self.linear(x).tanh())
        return again + F.linear(x, self.linear.weight[2:5]).sum(-1, keepdim=True)


class MatrixProduct(nn.Module):
    """GPT-2's layer: ``x W + b``."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 9))
        self.bias = nn.Parameter(torch.randn(9))

    def forward(self, x: Tensor) -> Tensor:
        flat = torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight)
        return flat.view(*x.shape[:-1], -1)


class SelfAttention(nn.Module):
    """torch's own attention, of which queries differ from keys and values."""

    def __init__(self, parts: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.parts = parts

    def forward(self, x: Tensor) -> Tensor:
        other = x.flip(1) if self.parts else x
        return self.attention(x, other, other, need_weights=False)[0]


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.unused = nn.Linear(4, 6), nn.Linear(7, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def _ended(*layers: nn.Module) -> Callable[[int], nn.Module]:
    return lambda outputs: nn.Sequential(*layers, nn.Flatten(), nn.LazyLinear(outputs))


def _of(*shape: int) -> Callable[[int, int], Inputs]:
    return lambda b, _: Inputs((torch.randn(b, *shape),), {})


def _tokens(entries: int, length: int) -> Callable[[int, int], Inputs]:
    return lambda b, _: Inputs((torch.randint(0, entries, (b, length)),), {})


def _built(name: str, layers: Callable[[], list[nn.Module]], *shape: int) -> Case:
    return Case(name, lambda d: _ended(*layers())(d), _of(*shape))


KINDS = [
    _built("linear", lambda: [nn.Linear(7, 9), nn.Tanh()], 7),
    _built("linear_few_places", lambda: [nn.Linear(7, 9), nn.Tanh()], 2, 7),
    _built("linear_many_places", lambda: [nn.Linear(4, 5), nn.Tanh()], 30, 4),
    _built("conv1d", lambda: [nn.Conv1d(3, 6, 3, padding=1), nn.Tanh()], 3, 8),
    _built("conv2d", lambda: [nn.Conv2d(3, 6, 3, stride=2, padding=1), nn.Tanh()], 3, 7, 7),
    _built("conv2d_few_places", lambda: [nn.Conv2d(9, 12, 3), nn.Tanh()], 9, 4, 4),
    _built("conv2d_one_filter", lambda: [nn.Conv2d(9, 1, 3), nn.Tanh()], 9, 4, 4),
    _built("conv3d", lambda: [nn.Conv3d(2, 5, 2, dilation=2), nn.Tanh()], 2, 4, 4, 5),
    _built("grouped", lambda: [nn.Conv2d(4, 8, 3, groups=2), nn.Tanh()], 4, 5, 5),
    _built("depthwise", lambda: [nn.Conv2d(6, 6, 3, groups=6), nn.Tanh()], 6, 5, 5),
    _built("transposed", lambda: [nn.ConvTranspose2d(4, 6, 3, stride=2), nn.Tanh()], 4, 3, 3),
    _built("lora", lambda: [LowRank(), nn.Tanh()], 5, 12),
    _built("attention_whole", lambda: [SelfAttention(False)], 5, 8),
    _built("attention_in_parts", lambda: [SelfAttention(True)], 5, 8),
    _built("layer_norm", lambda: [nn.Linear(6, 8), nn.LayerNorm(8)], 6),
    _built("positions", lambda: [Positions()], 5, 9),
    _built("twice", lambda: [Twice()], 3, 6),
    _built("matrix_product", lambda: [MatrixProduct()], 5, 6),
    _built("unused", lambda: [Unused()], 4),
    Case("long_lstm", lambda d: Recurrent(nn.LSTM, d), _of(9, 3)),
    Case("embedding", lambda d: _ended(nn.Embedding(20, 6))(d), _tokens(20, 7)),
    Case("padded", lambda d: _ended(nn.Embedding(20, 6, padding_idx=1))(d), _tokens(20, 7)),
    Case("tied", lambda d: _Head(), _tokens(20, 7)),
    *(case for case in CASES if case.name != "tied"),
]


class _Head(nn.Module):
    """An embedding that is also the output layer, at every place."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = TiedEmbedding(20)

    def forward(self, tokens: Tensor) -> Tensor:
        embedded = torch.tanh(self.inner.mix(self.inner.embed(tokens)))
        return self.inner.out(embedded.cumsum(1))[:, -3:, :4].flatten(1)


def random_projections(network: Network, call: Inputs, rank: int, **options: Any) -> Any:
    """Projections of every weight that has a side longer than the rank, however small."""
    whole = select("all", network, call)
    pairs = {}
    for place, block in enumerate(whole.blocks):
        torch.manual_seed(place)
        sides = Projected(rank=1).sides(block.shape)
        if sides is None or max(sides) <= rank:
            continue
        out, into = (
            None if side <= rank else torch.linalg.qr(torch.randn(side, rank).double()).Q
            for side in sides
        )
        pairs[block.name] = Pair(sides, out, into)
    return Projections(Projected(rank=rank), whole.names, pairs).of(whole)


def dense_projection(parameters: ProjectedSet) -> Tensor:
    """``P (N, N')``, column by column."""
    return parameters.spread(torch.eye(parameters.num_parameters, dtype=torch.float64)).T


@pytest.mark.parametrize("case", KINDS, ids=lambda case: case.name)
@pytest.mark.parametrize("engine", [HookEngine, LoopEngine, FunctionalEngine])
def test_rows_are_projections_of_gradients(case: Case, engine: type[Engine]) -> None:
    if not case.batched and engine is HookEngine:
        pytest.skip("there is no rule for it")
    if engine is FunctionalEngine and case.name in ("long_lstm", "lstm", "gru", "prelu"):
        pytest.skip("torch has no batching rule")
    call = case.inputs(4, 3)
    model = case.model(3)
    with torch.no_grad():
        model(*call.args, **call.kwargs)  # lazy layers get their sizes
    network = Network(model.double())
    parameters = random_projections(network, call, rank=2)
    assert parameters.projections.pairs
    with network.evaluating():
        linear = engine(network, parameters).linearize(call)
        rows = torch.randn(4, 2, linear.output[0].numel(), dtype=torch.float64)
        factors = linear.pull_back(rows)
        held = factors.hold()
    jacobian = dense_jacobian(model, call)
    whole = rows @ jacobian
    projection = dense_projection(parameters)
    torch.testing.assert_close(
        projection.T @ projection, torch.eye(parameters.num_parameters).double(), **EXACT
    )
    (columns, projected), *others = held.blocks()
    assert not others
    assert columns == slice(0, parameters.num_parameters)
    torch.testing.assert_close(projected, whole @ projection, **EXACT)
    exact = whole.square().sum((1, 2))
    torch.testing.assert_close(factors.squared_norms(), exact, **EXACT)
    norms, along = factors.project(projection[:5].T.new_ones(parameters.num_parameters, 2))
    torch.testing.assert_close(norms, exact, **EXACT)
    torch.testing.assert_close(along[..., 0], (whole @ projection).sum(2), **EXACT)
    outside = held.outside
    assert outside is not None
    for i, block in enumerate(parameters.full.blocks):
        own = whole[:, :, block.columns]
        left = own - own @ projection[block.columns] @ projection[block.columns].T
        torch.testing.assert_close(outside[:, :, i], left.square().sum(2), **EXACT)


def terms(kind: str, places: int) -> Summed | LookedUp:
    torch.manual_seed(places)
    delta = torch.randn(3, 2, places, 11, dtype=torch.float64)
    if kind == "summed":
        return Summed(delta, torch.randn(3, places, 6, dtype=torch.float64))
    return LookedUp(torch.randint(0, 11, (3, places)), delta[..., :6].contiguous(), 11)


@pytest.mark.parametrize("places", [1, 2, 50])
@pytest.mark.parametrize("kind", ["summed", "looked_up"])
def test_norms_by_inner_products_and_by_rows_agree(kind: str, places: int) -> None:
    pair = random_pair()
    rows = terms(kind, places)
    projected, squares = rows.compressed(pair)
    torch.testing.assert_close(squares, rows.dense().square().sum(2), **EXACT)
    torch.testing.assert_close(projected, pair.of_gradients(rows.dense()), **EXACT)


@pytest.mark.parametrize("offset", [0.0, 10.0, 1000.0])
def test_norms_in_float32_survive_terms_that_cancel(offset: float) -> None:
    # as of the keys of attention: gradients sum to zero over the positions
    delta = torch.randn(3, 2, 20, 90).double()
    delta = (delta - delta.mean(2, keepdim=True)).float()
    rows = Summed(delta, torch.randn(3, 20, 70) + offset)
    assert 20 * (70 + 2 * 90) < 2 * 90 * 70  # norms come from inner products
    exact = Summed(delta.double(), rows.a.double()).dense().square().sum(2)
    torch.testing.assert_close(rows.each_squared(), exact, rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_norms_are_never_negative_and_zero_of_nothing(dtype: torch.dtype) -> None:
    a = torch.rand(500, 2, 3, dtype=dtype)[..., :1].expand(-1, -1, 3) + 1
    delta = (a.flip(1) * torch.tensor([1.0, -1.0], dtype=dtype)[:, None])[:, None]
    squares = Summed(delta, a).each_squared()  # all of it cancels
    assert (squares >= 0).all()
    assert (squares <= 1e-6 * delta.square().sum((2, 3)).double()).all()
    nothing = Summed(delta[:, :, :0], a[:, :0]).each_squared()
    assert torch.equal(nothing, torch.zeros(500, 1, dtype=torch.float64))


def random_pair() -> Pair:
    out, into = (torch.linalg.qr(torch.randn(side, 3).double()).Q for side in (11, 6))
    return Pair((11, 6), out, into)


@pytest.mark.parametrize(
    "uses",
    [
        ["summed"],
        ["summed", "summed"],
        ["looked_up", "looked_up"],
        ["summed", "looked_up"],
        ["looked_up", "summed", "summed", "looked_up"],
        ["summed", "tensor"],
    ],
    ids=" ".join,
)
def test_several_uses_add_up(uses: list[str]) -> None:
    whole, pair = slice(0, 66), random_pair()
    rows = [
        torch.randn(3, 2, 66).double() if kind == "tensor" else terms(kind, places)
        for places, kind in enumerate(uses, start=2)
    ]
    several = Several([(whole, own) for own in rows], (11, 6))
    expected = sum(own if isinstance(own, Tensor) else own.dense() for own in rows)
    assert isinstance(expected, Tensor)
    projected, squares = several.compressed(pair)
    torch.testing.assert_close(several.dense(), expected, **EXACT)
    torch.testing.assert_close(projected, pair.of_gradients(expected), **EXACT)
    torch.testing.assert_close(squares, expected.square().sum(2), **EXACT)


@pytest.mark.parametrize(
    "parts",
    [[(0, 24), (24, 66)], [(0, 24), (12, 66)], [(0, 20), (20, 66)], [(0, 24)] * 2, [(3, 9)]],
    ids=["apart", "overlapping", "not of whole rows", "the same", "one, across rows"],
)
def test_parts_of_a_weight_add_up(parts: list[tuple[int, int]]) -> None:
    uses, expected = [], torch.zeros(3, 2, 66, dtype=torch.float64)
    for places, (start, stop) in enumerate(parts, start=2):
        outputs, rest = divmod(stop - start, 6)
        rows: Any = torch.randn(3, 2, stop - start).double()
        if not rest and not start % 6:
            delta = torch.randn(3, 2, places, outputs).double()
            rows = Summed(delta, torch.randn(3, places, 6).double())
        uses.append((slice(start, stop), rows))
        expected[:, :, start:stop] += rows if isinstance(rows, Tensor) else rows.dense()
    several, (out, into) = Several(uses, (11, 6)), (random_pair().out, random_pair().into)
    for pair in (Pair((11, 6), o, i) for o in (out, None) for i in (into, None)):
        projected, squares = several.compressed(pair)
        torch.testing.assert_close(projected, pair.of_gradients(expected), **EXACT)
        torch.testing.assert_close(squares, expected.square().sum(2), **EXACT)


def test_an_outer_product_is_projected() -> None:
    rows = Outer(torch.randn(3, 2, 11).double(), torch.randn(3, 6).double())
    pair = random_pair()
    projected, squares = rows.compressed(pair)
    torch.testing.assert_close(projected, pair.of_gradients(rows.dense()), **EXACT)
    torch.testing.assert_close(squares, rows.dense().square().sum(2), **EXACT)


def test_engines_are_chosen_and_checked_as_for_whole_weights() -> None:
    case = next(case for case in KINDS if case.name == "conv2d")
    call, model = case.inputs(6, 3), case.model(3)
    model(*call.args)
    network = Network(model.double())
    parameters = random_projections(network, call, rank=2)
    with network.evaluating():
        engine = choose_engine(network, parameters, call, check_every=1)
        assert isinstance(engine, HookEngine)
        for _ in range(3):
            assert engine.linearize(call).pull_back(torch.ones(6, 1, 3).double()).num_rows == 6


def test_wrong_rows_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    call, network = Inputs((torch.randn(6, 7).double(),), {}), Network(linear_net())
    parameters = random_projections(network, call, rank=2)
    right = Outer.compressed

    def wrong(self: Outer, pair: Pair) -> tuple[Tensor, Tensor]:
        rows, squares = right(self, pair)
        return rows, 2 * squares

    monkeypatch.setattr(Outer, "compressed", wrong)
    with (
        network.evaluating(),
        pytest.warns(UserWarning, match="squared norms differ"),
    ):
        engine = choose_engine(network, parameters, call)
    assert not isinstance(engine, HookEngine)


def linear_net() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(7, 30), nn.Tanh(), nn.Linear(30, 30), nn.Tanh(), nn.Linear(30, 2)]
    return nn.Sequential(*layers).double().eval()
