"""Parameters without a layer, in several places, in parts, or for many windows of a sample."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from draws import noise
from engines import Uses, same_as_the_loop

FEW = settings(deadline=None, max_examples=15)
BATCH = st.integers(1, 4)

# --- Element-wise parameters ---------------------------------------------------------------

OPERATIONS = {
    "x * w": lambda x, w: x * w,
    "w * x": lambda x, w: w * x,
    "x + w": lambda x, w: x + w,
    "w + x": lambda x, w: w + x,
    "torch.mul": lambda x, w: torch.mul(w, other=x),
    "torch.add": lambda x, w: torch.add(x, w),
    "x.mul": lambda x, w: x.mul(w),
    "x.add": lambda x, w: x.add(w),
}


@pytest.mark.parametrize("operation", OPERATIONS)
@FEW
@given(
    batch=BATCH,
    shape=st.lists(st.integers(1, 3), max_size=3),
    kept=st.lists(st.booleans(), min_size=3, max_size=3),
    dropped=st.integers(0, 3),
    leading=st.booleans(),
)
def test_scales_and_shifts(
    operation: str, batch: int, shape: list[int], kept: list[bool], dropped: int, leading: bool
) -> None:
    """Parameters that span some of the axes behind the batch, with a one for it or not."""
    own = [n if keep else 1 for n, keep in zip(shape, kept, strict=False)][dropped:]
    own = [1] * (len(shape) + 1 - len(own)) + own if leading or not own else own
    model = Uses(
        lambda m, x: OPERATIONS[operation](torch.tanh(x * m.first), m.w),
        first=(1,),
        w=tuple(own),
    )
    same_as_the_loop(model, noise(batch, *shape))


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_parameter_that_makes_its_input_larger(operation: str) -> None:
    model = Uses(lambda m, x: OPERATIONS[operation](x[:, None], m.w), w=(4, 1))
    same_as_the_loop(model, noise(3, 2))


def test_a_parameter_that_is_one_number() -> None:
    model = Uses(lambda m, x: m.layer(x) * m.scale, layer=nn.Linear(3, 2), scale=())
    same_as_the_loop(model, noise(3, 3))


@pytest.mark.parametrize("shape", [(5, 4), (1, 5, 4), (5, 1), (1, 1, 4)])
def test_positions_are_added_to_what_a_layer_gives(shape: tuple[int, ...]) -> None:
    model = Uses(
        lambda m, x: m.out(torch.tanh(m.layer(x) + m.position)),
        layer=nn.Linear(3, 4),
        position=shape,
        out=nn.Linear(4, 2),
    )
    same_as_the_loop(model, noise(3, 5, 3))


EXPANSIONS = {
    "expand": lambda w, x: w.expand(x.shape[0], -1, -1),
    "expand sizes": lambda w, x: w.expand((x.shape[0], 2, 4)),
    "expand_as": lambda w, x: w.expand_as(x[:, :2]),
    "expand a part": lambda w, x: w[0].expand(x.shape[0], -1, -1),
    "expand a smaller part": lambda w, x: w[0, 1].expand(x.shape[0], 3, -1),
}


@pytest.mark.parametrize("expansion", EXPANSIONS)
def test_class_tokens(expansion: str) -> None:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        return m.out(torch.cat([EXPANSIONS[expansion](m.token, x), m.layer(x)], 1))

    model = Uses(forward, token=(1, 2, 4), layer=nn.Linear(4, 4), out=nn.Linear(4, 2))
    same_as_the_loop(model, noise(3, 5, 4))


def test_two_parameters_in_one_product() -> None:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        tokens = m.token.expand(len(x), -1, -1)
        return tokens * m.scale + m.shift.expand_as(x[:, None].repeat(1, 2, 1)) * tokens

    same_as_the_loop(Uses(forward, token=(1, 2, 4), scale=(4,), shift=(2, 1)), noise(3, 4))


def test_a_parameter_expanded_to_the_shape_of_what_a_layer_gives() -> None:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        y = m.layer(x)
        return y * m.shift.expand_as(y).sin()

    same_as_the_loop(Uses(forward, layer=nn.Linear(3, 2), shift=(2,)), noise(3, 3))


# --- Several places ------------------------------------------------------------------------

CALLED_OFTEN = {
    "linear": (nn.Linear(3, 3), (3,)),
    "tokens": (nn.Linear(3, 3), (2, 3)),
    "convolution": (nn.Conv1d(2, 2, 3, padding=1), (2, 4)),
    "transposed": (nn.ConvTranspose1d(2, 2, 3, padding=1), (2, 4)),
    "batch norm": (nn.BatchNorm1d(2), (2, 4)),
    "layer norm": (nn.LayerNorm(4), (2, 4)),
    "attention": (nn.TransformerEncoderLayer(4, 2, 3, batch_first=True), (2, 4)),
}


@pytest.mark.parametrize("kind", CALLED_OFTEN)
@FEW
@given(batch=BATCH, times=st.integers(1, 4))
def test_a_module_called_several_times(kind: str, batch: int, times: int) -> None:
    module, shape = CALLED_OFTEN[kind]

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        for _ in range(times):
            x = torch.sin(m.module(x))
        return x

    same_as_the_loop(Uses(forward, module=module), noise(batch, *shape))


class Tied(nn.Module):
    """A language model whose output layer is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4, padding_idx=0)
        self.mix = nn.Linear(4, 4)
        self.again = nn.Linear(4, 4)
        self.out = nn.Linear(4, 5)
        self.again.weight = self.mix.weight
        self.out.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(torch.tanh(self.again(torch.tanh(self.mix(self.embed(tokens))))))


