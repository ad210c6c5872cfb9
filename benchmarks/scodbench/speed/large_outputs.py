"""Fits of last layers with many outputs, explicit and matrix-free: seconds and peak memory.

Type ``OMP_NUM_THREADS=1 scodbench speed large-outputs``. Every fit runs in a process of
its own, so that its peak is its own; rows go to ``results/large_outputs.jsonl``, a table
beside them.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from scodbench.speed.turns import machine
from scodkit import Categorical, LastLayers, Monitor

RANK = 50
# ways in rows of results, and what readers call them
NAMES = {"rows": "explicit", "products": "matrix-free"}
# inputs of the last layer, its outputs, samples
HEADS = [(512, 100, 16), (512, 300, 16), (512, 1000, 16), (128, 3100, 4), (512, 1000, 256)]
# what takes longer with explicit gradients is left to the other way
MOST_ROWS = 20_000


def fit(inputs: int, outputs: int, samples: int, way: str) -> dict[str, object]:
    """Fit one head in this process."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, inputs), nn.ReLU(), nn.Linear(inputs, outputs))
    monitor = Monitor(model, Categorical(), RANK, parameters=LastLayers(count=1))
    batches = torch.randn(samples, 64).split(64)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.perf_counter()
    monitor.fit(batches, progress=False, products=way == "products")
    seconds = time.perf_counter() - started
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    # afterwards: a plan computes, too, and the peak would be its own
    taken = "products" if monitor.plan(batches[0]).by_products else "rows"
    few = torch.randn(8, 64)
    monitor.score(few)
    started = time.perf_counter()
    monitor.score(few)
    score_s = (time.perf_counter() - started) / len(few)
    return {
        "head": f"{inputs} -> {outputs}",
        "samples": samples,
        "way": way,
        "seconds": round(seconds, 2),
        "peak_bytes": peak,
        "taken": taken,
        "score_s": score_s,
        "trace": monitor.basis.trace,
        "rank": RANK,
        **machine("cpu"),
    }


def measure(device: str, output: Path) -> None:
    """Fit all heads both ways, write rows, print a table.

    Args:
        device: cpu.
        output: Folder for rows and table.
    """
    found = []
    for inputs, outputs, samples in HEADS:
        for way in ("rows", "products"):
            if way == "rows" and samples * outputs > MOST_ROWS:
                continue
            arguments = ["-m", __name__, str(inputs), str(outputs), str(samples), way]
            done = subprocess.run(
                [sys.executable, *arguments], check=True, capture_output=True, text=True
            )
            found.append(json.loads(done.stdout))
            print(done.stdout.strip(), file=sys.stderr)
    path = output / "large_outputs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in found))
    text = table(found)
    path.with_suffix(".md").write_text(text)
    print(text)


def table(rows: list[dict[str, Any]]) -> str:
    """Return rows as Markdown."""
    lines = [
        "| head | samples | method | seconds | peak | chosen automatically | ms per score |",
        "| --- | --: | --- | --: | --: | --- | --: |",
    ]
    for row in rows:
        mib = f"{row['peak_bytes'] / 2**20:.0f} MiB"
        lines.append(
            f"| {row['head']} | {row['samples']} | {NAMES[row['way']]} "
            f"| {row['seconds']:.1f} | {mib} | {NAMES[row['taken']]} "
            f"| {1e3 * row['score_s']:.1f} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(json.dumps(fit(*map(int, sys.argv[1:4]), sys.argv[4])))
