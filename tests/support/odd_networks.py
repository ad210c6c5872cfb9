"""Networks that use their layers in ways of their own; each sample is alone in them."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

from dense_reference import OddModel
from odd_layers import FEATURES, IMAGES, MAPS, SEQUENCES, chain, conv, linear, net, noise, of
from scodkit import Bernoulli, Categorical, Gaussian
from scodkit.likelihoods import HeteroscedasticGaussian

MHA, MASK = nn.MultiheadAttention, torch.ones(3, 3, dtype=torch.bool).tril()


def attend(m: nn.Module, x: Tensor, **masks: Any) -> Tensor:
    return m.b(m.a(x, x, x, need_weights=False, **masks)[0].mean(1))


def heads(x: Tensor) -> Tensor:
    return x.unflatten(2, (2, 2)).transpose(1, 2)


def attention(name: str, **masks: Any) -> OddModel:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        q, k, v = (heads(part) for part in m.a(x).chunk(3, dim=2))
        mixed = F.scaled_dot_product_attention(q, k, v, **masks)
        return m.b(mixed.transpose(1, 2).flatten(2).mean(1))

    return net(name, SEQUENCES, forward, a=linear(4, 12), b=linear(4, 3))


def padding_mask(m: nn.Module, x: Tensor) -> Tensor:
    q, k, v = (heads(part) for part in m.a(x).split(4, dim=2))
    seen = (x[..., 0] > -0.5) | (torch.arange(3) == 0)
    mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None, None])
    return m.b(mixed.transpose(1, 2).flatten(2).mean(1))


def by_einsum(m: nn.Module, x: Tensor) -> Tensor:
    q, k, v = (torch.einsum("btd,dhk->bhtk", x, w) for w in (m.q, m.k, m.v))
    weights = torch.einsum("bhik,bhjk->bhij", q, k).softmax(-1)
    return torch.einsum("bhij,bhjk,hko->bo", weights, v, m.o)


def by_matmul(m: nn.Module, x: Tensor) -> Tensor:
    q, k, v = (h.reshape(len(x), 3, 4) for h in m.a(x).reshape(len(x), 3, 3, 4).unbind(2))
    return m.b(((q @ k.mT / 2).softmax(-1) @ v).flatten(1))


def rotary(m: nn.Module, x: Tensor) -> Tensor:
    angle = torch.arange(3)[:, None] * torch.tensor([1.0, 0.1], dtype=x.dtype)

    def turned(h: Tensor) -> Tensor:
        even, odd = h[..., ::2], h[..., 1::2]
        cos, sin = angle.cos(), angle.sin()
        return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(2)

    q, k = turned(m.q(x)), turned(m.k(x))
    return m.b((q @ k.mT).softmax(-1) @ m.v(x)).mean(1)


def class_token(m: nn.Module, x: Tensor) -> Tensor:
    h = torch.cat([m.c.expand(len(x), -1, -1), x], dim=1) + m.p
    return m.b(m.a(h)[:, 0])


def patches(m: nn.Module, x: Tensor) -> Tensor:
    cut = x.unfold(2, 2, 2).unfold(3, 2, 2).permute(0, 2, 3, 1, 4, 5).reshape(len(x), 4, 8)
    return m.b(torch.tanh(m.a(cut) + m.p).mean(1))


def windows(m: nn.Module, x: Tensor) -> Tensor:
    shifted = x.roll((1, 1), (2, 3))
    cut = shifted.reshape(len(x), 2, 2, 2, 2, 2).permute(0, 2, 4, 3, 5, 1).reshape(-1, 4, 2)
    mixed = m.a(cut, cut, cut, need_weights=False)[0]
    return m.b(mixed.reshape(len(x), 4, 4, 2).mean((1, 2)))


def u_net(m: nn.Module, x: Tensor) -> Tensor:
    deep = F.interpolate(m.b(F.max_pool2d(top := m.a(x), 2)), scale_factor=2)
    return m.c(torch.cat([top, deep], dim=1))


def transformer(m: nn.Module, x: Tensor) -> Tensor:
    return m.b(m.a(x).mean(1))


def layer(**options: Any) -> Any:
    return of(nn.TransformerEncoderLayer, 4, 2, 5, dropout=0.0, batch_first=True, **options)


ATTENTION = [
    net("attention", SEQUENCES, attend, a=of(MHA, 4, 2, batch_first=True), b=linear(4, 3)),
    net("attention over time first", SEQUENCES,
        lambda m, x: m.b(m.a(h := x.transpose(0, 1), h, h)[0].mean(0)), a=of(MHA, 4, 2),
        b=linear(4, 3)),
    net("attention with a causal mask", SEQUENCES, lambda m, x: attend(m, x, attn_mask=~MASK),
        a=of(MHA, 4, 2, batch_first=True), b=linear(4, 3)),
    net("attention with padding", SEQUENCES, lambda m, x: attend(
        m, x, key_padding_mask=(x[..., 0] > 0.5) & (torch.arange(3) > 0)),
        a=of(MHA, 4, 2, batch_first=True), b=linear(4, 3)),
    net("attention with further keys", SEQUENCES, attend,
        a=of(MHA, 4, 2, batch_first=True, add_bias_kv=True, add_zero_attn=True),
        b=linear(4, 3)),
    net("attention of other widths", SEQUENCES,
        lambda m, x: m.b(m.a(x, x[..., :2], x[..., 1:])[0].mean(1)),
        a=of(MHA, 4, 2, batch_first=True, kdim=2, vdim=3), b=linear(4, 3)),
    net("encoder layer", SEQUENCES, transformer, a=layer(), b=linear(4, 3)),
    net("encoder layer, norm first", SEQUENCES, transformer, a=layer(norm_first=True),
        b=linear(4, 3)),
    net("encoder with padding", SEQUENCES, lambda m, x: m.b(
        m.a(x, src_key_padding_mask=(x[..., 0] > 0.5) & (torch.arange(3) > 0))[:, 0]),
        a=lambda: nn.TransformerEncoder(layer()(), 2), b=linear(4, 3)),
    net("encoder layer over time first", SEQUENCES,
        lambda m, x: m.b(m.a(x.transpose(0, 1)).mean(0)),
        a=of(nn.TransformerEncoderLayer, 4, 2, 5, dropout=0.0), b=linear(4, 3)),
    net("decoder layer", SEQUENCES, lambda m, x: m.b(m.a(x, x.flip(1)).mean(1)),
        a=of(nn.TransformerDecoderLayer, 4, 2, 5, dropout=0.0, batch_first=True),
        b=linear(4, 3)),
    attention("scaled dot products"),
    attention("scaled dot products, causal", is_causal=True),
    attention("scaled dot products, boolean mask", attn_mask=MASK),
    attention("scaled dot products, additive mask",
              attn_mask=torch.linspace(-1, 1, 9, dtype=torch.float64).view(3, 3)),
    net("scaled dot products, padding", SEQUENCES, padding_mask, a=linear(4, 12),
        b=linear(4, 3)),
    net("attention by einsum", SEQUENCES, by_einsum, q=(4, 2, 2), k=(4, 2, 2), v=(4, 2, 2),
        o=(2, 2, 3)),
    net("attention by matmul", SEQUENCES, by_matmul, a=linear(4, 12), b=linear(12, 3)),
    net("rotary positions", SEQUENCES, rotary, q=linear(4, 4), k=linear(4, 4), v=linear(4, 4),
        b=linear(4, 3)),
    net("class token", SEQUENCES, class_token, c=(1, 1, 4), p=(4, 4), a=layer(),
        b=linear(4, 3)),
    net("patches", IMAGES, patches, a=linear(8, 3), p=(4, 3), b=linear(3, 3)),
    net("patches by a convolution", IMAGES,
        lambda m, x: m.b(m.a(x).flatten(2).transpose(1, 2).softmax(-1).mean(1)),
        a=conv(2, 3, 2, stride=2), b=linear(3, 3)),
    net("shifted windows", IMAGES, windows, a=of(MHA, 2, 1, batch_first=True), b=linear(2, 3)),
    net("u-net", IMAGES, u_net, MAPS, a=conv(2, 2, 3, padding=1), b=conv(2, 2, 1),
        c=conv(4, 2, 4)),
]  # fmt: skip


class Cube(torch.autograd.Function):
    """A derivative of one's own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, delta: Tensor) -> Tensor:
        return 3 * ctx.saved_tensors[0] ** 2 * delta


class Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.a(x))


def kept(m: nn.Module, x: Tensor) -> Tensor:
    h = m.a(x)
    h += m.b(torch.tanh(h))
    return m.c(h)


def equilibrium(m: nn.Module, x: Tensor) -> Tensor:
    z = torch.zeros(len(x), 3, dtype=x.dtype)
    for _ in range(6):
        z = torch.tanh(m.a(x) + 0.3 * m.b(z))
    return z


def hypernetwork(m: nn.Module, x: Tensor) -> Tensor:
    weights = m.a(x[:, :2]).view(-1, 3, 2)
    return torch.bmm(weights, x[:, 2:, None])[..., 0]


def forces(m: nn.Module, x: Tensor) -> Tensor:
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        energy = m.b(torch.tanh(m.a(x))).sum()
        return -torch.autograd.grad(energy, x, create_graph=True)[0]


def codebook(m: nn.Module, x: Tensor) -> Tensor:
    h = m.a(x)
    nearest = m.e(torch.cdist(h, m.e.weight).argmin(1))
    return m.b(h + (nearest - h).detach()) + m.b(nearest)


def scan(m: nn.Module, x: Tensor) -> Tensor:
    return m.b((m.a(x) * m.d.sigmoid()).cumsum(1).flip(1).roll(1, 2).flatten(1))


