"""How a fit scales over processes: measured on the cores at hand, projected to many GPUs.

``scodbench speed scaling`` times fits by one and by two processes, each with
as much data; ``--device cuda`` times the steps of a fit on one GPU. Both add rows to
``benchmarks/results/scaling.jsonl`` and write ``scaling.md``, the projection included.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.multiprocessing.spawn import spawn

from scodbench.speed import paper_nets
from scodbench.speed.large_nets import VisionTransformer
from scodbench.speed.turns import Timed, machine
from scodkit import Categorical, Monitor
from scodkit.fit.processes import Processes
from scodkit.sketch import Nystrom

Row = dict[str, Any]

# of the projection
IMAGES = 1_281_167
GPUS = (1, 8, 64, 512)
PER_NODE = 8
# bytes a second that a GPU sends in an all-reduce, and seconds before the first arrives; as
# vendors state them for NVLink 4 and for one 400 Gb/s adapter a GPU, at three quarters
INSIDE, BETWEEN, DELAY = 0.75 * 450e9, 0.75 * 50e9, 20e-6


def fit_times(monitor: Monitor, batches: list[Tensor], **options: Any) -> Row:
    """Return the seconds of a fit: all of it, its steps, adding up, and the rest."""
    added: list[float] = []
    add_up = Processes.add_up

    def timed(processes: Processes, state: Any) -> Any:
        if processes.count > 1:
            distributed.barrier()  # waiting for the slowest is part of the steps
        began = time.perf_counter()
        found = add_up(processes, state)
        added.append(time.perf_counter() - began)
        return found

    clock = Timed(batches)
    Processes.add_up = timed  # type: ignore[method-assign,assignment]
    try:
        began = time.perf_counter()
        monitor.fit(clock, progress=False, check_deterministic=False, **options)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        whole = time.perf_counter() - began
    finally:
        Processes.add_up = add_up  # type: ignore[method-assign]
    state = monitor.fitted.state
    assert state is not None
    sent = sum(tensor.nbytes for tensor in state.tensors.values())
    return {"whole_s": whole, "steps_s": clock.seconds, "add_up_s": added[0], "bytes": sent}


def cpu_process(rank: int, count: int, samples: int, folder: str) -> None:
    """Fit in one of several processes, on a core of its own, and note the times."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=count
    )
    domain = paper_nets.MNIST
    x = torch.randn(samples, *domain.shape, generator=torch.Generator().manual_seed(rank))
    sketch = Nystrom(size=domain.size)
    for _ in range(2):  # the first warms up
        distributed.barrier()
        monitor = Monitor(domain.model(), domain.likelihood, domain.rank, sketch=sketch)
        times = fit_times(monitor, list(x.split(256)))
    Path(folder, str(rank)).write_text(json.dumps(times))
    distributed.destroy_process_group()


def cpu_rows(samples: int, rounds: int) -> Iterator[Row]:
    """Yield fits by one and by two processes in turns, each with as many samples."""
    for turn in range(rounds):
        for count in (1, 2):
            with tempfile.TemporaryDirectory() as folder:
                spawn(cpu_process, (count, samples, folder), nprocs=count)
                times = [json.loads(Path(folder, str(r)).read_text()) for r in range(count)]
            yield {
                "kind": "weak scaling",
                "net": paper_nets.MNIST.name,
                "processes": count,
                "samples": samples * count,
                "turn": turn,
                "whole_s": max(own["whole_s"] for own in times),
                "add_up_s": max(own["add_up_s"] for own in times),
                "bytes": times[0]["bytes"],
            }


