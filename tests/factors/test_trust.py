"""An engine is chosen on one batch and trusted with all others: what must be noticed then."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

from cases import mlp
from draws import noise
from engines import Uses, chosen_engine, joined, randomised, right_rows
from scodkit.factors import pieces
from scodkit.factors.alone import LoopEngine
from scodkit.factors.hooks import HookEngine
from scodkit.model.inputs import Inputs
from scodkit.model.network import Network
from scodkit.model.parameters import select_names

# --- Layouts -------------------------------------------------------------------------------


def places_first(m: nn.Module, x: Tensor) -> Tensor:
    return m.b(torch.tanh(m.a(x.transpose(0, 1)))).transpose(0, 1)


def tokens_first(m: nn.Module, x: Tensor) -> Tensor:
    return m.embed((x[..., 0] > 0).long().T).transpose(0, 1)


def windows(m: nn.Module, x: Tensor) -> Tensor:
    folded = x.unflatten(1, (2, -1)).flatten(0, 1)
    return m.attention(folded, folded, folded)[0].reshape(x.shape)


def shared_table(m: nn.Module, x: Tensor) -> Tensor:
    return m.a(x) + m.b(noise(6, 4)).sum(0)


LAYOUTS = {
    "linear": Uses(places_first, a=nn.Linear(4, 4), b=nn.Linear(4, 2)),
    "norm": Uses(places_first, a=nn.LayerNorm(4), b=nn.LayerNorm(4)),
    "shift": Uses(lambda m, x: (x.transpose(0, 1) + m.w).transpose(0, 1), w=(4,)),
    "embedding": Uses(tokens_first, embed=nn.Embedding(2, 2)),
    "windows": Uses(windows, attention=nn.MultiheadAttention(4, 2, batch_first=True)),
    "table": Uses(shared_table, a=nn.Linear(4, 2), b=nn.Linear(4, 2)),
}


@pytest.mark.parametrize("batch", [2, 3, 5, 6])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_other_layouts_inside_a_model_are_noticed(layout: str, batch: int) -> None:
    kind, said = right_rows(LAYOUTS[layout], noise(batch, 6, 4))
    assert len(said) == (kind is not HookEngine)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_other_layouts_are_noticed_on_a_batch_of_one(layout: str) -> None:
    right_rows(LAYOUTS[layout], noise(1, 6, 4), then=noise(3, 6, 4))


# --- Order that depends on the data --------------------------------------------------------


def packed(m: nn.Module, x: Tensor) -> Tensor:
    """Leaves out the tokens whose first number is not positive."""
    kept = x[..., 0] > 0
    out = torch.zeros_like(x).masked_scatter(kept[..., None], torch.tanh(m.a(x[kept])))
    return out.sum(1)


def sorted_by_first(m: nn.Module, x: Tensor) -> Tensor:
    order = x[:, 0, 0].argsort(stable=True)
    return torch.tanh(m.a(x[order]))[order.argsort()]


FULL = torch.cat(
    [torch.tensor([1.0, 2.0, 3.0]).view(3, 1, 1).expand(3, 4, 1), noise(3, 4, 2)], 2
)


def by_kept_tokens(x: Tensor, *kept: int) -> Tensor:
    signs = [[1 if i < number else -1 for i in range(x.shape[1])] for number in kept]
    return (x[: len(kept)].abs() * torch.tensor(signs)[..., None]).double()


@pytest.mark.parametrize("later", [(4, 4), (3, 1), (4, 2, 3)])
def test_samples_that_are_packed(later: tuple[int, ...]) -> None:
    model = Uses(packed, a=nn.Linear(3, 3))
    right_rows(model, by_kept_tokens(FULL, 3, 3, 3), then=by_kept_tokens(FULL, *later))


@pytest.mark.parametrize("keys", [(1.0, 1.0, 1.0), (1.0, 2.0, 3.0)])
def test_samples_that_are_sorted(keys: tuple[float, ...]) -> None:
    first = FULL.clone().double()
    first[:, :, 0] = torch.tensor(keys)[:, None]
    right_rows(Uses(sorted_by_first, a=nn.Linear(3, 3)), first, then=FULL.flip(0).double())


def test_picking_tokens_behind_the_last_layer_keeps_the_fast_engine() -> None:
    model = Uses(lambda m, x: m.a(x)[torch.arange(len(x)), -1], a=nn.Linear(3, 3))
    assert right_rows(model, noise(3, 4, 3)) == (HookEngine, [])


# --- The trial itself ----------------------------------------------------------------------


def test_a_small_parameter_must_be_right_too() -> None:
    model = Uses(
        lambda m, x: m.a(x) + 1e-4 * m.b(noise(6, 4).to(x)).sum(0),
        a=nn.Linear(4, 2),
        b=nn.Linear(4, 2),
    )
    network, call = Network(randomised(model).float()), Inputs((noise(3, 4).float(),), {})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine = chosen_engine(network.model, call)
    small = select_names(network.model, ["b.weight", "b.bias"])
    rows = noise(3, 2, 2).float()
    found, expected = (
        joined(kind(network, small).linearize(call).pull_back(rows))
        for kind in (type(engine), LoopEngine)
    )
    assert (found - expected).norm() <= 1e-3 * expected.norm()


class Cubes(torch.autograd.Function):
    """A function whose gradient is taken outside torch, for one direction at a time."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, delta: Tensor) -> Tensor:
        return torch.from_numpy(3 * ctx.saved_tensors[0].numpy() ** 2 * delta.numpy())


@pytest.mark.parametrize(
    "large",
    [False, True],
)
def test_several_directions_are_tried(monkeypatch: pytest.MonkeyPatch, large: bool) -> None:
    if large:
        monkeypatch.setattr(pieces, "_LARGE", 0)
    model = Uses(lambda m, x: m.b(Cubes.apply(m.a(x))), a=nn.Linear(4, 3), b=nn.Linear(3, 2))
    kind, said = right_rows(model, noise(3, 4))
    assert len(said) == (kind is not HookEngine)


def test_large_models_get_the_fast_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "_LARGE", 0)
    assert right_rows(mlp(2), noise(4, 3)) == (HookEngine, [])


def joined_tokens(m: nn.Module, x: Tensor) -> Tensor:
    """Leaves out tokens as `packed` does, by joining what is kept of each sample."""
    lengths = [int((sample[:, 0] > 0).sum()) for sample in x]
    kept = [sample[:length] for sample, length in zip(x, lengths, strict=True)]
    parts = torch.tanh(m.a(torch.cat(kept))).split(lengths)
    return torch.stack([part.sum(0) for part in parts])


@pytest.mark.parametrize("later", [(3, 1), (4, 2, 3)])
def test_samples_that_are_joined(later: tuple[int, ...]) -> None:
    model = Uses(joined_tokens, a=nn.Linear(3, 3))
    right_rows(model, by_kept_tokens(FULL, 3, 3, 3), then=by_kept_tokens(FULL, *later))


@pytest.mark.parametrize("places", [6, 16])
def test_a_layout_that_comes_later_is_right(places: int) -> None:
    model = Uses(places_first, a=nn.Linear(4, 4), b=nn.Linear(4, 2))
    right_rows(model, noise(3, 1, 4), then=noise(16, places, 4))
