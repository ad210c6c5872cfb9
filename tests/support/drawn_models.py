"""Models whose samples change places within a batch, or influence each other, by parts.

A model is a move of samples, a layer, and the move back; or experts, packing, padding,
coupling. In all but the coupled ones every sample has an answer of its own, whatever its
neighbours, but row ``i`` of a layer need not belong to sample ``i``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils import rnn

Pick = Callable[[Tensor, Tensor], Tensor]

# --- Rows in another order -----------------------------------------------------------------


def one_hot(order: Tensor, like: Tensor) -> Tensor:
    return F.one_hot(order, len(order)).to(like.dtype)


def wide(order: Tensor, like: Tensor) -> Tensor:
    return order[:, None].expand_as(like)


def row_by_row(x: Tensor, order: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for i, j in enumerate(order.tolist()):
        out[i] = x[j]
    return out


def set_item(x: Tensor, order: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    out[order.argsort()] = x
    return out


def copied(x: Tensor, order: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for i, j in enumerate(order.tolist()):
        out[i].copy_(x[j])
    return out


def picked(x: Tensor, order: Tensor) -> Tensor:
    return x[order]


@functools.cache
def scripted() -> Pick:
    return torch.jit.script(picked)


class Moved(torch.autograd.Function):
    """Rows in another order, and gradients back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, delta: Tensor) -> tuple[Tensor, None]:
        return delta.index_select(0, ctx.saved_tensors[0].argsort()), None


PICKS: dict[str, Pick] = {
    "index": lambda x, o: x[o],
    "index, ellipsis": lambda x, o: x[o, ...],
    "list": lambda x, o: x[o.tolist()],
    "numpy": lambda x, o: x[o.numpy()],
    "tuple": lambda x, o: x[(o,)],
    "new axis": lambda x, o: x[None][:, o][0],
    "index_select": lambda x, o: x.index_select(0, o),
    "transposed index": lambda x, o: x.T[:, o].T,
    "transposed index_select": lambda x, o: x.T.index_select(1, o).T,
    "stack": lambda x, o: torch.stack([x[i] for i in o.tolist()]),
    "unbind": lambda x, o: torch.stack([x.unbind()[i] for i in o.tolist()]),
    "split": lambda x, o: torch.cat([x.split(1)[i] for i in o.tolist()]),
    "concat": lambda x, o: torch.concat([x[i : i + 1] for i in o.tolist()]),
    "concatenate": lambda x, o: torch.concatenate([x[i : i + 1] for i in o.tolist()], 0),
    "vstack": lambda x, o: torch.vstack([x[i] for i in o.tolist()]),
    "narrow": lambda x, o: torch.cat([x.narrow(0, i, 1) for i in o.tolist()]),
    "gather": lambda x, o: x.gather(0, wide(o, x)),
    "take_along_dim": lambda x, o: x.take_along_dim(o[:, None], 0),
    "take": lambda x, o: x.take(o[:, None] * x.shape[1] + torch.arange(x.shape[1])),
    "flat index": lambda x, o: x.flatten()[o[:, None] * x.shape[1] + torch.arange(x.shape[1])],
    "row by row": row_by_row,
    "set item": set_item,
    "copied": copied,
    "index_copy": lambda x, o: torch.zeros_like(x).index_copy(0, o.argsort(), x),
    "index_put": lambda x, o: torch.zeros_like(x).index_put((o.argsort(),), x),
    "index_add": lambda x, o: torch.zeros_like(x).index_add(0, o.argsort(), x),
    "scatter": lambda x, o: torch.zeros_like(x).scatter(0, wide(o.argsort(), x), x),
    "scatter_add": lambda x, o: torch.zeros_like(x).scatter_add(0, wide(o.argsort(), x), x),
    "matrix": lambda x, o: one_hot(o, x) @ x,
    "matrix from the right": lambda x, o: (x.T @ one_hot(o, x).T).T,
    "einsum": lambda x, o: torch.einsum("bc,cd->bd", one_hot(o, x), x),
    "tensordot": lambda x, o: torch.tensordot(one_hot(o, x), x, ([1], [0])),
    "functional linear": lambda x, o: F.linear(one_hot(o, x), x.T),
    "sparse matrix": lambda x, o: torch.sparse.mm(one_hot(o, x).to_sparse(), x),
    "embedding": lambda x, o: F.embedding(o, x),
    "function map": lambda x, o: torch.func.vmap(lambda i: x.index_select(0, i[None])[0])(o),
    "scripted": lambda x, o: scripted()(x, o),
    "derivative of one's own": Moved.apply,
    "operator": lambda x, o: torch.ops.aten.index_select.default(x, 0, o),
}

