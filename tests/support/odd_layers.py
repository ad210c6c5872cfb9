"""Layers of every kind, each in a small network of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils import parametrizations, parametrize
from torch.nn.utils import rnn as packing

from dense_reference import OddModel
from scodkit import Categorical, Gaussian


class Net(nn.Module):
    """A function of the inputs, and of parameters and modules of its own.

    Args:
        function: Takes the module and the inputs.
        own: Modules, shapes of parameters, or parameters.
    """

    def __init__(self, function: Callable[..., Any], **own: Any) -> None:
        super().__init__()
        self.function = function
        for name, value in own.items():
            is_shape = isinstance(value, tuple)
            setattr(self, name, nn.Parameter(torch.zeros(value)) if is_shape else value)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self.function(self, *inputs, **named)


def noise(*shape: int) -> Callable[[int], Tensor]:
    return lambda size: torch.randn(size, *shape, dtype=torch.float64)


def tokens(vocabulary: int, *shape: int) -> Callable[[int], Tensor]:
    return lambda size: torch.randint(0, vocabulary, (size, *shape))


FEATURES, IMAGES, SEQUENCES = noise(4), noise(2, 4, 4), noise(3, 4)


def net(name: str, batch: Any, function: Any, how: Any = None, **own: Any) -> OddModel:
    """A model by its function; ``own`` holds what makes its modules, or shapes."""

    def build() -> nn.Module:
        made = {n: make if isinstance(make, tuple) else make() for n, make in own.items()}
        return Net(function, **made)

    return OddModel(name, build, batch, **(how or {}))


def chain(name: str, batch: Any, *makers: Any, **how: Any) -> OddModel:
    """A model of layers in a row, each by what makes it."""
    return OddModel(name, lambda: nn.Sequential(*(make() for make in makers)), batch, **how)


def linear(width: int, outputs: int, **options: Any) -> Callable[[], nn.Module]:
    return lambda: nn.Linear(width, outputs, **options)


def conv(*about: Any, d: int = 2, transposed: bool = False, **options: Any) -> Any:
    kind = getattr(nn, f"Conv{'Transpose' if transposed else ''}{d}d")
    return lambda: kind(*about, **options)


def of(kind: Callable[..., nn.Module], *about: Any, **options: Any) -> Callable[[], nn.Module]:
    return lambda: kind(*about, **options)


FLAT = of(nn.Flatten)
MAPS = {"likelihood": Categorical(class_dim=1)}

PERCEPTRONS = [
    chain("linear", FEATURES, linear(4, 3)),
    chain("tanh", FEATURES, linear(4, 5), nn.Tanh, linear(5, 3)),
    chain("relu in place", FEATURES, linear(4, 6), of(nn.ReLU, inplace=True), linear(6, 3)),
    chain("activation in place first", FEATURES, of(nn.ELU, inplace=True), linear(4, 3)),
    chain("no biases", FEATURES, linear(4, 5, bias=False), nn.SiLU, linear(5, 3, bias=False)),
    chain("one output", FEATURES, linear(4, 1), likelihood=Gaussian(2.0)),
    net("no output axis", FEATURES, lambda m, x: m.a(x)[:, 0], {"likelihood": Gaussian()},
        a=linear(4, 1)),
    chain("prelu", FEATURES, linear(4, 5), nn.PReLU, linear(5, 3)),
    chain("prelu per channel", IMAGES, conv(2, 3, 3), of(nn.PReLU, 3), FLAT, linear(12, 3)),
    chain("glu", FEATURES, linear(4, 6), nn.GLU, linear(3, 3)),
    net("maxout", FEATURES, lambda m, x: m.b(m.a(x).unflatten(1, (4, 2)).amax(2)),
        a=linear(4, 8), b=linear(4, 3)),
    net("bilinear", FEATURES, lambda m, x: m.a(x[:, :2], x[:, 2:]), a=of(nn.Bilinear, 2, 2, 3)),
    chain("dropout in train mode", FEATURES, linear(4, 5), of(nn.Dropout, 0.5), linear(5, 3),
          train=True),
    chain("feature dropout in train mode", IMAGES, conv(2, 3, 3), nn.Dropout2d, FLAT,
          linear(12, 3), train=True),
    net("frozen", FEATURES, lambda m, x: m.b(torch.tanh(m.a(x))),
        a=lambda: nn.Linear(4, 4).requires_grad_(False), b=linear(4, 3)),
]  # fmt: skip

CONVOLUTIONS = [
    chain("conv1d", noise(2, 6), conv(2, 3, 3, d=1), nn.ReLU, FLAT, linear(12, 3)),
    chain("conv2d strided", IMAGES, conv(2, 3, 3, stride=2, padding=1), FLAT, linear(12, 3)),
    chain("conv3d", noise(1, 3, 3, 3), conv(1, 2, 2, d=3), nn.Tanh, FLAT, linear(16, 3)),
    chain("grouped", IMAGES, conv(2, 4, 3, groups=2), nn.GELU, FLAT, linear(16, 3)),
    chain("depthwise separable", IMAGES, conv(2, 2, 3, groups=2), conv(2, 3, 1), FLAT,
          linear(12, 3)),
    chain("dilated", noise(2, 8), conv(2, 3, 3, d=1, dilation=2, padding=1), FLAT,
          linear(18, 3)),
    chain("padded to the same size", IMAGES, conv(2, 2, 3, padding="same"), FLAT,
          linear(32, 3)),
    *(chain(f"padded {mode}", IMAGES, conv(2, 2, 3, padding=1, padding_mode=mode), nn.ReLU,
            of(nn.AvgPool2d, 4), FLAT, linear(2, 3))
      for mode in ("circular", "reflect", "replicate")),
    chain("transposed 1d", noise(2, 4), conv(2, 3, 3, d=1, transposed=True), FLAT,
          linear(18, 3)),
    chain("transposed 2d", noise(2, 2, 2), conv(2, 4, 3, transposed=True, stride=2, groups=2,
          output_padding=1), nn.Tanh, FLAT, linear(144, 3)),
    chain("transposed 3d", noise(1, 2, 2, 2), conv(1, 2, 2, d=3, transposed=True), FLAT,
          linear(54, 3)),
    chain("fully convolutional", IMAGES, conv(2, 3, 1), nn.Tanh, conv(3, 2, 3), **MAPS),
    chain("pools", IMAGES, conv(2, 3, 1), of(nn.MaxPool2d, 2), of(nn.AvgPool2d, 2), FLAT,
          linear(3, 3)),
    chain("adaptive pools", IMAGES, conv(2, 3, 2), of(nn.AdaptiveAvgPool2d, 2),
          of(nn.AdaptiveMaxPool2d, 1), FLAT, linear(3, 3)),
    net("global mean", IMAGES, lambda m, x: m.b(F.relu(m.a(x)).mean((2, 3))),
        a=conv(2, 4, 3), b=linear(4, 3)),
    chain("pixel shuffle", noise(1, 2, 2), conv(1, 8, 1), of(nn.PixelShuffle, 2), conv(2, 2, 3),
          **MAPS),
    chain("upsampled", noise(2, 2, 2), of(nn.Upsample, scale_factor=2, mode="bilinear"),
          conv(2, 2, 3), **MAPS),
    net("squeeze and excite", IMAGES,
        lambda m, x: m.c(((h := m.a(x)) * m.b(h.mean((2, 3))).sigmoid()[..., None, None]).sum(
            (2, 3))), a=conv(2, 3, 3), b=linear(3, 3), c=linear(3, 3)),
    net("unfolded by hand", IMAGES, lambda m, x: m.a(F.unfold(x, 2, stride=2).mT).mean(1),
        a=linear(8, 3)),
    net("channels last", lambda size: torch.randn(size, 2, 4, 4, dtype=torch.float64).to(
        memory_format=torch.channels_last), lambda m, x: m.b(m.a(x).flatten(1)),
        a=conv(2, 3, 3), b=linear(12, 3)),
]  # fmt: skip

NORMS = [
    chain("batch norm 1d", FEATURES, linear(4, 5), of(nn.BatchNorm1d, 5), linear(5, 3)),
    chain("batch norm in train mode", FEATURES, linear(4, 5), of(nn.BatchNorm1d, 5),
          linear(5, 3), train=True),
    chain("batch norm 2d", IMAGES, conv(2, 3, 3), of(nn.BatchNorm2d, 3), FLAT, linear(12, 3)),
    chain("batch norm without affine", FEATURES, linear(4, 5),
          of(nn.BatchNorm1d, 5, affine=False), linear(5, 3)),
    chain("layer norm", FEATURES, of(nn.LayerNorm, 4), linear(4, 5), of(nn.LayerNorm, 5),
          linear(5, 3)),
    chain("layer norm of images", IMAGES, of(nn.LayerNorm, [2, 4, 4]), FLAT, linear(32, 3)),
    chain("group norm", IMAGES, conv(2, 4, 3), of(nn.GroupNorm, 2, 4), FLAT, linear(16, 3)),
    chain("instance norm", IMAGES, conv(2, 3, 1), of(nn.InstanceNorm2d, 3, affine=True),
          nn.ReLU, FLAT, linear(48, 3)),
    chain("instance norm with statistics", IMAGES, conv(2, 3, 1),
          of(nn.InstanceNorm2d, 3, affine=True, track_running_stats=True), FLAT, linear(48, 3)),
    chain("rms norm", SEQUENCES, of(nn.RMSNorm, 4), FLAT, linear(12, 3)),
    chain("local response norm", IMAGES, conv(2, 3, 3), of(nn.LocalResponseNorm, 2), FLAT,
          linear(12, 3)),
    net("norm by hand", FEATURES,
        lambda m, x: m.a((x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True) * m.g + m.b),
        a=linear(4, 3), g=(4,), b=(4,)),
]  # fmt: skip


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).mT


def old_weight_norm() -> nn.Module:
    return nn.utils.weight_norm(nn.Linear(4, 5))


def symmetric() -> nn.Module:
    return parametrize.register_parametrization(nn.Linear(4, 4), "weight", Symmetric())


REPARAMETRISED = [
    chain("weight norm", FEATURES, lambda: parametrizations.weight_norm(nn.Linear(4, 5)),
          nn.Tanh, linear(5, 3)),
    chain("weight norm by hooks", FEATURES, old_weight_norm, nn.Tanh, linear(5, 3)),
    chain("spectral norm", FEATURES, lambda: parametrizations.spectral_norm(nn.Linear(4, 5)),
          nn.Tanh, linear(5, 3)),
    chain("spectral norm of a convolution", IMAGES,
          lambda: parametrizations.spectral_norm(nn.Conv2d(2, 3, 3)), FLAT, linear(12, 3)),
    chain("symmetric weights", FEATURES, symmetric, nn.Tanh, linear(4, 3)),
    net("low-rank update", FEATURES, lambda m, x: m.c(torch.tanh(m.a(x) + x @ m.l @ m.r)),
        a=linear(4, 5), l=(4, 2), r=(2, 5), c=linear(5, 3)),
    net("low-rank weights", FEATURES, lambda m, x: F.linear(x, m.l @ m.r), l=(3, 2), r=(2, 4)),
    net("standardised convolution", IMAGES, lambda m, x: F.conv2d(
        x, (m.w - m.w.mean((1, 2, 3), keepdim=True)) / m.w.std((1, 2, 3), keepdim=True)
        ).mean((2, 3)), w=(3, 2, 3, 3)),
    net("orthogonal by exponential", FEATURES,
        lambda m, x: m.a(torch.tanh(x @ torch.linalg.matrix_exp(m.w - m.w.mT))),
        w=(4, 4), a=linear(4, 3)),
]  # fmt: skip


def packed(m: nn.Module, x: Tensor, lengths: Tensor) -> Tensor:
    rows = packing.pack_padded_sequence(
        x, lengths.cpu(), batch_first=True, enforce_sorted=False
    )
    return m.b(m.a(rows)[1][0].transpose(0, 1).flatten(1))


def cells(m: nn.Module, x: Tensor) -> Tensor:
    h = x.new_zeros(len(x), 3)
    for t in range(x.shape[1]):
        h = m.a(x[:, t], h)
    return m.b(h)


def lengths_too(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 3, 4, dtype=torch.float64), torch.randint(1, 4, (size,))


def recurrent(name: str, kind: Any, width: int = 3, **options: Any) -> OddModel:
    return net(name, SEQUENCES, lambda m, x: m.b(m.a(x)[0][:, -1]),
               a=of(kind, 4, 3, batch_first=True, **options), b=linear(width, 3))  # fmt: skip


RECURRENT = [
    recurrent("lstm", nn.LSTM),
    recurrent("gru", nn.GRU),
    recurrent("rnn", nn.RNN, nonlinearity="relu"),
    recurrent("lstm both ways", nn.LSTM, 6, bidirectional=True),
    recurrent("lstm of two layers", nn.LSTM, num_layers=2),
    recurrent("lstm with projection", nn.LSTM, 2, proj_size=2),
    net("lstm over time first", SEQUENCES, lambda m, x: m.b(m.a(x.transpose(0, 1))[0][-1]),
        a=of(nn.LSTM, 4, 3), b=linear(3, 3)),
    net("packed lstm", lengths_too, packed, a=of(nn.LSTM, 4, 3, batch_first=True),
        b=linear(3, 3)),
    net("lstm cells", SEQUENCES,
        lambda m, x: m.b(m.a(x[:, 1], m.a(x[:, 0]))[0]), a=of(nn.LSTMCell, 4, 3),
        b=linear(3, 3)),
    net("gru cells", SEQUENCES, cells, a=of(nn.GRUCell, 4, 3), b=linear(3, 3)),
    net("recurrence by hand", SEQUENCES,
        lambda m, x: m.b(torch.tanh(m.a(x[:, 1]) + m.r(torch.tanh(m.a(x[:, 0]))))),
        a=linear(4, 3), r=linear(3, 3), b=linear(3, 3)),
]  # fmt: skip


def bag(name: str, **options: Any) -> OddModel:
    return net(name, tokens(6, 4), lambda m, t: m.b(torch.tanh(m.e(t))),
               e=of(nn.EmbeddingBag, 6, 3, **options), b=linear(3, 3))  # fmt: skip


def table(name: str, how: Any = None, **options: Any) -> OddModel:
    return net(name, tokens(6, 4), lambda m, t: m.b(torch.tanh(m.e(t)).mean(1)), how,
               e=of(nn.Embedding, 6, 3, **options), b=linear(3, 3))  # fmt: skip


EMBEDDINGS = [
    table("embedding"),
    table("embedding with padding", padding_idx=0),
    table("sparse embedding", sparse=True),
    table("embedding of bounded norm", {"refusal": "it changes its own weights"}, max_norm=0.5),
    table("embedding scaled by frequency", {"refusal": "gradients depend on the batch"},
          scale_grad_by_freq=True),
    bag("bag of words", mode="mean"),
    bag("summed bag", mode="sum", padding_idx=1),
    bag("largest of a bag", mode="max"),
    net("weighted bag", tokens(6, 4), lambda m, t: m.b(m.e(t, per_sample_weights=m.w[t])),
        e=of(nn.EmbeddingBag, 6, 3, mode="sum"), w=(6,), b=linear(3, 3)),
    net("bag by offsets", tokens(6, 4),
        lambda m, t: m.b(m.e(t.flatten(), torch.arange(0, t.numel(), t.shape[1]))),
        e=of(nn.EmbeddingBag, 6, 3), b=linear(3, 3)),
    net("tied embedding", tokens(5, 4), lambda m, t: F.linear(m.e(t).mean(1), m.e.weight),
        e=of(nn.Embedding, 5, 3)),
    net("one-hot by hand", tokens(5, 4),
        lambda m, t: m.b(F.one_hot(t, 5).to(m.w.dtype).mean(1) @ m.w), w=(5, 3),
        b=linear(3, 3)),
    net("positions", tokens(6, 4),
        lambda m, t: m.b((m.e(t) + m.p(torch.arange(t.shape[1]))).tanh().sum(1)),
        e=of(nn.Embedding, 6, 3), p=of(nn.Embedding, 4, 3), b=linear(3, 3)),
]  # fmt: skip

LAYERS = [
    *(*PERCEPTRONS, *CONVOLUTIONS, *NORMS),
    *(*REPARAMETRISED, *RECURRENT, *EMBEDDINGS),
]
