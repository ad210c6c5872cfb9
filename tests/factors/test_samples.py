"""Where samples lie after a torch function: whoever is told so must find them there alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode

from scodkit.factors.layout import COUNTED, FIRST, MIXED, Lay
from scodkit.factors.sample_rules import RULES
from scodkit.factors.samples import Samples, constants_of

BATCH = 3
Function = Callable[[Tensor], Any]


class Constants(nn.Module):
    """Tensors that are nobody's."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)

        def noise(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        self.w = nn.Parameter(noise(6, 6))
        self.kernel = nn.Parameter(noise(4, 4, 3))
        self.register_buffer("table", noise(7, 5))
        self.shift, self.order = noise(6), torch.tensor([2, 0, 1, 3])
        self.mask = torch.tensor([True, False, True, True])
        self.many = noise(BATCH, 1, 1, 6)
        self.three = noise(BATCH, BATCH)
        self.lstm = nn.LSTM(6, 2, batch_first=True).double()


M = Constants()


class Following(TorchFunctionMode):
    def __init__(self, samples: Samples) -> None:
        super().__init__()
        self.samples = samples

    def __torch_function__(self, func, types, args=(), kwargs=None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.samples.follow(func, args, kwargs or {}, result)
        return result


def followed(function: Function, x: Tensor) -> tuple[Samples, list[Tensor]]:
    samples, own = Samples(BATCH, constants_of(M)), x.detach().clone()
    samples.put(own, FIRST)
    with Following(samples), torch.no_grad():
        result = function(own)
    return samples, list(result) if isinstance(result, (list, tuple)) else [result]


def batch() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(BATCH, 4, 6, generator=generator, dtype=torch.float64)


def check_owners(function: Function) -> None:
    """Other numbers of a sample may change its own places of the results, and no others."""
    samples, results = followed(function, batch())
    assert not samples.lost
    wheres = [samples.of(result) for result in results]
    for sample in range(BATCH):
        other = batch()
        other[sample] = torch.randn(4, 6, dtype=torch.float64)
        changed = followed(function, other)[1]
        for where, before, after in zip(wheres, results, changed, strict=True):
            assert where not in (None, MIXED, COUNTED)
            axis, outer, inner = where
            assert before.shape[axis] == outer * BATCH * inner
            places = torch.arange(before.shape[axis]) // inner % BATCH
            differs = (before != after).movedim(axis, 0).reshape(len(places), -1).any(1)
            assert not differs[places != sample].any()
            assert before.dtype != torch.float64 or differs.any()


KEPT: dict[str, Function] = {
    "added": lambda x: x + 1,
    "by a vector": lambda x: M.shift * x,
    "broadcast in front": lambda x: x + M.many,
    "in place": lambda x: x.clone().mul_(2.0).relu_(),
    "compared": lambda x: torch.where(x > 0, x, -x),
    "with itself": lambda x: x * torch.sigmoid(x),
    "softmax": lambda x: x.softmax(-1),
    "folded": lambda x: x.reshape(-1, 6),
    "folded twice": lambda x: x.reshape(-1, 6).reshape(BATCH, 24),
    "flattened": lambda x: x.flatten(),
    "unflattened": lambda x: x.unflatten(2, (2, 3)),
    "time first": lambda x: x.transpose(0, 1),
    "time first, folded": lambda x: x.transpose(0, 1).reshape(-1, 6),
    "both sides": lambda x: x.movedim(0, 1).reshape(2, -1, 2).reshape(2, 2, -1),
    "permuted": lambda x: x.permute(2, 0, 1),
    "moved": lambda x: x.movedim((0, 1), (2, 0)),
    "turned": lambda x: x.reshape(BATCH, -1).T,
    "matrices turned": lambda x: x.mT,
    "inserted": lambda x: x[:, None].unsqueeze(0).squeeze(1),
    "squeezed": lambda x: x[None, :, :1].squeeze(),
    "sum": lambda x: x.sum(1),
    "kept sum": lambda x: x.mean((1, 2), keepdim=True),
    "largest": lambda x: x.max(2),
    "sum behind": lambda x: x.permute(1, 0, 2).sum(0),
    "sorted": lambda x: x.sort(dim=1),
    "topk": lambda x: x.topk(2, dim=-1),
    "flipped": lambda x: x.flip(1, 2),
    "rolled": lambda x: x.roll(1, 1),
    "normalised": lambda x: F.normalize(x, dim=2),
    "norm": lambda x: x.norm(dim=1),
    "split": lambda x: x.split(2, dim=2),
    "chunked": lambda x: x.chunk(3, -1),
    "unbound": lambda x: x.unbind(1),
    "stacked": lambda x: torch.stack([x, 2 * x], dim=0),
    "stacked behind": lambda x: torch.stack([x, 2 * x], dim=-1),
    "joined": lambda x: torch.cat([x, M.many[:, 0]], dim=1),
    "gathered": lambda x: x.gather(2, (x > 0).long()),
    "windows": lambda x: x.unfold(2, 3, 1),
    "some": lambda x: x[:, 1:3, ::2],
    "last": lambda x: x[:, -1],
    "last of all": lambda x: x[..., -1],
    "by a list": lambda x: x[:, [2, 0]],
    "by a table's order": lambda x: x[:, M.order],
    "by a mask": lambda x: x[:, M.mask],
    "by index_select": lambda x: x.index_select(1, M.order),
    "as many positions as samples": lambda x: x / torch.arange(BATCH).max() / BATCH,
    "one of each": lambda x: x[torch.arange(BATCH), (x[:, :, 0] > 0).sum(1).clamp_max(3)],
    "written": lambda x: _written(x),
    "made for it": lambda x: _made(x),
    "linear": lambda x: F.linear(x, M.w),
    "time first, linear": lambda x: F.linear(x.transpose(0, 1), M.w),
    "matmul": lambda x: x @ M.w,
    "matmul, columns": lambda x: M.w @ x.reshape(BATCH, -1)[:, :6].T,
    "matrix and vector": lambda x: x @ M.shift,
    "vector and matrices": lambda x: M.shift @ x.mT,
    "vector and columns": lambda x: M.shift @ x.reshape(BATCH, -1)[:, :6].T,
    "attention": lambda x: (x @ x.mT).softmax(-1) @ x,
    "baddbmm": lambda x: torch.baddbmm(x @ x.mT, x, x.mT),
    "einsum": lambda x: torch.einsum("bti,oi->tbo", x, M.w),
    "einsum, both": lambda x: torch.einsum("bti, bsi -> bts", x, x),
    "einsum, dots": lambda x: torch.einsum("b...i,oi->b...o", x, M.w),
    "distances": lambda x: torch.cdist(x, x),
    "distances from a table": lambda x: torch.cdist(x.transpose(0, 1), M.w),
    "distances to a table": lambda x: torch.cdist(M.w, x[:, 0]),
    "sdpa": lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True),
    "sdpa, masked": lambda x: F.scaled_dot_product_attention(
        x, x, x, x[:, :, :1] @ x[:, :1, :4]
    ),
    "layer_norm": lambda x: F.layer_norm(x, (4, 6)),
    "group_norm": lambda x: F.group_norm(x, 2),
    "batch_norm": lambda x: F.batch_norm(x, M.shift[:4], M.shift[:4].exp()),
    "conv": lambda x: F.conv1d(x, M.kernel, padding=1),
    "pool": lambda x: F.avg_pool1d(x, 2),
    "pool of channels": lambda x: F.avg_pool1d(x.reshape(BATCH, -1), 2),
    "by keywords": lambda x: F.conv1d(weight=M.kernel, input=x),
    "max pool": lambda x: F.max_pool1d(x, 2),
    "adaptive": lambda x: F.adaptive_avg_pool1d(x, 1),
    "interpolated": lambda x: F.interpolate(x, scale_factor=2),
    "padded": lambda x: F.pad(x, (1, 1)),
    "embedded": lambda x: F.embedding((x > 0).long(), M.table),
    "looked up": lambda x: M.table[(x > 0).long()],
    "one hot": lambda x: F.one_hot((x > 0).long(), 3),
    "recurrent": lambda x: M.lstm(x)[0],
    "shuffled pixels": lambda x: F.pixel_shuffle(x[..., None], 2),
    "tril": lambda x: (x @ x.mT).tril(),
    "fft": lambda x: torch.fft.rfft(x, dim=-1).abs(),
    "bilinear": lambda x: F.bilinear(x, x, M.table[:1, :1].expand(2, 6, 6).contiguous()),
}


def _written(x: Tensor) -> Tensor:
    y = x.clone()
    y[:, 0] = 0.0
    y[:, 1:3] = y[:, 2:4] * 2
    return y


def _made(x: Tensor) -> Tensor:
    y = torch.zeros(BATCH, 2, 4, 6, dtype=x.dtype)
    y[:, 1] = x
    return y


MIXING: dict[str, Function] = {
    "mean of all": lambda x: x - x.mean(0),
    "sorted": lambda x: x[x[:, 0, 0].argsort()],
    "by a list": lambda x: x[[2, 0, 1]],
    "by a constant order": lambda x: x[M.order[:3]],
    "reversed": lambda x: x.flip(0),
    "reversed with others": lambda x: x.flip(1, 0),
    "behind none": lambda x: x[None][:, [1, 0, 2]],
    "turned, by columns": lambda x: x.reshape(BATCH, -1).T[:, [1, 0, 2]].T,
    "index_select": lambda x: x.index_select(0, M.order[:3]),
    "gather": lambda x: x.gather(0, (x > 0).long()),
    "stacked rows": lambda x: torch.stack([x[i] for i in (2, 1, 0)]),
    "unbound": lambda x: torch.stack(x.unbind()[::-1]),
    "vstack": lambda x: torch.vstack([x[1:], x[:1]]),
    "concat": lambda x: torch.concat([x[1:], x[:1]]),
    "rolled": lambda x: x.roll(1, 0),
    "rolled flat": lambda x: x.roll(1),
    "permutation matrix": lambda x: M.three @ x.reshape(BATCH, -1),
    "gram": lambda x: x.reshape(BATCH, -1) @ x.reshape(BATCH, -1).T,
    "dispatch": lambda x: torch.einsum("bec,bd->ecd", x[:, :, :2], x[:, 0]),
    "embedding": lambda x: F.embedding(M.order[:3], x.reshape(BATCH, -1)),
    "take": lambda x: x.take(torch.arange(72).flip(0)),
    "kept alone": lambda x: x[x[:, 0, 0] > -9],
    "some": lambda x: x[:2],
    "half folded": lambda x: x.reshape(2, -1),
    "softmax": lambda x: x.softmax(0),
    "variance": lambda x: x.transpose(0, 1).var(False),
    "linear along samples": lambda x: F.linear(x.reshape(BATCH, -1).T, M.three),
    "batch statistics": lambda x: F.batch_norm(x, None, None, training=True),
    "channels of samples": lambda x: F.batch_norm(
        x.transpose(0, 1), M.shift[:3], M.shift[:3].exp()
    ),
    "where": lambda x: torch.where(x[:, 0, 0] > -9)[0],
    "scattered": lambda x: torch.zeros_like(x).scatter_(0, (x > 0).long(), x),
    "unknown": lambda x: torch.cov(x.reshape(BATCH, -1)),
    "distances": lambda x: torch.cdist(x.reshape(BATCH, -1), x.reshape(BATCH, -1)),
    "distances of one": lambda x: torch.cdist(y := x.reshape(BATCH, -1), y),
    "conv over samples": lambda x: F.conv1d(x.permute(1, 0, 2), M.kernel[:, :3]),
}


@pytest.mark.parametrize("case", KEPT)
def test_samples_lie_where_they_are_said_to(case: str) -> None:
    check_owners(KEPT[case])


@pytest.mark.parametrize("case", MIXING)
def test_what_mixes_samples_is_known_to(case: str) -> None:
    samples, results = followed(MIXING[case], batch())
    assert samples.of(results[0]) == MIXED


def _permuted_in_place(x: Tensor) -> Tensor:
    y = x.clone()
    y[[2, 0, 1]] = x
    return y


def _into_a_view(x: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    y[:, 0].copy_(x[:, 0])
    return y


LOST: dict[str, Function] = {
    "item": lambda x: x * x.max().item(),
    "branch": lambda x: x if (x > 0).any() else -x,
    "list": lambda x: x[x[:, 0, 0].argsort().tolist()],
    "array": lambda x: torch.from_numpy(x.numpy()),
    "number": lambda x: x * float(x[0, 0, 0]),
    "size of a choice": lambda x: x * x[x > 0].shape[0],
    "written by order": _permuted_in_place,
    "into a view": _into_a_view,
    "out": lambda x: torch.add(x, 1, out=torch.empty_like(x)),
}


@pytest.mark.parametrize("case", LOST)
def test_values_that_leave_the_tensors_are_noticed(case: str) -> None:
    assert followed(LOST[case], batch())[0].lost


def test_tensors_nobody_has_seen_being_made_are_mixed() -> None:
    samples = Samples(BATCH, constants_of(M))
    assert samples.of(torch.ones(BATCH)) == MIXED
    assert samples.of(M.w) is None
    assert samples.of(M.shift) is None


def test_notes_of_an_earlier_pass_do_not_count() -> None:
    x = batch()
    Samples(BATCH, constants_of(M)).put(x, Lay(0))
    assert Samples(BATCH, constants_of(M)).of(x) == MIXED


def test_rules_are_of_functions() -> None:
    assert len(RULES) > 500
    assert torch.nonzero not in RULES
    assert Tensor.__bool__ not in RULES
