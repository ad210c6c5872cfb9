"""Networks that move their samples about within a batch, or let them influence each other."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from odd_layers import FEATURES, IMAGES, SEQUENCES, chain, conv, linear, net, of

# --- Samples that change places, and come back ---------------------------------------------


def time_major(m: nn.Module, x: Tensor) -> Tensor:
    h = torch.tanh(m.a(x.transpose(0, 1).reshape(-1, 4)))
    return m.b(h.reshape(3, len(x), 4).mean(0))


def sorted_by_value(m: nn.Module, x: Tensor) -> Tensor:
    order = x[:, 0].argsort()
    return m.b(torch.tanh(m.a(x[order])))[order.argsort()]


def top_of(m: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    weights = m.g(x).softmax(1)
    top = weights.argmax(1)
    return top, weights.gather(1, top[:, None])


def by_mask(m: nn.Module, x: Tensor) -> Tensor:
    top, weight = top_of(m, x)
    out = x.new_zeros(len(x), 3)
    for e, expert in enumerate((m.a, m.b)):
        out[top == e] = expert(x[top == e])
    return weight * out


def by_one_hot(m: nn.Module, x: Tensor) -> Tensor:
    top, weight = top_of(m, x)
    chosen = F.one_hot(top, 2)
    slot = (chosen.cumsum(0) * chosen).sum(1) - 1
    dispatch = torch.einsum("be,bc->bec", chosen, F.one_hot(slot, len(x))).to(x.dtype)
    experts = torch.einsum("bec,bd->ecd", dispatch, x)
    out = torch.stack([m.a(experts[0]), m.b(experts[1])])
    return weight * torch.einsum("bec,eco->bo", dispatch, out)


def by_index(m: nn.Module, x: Tensor) -> Tensor:
    top, weight = top_of(m, x)
    out = x.new_zeros(len(x), 3)
    for e, expert in enumerate((m.a, m.b)):
        own = torch.where(top == e)[0]
        out.index_add_(0, own, expert(x[None, own].reshape(-1, 4)) * weight[own])
    return out


def expert_weights(m: nn.Module, x: Tensor) -> Tensor:
    top, weight = top_of(m, x)
    return weight * torch.einsum("bd,bdo->bo", x, m.w[top])


def ragged(m: nn.Module, x: Tensor) -> Tensor:
    kept = x[..., 0] > -0.5
    owner = torch.arange(len(x))[:, None].expand_as(kept)[kept]
    return m.b(x.new_zeros(len(x), 4).index_add(0, owner, torch.tanh(m.a(x[kept]))))


def in_one_row(m: nn.Module, x: Tensor) -> Tensor:
    row = x.reshape(1, -1, 4)
    owner = torch.arange(len(x)).repeat_interleave(3)
    q, k, v = m.a(row).chunk(3, dim=2)
    mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=owner[:, None] == owner)
    return m.b(mixed.reshape(x.shape).mean(1))


def in_one_picture(m: nn.Module, x: Tensor) -> Tensor:
    wide = x.permute(1, 2, 0, 3).reshape(1, 2, 4, -1)
    return m.b(m.a(wide).reshape(3, 4, len(x), 4).permute(2, 0, 1, 3).mean((2, 3)))


def padded_in_front(m: nn.Module, x: Tensor) -> Tensor:
    missing = -len(x) % 4
    return m.b(torch.tanh(m.a(F.pad(x, (0, 0, missing, 0)))))[missing:]


EXPERTS = {"g": linear(4, 2), "a": linear(4, 3), "b": linear(4, 3)}
MOVED = [
    net("time major", SEQUENCES, time_major, a=linear(4, 4), b=linear(4, 3)),
    net("sorted by value", FEATURES, sorted_by_value, a=linear(4, 4), b=linear(4, 3)),
    net("experts by mask", FEATURES, by_mask, **EXPERTS),
    net("experts by one-hot dispatch", FEATURES, by_one_hot, **EXPERTS),
    net("experts by index", FEATURES, by_index, **EXPERTS),
    net("experts' weights by index", FEATURES, expert_weights, g=linear(4, 2), w=(2, 4, 3)),
    net("ragged", SEQUENCES, ragged, a=linear(4, 4), b=linear(4, 3)),
    net("samples in one row", SEQUENCES, in_one_row, a=linear(4, 12), b=linear(4, 3)),
    net("samples in one picture", IMAGES, in_one_picture, a=conv(2, 3, 1), b=linear(3, 3)),
    net("padded in front", FEATURES, padded_in_front, a=linear(4, 4), b=linear(4, 3)),
    net("samples turned round", FEATURES, lambda m, x: m.b(torch.tanh(m.a(x.flip(0)))).flip(0),
        a=linear(4, 4), b=linear(4, 3)),
]  # fmt: skip

# --- Samples that influence each other -----------------------------------------------------

MIXED = {"refusal": "samples influence each other"}
BOTH = {"a": linear(4, 4), "b": linear(4, 3)}


def crowded(m: nn.Module, x: Tensor) -> Tensor:
    """Leaves out what is beyond an expert's capacity."""
    top, weight = top_of(m, x)
    place = (F.one_hot(top, 2).cumsum(0) - 1).gather(1, top[:, None])
    return torch.where(place < 2, weight * torch.where(top[:, None] == 0, m.a(x), m.b(x)), 0.0)