# before the first layer nothing has to be differentiable
INPUT_PICKS: dict[str, Pick] = {
    **PICKS,
    "through numpy": lambda x, o: torch.from_numpy(x.detach().numpy()[o.numpy()]),
    "through lists": lambda x, o: torch.tensor(np.array(x.tolist())[o.numpy()]),
}

ORDERS: dict[str, Callable[[Tensor], Tensor]] = {
    "by value": lambda x: x[:, 0].argsort(stable=True),
    "reversed": lambda x: torch.arange(len(x) - 1, -1, -1),
    "evens first": lambda x: (torch.arange(len(x)) % 2).argsort(stable=True),
}

# --- Experts, by the first feature ---------------------------------------------------------


def expert_of(x: Tensor) -> Tensor:
    return x[:, 0].nan_to_num().abs().long() % 2


def experts(m: nn.Module) -> tuple[nn.Module, nn.Module]:
    return m.a, m.c


def by_switch(m: nn.Module, x: Tensor) -> Tensor:
    chosen = F.one_hot(expert_of(x), 2)
    slot = (chosen.cumsum(0) * chosen).sum(1) - 1
    dispatch = torch.einsum("be,bc->bec", chosen, F.one_hot(slot, len(x))).to(x.dtype)
    boxes = torch.einsum("bec,bd->ecd", dispatch, x)
    out = torch.stack([e(box) for e, box in zip(experts(m), boxes, strict=True)])
    return torch.einsum("bec,ecd->bd", dispatch, out)


def by_new_axis(m: nn.Module, x: Tensor) -> Tensor:
    out = x.new_zeros(len(x), 4)
    for e, expert in enumerate(experts(m)):
        own = torch.where(expert_of(x) == e)[0]
        out.index_add_(0, own, expert(x[None, own].reshape(-1, 4)))
    return out


def by_mask(m: nn.Module, x: Tensor) -> Tensor:
    out = x.new_zeros(len(x), 4)
    for e, expert in enumerate(experts(m)):
        out[expert_of(x) == e] = expert(x[expert_of(x) == e])
    return out


def by_sorting(m: nn.Module, x: Tensor) -> Tensor:
    order = expert_of(x).argsort(stable=True)
    sizes = expert_of(x).bincount(minlength=2).tolist()
    parts = x.index_select(0, order).split(sizes)
    out = torch.cat([e(part) for e, part in zip(experts(m), parts, strict=True)])
    return torch.zeros_like(out).index_copy(0, order, out)


def by_lists(m: nn.Module, x: Tensor) -> Tensor:
    where = expert_of(x).tolist()
    done: dict[int, Tensor] = {}
    for e, expert in enumerate(experts(m)):
        own = [i for i, chosen in enumerate(where) if chosen == e]
        if own:
            done |= dict(zip(own, expert(torch.stack([x[i] for i in own])), strict=True))
    return torch.stack([done[i] for i in range(len(x))])


def by_slots(m: nn.Module, x: Tensor) -> Tensor:
    chosen = expert_of(x)
    slot = (F.one_hot(chosen, 2).cumsum(0) - 1)[torch.arange(len(x)), chosen]
    boxes = x.new_zeros(2, len(x), 4)
    boxes[chosen, slot] = x
    return torch.stack([e(box) for e, box in zip(experts(m), boxes, strict=True)])[chosen, slot]


def by_capacity_two_each(m: nn.Module, x: Tensor) -> Tensor:
    """Rounds of two samples an expert, as many rounds as it takes."""
    chosen, out = expert_of(x), x.new_zeros(len(x), 4)
    for e, expert in enumerate(experts(m)):
        own = (chosen == e).nonzero()[:, 0]
        for some in own.split(2):
            padded = torch.cat([x[some], x.new_zeros(2 - len(some), 4)])
            out = out.index_copy(0, some, expert(padded)[: len(some)])
    return out


