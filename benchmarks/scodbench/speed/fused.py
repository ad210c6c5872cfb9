"""What a fused score costs beside the prediction alone and beside SCOD, in one run, in turns.

Writes rows to results/fused.jsonl; those of a GPU to fused_cuda.jsonl.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from scodbench.nets import DenseNet121, ResNet18
from scodbench.speed import contenders
from scodbench.speed.paper_nets import SMALL, Domain
from scodbench.speed.turns import Run, add_rows, interleaved, rows_file, settle
from scodkit import Categorical, Fused, LastLayers, Monitor
from scodkit.sketch import Nystrom

BATCHES = (1, 64)
SECONDS = {"cpu": 2.0, "cuda": 0.1}  # of each; a GPU's clock is read every ten runs

NETS = (
    *SMALL,
    Domain("resnet-18, 64 x 64", lambda: ResNet18(5), Categorical(), (3, 64, 64), 124, 20, 5),
    Domain("densenet-121", lambda: DenseNet121(10), Categorical(), (3, 32, 32), 184, 30, 10),
)


def rows(domain: Domain, batch: int, device: str) -> Iterator[dict[str, Any]]:
    """Yield the times of one network."""
    model, x = domain.model(device), domain.batch(batch, device)
    train = [domain.batch(64, device) + 0.1 * i for i in range(16)]
    held_out = [domain.batch(64, device) + 0.1 * i + 0.05 for i in range(4)]
    scod = Monitor(
        model,
        domain.likelihood,
        domain.rank,
        sketch=Nystrom(size=domain.size),
        parameters=LastLayers(fraction=0.15),
    ).fit(train[:4], progress=False)
    fused, recorded = (
        Fused(model, domain.likelihood)
        .fit(train, progress=False)
        .calibrate(held_out, progress=False)
        for _ in range(2)
    )
    recorded.compile(x)
    runs: dict[str, Run] = {
        "forward": contenders.forward(model, x),
        "fused": lambda: fused.score(x),
        "fused, compiled": lambda: recorded.score(x),
        "scod, weights of fused": lambda: fused.monitor.score(x),
        "scod, last layers": lambda: scod.score(x),
    }
    for method, ms in interleaved(runs, device, SECONDS[device]).items():
        yield {"net": domain.name, "method": method, "batch": batch, "ms": ms}


def measure(device: str, output: Path) -> None:
    """Measure all networks, write the rows and print them.

    Args:
        device: Where.
        output: Folder for the rows.
    """
    settle(device)
    file = rows_file(output, "fused", device)
    for domain in NETS:
        for batch in BATCHES:
            torch.manual_seed(0)
            times = list(rows(domain, batch, device))
            add_rows(file, times, "forward_passes", times[0]["ms"], device)
            cells = "  ".join(f"{r['method']} {r['forward_passes']:.2f}" for r in times)
            print(f"{domain.name}, batch {batch}: {cells}", flush=True)
