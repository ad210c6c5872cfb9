"""What a fit and a score cost as the network grows."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
from torch import nn

from scodbench.measure import Setup
from scodbench.nets import digits_net
from scodbench.rows import Row
from scodbench.samples import Loader
from scodbench.sweeps.points import sweep_row
from scodbench.timing import prediction_times
from scodkit.monitor import Monitor
from scodkit.numerics.timing import wait_for
from scodkit.sketch import Nystrom

WIDTHS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
SIZE, RANK = 64, 32
_FIT_ON = 256
_BATCH = 64


def size_sweep(setup: Setup) -> Iterator[Row]:
    """Yield what the monitor costs on networks of growing width, with the same sketch.

    The networks are those for digits with more or fewer channels; their weights are random,
    for they have no part in the time.

    Args:
        setup: Data of MNIST; its network is not used.
    """
    learnt = list(Loader(setup.fit_on.take(slice(0, _FIT_ON)), _BATCH, setup.device))
    for width in WIDTHS:
        model = wide_net(width, setup.seed).to(setup.device)
        monitor = Monitor(model, setup.domain.likelihood, RANK, sketch=Nystrom(size=SIZE))
        monitor.fit(learnt[:1], progress=False)  # warms up
        wait_for(setup.device)
        began = time.perf_counter()
        monitor.fit(learnt, progress=False)
        wait_for(setup.device)
        costs = {"fit_s": time.perf_counter() - began, "fit_on": _FIT_ON}
        with setup.alone():
            for batch in (1, _BATCH):
                costs |= prediction_times(monitor.score, model, learnt[0][0][:batch])
        weights = sum(p.numel() for p in model.parameters())
        choice = {"width": width}
        yield sweep_row(setup, "size", "none", choice, weights=weights, **costs)


def wide_net(width: float, seed: int = 0) -> nn.Module:
    """Return the network for digits, five classes, with so many times the channels.

    Args:
        width: One for the network of the domain.
        seed: Of its weights.

    Examples:
        >>> sum(p.numel() for p in wide_net(1.0).parameters())
        15493
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return digits_net(nn.Linear(9 * round(32 * width), 5), width=width).eval()
