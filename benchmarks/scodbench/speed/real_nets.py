"""Two trained networks on real data: the SCOD paper's MNIST 0-4 net and its Wine net."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from scodbench import nets
from scodbench.data import load
from scodbench.domains.digits import standardised
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


def _mnist(split: str) -> tuple[Tensor, Tensor]:
    images, labels = load.mnist(split)
    return standardised(images), labels


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
    model = nets.digits_net(nn.Linear(288, 5))
    x, y = _mnist("train")
    x, y = x[y < 5], y[y < 5]
    _train(model, (x, y), nn.CrossEntropyLoss(), epochs=20, batch=16)
    test_x, test_y = _mnist("test")
    known, novel = test_x[test_y < 5], test_x[test_y >= 5]
    return TrainedNet(
        "mnist 0-4", model, Categorical(), x[:num_data], known[:num_test], novel[:num_test]
    )


def wine_net(num_data: int = 1000) -> TrainedNet:
    """Return a red-wine quality regressor (11,401 weights) with white wine as the unknown."""
    torch.manual_seed(0)
    red, white = load.wine().values()
    red = red[torch.randperm(len(red))]
    x, y = red[:num_data, :11], red[:num_data, 11:]
    model = nets.wine_net()
    _train(model, (x, y), nn.MSELoss(), epochs=40, batch=16)
    return TrainedNet("wine", model, Gaussian(), x, red[num_data:, :11], white[:2000, :11])
