"""Networks larger than the paper's on a GPU: times of fits and scores, memory beside its plan.

``python benchmarks/large_models.py`` writes one JSON row per case to
``benchmarks/results/large_models.jsonl`` and a table to ``large_models.md``. Weights and inputs
are random; what is measured does not depend on them.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from large_nets import Segmenter, VisionTransformer
from scodkit import Categorical, LastLayers, Monitor, MonteCarlo
from scodkit.likelihoods import Likelihood
from scodkit.sketch import Nystrom
from timing import machine

RESULTS = Path(__file__).parent / "results"
Row = dict[str, Any]


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
    size: int
    parameters: Any = "all"
    options: dict[str, Any] = field(default_factory=dict)
    scored: int = 16  # inputs, at most; 0 where that is out of reach


PICTURE, STREET = (3, 224, 224), (3, 512, 512)
LAST = LastLayers(fraction=0.15)
HEAD = LastLayers(count=1)
TEN, CLASSES, MAP = Categorical(directions=10), Categorical(), Categorical(class_dim=1)
PIXELS = MonteCarlo(of_every_pixel, samples=4)

CASES = (
    Case("ViT-B, all, 10 directions", VisionTransformer, TEN, PICTURE, 32, 40),
    Case("ViT-B, last 15 %, 10 directions", VisionTransformer, TEN, PICTURE, 32, 40, LAST),
    Case(
        "ViT-B, all, 1000 classes", VisionTransformer, Categorical(), PICTURE, 32, 40, scored=0
    ),
    Case("ViT-B, head, 1000 classes", VisionTransformer, CLASSES, PICTURE, 32, 40, HEAD),
    Case(
        "U-Net, 21 classes a pixel",
        Segmenter,
        Categorical(class_dim=1),
        STREET,
        4,
        40,
        scored=0,
    ),
    Case("U-Net, 4 draws", Segmenter, PIXELS, STREET, 4, 40),
)


def measured(case: Case, samples: int) -> Row:
    """Return the time and the peak memory of a fit and of scoring, and what was planned."""
    torch.manual_seed(0)
    model = case.build().cuda().eval()
    x = torch.randn(case.batch, *case.shape, device="cuda")
    sketch = Nystrom(size=case.size)
    monitor = Monitor(
        model, case.likelihood, case.size // 2, sketch=sketch, parameters=case.parameters
    )
    plan = monitor.plan(x)
    monitor.fit([x], progress=False, **case.options)  # chooses kernels and engines
    torch.cuda.empty_cache()
    forward_s, forward_peak = _timed(lambda: _forward(model, x))
    both_s, both_peak = _timed(lambda: model(x).sum().backward())
    model.zero_grad(set_to_none=True)
    batches = [x] * max(1, samples // case.batch)
    fit_s, fit_peak = _timed(lambda: monitor.fit(batches, progress=False, **case.options))
    row: Row = {
        "case": case.name,
        "weights": plan.num_parameters,
        "directions": plan.directions,
        "columns": plan.columns,
        "by_products": plan.by_products,
        "samples": len(batches) * case.batch,
        "forward_s": forward_s / len(x),
        "forward_peak": forward_peak,
        "both_s": both_s / len(x),
        "both_peak": both_peak,
        "fit_s": fit_s,
        "fit_peak": fit_peak,
        "fit_planned": plan.fit_bytes,
        "score_planned": plan.score_bytes,
    }
    if case.scored:
        few = x[: case.scored]
        monitor.score(few)
        score_s, score_peak = _timed(lambda: monitor.score(few))
        row |= {"score_s": score_s / len(few), "score_peak": score_peak}
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


def rows_of(cases: Iterator[Case], samples: int) -> Iterator[Row]:
    """Yield the rows of cases; what fails says why."""
    for case in cases:
        try:
            yield measured(case, samples)
        except Exception as error:
            yield {"case": case.name, "why": f"{type(error).__name__}: {error}"[:300]}
        torch.cuda.empty_cache()


def table(rows: list[Row]) -> str:
    """Return rows as Markdown."""
    lines = [
        "| network | weights | directions | way | ms a sample, fit | peak, GB | planned, GB | "
        "ms a sample, scored | peak, GB | planned, GB |",
        "| --- | --: | --: | --- | --: | --: | --: | --: | --: | --: |",
    ]
    for row in (row for row in rows if "why" not in row):
        way = "products" if row["by_products"] else "rows"
        scored = ["", "", ""]
        if "score_s" in row:
            sizes = (f"{row[name] / 1e9:.2f}" for name in ("score_peak", "score_planned"))
            scored = [f"{1e3 * row['score_s']:.1f}", *sizes]
        cells = [
            row["case"],
            f"{row['weights'] / 1e6:.1f} M",
            f"{row['directions']}",
            way,
            f"{1e3 * row['fit_s'] / row['samples']:.1f}",
            f"{row['fit_peak'] / 1e9:.2f}",
            f"{row['fit_planned'] / 1e9:.2f}",
            *scored,
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure all cases, or those that are named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", action="append", help="part of a name; may be repeated")
    parser.add_argument("--samples", type=int, default=256, help="of a fit")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    chosen = (c for c in CASES if not options.case or any(o in c.name for o in options.case))
    about = machine("cuda")
    rows = []
    for row in rows_of(chosen, options.samples):
        rows.append({**row, **about})
        print(json.dumps(row), flush=True)
    text = "".join(f"{json.dumps(row)}\n" for row in rows)
    (options.output / "large_models.jsonl").write_text(text)
    (options.output / "large_models.md").write_text(table(rows))
    print(table(rows))


if __name__ == "__main__":
    main()
