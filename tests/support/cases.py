"""Models as data: each with a batch it takes and the number of its outputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from scodkit.model.inputs import Inputs


class Attention(nn.Module):
    """LayerNorm and scaled dot-product attention."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.qkv = nn.Linear(4, 12)
        self.head = nn.Linear(4, outputs)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).reshape(*x.shape[:2], 3, 2, 2).unbind(2)
        y = F.scaled_dot_product_attention(q.mT, k.mT, v.mT)
        return self.head(y.mT.reshape(x.shape).mean(1))


class Recurrent(nn.Module):
    """An LSTM or GRU with a linear head on its last state."""

    def __init__(self, cell: type[nn.Module], outputs: int) -> None:
        super().__init__()
        self.cell = cell(3, 3, batch_first=True)
        self.head = nn.Linear(3, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cell(x)[0][:, -1])


class TiedEmbedding(nn.Module):
    """An embedding whose matrix is used again as the output layer."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(outputs, 3)
        self.mix = nn.Linear(3, 3)
        self.out = nn.Linear(3, outputs, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(torch.tanh(self.mix(self.embed(tokens).mean(1))))


class DictModel(nn.Module):
    """Takes keywords, as Hugging Face models do."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, outputs)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        mask = attention_mask[..., None].to(self.head.weight.dtype)
        return self.head((self.embed(input_ids) * mask).sum(1))


class Helper:
    """No module, but knows one."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer


def mlp(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, outputs))


def conv_batchnorm(outputs: int) -> nn.Module:
    net = nn.Sequential(
        nn.Conv2d(2, 4, 3, stride=2, dilation=1, groups=2),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(16, outputs),
    )
    norm = net[1]
    assert isinstance(norm, nn.BatchNorm2d)
    assert norm.running_mean is not None
    assert norm.running_var is not None
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.5, 2.0)
    return net


def dilated_groupnorm(outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(2, 4, 3, dilation=2, padding=1),
        nn.GroupNorm(2, 4),
        nn.GELU(),
        nn.Flatten(),
        nn.Linear(4 * 4, outputs),
    )


@dataclass(frozen=True)
class Case:
    """A model, how to make a batch for it, and whether the hook engine has rules for it."""

    name: str
    build: Callable[[int], nn.Module]
    batch: Callable[[int, int], Inputs]
    batched: bool = True

    def model(self, outputs: int, dtype: torch.dtype = torch.float64) -> nn.Module:
        torch.manual_seed(0)
        return self.build(outputs).to(dtype).eval()

    def inputs(
        self, size: int, outputs: int, seed: int = 0, dtype: torch.dtype = torch.float64
    ) -> Inputs:
        torch.manual_seed(seed)
        call = self.batch(size, outputs)
        return call.map(lambda t: t.to(dtype) if t.is_floating_point() else t)


def _tensor(make: Callable[[int, int], Tensor]) -> Callable[[int, int], Inputs]:
    return lambda size, outputs: Inputs((make(size, outputs),), {})


CASES = [
    Case("mlp", mlp, _tensor(lambda b, _: torch.randn(b, 3))),
    Case("conv_batchnorm", conv_batchnorm, _tensor(lambda b, _: torch.randn(b, 2, 5, 5))),
    Case("dilated_groupnorm", dilated_groupnorm, _tensor(lambda b, _: torch.randn(b, 2, 6))),
    Case("attention", Attention, _tensor(lambda b, _: torch.randn(b, 4, 4))),
    Case("lstm", lambda d: Recurrent(nn.LSTM, d), _tensor(lambda b, _: torch.randn(b, 4, 3))),
    Case("gru", lambda d: Recurrent(nn.GRU, d), _tensor(lambda b, _: torch.randn(b, 4, 3))),
    Case(
        "prelu",
        lambda d: nn.Sequential(nn.Linear(3, d), nn.PReLU()),
        _tensor(lambda b, _: torch.randn(b, 3)),
        False,
    ),
    Case("tied", TiedEmbedding, _tensor(lambda b, d: torch.randint(0, d, (b, 4)))),
    Case(
        "dict",
        DictModel,
        lambda b, _: Inputs(
            (),
            {
                "input_ids": torch.randint(0, 5, (b, 4)),
                "attention_mask": torch.randint(0, 2, (b, 4)),
            },
        ),
    ),
]