def gpu_rows(batches: int) -> Iterator[Row]:
    """Yield the steps of a fit of ViT-B on a GPU: last layers, and all of it."""
    x = torch.randn(64, 3, 224, 224, device="cuda")
    for name, directions, size in (("ViT-B, 10 directions", 10, 40),):
        torch.manual_seed(0)
        model: nn.Module = VisionTransformer().cuda().eval()
        likelihood = Categorical(directions=directions)
        monitor = Monitor(model, likelihood, size // 2, sketch=Nystrom(size=size))
        monitor.memory_budget = 48 * 2**30  # the GPU has nothing else to do
        monitor.fit(
            [x] * 2, progress=False, check_deterministic=False, precision=torch.bfloat16
        )
        times = fit_times(monitor, [x] * batches, precision=torch.bfloat16)
        rest = times["whole_s"] - sum(times["steps_s"])
        yield {"kind": "steps", "net": name, "batch": len(x), "rest_s": rest, **times}


def projected(row: Row, gpus: int, seed: int = 0) -> Row:
    """Return what a fit on all images takes on many GPUs, by its measured steps.

    Every GPU draws its steps from the measured ones; the slowest is waited for. Adding up is
    a ring within each node and one between nodes; the rest is what one GPU took for it.
    """
    draw = torch.Generator().manual_seed(seed)
    steps = torch.tensor(row["steps_s"][2:], dtype=torch.float64)  # without the first ones
    count = math.ceil(math.ceil(IMAGES / gpus) / row["batch"])
    drawn = steps[torch.randint(len(steps), (gpus, count), generator=draw)]
    slowest = float(drawn.sum(1).max())
    inside, nodes = min(gpus, PER_NODE), max(1, gpus // PER_NODE)
    ring = 2 * (inside - 1) / inside * row["bytes"] / INSIDE
    ring += 2 * (nodes - 1) / nodes * row["bytes"] / inside / BETWEEN
    buckets = row["bytes"] / (4 * 2**24)
    ring += buckets * DELAY * 2 * (inside - 1 + nodes - 1) if gpus > 1 else 0.0
    whole = slowest + ring + row["rest_s"]
    return {"net": row["net"], "gpus": gpus, "steps": slowest, "add_up": ring, "whole": whole}


def table(rows: list[Row]) -> str:
    """Return both tables as Markdown."""
    weak = [row for row in rows if row["kind"] == "weak scaling"]
    lines = [
        "| processes | samples | seconds | samples per second | efficiency | adding up |",
        "| --: | --: | --: | --: | --: | --: |",
    ]
    rates = {}
    for count in sorted({row["processes"] for row in weak}):
        own = [row for row in weak if row["processes"] == count]
        whole = statistics.median(row["whole_s"] for row in own)
        added = statistics.median(row["add_up_s"] for row in own)
        rates[count] = own[0]["samples"] / whole
        share = rates[count] / (count * rates[1])
        lines.append(
            f"| {count} | {own[0]['samples']} | {whole:.2f} | {rates[count]:.0f} | "
            f"{share:.0%} | {added / whole:.1%} |"
        )
    steps = [row for row in rows if row["kind"] == "steps"]
    if steps:
        lines += [
            "",
            "| network | GPUs | seconds of steps | adding up | in all | its share |",
            "| --- | --: | --: | --: | --: | --: |",
        ]
    for row in steps:
        for gpus in GPUS:
            own = projected(row, gpus)
            lines.append(
                f"| {own['net']} | {gpus} | {own['steps']:.1f} | {own['add_up']:.2f} | "
                f"{own['whole']:.1f} | {own['add_up'] / own['whole']:.1%} |"
            )
    return "\n".join(lines) + "\n"


def measure(device: str, output: Path) -> None:
    """Measure on a device, and write all rows and both tables.

    Args:
        device: cpu or cuda.
        output: Folder for rows and tables.
    """
    path = output / "scaling.jsonl"
    about = {"device": device, **machine(device)}
    kept = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    kept = [row for row in kept if row["device"] != device]
    for row in gpu_rows(batches=30) if device == "cuda" else cpu_rows(samples=4096, rounds=5):
        kept.append({**row, **about})
        print(json.dumps({k: v for k, v in row.items() if k != "steps_s"}), flush=True)
    path.write_text("".join(f"{json.dumps(row)}\n" for row in kept))
    text = table(kept)
    (output / "scaling.md").write_text(text)
    print(text)
