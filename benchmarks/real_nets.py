"""Two trained networks on real data: the SCOD paper's MNIST 0-4 net and its Wine net.

Data is read from the folder named by the variable SCODKIT_DATA: ``mnist/*-ubyte.gz`` (the
original idx files) and ``wine/winequality-{red,white}.csv`` (UCI).
"""

from __future__ import annotations

import gzip
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from paper_nets import digits, wine
from scodkit.likelihoods import Categorical, Gaussian, Likelihood


@dataclass(frozen=True)
class TrainedNet:
    """A trained network with the data its monitor is fitted and judged on."""

    name: str
    model: nn.Module
    likelihood: Likelihood
    fit_on: Tensor
    known: Tensor
    novel: Tensor


def data_folder() -> Path:
    """Return the data folder, or stop with what to type."""
    folder = os.environ.get("SCODKIT_DATA")
    if not folder or not all((Path(folder) / name).is_dir() for name in ("mnist", "wine")):
        sys.exit(
            "expected the variable SCODKIT_DATA to name a folder with mnist/ and wine/, got "
            f"{folder!r}; type: SCODKIT_DATA=path/to/data make bench-sketch"
        )
    return Path(folder)


def _idx(path: Path) -> Tensor:
    raw = gzip.decompress(path.read_bytes())
    rank = raw[3]
    shape = np.frombuffer(raw, dtype=">u4", count=rank, offset=4)
    values = np.frombuffer(raw, dtype=np.uint8, offset=4 + 4 * rank)
    return torch.from_numpy(values.reshape(shape.astype(int)).copy())


def idx_images(folder: Path, split: str) -> Tensor:
    """Return the images of ``train`` or ``t10k``, standardised, ``(n, 1, 28, 28)``."""
    images = _idx(folder / f"{split}-images-idx3-ubyte.gz").float().div_(255)
    return ((images - 0.1307) / 0.3081)[:, None]


def idx_labels(folder: Path, split: str) -> Tensor:
    """Return the classes of ``train`` or ``t10k``, ``(n,)``."""
    return _idx(folder / f"{split}-labels-idx1-ubyte.gz").long()


def wine_table(colour: str) -> Tensor:
    """Return the wines of a colour, ``(n, 12)``: eleven features, then the quality."""
    path = data_folder() / "wine" / f"winequality-{colour}.csv"
    return torch.from_numpy(np.loadtxt(path, delimiter=";", skiprows=1)).float()


def _mnist(split: str) -> tuple[Tensor, Tensor]:
    folder = data_folder() / "mnist"
    return idx_images(folder, split), idx_labels(folder, split)


def _train(
    model: nn.Module, data: tuple[Tensor, Tensor], loss: nn.Module, epochs: int, batch: int
) -> nn.Module:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    if isinstance(loss, nn.MSELoss):
        optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    x, y = data
    for _ in range(epochs):
        for chosen in torch.randperm(len(x)).split(batch):
            optimizer.zero_grad()
            loss(model(x[chosen]), y[chosen]).backward()
            optimizer.step()
    return model.eval()


def mnist_net(num_data: int = 500, num_test: int = 2000) -> TrainedNet:
    """Return the paper's net for the digits 0-4 (15,493 weights), trained by its recipe."""
    torch.manual_seed(0)
    model = digits(nn.Linear(288, 5))
    x, y = _mnist("train")
    x, y = x[y < 5], y[y < 5]
    _train(model, (x, y), nn.CrossEntropyLoss(), epochs=20, batch=16)
    test_x, test_y = _mnist("t10k")
    known, novel = test_x[test_y < 5], test_x[test_y >= 5]
    return TrainedNet(
        "mnist 0-4", model, Categorical(), x[:num_data], known[:num_test], novel[:num_test]
    )


def wine_net(num_data: int = 1000) -> TrainedNet:
    """Return a red-wine quality regressor (11,401 weights) with white wine as the unknown."""
    torch.manual_seed(0)
    red, white = wine_table("red"), wine_table("white")
    red = red[torch.randperm(len(red))]
    x, y = red[:num_data, :11], red[:num_data, 11:]
    model = wine()
    _train(model, (x, y), nn.MSELoss(), epochs=40, batch=16)
    return TrainedNet("wine", model, Gaussian(), x, red[num_data:, :11], white[:2000, :11])
