"""9. Common mistakes, and what is said of each: expected, found, what to type instead."""

import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from given import batches, digits, small_cnn, trained
from torch import nn
from torch.utils.data import DataLoader, Dataset

from scodkit import Bernoulli, Categorical, DriftAlarm, Monitor
from scodkit.errors import ScodError

known, labels, unknown = digits()
train, heldout, x = known[:500], known[500:700], known[700:]
train_loader = batches(train, labels[:500])
model = trained(small_cnn(), batches(train, labels[:500], shuffle=True), epochs=5)
monitor = Monitor(model, Categorical()).fit(train_loader, progress=False)
folder = Path(tempfile.mkdtemp())
monitor.save(folder / "monitor.scod")


def changed() -> object:
    """Score with a model whose weights changed after the fit."""
    other = trained(small_cnn(), batches(train, labels[:500]), epochs=1)
    own = Monitor(other, Categorical()).fit(train_loader, progress=False)
    other.load_state_dict(model.state_dict())
    return own.score(x)


def fit(net: nn.Module, data: object = train_loader, **options: object) -> Monitor:
    """Fit a monitor of a classifier."""
    return Monitor(net, Categorical(), **options).fit(data, progress=False)


MISTAKES: dict[str, Callable[[], object]] = {
    "scored before the fit": lambda: Monitor(model, Categorical()).score(x),
    "flagged before the calibration": lambda: fit(model).flag(x),
    "calibrated on the training data": lambda: monitor.calibrate(train_loader, progress=False),
    "probabilities where logits belong": lambda: fit(nn.Sequential(model, nn.Softmax(1))),
    "a sigmoid before Bernoulli()": lambda: Monitor(
        nn.Sequential(model, nn.Linear(5, 1), nn.Sigmoid()), Bernoulli()
    ).fit(train_loader, progress=False),
    "one output and Categorical()": lambda: fit(nn.Sequential(model, nn.Linear(5, 1))),
    "the likelihood as a string": lambda: Monitor(model, "categorical"),
    "a data set where a loader belongs": lambda: fit(model, train_loader.dataset),
    "data that is augmented at random": lambda: fit(model, DataLoader(Noisy(), batch_size=64)),
    "labels first in the batch": lambda: fit(model, batches(labels[:500], train)),
    "bytes of images": lambda: fit(model, [(255 * train).byte()]),
    "a single image": lambda: monitor.score(x[0]),
    "a list of two batches": lambda: fit(model, train).score([x[:50], x[50:100]]),
    "images that were not divided by 255": lambda: monitor.score(255 * x),
    "a NaN in the training data": lambda: fit(model, [train / 0]),
    "weights that changed after the fit": changed,
    "loaded for other weights": lambda: Monitor.load(folder / "monitor.scod", small_cnn()),
    "a rate per cent": lambda: calibrated().flag(x, false_alarm=5),
    "a rate that 200 samples cannot give": lambda: calibrated().flag(x, false_alarm=0.001),
    "an alarm before the calibration": lambda: DriftAlarm(fit(model)),
    "the training data once more": lambda: monitor.update(train_loader, progress=False),
}


class Noisy(Dataset[torch.Tensor]):
    """Training images with other noise each time they are read."""

    def __len__(self) -> int:
        return len(train)

    def __getitem__(self, place: int) -> torch.Tensor:
        return train[place] + 0.1 * torch.randn(1, 8, 8)


def calibrated() -> Monitor:
    """Return the monitor with held-out scores."""
    return Monitor.load(folder / "monitor.scod", model).calibrate(heldout, progress=False)


told: dict[str, str] = {}
for mistake, make in MISTAKES.items():
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            make()
        except ScodError as error:
            told[mistake] = f"{type(error).__name__}: {error}"
        else:
            told[mistake] = "; ".join(f"{w.category.__name__}: {w.message}" for w in warned)
    print(f"{mistake}\n    {told[mistake] or 'nothing'}")