@pytest.mark.parametrize("names", [None, ["embed.weight"], ["mix.weight", "again.bias"]])
@pytest.mark.parametrize("shape", [(3,), (3, 6)])
def test_tied_weights(shape: tuple[int, ...], names: list[str] | None) -> None:
    tokens = torch.randint(0, 5, shape, generator=torch.Generator().manual_seed(0))
    same_as_the_loop(Tied(), tokens, names=names)


def test_one_weight_in_layers_of_different_kinds() -> None:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        y = F.linear(x, m.w) * m.w[0] + F.layer_norm(x, [3], m.w[1], m.w[1])
        return F.conv1d(y[:, None], m.w.view(3, 1, 3), m.b).sum(2) + F.linear(y, m.w, m.b)

    same_as_the_loop(Uses(forward, w=(3, 3), b=(3,)), noise(4, 3))


# --- Parts ---------------------------------------------------------------------------------

PARTS: dict[str, Callable[[Tensor], list[Tensor]]] = {
    "chunk": lambda w: list(w.chunk(3)),
    "split": lambda w: list(torch.split(w, [1, 3, 2])),
    "index": lambda w: [w[:2], w[5:], w[3][None]],
    "overlapping": lambda w: [w[:4], w[2:]],
    "unbind": lambda w: [part[None] for part in w.unbind()],
    "narrow": lambda w: [w.narrow(0, 1, 3), w.narrow(0, 0, 2)],
    "part of a part": lambda w: [w[1:][1:][:2], w[2:4].view(-1).view(2, 4)],
    "view": lambda w: [w.view(3, 2, 4)[1], w.reshape(-1)[4:12].view(2, 4)],
    "unused": lambda w: [w[:1]],
}


@pytest.mark.parametrize("whole", ["before", "after", "never"])
@pytest.mark.parametrize("kind", PARTS)
def test_a_weight_used_in_parts(kind: str, whole: str) -> None:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        parts = [F.linear(x, part) for part in PARTS[kind](m.w)]
        if whole == "before":
            return F.linear(torch.tanh(F.linear(x, m.w)), m.w.view(4, 6)).sin() + sum(
                part.sum(-1, keepdim=True) for part in parts
            )
        return torch.cat(parts if whole == "never" else [*parts, F.linear(x, m.w)], -1)

    same_as_the_loop(Uses(forward, w=(6, 4)), noise(3, 4))
    same_as_the_loop(Uses(forward, w=(6, 4)), noise(3, 2, 4))


