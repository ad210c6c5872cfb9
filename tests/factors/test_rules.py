"""Each rule of the hook engine against plain autograd, over drawn shapes and options."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from draws import noise
from engines import Uses, same_as_the_loop
from scodkit.factors.rules.rows import _MULTIPLIED, LookedUp, Summed

FEW = settings(deadline=None, max_examples=15)
SOME = settings(deadline=None, max_examples=40)
BATCH = st.integers(1, 4)
SMALL = st.integers(1, 3)


def behind(scale: tuple[int, ...], layer: nn.Module) -> nn.Module:
    """The layer behind a scaling of its input, whose parameter is chosen too."""
    return Uses(lambda m, x: m.layer(torch.tanh(x * m.scale)), scale=scale, layer=layer)


def behind_channels(shape: tuple[int, ...], layer: nn.Module) -> nn.Module:
    """The same for a layer that takes channels and positions."""
    return behind((shape[0], *(1,) * len(shape[1:])), layer)


# --- Linear --------------------------------------------------------------------------------


@SOME
@given(
    batch=BATCH,
    lead=st.lists(SMALL, max_size=3),
    sizes=st.tuples(SMALL, st.integers(1, 5)),
    bias=st.booleans(),
    alone=st.booleans(),
)
def test_linear(
    batch: int, lead: list[int], sizes: tuple[int, int], bias: bool, alone: bool
) -> None:
    layer = nn.Linear(*sizes, bias)
    model = nn.Sequential(layer, nn.Tanh()) if alone else behind((sizes[0],), layer)
    same_as_the_loop(model, noise(batch, *lead, sizes[0]))


@pytest.mark.parametrize("lead", [(), (2,)])
def test_linear_layers_with_large_rows(lead: tuple[int, ...]) -> None:
    model = nn.Sequential(nn.Linear(65, 64), nn.Tanh(), nn.Linear(64, 66))
    same_as_the_loop(model, noise(24, *lead, 65))


# --- Convolutions --------------------------------------------------------------------------

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@st.composite
def sizes(draw: st.DrawFn, dims: int, lowest: int, highest: int) -> int | tuple[int, ...]:
    """One size for all axes, or one for each."""
    each = st.integers(lowest, highest)
    return draw(each | st.tuples(*[each] * dims))


def spread(size: int | tuple[int, ...], dims: int) -> tuple[int, ...]:
    return (size,) * dims if isinstance(size, int) else size


def spans_of(kernel: int | tuple[int, ...], dilation: int | tuple[int, ...], dims: int) -> list:
    pairs = zip(spread(kernel, dims), spread(dilation, dims), strict=True)
    return [d * (k - 1) for k, d in pairs]


@st.composite
def convolutions(draw: st.DrawFn) -> tuple[nn.Module, tuple[int, ...]]:
    """A convolution, and the channels and positions it takes."""
    dims = draw(SMALL)
    groups = draw(SMALL)
    inputs, outputs = (groups * draw(st.integers(1, 2)) for _ in range(2))
    outputs *= draw(st.sampled_from([1, 1, 5]))
    kernel, dilation = draw(sizes(dims, 1, 3)), draw(sizes(dims, 1, 2))
    padding = draw(st.sampled_from(["same", "valid"]) | sizes(dims, 0, 2))
    stride = 1 if padding == "same" else draw(sizes(dims, 1, 3))
    layer = CONVOLUTIONS[dims - 1](
        inputs,
        outputs,
        kernel,
        stride=stride,
        padding=padding,
        dilation=dilation,
        groups=groups,
        bias=draw(st.booleans()),
        padding_mode=draw(
            st.sampled_from(["zeros", "zeros", "circular", "reflect", "replicate"])
        ),
    )
    # at least what the kernel spans, and more than any margin
    spans = spans_of(kernel, dilation, dims)
    positions = [max(span + 1, 3) + draw(st.integers(0, 2)) for span in spans]
    return layer, (inputs, *positions)


@st.composite
def transposed_convolutions(draw: st.DrawFn) -> tuple[nn.Module, tuple[int, ...]]:
    """A transposed convolution, and the channels and positions it takes."""
    dims = draw(SMALL)
    groups = draw(SMALL)
    inputs, outputs = (groups * draw(st.integers(1, 2)) for _ in range(2))
    kernel, dilation = draw(sizes(dims, 1, 3)), draw(sizes(dims, 1, 3))
    stride = draw(sizes(dims, 1, 3))
    limits = zip(spread(stride, dims), spread(dilation, dims), strict=True)
    extra = tuple(draw(st.integers(0, max(limit) - 1)) for limit in limits)
    spans = [
        d * (k - 1) for k, d in zip(*(spread(s, dims) for s in (kernel, dilation)), strict=True)
    ]
    padding = tuple(draw(st.integers(0, span // 2)) for span in spans)
    layer = TRANSPOSED[dims - 1](
        inputs,
        outputs,
        kernel,
        stride=stride,
        padding=padding,
        output_padding=extra,
        groups=groups,
        bias=draw(st.booleans()),
        dilation=dilation,
    )
    return layer, (inputs, *(draw(st.integers(2, 3)) for _ in range(dims)))


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@settings(deadline=None, max_examples=100)
@given(drawn=convolutions(), batch=BATCH)
def test_convolutions(drawn: tuple[nn.Module, tuple[int, ...]], batch: int) -> None:
    layer, shape = drawn
    model = behind_channels(shape, layer)
    same_as_the_loop(model, noise(batch, *shape))


@settings(deadline=None, max_examples=60)
@given(drawn=transposed_convolutions(), batch=BATCH)
def test_transposed_convolutions(drawn: tuple[nn.Module, tuple[int, ...]], batch: int) -> None:
    layer, shape = drawn
    model = behind_channels(shape, layer)
    same_as_the_loop(model, noise(batch, *shape))


def test_convolutions_take_options_as_keywords_too() -> None:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        y = F.conv1d(weight=m.a, input=x, dilation=2, padding=(1,), groups=2)
        return F.conv_transpose1d(y, m.b, dilation=2, stride=(2,))

    same_as_the_loop(Uses(forward, a=(4, 1, 2), b=(4, 3, 2)), noise(3, 2, 5))


# --- Normalisations ------------------------------------------------------------------------

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
NORMS = {
    "batch": lambda c, shape: BATCH_NORMS[len(shape) - 1](c),
    "batch-flat": lambda c, shape: nn.Sequential(
        nn.Flatten(), nn.BatchNorm1d(c * math.prod(shape), eps=0.3)
    ),
    "group": lambda c, shape: nn.GroupNorm(2, c),
    "group-one": lambda c, shape: nn.GroupNorm(1, c, eps=0.3),
    "layer-1": lambda c, shape: nn.LayerNorm([c, *shape][-1:]),
    "layer-2": lambda c, shape: nn.LayerNorm([c, *shape][-2:], eps=0.3),
    "layer-all": lambda c, shape: nn.LayerNorm([c, *shape]),
    "layer-no-bias": lambda c, shape: nn.LayerNorm([c, *shape][-2:], bias=False),
    "rms-1": lambda c, shape: nn.RMSNorm([c, *shape][-1:]),
    "rms-all": lambda c, shape: nn.RMSNorm([c, *shape], eps=0.3),
}


SHAPE = st.lists(st.integers(2, 3), min_size=1, max_size=3)


@pytest.mark.parametrize("kind", NORMS)
@FEW
@given(batch=BATCH, channels=st.sampled_from([2, 4]), shape=SHAPE)
def test_normalisations(kind: str, batch: int, channels: int, shape: list[int]) -> None:
    layer = NORMS[kind](channels, shape)
    model = behind_channels((channels, *shape), layer)
    same_as_the_loop(model, noise(batch, channels, *shape))


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("tracking", [True, False])
@pytest.mark.parametrize("kind", [nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d])
def test_instance_norm(kind: type[nn.Module], tracking: bool, affine: bool) -> None:
    shape = (3, 2, 4)[: int(kind.__name__[-2])]
    layer = kind(2, affine=affine, track_running_stats=tracking, eps=0.3)
    same_as_the_loop(behind_channels((2, *shape), layer), noise(3, 2, *shape))


def test_norms_without_parameters_let_gradients_through() -> None:
    layer = nn.Sequential(
        nn.BatchNorm1d(4, affine=False),
        nn.LayerNorm(4, elementwise_affine=False),
        nn.GroupNorm(2, 4, affine=False),
        nn.RMSNorm(4, elementwise_affine=False),
    )
    same_as_the_loop(behind((4,), layer), noise(3, 4))


@pytest.mark.parametrize("chosen", ["weight", "bias"])
@pytest.mark.parametrize(
    "layer",
    [
        nn.BatchNorm1d(4),
        nn.LayerNorm(4),
        nn.GroupNorm(2, 4),
        nn.Linear(4, 4),
        nn.Conv1d(4, 2, 1),
        nn.ConvTranspose1d(4, 2, 1),
    ],
    ids=lambda one: type(one).__name__,
)
def test_one_parameter_of_a_layer(layer: nn.Module, chosen: str) -> None:
    model = nn.Sequential(layer.requires_grad_(False), nn.Tanh())
    same_as_the_loop(model, noise(3, 4, 4), names=[f"0.{chosen}"])


# --- Embeddings ----------------------------------------------------------------------------


@SOME
@given(
    batch=BATCH,
    lead=st.lists(SMALL, max_size=3),
    entries=st.integers(1, 4),
    padding=st.none() | st.integers(-4, 3),
    sparse=st.booleans(),
)
def test_embedding(
    batch: int, lead: list[int], entries: int, padding: int | None, sparse: bool
) -> None:
    if padding is not None:
        padding = max(-entries, min(padding, entries - 1))
    generator = torch.Generator().manual_seed(entries)
    tokens = torch.randint(0, entries, (batch, *lead), generator=generator)
    model = Uses(
        lambda m, x: m.head(m.embed(x)),
        embed=nn.Embedding(entries, 3, padding_idx=padding, sparse=sparse),
        head=nn.Linear(3, 2),
    )
    same_as_the_loop(model, tokens)


def test_functional_embedding_counts_padding_from_the_end() -> None:
    model = Uses(
        lambda m, x: F.embedding(x, m.w, padding_idx=-1) * m.scale, w=(4, 3), scale=(3,)
    )
    same_as_the_loop(model, torch.tensor([[3, 1, 3], [0, 2, 2], [3, 3, 3]]))


# --- Attention -----------------------------------------------------------------------------


class Attends(nn.Module):
    """Attention of a first input to a second, or to itself."""

    def __init__(self, kind: str, **options: object) -> None:
        super().__init__()
        self.kind = kind
        self.need_weights = options.pop("need_weights", False)
        self.register_buffer("mask", options.pop("mask", None))
        self.before = nn.Linear(4, 4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True, **options)

    def forward(self, x: Tensor, memory: Tensor, missing: Tensor) -> Tensor:
        query = torch.tanh(self.before(x))
        key, value = {
            "self": (query, query),
            "cross": (memory, memory),
            "three": (torch.sin(memory), memory),
        }[self.kind]
        out, weights = self.attention(
            query,
            key,
            value,
            key_padding_mask=missing[:, : key.shape[1]],
            need_weights=self.need_weights,
            attn_mask=self.mask,
        )
        return out if weights is None else torch.cat([out, weights], 2)


@SOME
@given(
    batch=BATCH,
    lengths=st.tuples(SMALL, SMALL),
    kind=st.sampled_from(["self", "cross", "three"]),
    width=st.sampled_from([4, 3]),
    masked=st.sampled_from([None, torch.bool, torch.float64]),
    switches=st.tuples(st.booleans(), st.booleans(), st.booleans()),
)
def test_attention(
    batch: int,
    lengths: tuple[int, int],
    kind: str,
    width: int,
    masked: torch.dtype | None,
    switches: tuple[bool, bool, bool],
) -> None:
    bias, need_weights, add_zero_attn = switches
    length, other = lengths[0], lengths[0] if kind == "self" else lengths[1]
    width = 4 if kind == "self" else width
    mask = None if masked is None else noise(length, other, seed=7)
    if mask is not None and masked == torch.bool:
        mask = mask > 0.5
        mask[:, 0] = False
    model = Attends(
        kind,
        kdim=width,
        vdim=width,
        bias=bias,
        need_weights=need_weights,
        add_zero_attn=add_zero_attn,
        mask=mask,
    )
    missing = noise(batch, 3, seed=6) > 0.3
    missing[:, 0] = False
    if mask is not None and masked == torch.float64:
        missing = torch.where(missing, -2.0, 0.0).double()
    same_as_the_loop(
        model, noise(batch, length, 4), noise(batch, other, width, seed=5), missing
    )


@pytest.mark.parametrize("dims", [(3, 5), (4, 2)])
def test_attention_with_keys_and_values_of_different_widths(dims: tuple[int, int]) -> None:
    model = Uses(
        lambda m, x, key, value: m.attention(m.before(x), key, value)[0],
        before=nn.Linear(4, 4),
        attention=nn.MultiheadAttention(4, 2, kdim=dims[0], vdim=dims[1], batch_first=True),
    )
    keys, values = noise(3, 2, dims[0], seed=5), noise(3, 2, dims[1], seed=6)
    same_as_the_loop(model, noise(3, 5, 4), keys, values)


def test_attention_that_takes_the_batch_second() -> None:
    model = Uses(
        lambda m, x: m.attention(*[x.transpose(0, 1)] * 3)[0].transpose(0, 1),
        attention=nn.MultiheadAttention(4, 2),
    )
    same_as_the_loop(model, noise(3, 5, 4))


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
def test_a_transformer_layer(norm_first: bool, frozen: bool) -> None:
    layer = nn.TransformerEncoderLayer(4, 2, 5, batch_first=True, norm_first=norm_first)
    model = nn.Sequential(
        layer, nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), nn.Linear(4, 2)
    )
    same_as_the_loop(model.requires_grad_(not frozen), noise(3, 5, 4))


def test_a_transformer_decodes() -> None:
    layer = nn.TransformerDecoderLayer(4, 2, 5, batch_first=True)
    model = Uses(lambda m, x, memory: m.layer(x, memory), layer=layer)
    same_as_the_loop(model, noise(3, 5, 4), noise(3, 2, 4, seed=5))


@pytest.mark.parametrize(("samples", "count", "outputs"), [(120, 3, 300), (2, 1, 20_000)])
def test_rows_over_positions_are_read_a_few_samples_and_outputs_at_a_time(
    samples: int, count: int, outputs: int
) -> None:
    delta = noise(samples, count, 5, outputs)
    a = noise(samples, 5, 48, seed=1)
    matrix = noise(outputs * 48, 7, seed=2)
    rows = Summed(delta, a)
    assert rows.nbytes > 2 * _MULTIPLIED
    norms, along = rows.energies(matrix)
    slow = torch.einsum("bqmo,bmi->bqoi", delta, a).flatten(2)
    torch.testing.assert_close(rows.dense(), slow, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(norms, slow.square().sum((1, 2)), rtol=1e-12, atol=0)
    torch.testing.assert_close(along, slow @ matrix, rtol=1e-11, atol=1e-10)


def test_rows_of_a_table_are_read_where_it_was_looked_up() -> None:
    delta = noise(4, 3, 6, 5)
    places = torch.randint(0, 7, (4, 6), generator=torch.Generator().manual_seed(1))
    matrix = noise(9 * 5, 8, seed=2)
    rows = LookedUp(places, delta, 9)
    norms, along = rows.energies(matrix)
    slow = torch.einsum("bqme,bmv->bqve", delta, F.one_hot(places, 9).double()).flatten(2)
    assert rows.nbytes == slow.nbytes
    torch.testing.assert_close(rows.dense(), slow, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(norms, slow.square().sum((1, 2)), rtol=1e-12, atol=0)
    torch.testing.assert_close(along, slow @ matrix, rtol=1e-11, atol=1e-11)