def graph(m: nn.Module, x: Tensor) -> Tensor:
    near = (torch.cdist(x, x) < 2.5).to(x.dtype)
    near = near / near.sum(-1, keepdim=True)
    return m.b(torch.relu(near @ m.a(near @ x))).mean(1)


def scattered(m: nn.Module, x: Tensor) -> Tensor:
    order = x.argsort(dim=1)
    h = torch.zeros_like(x).scatter(1, order, m.a(x.gather(1, order)))
    return m.b(torch.where(x > 0, h, -0.5 * h))


def spectral(m: nn.Module, x: Tensor) -> Tensor:
    bands = torch.fft.rfft(x, dim=1) * torch.view_as_complex(m.w)
    return m.b(torch.fft.irfft(bands, n=4, dim=1))


def flow(m: nn.Module, x: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=1)
    scale, shift = m.a(left).chunk(2, dim=1)
    right = right * scale.tanh().exp() + shift
    return m.b(torch.cat([right, left], dim=1))


def scaled_in_place(m: nn.Module, x: Tensor) -> Tensor:
    return m.b(torch.tanh(m.a(x.sub_(0.3).div_(1.7))))


def counted(m: nn.Module, x: Tensor) -> Tensor:
    m.calls += 1
    return m.a(x) * m.scale


def with_buffers() -> nn.Module:
    model = net("", FEATURES, counted, a=linear(4, 3)).build()
    model.register_buffer("calls", torch.zeros((), dtype=torch.int64))
    model.register_buffer("scale", torch.tensor(1.3))
    return model


def named(size: int) -> dict[str, Any]:
    x = torch.randn(size, 3, 4, dtype=torch.float64)
    return {"x": x, "mask": torch.rand(size, 3) > 0.3, "power": 2}


def two(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 4, dtype=torch.float64), torch.randint(0, 5, (size, 2))


def rbf(m: nn.Module, x: Tensor) -> Tensor:
    return m.b((-m.g.exp() * torch.cdist(x, m.c).square()).exp())


def slices(m: nn.Module, x: Tensor) -> Tensor:
    h = torch.tanh(F.linear(x, m.w[:5], m.w[:5, 0]))
    return F.linear(h, m.w[5:8].repeat(1, 2)[:, :5]) + m.w[8, :3]