def many(m: nn.Module, x: Tensor) -> Tensor:
    """Does otherwise with more samples than a fit has shown."""
    return m.b(torch.tanh(m.a(x))) * (1.5 if len(x) > 4 else 1.0)


def branching(m: nn.Module, x: Tensor) -> Tensor:
    return m.b(torch.tanh(m.a(x))) if float(x.detach().mean()) > 0 else m.b(m.a(x))


def longest(m: nn.Module, x: Tensor) -> Tensor:
    lengths = 1 + (x[:, 1:, 0] > 0).sum(1)
    most = int(lengths.max())
    mask = torch.arange(most) < lengths[:, None]
    return m.b((torch.tanh(m.a(x[:, :most])) * mask[..., None]).mean(1))


def in_gradients_only(m: nn.Module, x: Tensor) -> Tensor:
    h = torch.tanh(m.a(x))
    mean = h.mean(0)
    return m.b(h + mean - mean.detach())


def mixed(name: str, function: Any, batch: Any = FEATURES, **own: Any) -> Any:
    return net(name, batch, function, MIXED, **(own or BOTH))


def centred(m: nn.Module, x: Tensor) -> Tensor:
    return m.b(torch.tanh(m.a(x - x.mean(0))))


COUPLED = [
    mixed("mean of the batch", centred),
    mixed("spread of the batch", lambda m, x: m.b(torch.tanh(m.a(x / (1 + x.var(0, False)))))),
    mixed("softmax over samples", lambda m, x: m.b(m.a(x).softmax(0))),
    mixed("norm over samples", lambda m, x: m.b(F.normalize(m.a(x), dim=0))),
    mixed("attention over samples", lambda m, x: m.b((m.a(x) @ m.a(x).T).softmax(1) @ m.a(x))),
    mixed("attention over time, misread", lambda m, x: m.b(m.a(x, x, x)[0].mean(1)), SEQUENCES,
          a=of(nn.MultiheadAttention, 4, 2), b=linear(4, 3)),
    mixed("lstm over time, misread", lambda m, x: m.b(m.a(x)[0][:, -1]), SEQUENCES,
          a=of(nn.LSTM, 4, 3), b=linear(3, 3)),
    chain("batch norm without statistics", FEATURES, linear(4, 5),
          of(nn.BatchNorm1d, 5, track_running_stats=False), linear(5, 3), **MIXED),
    chain("batch norm of images without statistics", IMAGES, conv(2, 3, 3),
          of(nn.BatchNorm2d, 3, track_running_stats=False), of(nn.Flatten), linear(12, 3),
          **MIXED),
    mixed("running sum over samples", lambda m, x: m.b(torch.tanh(m.a(x)).cumsum(0))),
    mixed("largest of the batch", lambda m, x: m.b(torch.tanh(m.a(x / x.abs().max())))),
    mixed("each column sorted", lambda m, x: m.b(torch.tanh(m.a(x.sort(0)[0])))),
    mixed("the neighbour", lambda m, x: m.b(torch.tanh(m.a(x) + 0.1 * m.a(x).roll(1, 0)))),
    mixed("the first sample", lambda m, x: m.b(torch.tanh(m.a(x - x[:1])))),
    mixed("distances of samples",
          lambda m, x: m.b(m.a(x)) + torch.cdist(x, x).mean(1, keepdim=True)),
    mixed("limited capacity", crowded, **EXPERTS),
    mixed("otherwise with many", many),
    mixed("branch by the batch's mean", branching),
    mixed("mean over the longest", longest, SEQUENCES, **BOTH),
    mixed("in gradients only", in_gradients_only),
    mixed("scaled by a number of the batch", lambda m, x: m.b(m.a(x)) * (1 + x.std().item())),
    mixed("weights by place in the batch", lambda m, x: m.b(x * m.w[: len(x), None]), w=(8,),
          b=linear(4, 3)),
    mixed("weights for each of four samples", lambda m, x: m.b(x + m.w[:, None]), w=(4,),
          b=linear(4, 3)),
    mixed("weights of four samples, for as many", lambda m, x: m.b(x) + (
        m.w[:, None] if len(x) == 4 else 0.0), w=(4,), b=linear(4, 3)),
    mixed("weakly", lambda m, x: m.b(torch.tanh(m.a(x - 1e-6 * x.mean(0))))),
]  # fmt: skip

BATCHES = [*MOVED, *COUPLED]
