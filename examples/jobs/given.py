"""What a user has already: data, and a network that was trained on it.

Nothing here knows of scodkit, and nothing is downloaded: the digits come with scikit-learn, all
other data is made up.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)  # faster for networks as small as these
torch.manual_seed(0)


def digits() -> tuple[Tensor, Tensor, Tensor]:
    """Return digits 0-4 ``(901, 1, 8, 8)`` in [0, 1], their labels, and digits 5-9."""
    data = load_digits()
    order = torch.randperm(len(data.target))
    images = torch.tensor(data.images, dtype=torch.float32)[order, None] / 16
    labels = torch.tensor(data.target)[order]
    return images[labels < 5], labels[labels < 5], images[labels >= 5]


def batches(*tensors: Tensor, size: int = 64, shuffle: bool = False) -> DataLoader[object]:
    """Return a loader as anyone has one: batches ``[inputs, labels]``."""
    return DataLoader(TensorDataset(*tensors), batch_size=size, shuffle=shuffle)


def trained(
    net: nn.Module,
    loader: DataLoader[object],
    loss: Callable[[Tensor, Tensor], Tensor] = nn.functional.cross_entropy,
    epochs: int = 15,
) -> nn.Module:
    """Return the network after training; it is left in train mode, as it often is."""
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    for _ in range(epochs):
        for *inputs, y in loader:
            optimizer.zero_grad()
            loss(net(*inputs), y).backward()
            optimizer.step()
    return net


def small_cnn() -> nn.Module:
    """Return a classifier of five kinds of digits."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(128, 5)),
    )