BY_HAND = [
    net("residual in place", FEATURES, kept, a=linear(4, 4), b=linear(4, 4), c=linear(4, 3)),
    net("layer used twice", FEATURES, lambda m, x: m.b(torch.tanh(m.a(torch.tanh(m.a(x))))),
        a=linear(4, 4), b=linear(4, 3)),
    net("transposed weights again", FEATURES,
        lambda m, x: m.b(F.linear(torch.tanh(F.linear(x, m.w)), m.w.t())), w=(3, 4),
        b=linear(4, 3)),
    net("slices of weights", FEATURES, slices, w=(9, 4)),
    net("unused weights", FEATURES, lambda m, x: m.b(x), a=linear(4, 4), b=linear(4, 3)),
    net("weights as long as the batch", FEATURES, lambda m, x: m.a(x * m.w) + m.v.sum(),
        w=(4,), v=(4, 3), a=linear(4, 3)),
    net("integers", lambda size: torch.randint(0, 9, (size, 4)),
        lambda m, x: torch.tanh(m.w * x) @ m.v, w=(4,), v=(4, 3)),
    net("integers for a linear layer", lambda size: torch.randint(0, 9, (size, 4)),
        lambda m, x: m.a(x), {"refusal": "the model takes no integers"}, a=linear(4, 3)),
    net("scalars", FEATURES, lambda m, x: m.a(x).mul(m.t.exp()) + m.s, a=linear(4, 3), t=(),
        s=()),
    net("temperature", FEATURES, lambda m, x: m.a(x) / m.t.square().add(1), a=linear(4, 3),
        t=(1,)),
    net("fourier layer", FEATURES, spectral, w=(3, 2), b=linear(4, 3)),
    net("complex weights", FEATURES,
        lambda m, x: m.a(torch.fft.ifft(torch.fft.fft(x) * m.w).real),
        {"refusal": "weights are not real"}, a=linear(4, 3),
        w=lambda: nn.Parameter(torch.randn(4, dtype=torch.complex128))),
    net("scan over time", SEQUENCES, scan, a=linear(4, 4), d=(4,), b=linear(12, 3)),
    net("gather and scatter", FEATURES, scattered, a=linear(4, 4), b=linear(4, 3)),
    net("largest features", FEATURES, lambda m, x: m.b(m.a(x).topk(3, dim=1).values),
        a=linear(4, 5), b=linear(3, 3)),
    net("sorted features", FEATURES, lambda m, x: m.b(m.a(x).sort(1, descending=True)[0]),
        a=linear(4, 4), b=linear(4, 3)),
    net("median of features", FEATURES, lambda m, x: m.b(
        torch.stack([m.a(x).median(1)[0], m.a(x).quantile(0.7, 1)], 1)), a=linear(4, 5),
        b=linear(2, 3)),
    *(net(f"checkpoint, {word}", FEATURES,
          lambda m, x, use=use: m.b(checkpoint(
              lambda h: torch.tanh(m.a(h)), x.clone().requires_grad_(), use_reentrant=use)),
          a=linear(4, 4), b=linear(4, 3))
      for word, use in (("reentrant", True), ("not reentrant", False))),
    net("derivative of one's own", FEATURES, lambda m, x: m.b(Cube.apply(m.a(x) / 2)),
        a=linear(4, 3), b=linear(3, 3)),
    net("scripted", FEATURES, lambda m, x: m.b(m.a(x)),
        a=lambda: torch.jit.script(Scripted()), b=linear(5, 3)),
    net("cosine similarity", FEATURES, lambda m, x: F.cosine_similarity(
        m.a(x)[:, None], m.p, dim=2), a=linear(4, 3), p=(3, 3)),
    net("hypernetwork", FEATURES, hypernetwork, a=linear(2, 6)),
    net("low-rank bilinear form", FEATURES,
        lambda m, x: torch.einsum("bi,kir,kjr,bj->bk", x, m.u, m.v, x), u=(3, 4, 2),
        v=(3, 4, 2)),
    net("fourier features", FEATURES, lambda m, x: m.b(
        torch.cat([(x @ m.w).sin(), (x @ m.w).cos()], 1)), w=(4, 2), b=linear(4, 3)),
    net("radial basis", FEATURES, rbf, c=(3, 4), g=(), b=linear(3, 3)),
    net("equilibrium", FEATURES, equilibrium, a=linear(4, 3), b=linear(3, 3)),
    net("branch per sample", FEATURES, lambda m, x: torch.where(x[:, :1] > 0, m.a(x), m.b(x)),
        a=linear(4, 3), b=linear(4, 3)),
    net("set", SEQUENCES, lambda m, x: m.b(torch.relu(m.a(x)).sum(1)), a=linear(4, 4),
        b=linear(4, 3)),
    net("graph", SEQUENCES, graph, a=linear(4, 4), b=linear(4, 3)),
    net("invertible", FEATURES, flow, a=linear(2, 4), b=linear(4, 3)),
    net("forces", FEATURES, forces, {"likelihood": Gaussian((1.0, 2.0, 0.5, 1.5))},
        a=linear(4, 3), b=linear(3, 1)),
    net("codebook", FEATURES, codebook, a=linear(4, 2), e=of(nn.Embedding, 4, 2),
        b=linear(2, 3)),
    net("rounded, straight through", FEATURES,
        lambda m, x: m.b((h := torch.tanh(m.a(x))) + (h.round() - h).detach()), a=linear(4, 4),
        b=linear(4, 3)),
    net("linear solve", FEATURES,
        lambda m, x: m.b(torch.linalg.solve(torch.eye(4) * 3 + m.w.tanh(), x.mT).mT), w=(4, 4),
        b=linear(4, 3)),
    net("gated experts, dense", FEATURES, lambda m, x: torch.einsum(
        "be,beo->bo", m.g(x).softmax(1), m.a(x).unflatten(1, (2, 3))), g=linear(4, 2),
        a=linear(4, 6)),
    net("function map inside", FEATURES,
        lambda m, x: torch.func.vmap(lambda one: m.b(torch.tanh(m.a(one))))(x), a=linear(4, 4),
        b=linear(4, 3)),
    net("in lists", FEATURES,
        lambda m, x: m.a["last"](torch.tanh(x * m.w[0] + m.w[1])),
        a=lambda: nn.ModuleDict({"last": nn.Linear(4, 3)}),
        w=lambda: nn.ParameterList([torch.zeros(4), torch.zeros(4)])),
    net("normalises its input in place", FEATURES, scaled_in_place, a=linear(4, 4),
        b=linear(4, 3)),
    OddModel("counts its calls", with_buffers, FEATURES),
    net("loop over samples", FEATURES,
        lambda m, x: torch.stack([m.b(torch.tanh(m.a(one))) for one in x]), a=linear(4, 3),
        b=linear(3, 3)),
    net("two inputs", two, lambda m, x, t: m.b(m.a(x) * m.e(t).mean(1)), a=linear(4, 3),
        e=of(nn.Embedding, 5, 3), b=linear(3, 3)),
    net("keywords", named, lambda m, x, mask, power: m.b(
        (m.a(x).tanh() ** power * mask[..., None]).sum(1)), a=linear(4, 3), b=linear(3, 3)),
    net("several outputs", FEATURES, lambda m, x: (m.a(x).sum(), m.b(torch.tanh(m.a(x)))),
        {"outputs": lambda out: out[1]}, a=linear(4, 3), b=linear(3, 3)),
    net("named outputs", FEATURES, lambda m, x: SimpleNamespace(logits=m.a(x)),
        {"outputs": lambda out: out.logits}, a=linear(4, 3)),
    net("mixture of densities", FEATURES, lambda m, x: torch.cat(
        [m.a(x).softmax(1), m.b(x), F.softplus(m.c(x))], 1),
        {"likelihood": Gaussian((1.0, 2.0, 0.5, 1.5, 0.7, 1.2))},
        a=linear(4, 2), b=linear(4, 2), c=linear(4, 2)),
    chain("mean and variance", FEATURES, linear(4, 4), nn.Tanh, linear(4, 4),
          likelihood=HeteroscedasticGaussian()),
    chain("many answers", FEATURES, linear(4, 3), nn.Tanh, linear(3, 2),
          likelihood=Bernoulli()),
    chain("a class at every place", SEQUENCES, linear(4, 3), nn.Tanh, linear(3, 3),
          likelihood=Categorical(class_dim=-1)),
    net("sines", noise(2), lambda m, x: m.b(torch.sin(math.tau * m.a(x))), a=linear(2, 4),
        b=linear(4, 3)),
]  # fmt: skip

NETWORKS = [*ATTENTION, *BY_HAND]
