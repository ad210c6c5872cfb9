"""What it costs to know that a score belongs to its sample, and to the model that was fitted.

Scores are timed as they are, and with everything left out that is there for trust alone: the
samples followed through the model, the checks of batches, the look at the model's state, at the
range of the inputs. All in one run, in turns, beside the forward pass. Writes rows to
results/checks.jsonl.
"""

from __future__ import annotations

import copy
import json
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from scodbench.nets import ResNet18
from scodbench.speed.paper_nets import SMALL, Domain
from scodbench.speed.turns import Run, machine, settle
from scodkit import Categorical, Monitor
from scodkit.model.inputs import Inputs
from scodkit.model.network import Network, StateWatch
from scodkit.sketch import Nystrom

BATCHES = (1, 64)

# that the contenders of one network take turns for, and how often each at least
SECONDS = 20
FEWEST = 10


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


def fitted(domain: Domain, model: nn.Module) -> Monitor:
    """Return a monitor of a model, fitted on random inputs."""
    monitor = Monitor(model, domain.likelihood, domain.rank, sketch=Nystrom(size=domain.size))
    return monitor.fit([domain.batch(64)], progress=False)


def untrusting(monitor: Monitor) -> Monitor:
    """Return a monitor that scores without what is there for trust alone."""
    scorer: Any = monitor._ready()
    engine: Any = scorer.source.engine
    recorded, monitor.check_every = engine._recorder, 0
    scorer.check = lambda *_, **__: scorer.fitted
    scorer.watch.look = lambda _: None

    def careless(call: Inputs) -> Any:
        found = recorded(call)
        found._samples = None
        return found

    engine._recorder = careless
    return monitor


def lower_quartiles(runs: Mapping[str, Run]) -> dict[str, float]:
    """Return the milliseconds of contenders that take turns, a single run at a time.

    A few percent are to be told apart: what disturbs a run, or a few in a row, falls on all
    contenders alike, and the quicker runs are those that little has disturbed.
    """
    found: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    end = time.perf_counter() + SECONDS
    while time.perf_counter() < end or len(found["score"]) < FEWEST:
        for name, run in runs.items():
            began = time.perf_counter()
            run()
            found[name].append((time.perf_counter() - began) * 1e3)
    return {name: statistics.quantiles(times, n=4)[0] for name, times in found.items()}


def costs(domain: Domain, size: int) -> dict[str, object]:
    """Return the milliseconds of a score with all checks and without, and of a first batch."""
    model, x = domain.model(), domain.batch(size)
    monitor = fitted(domain, model)
    bare, strict = untrusting(copy.deepcopy(monitor)), copy.deepcopy(monitor)
    strict.check_every = 1

    def forward() -> None:
        with torch.no_grad():
            model(x)

    runs = {
        "forward": forward,
        "score": lambda: monitor.score(x),
        "unchecked": lambda: bare.score(x),
        "each batch checked": lambda: strict.score(x),
    }
    found = lower_quartiles(runs)
    times = {f"{name} ms": round(ms, 4) for name, ms in found.items()}
    extra = found["score"] / found["unchecked"] - 1
    # one in so many is checked, which the median of the runs does not show
    checked = (found["each batch checked"] / found["score"] - 1) / monitor.check_every
    return {"net": domain.name, "batch": size, **times, "extra": round(extra + checked, 4)}


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
            watch.unmoved()
        times.append((time.perf_counter() - began) / 20)
    return min(times) * 1e6


def measure(device: str, output: Path) -> None:
    """Time every network, and write the rows.

    Args:
        device: cpu.
        output: Folder for the rows.
    """
    settle(device)
    rows: list[dict[str, object]] = []
    rows.append({"state check of 200 parameters and 200 buffers us": state_microseconds()})
    print(rows[-1])
    for domain in NETS:
        for size in BATCHES:
            rows.append(costs(domain, size))
            print(rows[-1], flush=True)
    text = "".join(json.dumps({**row, **machine(device)}) + "\n" for row in rows)
    (output / "checks.jsonl").write_text(text, encoding="utf-8")