ROUTES: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "switch": by_switch,
    "new axis": by_new_axis,
    "mask": by_mask,
    "sorting": by_sorting,
    "lists": by_lists,
    "slots": by_slots,
    "rounds": by_capacity_two_each,
    "where": lambda m, x: torch.where(expert_of(x)[:, None] == 0, m.a(x), m.c(x)),
    "weights": lambda m, x: torch.einsum(
        "bd,bod->bo", x, torch.stack([m.a.weight, m.c.weight])[expert_of(x)]
    ),
    "dense": lambda m, x: x[:, :1].sigmoid() * m.a(x) + x[:, :1].cos() * m.c(x),
}

# --- Tokens of samples, packed; a token counts if its first number is positive --------------


def counted(x: Tensor) -> Tensor:
    return x[..., 0] > 0


def summed(h: Tensor, kept: Tensor) -> Tensor:
    owner = torch.arange(len(kept))[:, None].expand_as(kept)[kept]
    return h.new_zeros(len(kept), 4).index_add(0, owner, h)


def time_major(m: nn.Module, x: Tensor) -> Tensor:
    h = torch.tanh(m.a(x.transpose(0, 1).reshape(-1, 4))).reshape(3, len(x), 4)
    return (h * counted(x).T[..., None]).sum(0)


def time_major_branch(m: nn.Module, x: Tensor) -> Tensor:
    h = m.a(x.transpose(0, 1).reshape(-1, 4)).reshape(3, len(x), 4)
    return torch.where(x[:, 0, :1] > 0, torch.tanh(h).sum(0), torch.tanh(x.sum(1)))


def interleaved(m: nn.Module, x: Tensor) -> Tensor:
    h = torch.stack(list(x.unbind(1))).view(-1, 4)
    return torch.tanh(m.a(h)).view(3, len(x), 4).permute(1, 0, 2).mean(1)


def nonzero(m: nn.Module, x: Tensor) -> Tensor:
    where = counted(x).flatten().nonzero()[:, 0]
    h = torch.tanh(m.a(x.reshape(-1, 4).index_select(0, where)))
    return h.new_zeros(len(x) * 3, 4).index_copy(0, where, h).view(len(x), 3, 4).sum(1)


def joined(m: nn.Module, x: Tensor) -> Tensor:
    sizes = counted(x).sum(1).tolist()
    tokens = torch.cat([one[counted(one)] for one in x])
    parts = torch.tanh(m.a(tokens)).split(sizes)
    return torch.stack([part.sum(0) for part in parts])


def packed(m: nn.Module, x: Tensor) -> Tensor:
    lengths = counted(x).sum(1).clamp_min(1)
    rows = rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    h = rnn.PackedSequence(torch.tanh(m.a(rows.data)), *rows[1:])
    return rnn.pad_packed_sequence(h, batch_first=True)[0].sum(1)


def padded(m: nn.Module, x: Tensor) -> Tensor:
    """Sequences of what counts, as long as the longest."""
    parts = [one[counted(one)] for one in x]
    rows = rnn.pad_sequence([*parts, x.new_zeros(1, 4)], batch_first=True)[:-1]
    there = torch.arange(rows.shape[1]) < counted(x).sum(1)[:, None]
    return (torch.tanh(m.a(rows)) * there[..., None]).sum(1)


def one_row(m: nn.Module, x: Tensor) -> Tensor:
    row, owner = m.a(x.reshape(1, -1, 4)), torch.arange(len(x)).repeat_interleave(3)
    mixed = F.scaled_dot_product_attention(row, row, row, attn_mask=owner[:, None] == owner)
    return mixed.reshape(x.shape).mean(1)


def one_picture(m: nn.Module, x: Tensor) -> Tensor:
    strip = x.permute(2, 0, 1).reshape(1, 4, -1)
    h = torch.tanh(F.conv1d(strip, m.a.weight[..., None]))
    return h.reshape(4, len(x), 3).permute(1, 2, 0).sum(1)


