"""Times a scored prediction and a fit against the forward pass, floors, loops and peers.

``scodbench speed --device cpu`` writes one JSON row per net, method and batch to
``benchmarks/results/speed_cpu.jsonl`` and prints the table; ``--device cuda`` likewise.
"""

from __future__ import annotations

import json
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from scodbench.speed import contenders, paper_nets
from scodbench.speed.contenders import fitted_monitor
from scodbench.speed.paper_nets import Domain
from scodbench.speed.speed_table import print_table
from scodbench.speed.turns import interleaved, machine, settle
from scodkit import LastLayers, Monitor
from scodkit.likelihoods import Categorical
from scodkit.sketch import Nystrom

Rows = Iterator[dict[str, object]]


def score_rows(domain: Domain, batch: int, device: str, seconds: float) -> Rows:
    """Yield the times of scored predictions of one network."""
    model = domain.model(device)
    x = domain.batch(batch, device)
    monitor = fitted_monitor(domain, model)
    basis = monitor.basis
    runs: dict[str, Callable[[], object]] = {
        "forward": contenders.forward(model, x),
        "floor": contenders.floor(model, x, domain.likelihood, basis),
        "scodkit": lambda: monitor.score(x),
        "loop": contenders.loop(model, x, domain.likelihood, basis),
    }
    if batch > 1:
        runs["loop in the batch"] = contenders.batch_loop(model, x, domain.likelihood, basis)
    recorded = fitted_monitor(domain, model).compile(x)
    runs["scodkit, compiled"] = lambda: recorded.score(x)
    last = fitted_monitor(domain, model, parameters=LastLayers(count=1))
    runs["scodkit, last layer"] = lambda: last.score(x)
    tail = fitted_monitor(domain, model, parameters=LastLayers(count=1)).compile(x)
    runs["scodkit, last layer, compiled"] = lambda: tail.score(x)
    later = fitted_monitor(domain, model, parameters=LastLayers(fraction=0.15))
    runs["scodkit, last 15 %"] = lambda: later.score(x)
    if isinstance(domain.likelihood, Categorical):
        top = fitted_monitor(domain, model, likelihood=Categorical(directions=1))
        runs["scodkit, directions=1"] = lambda: top.score(x)
        one = fitted_monitor(domain, model, likelihood=Categorical(directions=1)).compile(x)
        runs["scodkit, directions=1, compiled"] = lambda: one.score(x)
    for name, weights in (("last layer", "last_layer"), ("all layers", "all")):
        peer = contenders.laplace(domain, model, weights)
        if peer is not None:
            runs[f"laplace-torch KFAC, {name}"] = lambda peer=peer: peer(x)
    for method, ms in interleaved(runs, device, seconds).items():
        yield {"net": domain.name, "task": "score", "method": method, "batch": batch, "ms": ms}


def fit_rows(domain: Domain, device: str, seconds: float) -> Rows:
    """Yield the time per sample of fits of one network, on batches of 256.

    Ours is the median time between two requests for a batch: choosing an engine and solving
    for the basis do not grow with the data.
    """
    model = domain.model(device)
    x = domain.batch(256, device)
    monitor = Monitor(model, domain.likelihood, domain.rank, sketch=Nystrom(domain.size))
    few = x[:8]
    clock = Clock([x] * 6)
    runs = {
        "fit": lambda: monitor.fit(clock, progress=False, check_deterministic=False),
        "loop": contenders.loop_fit(model, few, domain.likelihood, domain.size),
        "floor": contenders.fit_floor(model, x, domain.likelihood, domain.size),
    }
    ms = interleaved(runs, device, seconds, rounds=5)
    about = {"net": domain.name, "task": "fit", "batch": len(x)}
    ours = statistics.median(clock.seconds) * 1e3
    yield {**about, "method": "scodkit", "ms": ours / len(x)}
    yield {**about, "method": "loop", "ms": ms["loop"] / len(few)}
    yield {**about, "method": "floor", "ms": ms["floor"] / len(x)}


class Clock:
    """A loader that notes how long each batch keeps its reader, but for the first of a pass."""

    def __init__(self, batches: list[Tensor]) -> None:
        self._batches = batches
        self.seconds: list[float] = []

    def __iter__(self) -> Iterator[Tensor]:
        """Yield the batches."""
        for number, batch in enumerate(self._batches):
            began = time.perf_counter()
            yield batch
            if number:
                self.seconds.append(time.perf_counter() - began)


