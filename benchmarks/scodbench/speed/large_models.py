"""Networks larger than the paper's on a GPU: times of fits and scores, memory beside its plan.

``scodbench speed large-models --device cuda`` writes one JSON row per case to
``benchmarks/results/large_models.jsonl`` and a table to ``large_models.md``. Weights and inputs
are random; what is measured does not depend on them.
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from scodbench.speed.large_nets import Segmenter, VisionTransformer
from scodbench.speed.turns import Timed, machine
from scodkit import Categorical, LastLayers, Monitor, MonteCarlo
from scodkit.likelihoods import Likelihood
from scodkit.sketch import Nystrom

Row = dict[str, Any]
BUDGET = 32 * 2**30  # for what batches take: the GPU has nothing else to do


def of_every_pixel(output: Tensor) -> torch.distributions.Distribution:
    """Return the classes' distribution at every pixel, from logits ``(B, C, H, W)``."""
    return torch.distributions.Categorical(logits=output.movedim(1, -1))


@dataclass(frozen=True)
class Case:
    """A network, what of it is monitored, and on what."""

    name: str
    build: Callable[[], nn.Module]
    likelihood: Likelihood
    shape: tuple[int, ...]
    batch: int
    batches: int
    parameters: Any = "all"
    precision: torch.dtype | None = None
    scored: bool = True  # or that is out of reach


SIZE = 40  # columns of each sketch
PICTURE, STREET = (3, 224, 224), (3, 512, 512)
LAST = LastLayers(fraction=0.15)
HEAD = LastLayers(count=1)
TEN, CLASSES, MAP = Categorical(directions=10), Categorical(), Categorical(class_dim=1)
PIXELS = MonteCarlo(of_every_pixel, samples=4)
HALF = torch.bfloat16

CASES = (
    Case("ViT-B, all, 10 directions", VisionTransformer, TEN, PICTURE, 32, 6),
    Case("the same in bfloat16", VisionTransformer, TEN, PICTURE, 32, 6, precision=HALF),
    Case("ViT-B, last 15 %, 10 directions", VisionTransformer, TEN, PICTURE, 32, 10, LAST),
    Case("ViT-B, head, 1000 classes", VisionTransformer, CLASSES, PICTURE, 32, 10, HEAD),
    Case("U-Net, 4 draws", Segmenter, PIXELS, STREET, 8, 6),
    Case("U-Net, 21 classes a pixel", Segmenter, MAP, STREET, 8, 3, scored=False),
    Case("ViT-B, all, 1000 classes", VisionTransformer, CLASSES, PICTURE, 32, 2, scored=False),
)


def measured(case: Case) -> Row:
    """Return the time and the peak memory of a fit and of scoring, and what was planned."""
    torch.manual_seed(0)
    model = case.build().cuda().eval()
    x = torch.randn(case.batch, *case.shape, device="cuda")

    def monitored() -> Monitor:
        about = (model, case.likelihood, SIZE // 2)
        monitor = Monitor(*about, sketch=Nystrom(size=SIZE), parameters=case.parameters)
        monitor.memory_budget = BUDGET
        return monitor

    def fit(batches: Iterable[Tensor]) -> Monitor:
        return monitored().fit(batches, progress=False, precision=case.precision)

    plan = monitored().plan(x, precision=case.precision)
    fit([x])  # chooses kernels
    torch.cuda.empty_cache()
    _forward(model, x)
    forward_s, _ = _timed(lambda: _forward(model, x))
    both_s, _ = _timed(lambda: model(x).flatten(1).sum().backward())
    model.zero_grad(set_to_none=True)
    clock, fitted = Timed([x] * case.batches), []
    fit_s, fit_peak = _timed(lambda: fitted.append(fit(clock)))
    steps = clock.seconds[1:] or clock.seconds
    row: Row = {
        "case": case.name,
        "weights": plan.num_parameters,
        "directions": plan.directions,
        "by_products": plan.by_products,
        "samples": case.batches * case.batch,
        "forward_s": forward_s / len(x),
        "both_s": both_s / len(x),
        "step_s": sum(steps) / len(steps) / len(x),
        "fit_s": fit_s,
        "fit_peak": fit_peak,
        "fit_planned": plan.fit_bytes,
    }
    if case.scored:
        fitted[0].score(x)
        score_s, score_peak = _timed(lambda: fitted[0].score(x))
        row |= {"score_s": score_s / len(x), "score_peak": plan.basis_bytes + score_peak}
        row["score_planned"] = plan.score_bytes
    return row


def _forward(model: nn.Module, x: Tensor) -> None:
    with torch.no_grad():
        model(x)


def _timed(run: Callable[[], object]) -> tuple[float, int]:
    """Return seconds, and the bytes at the peak above those before."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - began, torch.cuda.max_memory_allocated() - before


def rows_of(cases: Iterable[Case]) -> Iterator[Row]:
    """Yield the rows of cases; what fails says why."""
    for case in cases:
        try:
            yield measured(case)
        except Exception as error:
            yield {"case": case.name, "why": f"{type(error).__name__}: {error}"[:300]}
        torch.cuda.empty_cache()


def table(rows: list[Row]) -> str:
    """Return rows as Markdown: what fits take, then what scores take."""
    found = [row for row in rows if "why" not in row]
    lines = [
        "| network | weights | directions | method | forward, backward | fit | peak, GB "
        "| planned |",
        "| --- | --: | --: | --- | --: | --: | --: | --: |",
    ]
    for row in found:
        cells = [
            row["case"],
            f"{row['weights'] / 1e6:.1f} M",
            f"{row['directions']:,}",
            "matrix-free" if row["by_products"] else "explicit",
            f"{_milliseconds(row['forward_s'])}, {_milliseconds(row['both_s'])}",
            _milliseconds(row["step_s"]),
            *_sizes(row, "fit"),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    lines += [
        "",
        "| network | forward, backward | score | peak, GB | planned |",
        "| --- | --: | --: | --: | --: |",
    ]
    for row in (row for row in found if "score_s" in row):
        cells = [
            row["case"],
            f"{_milliseconds(row['forward_s'])}, {_milliseconds(row['both_s'])}",
            _milliseconds(row["score_s"]),
            *_sizes(row, "score"),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.1f}"


def _sizes(row: Row, what: str) -> list[str]:
    peak, planned = row[f"{what}_peak"], row[f"{what}_planned"]
    percent = round(100 * (planned / peak - 1))
    return [f"{peak / 1e9:.2f}", f"{planned / 1e9:.2f} ({percent:+d}%)"]


def measure(device: str, output: Path) -> None:
    """Measure all cases, write the rows and print the table.

    Args:
        device: cuda; a CPU would take days.
        output: Folder for rows and table.
    """
    warnings.simplefilter("ignore")
    about = machine(device)
    rows = []
    for row in rows_of(CASES):
        rows.append({**row, **about})
        print(json.dumps(row), flush=True)
        text = "".join(f"{json.dumps(row)}\n" for row in rows)
        (output / "large_models.jsonl").write_text(text)
        (output / "large_models.md").write_text(table(rows))
    print(table(rows))
