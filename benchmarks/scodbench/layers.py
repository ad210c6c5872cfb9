"""Do more layers serve a regressor better than more directions, where memory is short?

`Fused` takes the last 15 % of layers, or fewer where its budget leaves few directions in so
many weights. From how many directions on more layers serve better is measured on six tasks that
are none of the domains: angle, size and place of garments and of house numbers. Classes 0-4 are
learnt; classes 5-9, and photographs beside house numbers, are unknown.
``scodbench layers`` writes rows to benchmarks/results/layers.jsonl, and a table.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import affine_grid, grid_sample
from tqdm.auto import tqdm

from scodbench.data import load
from scodbench.samples import TensorSamples
from scodbench.speed.turns import machine, settle
from scodbench.training import Recipe, train
from scodkit import Budget, Fused, Gaussian, LastLayers, Monitor
from scodkit.metrics import separation
from scodkit.model.parameters import ParameterSet, endings, select

RESULTS = Path("benchmarks/results")
ROWS = RESULTS / "layers.jsonl"
DIRECTIONS = (6, 10, 15, 20, 40)  # that the budget leaves in the last 15 % of layers
ENOUGH = (1, 10, 20, 40)  # directions that a choice of layers must leave
SEEDS = 2
_TRAIN, _SELECTION, _TEST = 3000, 500, 1000
_RECIPE = Recipe(torch.optim.Adam, 1e-3, 64, 8)
_BATCH = 100


@dataclass(frozen=True)
class Task:
    """A number to be read off a picture.

    Args:
        pictures: Known and unknown ones, ``(n, channels, height, width)`` in [0, 1].
        name: ``angle``, ``size`` or ``place``.
    """

    pictures: Callable[[], tuple[Tensor, Tensor]]
    name: str

    def samples(self, pictures: Tensor, seed: int) -> TensorSamples:
        """Return pictures moved at random, with how far."""
        generator = torch.Generator().manual_seed(seed)
        amount = torch.randn(len(pictures), generator=generator)
        one, zero = torch.ones_like(amount), torch.zeros_like(amount)
        cos, sin = (amount * math.pi / 8).cos(), (amount * math.pi / 8).sin()
        larger = (0.2 * amount).exp()
        back = {
            "angle": [cos, -sin, zero, sin, cos, zero],
            "size": [larger, zero, zero, zero, larger, zero],
            "place": [one, zero, 0.2 * amount, zero, one, zero],
        }[self.name]
        grid = affine_grid(
            torch.stack(back, 1).view(-1, 2, 3), list(pictures.shape), align_corners=False
        )
        moved = grid_sample(pictures, grid, align_corners=False)
        return TensorSamples(moved, amount[:, None], torch.Tensor.clone)


def garments() -> tuple[Tensor, Tensor]:
    """Return garments of classes 0-4, and of the others."""
    images, labels = load.fashion_mnist("train")
    return _parted(images[:20_000, None].float() / 255, labels[:20_000] < 5)


def numbers() -> tuple[Tensor, Tensor]:
    """Return house numbers 0-4, and the others with photographs."""
    images, labels = load.svhn()
    photographs = load.tinyimagenet()[0][:_TEST]
    known, novel = _parted(_as_channels(images), labels < 5)
    # each picture twice: they are moved at random
    return known.repeat(3, 1, 1, 1), torch.cat([novel[:_TEST], _as_channels(photographs)])


def _as_channels(images: Tensor) -> Tensor:
    return (images if images.shape[1] == 3 else images.permute(0, 3, 1, 2)).float() / 255


def _parted(images: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
    return images[known], images[~known]


TASKS = {
    f"{name} of {what}": Task(pictures, name)
    for what, pictures in (("garments", garments), ("house numbers", numbers))
    for name in ("angle", "size", "place")
}


def build(channels: int) -> nn.Module:
    """Return twelve layers, of which the last 15 % have 81,089 weights and more.

    Args:
        channels: Of a picture.
    """
    widths = [channels, 16, 16, 32, 32, 64, 64, 64, 64, 96]
    layers: list[nn.Module] = []
    for i, (before, after) in enumerate(itertools.pairwise(widths)):
        layers += [nn.Conv2d(before, after, 3, 2 if i in (1, 3, 5) else 1, 1), nn.ReLU()]
    head = [nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(384, 64), nn.ReLU()]
    return nn.Sequential(*layers, *head, nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 1))


def layers_of(model: nn.Module, x: Tensor) -> list[ParameterSet]:
    """Return the last layer, the last two, and so on to the last 15 % of layers."""
    network = Monitor(model, Gaussian())._network
    with network.evaluating():
        call = network.inputs_of(x)
        most = select(LastLayers(fraction=0.15), network, call).num_parameters
        return [own for own in endings(network, call) if own.num_parameters <= most]


def rows(task: str, seed: int) -> Iterator[dict[str, Any]]:
    """Yield the AUROC of a network's `Fused` for each budget and choice of layers."""
    known, novel = TASKS[task].pictures()
    own = TASKS[task].samples(known[: _TRAIN + _SELECTION + _TEST], seed)
    parts = torch.split(torch.arange(len(own)), [_TRAIN, _SELECTION, _TEST])
    learnt, held_out, new = (own.take(part) for part in parts)
    unknown = TASKS[task].samples(novel[-_TEST:], seed + 1000)
    data = (learnt, held_out)
    trained = train(
        lambda: build(known.shape[1]), Gaussian(), _RECIPE, data, seed, progress=False
    )
    choices = layers_of(trained.model, known[:2])
    for directions in DIRECTIONS:
        budget = Budget(bytes=8 * directions * choices[-1].num_parameters)
        for count, chosen in enumerate(choices, start=1):
            fused = Fused(trained.model, Gaussian(), parameters=chosen.names, budget=budget)
            fused.fit(learnt.batches(_BATCH), progress=False)
            fused.calibrate(held_out.batches(_BATCH), progress=False)
            mine, theirs = (
                torch.cat([fused.score(x) for x, _ in sample.batches(_BATCH)])
                for sample in (new, unknown)
            )
            yield {
                "task": task,
                "seed": seed,
                "bytes": budget.bytes,
                "layers": count,
                "directions": budget.bytes // (8 * chosen.num_parameters),
                "kept": fused.monitor.rank,
                "auroc": separation(mine, theirs, resamples=20).auroc,
                "loss": trained.loss,
            }