def large_fit_rows(domain: Domain, batch: int, samples: int) -> Rows:
    """Yield the time a GPU takes to sketch a data set that lies in its memory."""
    for name, precision in (("scodkit", None), ("scodkit, bfloat16", torch.bfloat16)):
        monitor = Monitor(
            domain.model("cuda"), domain.likelihood, domain.rank, sketch=Nystrom(domain.size)
        )
        monitor.memory_budget = 5 * 2**34
        x = domain.batch(batch, "cuda")
        _seconds_of_fit(monitor, [x] * 2, precision)
        taken = _seconds_of_fit(monitor, [x] * -(-samples // batch), precision)
        about = {"net": domain.name, "task": f"fit of {samples}", "batch": batch}
        yield {**about, "method": name, "ms": taken * 1e3}
        del monitor
        torch.cuda.empty_cache()


def _seconds_of_fit(
    monitor: Monitor, batches: list[Tensor], precision: torch.dtype | None
) -> float:
    began = time.perf_counter()
    monitor.fit(batches, progress=False, check_deterministic=False, precision=precision)
    torch.cuda.synchronize()
    return time.perf_counter() - began


def captured(function: Callable[[Tensor], Tensor], x: Tensor) -> Callable[[], object]:
    """Return the replay of a CUDA graph of a function, as bare as can be."""
    with torch.no_grad():
        for _ in range(3):
            function(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            function(x)
    return graph.replay


def replay_of(monitor: Monitor, x: Tensor) -> Callable[[], object]:
    """Return the replay of a recorded monitor's CUDA graph, without copies of its results."""
    scorer = monitor._scorer
    assert scorer is not None
    recording = scorer._captured
    assert recording is not None
    return lambda: recording([x], 0)


def gpu_score_rows(domain: Domain, batch: int, seconds: float) -> Rows:
    """Yield the times of recorded scored predictions on a GPU, and their extra memory."""
    model = domain.model("cuda")
    x = domain.batch(batch, "cuda")
    monitor = fitted_monitor(domain, model)
    runs: dict[str, Callable[[], object]] = {
        "forward": contenders.forward(model, x),
        "forward, captured": captured(model, x),
        "floor": contenders.floor(model, x, domain.likelihood, monitor.basis),
        "scodkit": lambda: monitor.score(x),
    }
    extra, block = extra_memory(monitor, model, x, domain)
    recorded = fitted_monitor(domain, model).compile(x)
    runs["scodkit, captured"] = lambda: recorded.score(x)
    runs["scodkit, captured, replay alone"] = replay_of(recorded, x)
    fused = fitted_monitor(domain, model).compile(x, fuse=True)
    runs["scodkit, fused and captured"] = lambda: fused.score(x)
    runs["scodkit, fused and captured, replay alone"] = replay_of(fused, x)
    if isinstance(domain.likelihood, Categorical):
        top = fitted_monitor(domain, model, likelihood=Categorical(directions=1)).compile(x)
        runs["scodkit, directions=1, captured"] = lambda: top.score(x)
    about = {"net": domain.name, "task": "score", "batch": batch}
    for method, ms in interleaved(runs, "cuda", seconds).items():
        yield {**about, "method": method, "ms": ms}
    yield {**about, "task": "extra memory", "method": "scodkit", "bytes": extra, "block": block}


def extra_memory(
    monitor: Monitor, model: torch.nn.Module, x: Tensor, domain: Domain
) -> tuple[int, int]:
    """Return the peak of scoring above the floor's, and the largest layer's block of rows."""
    weights = list(model.parameters())
    with torch.no_grad():
        rows = domain.likelihood.factor(model(x))

    def backward_passes() -> None:
        output = model(x)
        for j in range(rows.shape[1]):
            torch.autograd.grad(output, weights, rows[:, j], retain_graph=True)

    peaks = []
    for run in (backward_passes, lambda: monitor.score(x)):
        run()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    widest = max(p.numel() for p in weights)
    return peaks[1] - peaks[0], widest * rows.shape[1] * len(x) * 4


def rows_of(device: str, seconds: float) -> Rows:
    """Yield all rows of a device."""
    if device == "cuda":
        yield from gpu_score_rows(paper_nets.MNIST, 1, seconds)
        yield from gpu_score_rows(paper_nets.MNIST, 1024, seconds)
        yield from large_fit_rows(paper_nets.TAXINET, 256, 30_000)
        yield from gpu_score_rows(paper_nets.TAXINET, 1, seconds)
        torch.backends.cudnn.benchmark = False  # trying kernels for 120 layers takes longest
        yield from large_fit_rows(paper_nets.CIFAR, 500, 5_000)
        return
    for domain in paper_nets.SMALL:
        for batch in (1, 64):
            yield from score_rows(domain, batch, device, seconds)
        yield from fit_rows(domain, device, seconds)


def measure(device: str, output: Path, seconds: float = 3.0) -> None:
    """Time every network, write the rows and print the table.

    Args:
        device: cpu or cuda.
        output: Folder for rows and tables.
        seconds: For each contender.
    """
    warnings.simplefilter("ignore")  # peers' deprecations
    settle(device)
    about = {"device": device, **machine(device)}
    path = output / f"speed_{device}.jsonl"
    with path.with_suffix(".part").open("w", encoding="utf-8") as file:
        for row in rows_of(device, seconds):
            file.write(json.dumps({**row, **about}) + "\n")
            file.flush()
            print(json.dumps(row), flush=True)
    path.with_suffix(".part").replace(path)
    print_table(output)