def as_channels(m: nn.Module, x: Tensor) -> Tensor:
    weights = m.a.weight.repeat(len(x), 1)[..., None]
    h = F.conv1d(x.mT.reshape(1, -1, 3), weights, groups=len(x))
    return torch.tanh(h).reshape(len(x), 4, 3).sum(2)


PACKS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "time major": time_major,
    "time major branch": time_major_branch,
    "interleaved": interleaved,
    "boolean": lambda m, x: summed(torch.tanh(m.a(x[counted(x)])), counted(x)),
    "nonzero": nonzero,
    "joined": joined,
    "packed sequence": packed,
    "padded sequence": padded,
    "one row": one_row,
    "one picture": one_picture,
    "as channels": as_channels,
    "sample major": lambda m, x: torch.tanh(m.a(x.reshape(-1, 4))).view(x.shape).sum(1),
}

# --- Rows that no sample fills: where they are, and how to get there -------------------------


def fixed_room(x: Tensor) -> tuple[Tensor, slice]:
    room = x.new_zeros(16, x.shape[1])
    room[16 - len(x) :] = x
    return room, slice(16 - len(x), None)


def every_other(x: Tensor) -> tuple[Tensor, slice]:
    room = torch.stack([torch.ones_like(x), x], 1)
    return room.flatten(0, 1), slice(1, None, 2)


PADS: dict[str, Callable[[Tensor], tuple[Tensor, slice]]] = {
    "behind": lambda x: (F.pad(x, (0, 0, 0, -len(x) % 4)), slice(len(x))),
    "in front": lambda x: (F.pad(x, (0, 0, -len(x) % 4, 0)), slice(-len(x) % 4, None)),
    "one in front": lambda x: (torch.cat([torch.ones_like(x[:1]), x]), slice(1, None)),
    "stacked in front": lambda x: (torch.vstack([x[:1] * 0, x]), slice(1, None)),
    "last again": lambda x: (torch.cat([x, x[-1:]]), slice(len(x))),
    "first again": lambda x: (torch.cat([x[:1], x]), slice(1, None)),
    "fixed room": fixed_room,
    "every other": every_other,
    "twice": lambda x: (x.repeat(2, 1), slice(len(x), None)),
    "twice each": lambda x: (x.repeat_interleave(2, 0), slice(None, None, 2)),
}

# --- Samples that influence each other, and when ---------------------------------------------


def paired(x: Tensor) -> Tensor:
    whole = len(x) // 2 * 2
    pairs = x[:whole].reshape(-1, 2, x.shape[1])
    return torch.cat([(pairs - pairs.mean(1, keepdim=True)).flatten(0, 1), x[whole:]])


def by_batch_norm(x: Tensor) -> Tensor:
    if len(x) < 2:  # or torch refuses
        return x
    return F.batch_norm(x, None, None, training=True)


def crowded(x: Tensor) -> Tensor:
    place = (F.one_hot(expert_of(x), 2).cumsum(0) - 1).gather(1, expert_of(x)[:, None])
    return torch.where(place < 2, x, 0.0)


def shifted_gradients(x: Tensor) -> Tensor:
    mean = x.mean(0)
    return x + mean - mean.detach()


COUPLINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda x: x - x.mean(0),
    "batch norm": by_batch_norm,
    "largest": lambda x: x / (1 + x.detach().abs().max()),
    "number": lambda x: x * (1 + x.detach().std(correction=0).item()),
    "softmax": lambda x: x.softmax(0),
    "running sum": lambda x: x.cumsum(0),
    "neighbour": lambda x: x.roll(1, 0),
    "first": lambda x: x - x[:1],
    "attention": lambda x: (x @ x.T).softmax(1) @ x,
    "sorted": lambda x: x.sort(0)[0],
    "pairs": paired,
    "capacity": crowded,
    "gradients only": shifted_gradients,
    "place": lambda x: x * torch.arange(1, len(x) + 1)[:, None],
    "count": lambda x: x / len(x),
}

WHENS: dict[str, Callable[[Tensor], bool]] = {
    "always": lambda x: True,
    "in large batches": lambda x: len(x) > 4,
    "in even batches": lambda x: len(x) % 2 == 0,
    "with an outlier": lambda x: float(x.detach().abs().nan_to_num().max()) > 12,
    "with a negative key": lambda x: bool((x[:, 0] < 0).any()),
}
