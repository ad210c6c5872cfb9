"""A thousand classes by their largest directions, and next-token heads by draws.

Type ``OMP_NUM_THREADS=1 scodbench speed many-classes``. Rows, beside the forward pass: of
classifiers the directions at the output alone, by way of the whole matrix and by its secular
equation; of decoders scores and fits. Rows go to ``results/many_classes.jsonl``, a table beside
them.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from scodbench.speed.turns import Timed, machine
from scodkit import Categorical, LastLayers, Monitor
from scodkit.likelihoods import categorical
from scodkit.model.parameters import Selection

CLASSES, BATCH, OLD_BATCH = 1000, 64, 4
WIDTH, LENGTH, RANK = 64, 16, 10
BODY = ["blocks.*"]


class Block(nn.Module):
    """A decoder's layer: causal attention with one head, then a perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mix, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return states ``(B, S, W)``."""
        query, key, value = self.mix(self.first(x)).chunk(3, -1)
        x = x + self.out(scaled_dot_product_attention(query, key, value, is_causal=True))
        return x + self.down(nn.functional.gelu(self.up(self.second(x))))


class Decoder(nn.Module):
    """Two layers of width 64 between tokens ``(B, S)`` and next-token logits ``(B, S, V)``.

    Args:
        vocabulary: Number of tokens.
    """

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(WIDTH, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits."""
        return self.head(self.blocks(self.embedding(tokens)))


@dataclass(frozen=True)
class Task:
    """A decoder, what of it is monitored, and how."""

    vocabulary: int
    likelihood: Categorical
    parameters: Selection
    size: int


DRAWS = {pool: Categorical(class_dim=-1, samples=4, pool=pool) for pool in ("mean", "last")}
LARGEST = Categorical(1, class_dim=-1, pool="last")
TASKS = [
    Task(vocabulary, likelihood, parameters, size)
    for vocabulary, size in ((32_000, 8), (128_000, 4))
    for likelihood in (DRAWS["mean"], DRAWS["last"], LARGEST)
    for parameters in (BODY, LastLayers(count=1))
]


def milliseconds(run: Callable[[], object], samples: int) -> float:
    """Return the median time for each sample, after a run that is not counted."""
    run()
    found = []
    for _ in range(7):
        started = time.perf_counter()
        run()
        found.append(1e3 * (time.perf_counter() - started) / samples)
    return statistics.median(found)


def classifiers() -> Iterator[dict[str, Any]]:
    """Yield the times of directions of a thousand classes."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, CLASSES)).eval()
    x = torch.randn(BATCH, 512)
    with torch.no_grad():
        forward = milliseconds(lambda: net(x), BATCH)
        logits = 3 * net(x)
    for directions in (1, 5):
        likelihood = Categorical(directions)
        q = logits[:OLD_BATCH].double().softmax(-1)
        monitor = Monitor(net, likelihood, RANK, parameters=LastLayers(count=1))
        monitor.fit(torch.randn(128, 512).split(64), progress=False)
        yield {
            "what": f"{CLASSES} classes, directions={directions}",
            "forward_ms": forward,
            "matrix_ms": milliseconds(
                lambda q=q, k=directions: categorical._eigenrows(q, k), OLD_BATCH
            ),
            "rows_ms": milliseconds(lambda f=likelihood.factor: f(logits), BATCH),
            "score_ms": milliseconds(lambda score=monitor.score: score(x), BATCH),
        }


def decoder(task: Task) -> dict[str, Any]:
    """Return the times of one decoder."""
    torch.manual_seed(0)
    net = Decoder(task.vocabulary).eval()
    batches = torch.randint(task.vocabulary, (6 * task.size, LENGTH)).split(task.size)
    clock = Timed(list(batches))
    monitor = Monitor(net, task.likelihood, RANK, parameters=task.parameters)
    monitor.fit(clock, progress=False, check_deterministic=False)
    tokens = batches[0]
    with torch.no_grad():
        forward = milliseconds(lambda: net(tokens), task.size)
        logits, keys = net(tokens), torch.arange(task.size)
    likelihood = task.likelihood
    rule = f"samples={likelihood.samples}" if likelihood.draws else "directions=1"
    size = f"{task.vocabulary // 1000}k tokens x {LENGTH}"
    where = "body" if task.parameters is BODY else "head"
    return {
        "what": f"{size}, {rule}, {likelihood.pool}, {where}",
        "forward_ms": forward,
        "rows_ms": milliseconds(lambda: likelihood.factor(logits, keys), task.size),
        "score_ms": milliseconds(lambda: monitor.score(tokens), task.size),
        # the first batches also choose the engine and check its rows
        "fit_ms": 1e3 * statistics.median(clock.seconds[2:]) / task.size,
        "weights": monitor.fitted.parameters.num_parameters,
        "engine": monitor.fitted.engine,
    }


def measure(device: str, output: Path) -> None:
    """Measure all, write rows, print a table.

    Args:
        device: cpu.
        output: Folder for rows and table.
    """
    warnings.simplefilter("ignore")
    found = []
    for row in (*classifiers(), *map(decoder, TASKS)):
        found.append({**row, **machine(device)})
        print(json.dumps(row), file=sys.stderr, flush=True)
    path = output / "many_classes.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in found), encoding="utf-8")
    text = table(found)
    path.with_suffix(".md").write_text(text, encoding="utf-8")
    print(text)


def table(rows: list[dict[str, Any]]) -> str:
    """Return rows as Markdown, in milliseconds a sample."""
    names = {
        "forward_ms": "forward",
        "matrix_ms": "directions by the whole matrix",
        "rows_ms": "directions at the output",
        "score_ms": "score",
        "fit_ms": "fit",
    }
    lines = [
        f"| ms per sample | {' | '.join(names.values())} |",
        "| --- |" + " --: |" * len(names),
    ]
    for row in rows:
        cells = " | ".join(f"{row[name]:.2f}" if name in row else "" for name in names)
        lines.append(f"| {row['what']} | {cells} |")
    return "\n".join(lines) + "\n"
