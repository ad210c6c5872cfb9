"""Train a small network on the digits 0-4, then ask it about 5-9: does the monitor notice?

Run with ``make demo``. No download: the digits come with scikit-learn.
"""

from __future__ import annotations

import time

import torch
from sklearn.datasets import load_digits
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from scodkit import Categorical, LastLayers, Monitor


def load() -> tuple[Tensor, Tensor]:
    """Return images ``(1797, 1, 8, 8)`` in [0, 1] and labels ``(1797,)``, shuffled."""
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    return images[order], torch.tensor(digits.target)[order]


def train(images: Tensor, labels: Tensor) -> nn.Module:
    """Return a small convolutional classifier of the digits 0-4."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(128, 5),
    )
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    loader = DataLoader(TensorDataset(images, labels), batch_size=32, shuffle=True)
    for _ in range(15):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x), y).backward()
            optimizer.step()
    return net.eval()


def entropy(logits: Tensor) -> Tensor:
    """Return the entropy of softmax predictions, ``(B,)``."""
    return torch.distributions.Categorical(logits=logits).entropy()


def main() -> None:
    """Fit, score and print one table."""
    images, labels = load()
    known = labels < 5
    x, y = images[known], labels[known]
    train_x, heldout_x, test_x = x[:500], x[500:700], x[700:]
    novel_x = images[~known]
    net = train(train_x, y[:500])
    with torch.no_grad():
        accuracy = (net(test_x).argmax(1) == y[700:]).float().mean()
        baseline = torch.cat([entropy(net(test_x)), entropy(net(novel_x))])
    truth = torch.cat([torch.zeros(len(test_x)), torch.ones(len(novel_x))])

    print(f"digits 0-4: {len(train_x)} to train, accuracy {accuracy:.3f} on held-out digits")
    print(f"out of distribution: {len(novel_x)} digits 5-9, never seen\n")
    header = ("score", "AUROC", "captured", "alarms 0-4", "alarms 5-9", "fit s", "ms/digit")
    print("{:<24}{:>8}{:>10}{:>12}{:>12}{:>8}{:>10}".format(*header))
    choices = {"SCOD, all layers": "all", "SCOD, last 2 layers": LastLayers(count=2)}
    for name, parameters in choices.items():
        monitor = Monitor(net, Categorical(), rank=50, parameters=parameters)
        start = time.perf_counter()
        monitor.fit(DataLoader(TensorDataset(train_x), batch_size=100), progress=False)
        fit_seconds = time.perf_counter() - start
        monitor.calibrate([heldout_x], progress=False)
        start = time.perf_counter()
        scores = torch.cat([monitor.score(test_x), monitor.score(novel_x)])
        cost = (time.perf_counter() - start) / len(scores) * 1000
        false_alarms = monitor.flag(test_x, false_alarm=0.05).float().mean()
        caught = monitor.flag(novel_x, false_alarm=0.05).float().mean()
        print(
            f"{name:<24}{roc_auc_score(truth, scores):>8.3f}{monitor.basis.captured:>10.3f}"
            f"{false_alarms:>12.1%}{caught:>12.1%}{fit_seconds:>8.2f}{cost:>10.3f}"
        )
    print(f"{'entropy of the output':<24}{roc_auc_score(truth, baseline):>8.3f}")


if __name__ == "__main__":
    main()
