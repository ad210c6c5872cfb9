"""Do alarms depend on the prior, or on the noise variance? On three small tasks, none a domain.

The score of a `Gaussian` depends on the prior's variance over the noise variance alone, so one
sweep of the prior is a sweep of both. Thresholds are calibrated anew for each prior.
``scodbench prior`` writes rows to benchmarks/results/prior.jsonl, and a table.
"""

from __future__ import annotations

import functools
import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from scodbench.samples import Loader, TensorSamples
from scodbench.speed.turns import machine, settle
from scodbench.training import Recipe, train
from scodkit import Calibration, Categorical, Gaussian, Monitor
from scodkit.errors import optional
from scodkit.metrics import separation

RESULTS = Path("benchmarks/results")
ROWS = RESULTS / "prior.jsonl"
EXPONENTS = (-8, -6, -4, -2, 0, 2, 8)  # of the prior's variance, in powers of ten
FALSE_ALARM = 0.05
SEEDS = 5
_DEFAULT = 0  # exponent of the prior's variance by default
_RANK, _BATCH = 50, 100


@dataclass(frozen=True)
class Data:
    """Inputs of a task; held-out ones also choose the epoch and the noise variance.

    Args:
        learnt: To train and to fit on.
        held_out: For the threshold.
        test: Known inputs to score.
        unknown: Unknown inputs to score.
    """

    learnt: TensorSamples
    held_out: TensorSamples
    test: Tensor
    unknown: Tensor


def control(seed: int) -> Data:
    """Return six numbers with two smooth outputs and noise; unknown are three times as far."""
    draw = torch.Generator().manual_seed(seed)
    gain, x = torch.randn(6, 2, generator=draw), torch.randn(2500, 6, generator=draw)
    noise = torch.randn(len(x), 2, generator=draw)
    y = torch.tanh(x @ gain) + 0.3 * torch.sin(2 * x[:, :2]) + 0.1 * noise
    parts = torch.split(torch.arange(len(x)), [1500, 500, 500])
    learnt, held_out = (TensorSamples(x[part], y[part]) for part in parts[:2])
    return Data(learnt, held_out, x[parts[2]], 3 * torch.randn(500, 6, generator=draw))


def digits(seed: int, *, numbers: bool) -> Data:
    """Return scikit-learn's digits 0-4, as numbers or as classes; unknown are 5-9."""
    data = optional("sklearn.datasets", "demo").load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(seed))
    images = torch.tensor(data.images, dtype=torch.float32)[order, None] / 16
    labels = torch.tensor(data.target)[order]
    known = labels < 5
    target = labels.float()[:, None] if numbers else labels
    x, y = images[known], target[known]
    parts = torch.split(torch.arange(len(x)), [500, 200, len(x) - 700])
    learnt, held_out = (TensorSamples(x[part], y[part]) for part in parts[:2])
    return Data(learnt, held_out, x[parts[2]], images[~known])


def control_net() -> nn.Module:
    """Return a network of 1,346 weights."""
    layers = (nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 2))
    return nn.Sequential(*layers)


def digits_net(outputs: int) -> nn.Module:
    """Return two convolutions and a linear layer.

    Args:
        outputs: Of the linear layer.
    """
    first = (nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
    second = (nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(128, outputs))


Task = tuple[Callable[[int], Data], Callable[[], nn.Module], Gaussian | Categorical]
TASKS: dict[str, Task] = {
    "control": (control, control_net, Gaussian()),
    "digit as a number": (
        functools.partial(digits, numbers=True),
        functools.partial(digits_net, 1),
        Gaussian(),
    ),
    "digit as a class": (
        functools.partial(digits, numbers=False),
        functools.partial(digits_net, 5),
        Categorical(),
    ),
}


def rows(task: str, seed: int) -> Iterator[dict[str, Any]]:
    """Yield alarms and AUROC of a network for each variance of the prior."""
    of, build, likelihood = TASKS[task]
    data = of(seed)
    recipe = Recipe(torch.optim.Adam, 3e-3, 64 if task == "control" else 32, 30)
    pair = (data.learnt, data.held_out)
    model = train(build, likelihood, recipe, pair, seed, progress=False).model
    if isinstance(likelihood, Gaussian):
        with torch.no_grad():
            errors = data.held_out.targets - model(data.held_out.inputs)
        likelihood = Gaussian(tuple(errors.square().mean(0).tolist()))
    monitor = Monitor(model, likelihood, _RANK).fit(Loader(data.learnt, _BATCH), progress=False)
    alarms: dict[int, Tensor] = {}
    found: list[dict[str, Any]] = []
    for exponent in EXPONENTS:
        monitor.prior_scale = 10.0 ** (exponent / 2)
        held_out = Calibration(monitor.score(data.held_out.inputs))
        known, unknown = monitor.score(data.test), monitor.score(data.unknown)
        raised = [held_out.flag(scores, FALSE_ALARM) for scores in (known, unknown)]
        alarms[exponent] = torch.cat(raised)
        found.append(
            {
                "task": task,
                "seed": seed,
                "exponent": exponent,
                "false_alarms": float(raised[0].double().mean()),
                "caught": float(raised[1].double().mean()),
                "auroc": separation(known, unknown, resamples=20).auroc,
                "captured": monitor.basis.captured,
            }
        )
    for row in found:
        same = alarms[int(row["exponent"])] == alarms[_DEFAULT]
        yield {**row, "same": float(same.double().mean())}


def table(found: list[dict[str, Any]]) -> str:
    """Return what is caught for each prior, and for how many inputs the alarm is the same.

    Args:
        found: Rows.
    """
    titles = [f"1e{exponent}" if exponent else "1" for exponent in EXPONENTS]
    lines = [
        "| prior variance | " + " | ".join(titles) + " |",
        "| --- |" + " --: |" * len(titles),
    ]
    told = {"caught": "unknown inputs flagged", "same": "inputs judged as at 1"}
    for task in TASKS:
        for key, what in told.items():
            cells = [
                f"{statistics.mean(r[key] for r in found if _is(r, task, exponent)):.1%}"
                for exponent in EXPONENTS
            ]
            lines.append(f"| {task}: {what} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _is(row: dict[str, Any], task: str, exponent: int) -> bool:
    return bool(row["task"] == task and row["exponent"] == exponent)


def main(*, tables: bool) -> None:
    """Measure, then write the table from the rows.

    Args:
        tables: Only write the table of the rows that are there.
    """
    if not tables:
        settle("cpu")
        networks = [(task, seed) for task in TASKS for seed in range(SEEDS)]
        with ROWS.with_suffix(".part").open("w", encoding="utf-8") as file:
            for task, seed in tqdm(networks, unit="network"):
                for row in rows(task, seed):
                    file.write(json.dumps({**row, **machine("cpu")}) + "\n")
        ROWS.with_suffix(".part").replace(ROWS)
    found = [json.loads(line) for line in ROWS.read_text(encoding="utf-8").splitlines()]
    text = table(found)
    (RESULTS / "prior.md").write_text(text, encoding="utf-8")
    print(text)
