"""A model of your own, as ``scod`` takes it: a function without arguments that returns it.

``python model.py`` trains it on scikit-learn's diabetes data (442 patients, ten measurements
each; the target is the progression of the illness a year later) and writes into the current
folder: ``weights.safetensors``, ``train.csv`` (250 patients), ``heldout.csv`` (130 others),
``test.csv`` (62 others) and ``slips.csv`` (those of ``test.csv``, each with a slip).
"""

from __future__ import annotations

import numpy as np
import torch
from safetensors.torch import save_file
from sklearn.datasets import load_diabetes
from torch import Tensor, nn

UNITS = 100.0  # the target is some hundreds


class Standardised(nn.Module):
    """Measurements in their own units, brought to mean 0 and deviation 1."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(features))
        self.register_buffer("deviation", torch.ones(features))

    def forward(self, x: Tensor) -> Tensor:
        """Return the measurements ``(B, features)`` without units."""
        return (x - self.mean) / self.deviation


def net() -> nn.Module:
    """Return the network, not yet trained: ``scod --weights`` loads the weights."""
    return nn.Sequential(Standardised(10), nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 1))


def train(x: Tensor, y: Tensor) -> nn.Module:
    """Return the network trained on measurements ``(n, 10)`` and targets ``(n,)``."""
    torch.manual_seed(0)
    model = net()
    model[0].mean.copy_(x.mean(0))
    model[0].deviation.copy_(x.std(0))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=1e-3)
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x)[:, 0], y / UNITS).backward()
        optimizer.step()
    return model


def with_slips(x: np.ndarray) -> np.ndarray:
    """Return measurements ``(n, 10)``, in each row a slip: other units, a digit too many."""
    x = x.copy()
    x[0::3, 3] /= 7.5  # blood pressure in kPa
    x[1::3, 4] /= 38.7  # cholesterol in mmol/l
    x[2::3, 0] *= 10  # age
    return x


def main() -> None:
    """Train, and write the weights and the data."""
    patients = load_diabetes(scaled=False)
    order = np.random.default_rng(0).permutation(len(patients.target))
    x, y = patients.data[order], patients.target[order]
    model = train(torch.tensor(x[:250]).float(), torch.tensor(y[:250]).float())
    save_file(model.state_dict(), "weights.safetensors")
    names = ",".join(patients.feature_names)
    tables = {"train.csv": x[:250], "heldout.csv": x[250:380], "test.csv": x[380:]}
    for name, rows in (tables | {"slips.csv": with_slips(x[380:])}).items():
        np.savetxt(name, rows, fmt="%.6g", delimiter=",", header=names, comments="")


if __name__ == "__main__":
    main()
