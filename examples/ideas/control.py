"""The control network of three figures: 6 inputs, 2 outputs, 1,346 weights, 1,500 samples."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from scodkit import Gaussian

LIKELIHOOD = Gaussian(variance=0.01)


@dataclass(frozen=True)
class Control:
    """A trained network, with as many inputs of its distribution as anyone wants.

    Args:
        net: In float64, in which certificates are tight.
        x: Its training inputs, ``(1500, 6)``, standard normal.
        heldout: Others of the same distribution, ``(200, 6)``.
        far: Of three times their spread, ``(200, 6)``.
    """

    net: nn.Module
    x: Tensor
    heldout: Tensor
    far: Tensor


@functools.cache
def trained() -> Control:
    """Train the network: two seconds."""
    torch.manual_seed(0)
    gain, x = torch.randn(6, 2), torch.randn(1500, 6)
    y = torch.tanh(x @ gain) + 0.3 * torch.sin(2 * x[:, :2]) + 0.1 * torch.randn(1500, 2)
    heldout, far = torch.randn(200, 6), 3 * torch.randn(400, 6)[:200]
    net = nn.Sequential(
        nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 2)
    )
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    for _ in range(60):
        for a, b in DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True):
            optimizer.zero_grad()
            torch.autograd.backward(nn.functional.mse_loss(net(a), b))
            optimizer.step()
    return Control(net.double().eval(), x.double(), heldout.double(), far.double())