def test_weights_are_used_without_modules() -> None:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        x = F.linear(input=x, weight=m.w, bias=m.b)
        x = F.layer_norm(x, (4,), weight=m.b, eps=0.1)
        x = F.batch_norm(x.mT, m.mean, m.var, weight=m.c, bias=m.b).mT
        x = F.group_norm(x.mT, 2, bias=m.b, weight=m.c).mT
        return F.rms_norm(x, (4,), m.b) + F.instance_norm(x.mT, weight=m.b, bias=m.c).mT

    model = Uses(forward, w=(4, 3), b=(4,), c=(4,))
    model.register_buffer("mean", noise(4))
    model.register_buffer("var", noise(4).square() + 0.1)
    same_as_the_loop(model, noise(3, 5, 3))


# --- Windows -------------------------------------------------------------------------------

WINDOWED = {
    "linear": (nn.Linear(3, 2), (3,)),
    "tokens": (nn.Linear(3, 2), (2, 3)),
    "conv1d": (nn.Conv1d(2, 4, 2, groups=2), (2, 4)),
    "conv2d": (nn.Conv2d(1, 3, 2, stride=2, padding=1), (1, 3, 4)),
    "transposed": (nn.ConvTranspose1d(2, 4, 2, stride=2, groups=2), (2, 3)),
    "batch norm": (nn.BatchNorm1d(2), (2, 4)),
    "instance norm": (nn.InstanceNorm1d(2, affine=True), (2, 4)),
    "layer norm": (nn.LayerNorm((2, 4)), (2, 4)),
    "group norm": (nn.GroupNorm(2, 4), (4, 3)),
    "rms norm": (nn.RMSNorm(4), (2, 4)),
    "shift": (Uses(lambda m, x: x + m.w * x, w=(2, 1)), (2, 4)),
}


@pytest.mark.parametrize("kind", WINDOWED)
@FEW
@given(batch=BATCH, windows=st.integers(1, 4), others=st.lists(st.integers(1, 2), max_size=1))
def test_windows_folded_into_the_batch(
    kind: str, batch: int, windows: int, others: list[int]
) -> None:
    module, shape = WINDOWED[kind]

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        folded = torch.tanh(x * m.scale).reshape(-1, *shape)
        return m.module(folded).unflatten(0, x.shape[: -len(shape)])

    model = Uses(forward, module=module, scale=(1,))
    same_as_the_loop(model, noise(batch, windows, *others, *shape))


def test_tokens_of_windows_folded_into_the_batch() -> None:
    model = Uses(lambda m, x: m.embed(x.flatten()).view(*x.shape, 2), embed=nn.Embedding(4, 2))
    tokens = torch.randint(0, 4, (3, 2, 3), generator=torch.Generator().manual_seed(0))
    same_as_the_loop(model, tokens)


# --- Choices -------------------------------------------------------------------------------


@settings(deadline=None, max_examples=30)
@given(chosen=st.sets(st.integers(0, 9), min_size=1), batch=BATCH)
def test_any_choice_of_parameters_in_any_order(chosen: set[int], batch: int) -> None:
    model = Uses(
        lambda m, x: m.out(m.norm(m.between(torch.tanh(m.conv(x)).mT) + m.shift).sum(1)),
        conv=nn.Conv1d(2, 3, 2),
        between=nn.Linear(3, 4),
        shift=(4,),
        norm=nn.LayerNorm(4),
        out=nn.Linear(4, 2),
        unused=(3,),
    )
    names = list(dict(model.named_parameters()))
    assert len(names) == 10
    some = [names[i] for i in sorted(chosen, key=lambda i: (7 * i) % 10)]
    if some != ["unused"]:
        same_as_the_loop(model, noise(batch, 2, 4), names=some)
