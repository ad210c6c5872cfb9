"""What it costs to know that a score belongs to its sample, and to the model that was fitted.

Scores are timed as they are, and with everything left out that is there for trust alone: the
samples followed through the model, the checks of batches, the look at the model's state, at the
range of the inputs. All in one run, in turns, beside the forward pass. Writes rows to
results/checks.jsonl.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import torch
from torch import nn

from scodbench.nets import ResNet18
from scodbench.speed.paper_nets import SMALL, Domain
from scodbench.speed.turns import interleaved, machine, settle
from scodkit import Categorical, Monitor
from scodkit.factors import recorder
from scodkit.network import Network
from scodkit.sketch import Nystrom
from scodkit.state import StateWatch

BATCHES = (1, 64)


def transformer() -> nn.Module:
    """Return a small transformer encoder over 16 tokens, with a linear head."""
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
    flat = nn.Sequential(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))
    return nn.Sequential(flat, nn.Flatten(), nn.Linear(16 * 64, 5))


NETS = (
    *SMALL,
    Domain("resnet-18, 32 x 32", lambda: ResNet18(5), Categorical(1), (3, 32, 32), 46, 7, 5),
    Domain("transformer", transformer, Categorical(), (16, 64), 46, 7, 5),
)


class _Nothing:
    """Follows no samples."""

    lost, strangers = "", {}

    def __init__(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def untrusting(monitor: Monitor) -> Iterator[None]:
    """Score without what is there for trust alone."""
    every, scorer = monitor.check_every, monitor._ready()
    monitor.check_every = 0
    with (
        mock.patch.object(recorder, "Samples", lambda *_: None),
        mock.patch.object(type(scorer), "check", lambda *_, **__: scorer.fitted),
        mock.patch.object(scorer.watch, "look", lambda _: None),
    ):
        yield
    monitor.check_every = every


def costs(domain: Domain, size: int) -> dict[str, object]:
    """Return the milliseconds of a score with all checks and without, and of a first batch."""
    model, x = domain.model(), domain.batch(size)
    monitor = Monitor(model, domain.likelihood, domain.rank, sketch=Nystrom(size=domain.size))
    monitor.fit(domain.batch(256).split(64), progress=False)

    def bare() -> None:
        with untrusting(monitor):
            monitor.score(x)

    def forward() -> None:
        with torch.no_grad():
            model(x)

    monitor.score(x)
    runs = {"forward": forward, "score": lambda: monitor.score(x), "unchecked": bare}
    found = interleaved(runs, "cpu", seconds=3.0)
    monitor.check_every = 1
    runs = {"unchecked": bare, "each batch checked": lambda: monitor.score(x)}
    found["each batch checked"] = interleaved(runs, "cpu", seconds=2.0)["each batch checked"]
    return {"net": domain.name, "batch": size, **{f"{k} ms": v for k, v in found.items()}}


def state_microseconds() -> float:
    """Return what a look at 200 parameters and 200 buffers takes, the best of many."""
    pairs = [nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)) for _ in range(50)]
    model = nn.Sequential(*pairs)
    for index, pair in enumerate(pairs):  # four parameters and three buffers each so far
        pair.register_buffer(f"own{index}", torch.zeros(1))
    watch = StateWatch(Network(model))
    times = []
    for _ in range(200):
        began = time.perf_counter()
        for _ in range(20):
            watch.unchanged()
        times.append((time.perf_counter() - began) / 20)
    return min(times) * 1e6


def measure(device: str, output: Path) -> None:
    """Time every network, and write the rows.

    Args:
        device: cpu.
        output: Folder for the rows.
    """
    settle(device)
    rows = [costs(domain, size) for domain in NETS for size in BATCHES]
    rows.append({"state check of 200 parameters and 200 buffers us": state_microseconds()})
    text = "".join(json.dumps({**row, **machine(device)}) + "\n" for row in rows)
    (output / "checks.jsonl").write_text(text, encoding="utf-8")
    print(*rows, sep="\n")