def mean_auroc(found: list[dict[str, Any]], enough: int) -> float:
    """Return the mean AUROC if the longest end with enough directions is taken.

    Args:
        found: Rows of one or several budgets.
        enough: Directions; if no end has as many, the last layer alone is taken.
    """
    best: dict[tuple[object, ...], dict[str, Any]] = {}
    for row in sorted(found, key=lambda row: int(row["layers"])):
        if row["layers"] == 1 or row["directions"] >= enough:
            best[row["task"], row["seed"], row["bytes"]] = row
    return statistics.mean(float(row["auroc"]) for row in best.values())


def table(found: list[dict[str, Any]]) -> str:
    """Return mean AUROC over tasks and networks, for each budget and rule."""
    budgets = sorted({row["bytes"] for row in found})
    titles = ["last 15 %", *(f"end with {n} directions" for n in ENOUGH[1:])]
    lines = [
        "| directions in the last 15 % of layers | " + " | ".join(titles) + " |",
        "| --- |" + " --: |" * len(titles),
    ]
    for directions, size in zip(DIRECTIONS, budgets, strict=True):
        own = [row for row in found if row["bytes"] == size]
        cells = [f"{mean_auroc(own, n):.3f}" for n in ENOUGH]
        lines.append(f"| {directions} | " + " | ".join(cells) + " |")
    cells = [f"{mean_auroc(found, n):.3f}" for n in ENOUGH]
    return "\n".join([*lines, "| mean | " + " | ".join(cells) + " |"]) + "\n"


def main(*, tables: bool) -> None:
    """Measure, then write the table from the rows.

    Args:
        tables: Only write the table of the rows that are there.
    """
    if not tables:
        settle("cpu")
        with ROWS.with_suffix(".part").open("w", encoding="utf-8") as file:
            for task, seed in tqdm(
                list(itertools.product(TASKS, range(SEEDS))), unit="network"
            ):
                for row in rows(task, seed):
                    file.write(json.dumps({**row, **machine("cpu")}) + "\n")
        ROWS.with_suffix(".part").replace(ROWS)
    found = [json.loads(line) for line in ROWS.read_text(encoding="utf-8").splitlines()]
    text = table(found)
    (RESULTS / "layers.md").write_text(text, encoding="utf-8")
    print(text)
