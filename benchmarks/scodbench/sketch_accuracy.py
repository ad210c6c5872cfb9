"""How close each sketch comes to the exact Fisher information of real networks.

Writes one JSON row per (net, sketch, size, rank, seed) to results/sketch_accuracy.jsonl, then a
table and a figure made from those rows alone. ``make bench-sketch`` runs it, ``--tables``
redraws.

Errors are relative, in Frobenius and nuclear norm; "over best" is the nuclear error over the
least any matrix of that rank can have. AUROCs are reported, never used to choose anything.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor

from scodbench.speed.real_nets import TrainedNet, mnist_net, wine_net
from scodkit import Eigenbasis
from scodkit.factors.alone import FunctionalEngine
from scodkit.factors.pieces import FactorSource
from scodkit.model.inputs import Inputs
from scodkit.model.network import Network
from scodkit.model.parameters import select
from scodkit.scoring.energies import Energies
from scodkit.scoring.score import score
from scodkit.sketch import (
    SRFT,
    Exact,
    Fold,
    FrequentDirections,
    Gaussian,
    Map,
    Nystrom,
    Sketch,
    SparseSign,
    TwoSided,
)
from scodkit.sketch.base import FlatFactors

RESULTS = Path("benchmarks/results")
ROWS = RESULTS / "sketch_accuracy.jsonl"
SEEDS = range(5)
SIZES = (76, 154, 304)
MAPS: tuple[Map, ...] = (
    Fold(),
    SparseSign(2),
    SparseSign(4),
    SparseSign(8),
    SRFT(),
    Gaussian(),
)


@dataclass(frozen=True)
class Problem:
    """A net's Fisher factors as matrices, and its exact eigenbasis."""

    name: str
    rows: Tensor  # (M p, N)
    num_data: int
    exact: Eigenbasis
    known: Tensor  # (B, p, N)
    novel: Tensor

    @property
    def spectrum(self) -> Tensor:
        """All eigenvalues of F, in float64, descending."""
        return self.exact.values.double()


def factors(net: TrainedNet, x: Tensor) -> Tensor:
    """Return the Fisher factors of a batch as one tensor (B, p, N)."""
    network = Network(net.model)
    call = Inputs((x,), {})
    engine = FunctionalEngine(network, select("all", network, call))
    with torch.no_grad():
        shape = tuple(net.model(x[:1]).shape[1:])
    source = FactorSource(engine, net.likelihood, shape, 2**28)
    return torch.cat(
        [torch.cat([rows for _, rows in p.factors.blocks()], 2) for p in source.pieces(call)]
    )


def problem(net: TrainedNet) -> Problem:
    """Compute everything exact about a net, once."""
    rows = factors(net, net.fit_on).flatten(0, 1)
    exact = fit(Exact(), rows, len(net.fit_on), rank=rows.shape[1])
    known, novel = factors(net, net.known[:400]), factors(net, net.novel[:400])
    return Problem(net.name, rows, len(net.fit_on), exact, known, novel)


def fit(sketch: Sketch, rows: Tensor, num_data: int, rank: int) -> Eigenbasis:
    """Stream rows past a sketch in batches of 500 and return the basis."""
    state = sketch.zero(rows.shape[1], rank, rows.dtype, "cpu")
    for some in rows.split(500):
        sketch.update(state, FlatFactors(some), some.double().square().sum(), 0)
    state.num_data = num_data
    return sketch.eigenbasis(state, rank)


def errors(problem: Problem, basis: Eigenbasis) -> tuple[float, float, float]:
    """Return the relative errors in Frobenius and nuclear norm, and the best nuclear one."""
    spectrum = problem.spectrum
    # both matrices live in the row space of F: work in its eigenbasis
    turn = problem.exact.vectors.double().mT @ basis.vectors.double()
    approximate = (turn * basis.values.double()) @ turn.mT
    gap = torch.linalg.eigvalsh(torch.diag(spectrum) - approximate)
    frobenius = float(gap.square().sum().sqrt() / spectrum.square().sum().sqrt())
    best = float(spectrum[basis.rank :].sum() / spectrum.sum())
    return frobenius, float(gap.abs().sum() / spectrum.sum()), best


def auroc(problem: Problem, basis: Eigenbasis) -> float:
    """Return the AUROC of the score, known against novel."""
    scores = []
    for rows in (problem.known, problem.novel):
        along = rows.double() @ basis.vectors.double()
        parts = Energies(rows.double().square().sum((1, 2)), along.square().sum(1))
        scores.append(score(parts, basis, 1.0))
    truth = torch.cat([torch.zeros(len(scores[0])), torch.ones(len(scores[1]))])
    return float(roc_auc_score(truth, torch.cat(scores)))


def plan() -> Iterator[tuple[str, Sketch, int, int, int]]:
    """Yield (family, sketch, size, rank, seed) for every row of the benchmark."""
    for seed in SEEDS:
        for size in SIZES:
            for rank, label in (
                ((size - 4) // 6, "(T-4)/6"),
                (2 * (size - 1) // 3, "2(T-1)/3"),
            ):
                sketch = TwoSided(size, SRFT(), seed)
                yield f"two-sided, k={label}", sketch, size, rank, seed
            for rank, label in ((size // 2, "T/2"), (size, "T")):
                yield f"Nystrom, k={label}", Nystrom(size, seed=seed), size, rank, seed
        for size in SIZES[:2]:
            for mapping in MAPS:
                name = f"map {mapping}"
                yield name, Nystrom(size, mapping, seed), size, size // 2, seed
        for size in (38, 57, 76, 114, 152, 232):
            yield "rank 38", Nystrom(size, seed=seed), size, 38, seed
    for size in SIZES:
        yield "FD, k=T/2", FrequentDirections(size // 2), size, size // 2, 0
        yield (
            "FD unshrunk, k=T/2",
            FrequentDirections(size // 2, shrink=False),
            size,
            size // 2,
            0,
        )


def measure() -> None:
    """Run everything and write the rows."""
    RESULTS.mkdir(exist_ok=True)
    with ROWS.with_suffix(".part").open("w") as out:
        for net in (mnist_net(), wine_net()):
            data = problem(net)
            exact = {"net": net.name, "family": "exact", "size": len(data.rows), "seed": 0}
            exact |= {"rank": data.exact.rank, "auroc": auroc(data, data.exact)}
            out.write(json.dumps(exact) + "\n")
            for family, sketch, size, rank, seed in plan():
                start = time.perf_counter()
                basis = fit(sketch, data.rows, data.num_data, rank)
                seconds = time.perf_counter() - start
                frobenius, nuclear, best = errors(data, basis)
                row: dict[str, Any] = {"net": net.name, "family": family, "size": size}
                row |= {"rank": rank, "seed": seed, "frobenius": frobenius, "nuclear": nuclear}
                row |= {"over_best": nuclear / best}
                row |= {"auroc": auroc(data, basis), "captured": basis.captured}
                row |= {"clamped": basis.clamped, "seconds": round(seconds, 3)}
                out.write(json.dumps(row) + "\n")
                print(row, flush=True)
    ROWS.with_suffix(".part").replace(ROWS)


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as Markdown: means and standard deviations over seeds."""
    lines = [
        "| net | sketch | T | k | Frobenius | nuclear | over best | AUROC | seconds |",
        "| --- | --- | --: | --: | --: | --: | --: | --: | --: |",
    ]
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["net"], row["family"], row["size"], row["rank"]), []).append(row)

    def show(group: list[dict[str, Any]], key: str, form: str) -> str:
        values = [row[key] for row in group if key in row]
        spread = f" ± {format(stdev(values), form)}" if len(values) > 1 else ""
        return format(mean(values), form) + spread if values else ""

    for (net, family, size, rank), group in groups.items():
        columns = [net, family, size, rank]
        columns += [show(group, "frobenius", ".1e"), show(group, "nuclear", ".1e")]
        columns += [show(group, "over_best", ".3f"), show(group, "auroc", ".4f")]
        columns += [show(group, "seconds", ".2f")]
        lines.append("| " + " | ".join(map(str, columns)) + " |")
    return "\n".join(lines) + "\n"


_MEMORY = "memory T, in vectors\nof a number per weight"
_ERROR = r"$\|F-\hat F\|_*\,/\,\mathrm{tr}\,F$"


def draw(rows: list[dict[str, Any]]) -> None:
    """Draw the error of each sketch against the memory it takes."""
    from scodbench.figures.style import (
        ORANGE,
        SKETCHES,
        SKY,
        legend_below,
        panels,
        save_png,
        style,
    )

    nets = list(dict.fromkeys(row["net"] for row in rows))
    styles = {
        "two-sided, k=(T-4)/6": (*SKETCHES["TwoSided"], "two-sided (paper), k=(T-4)/6"),
        "two-sided, k=2(T-1)/3": (ORANGE, "D", "two-sided (paper), k=2(T-1)/3"),
        "FD, k=T/2": (*SKETCHES["FrequentDirections"], "Frequent Directions, k=T/2"),
        "Nystrom, k=T/2": (*SKETCHES["Nystrom"], "Nyström, k=T/2 (default)"),
        "Nystrom, k=T": (SKY, "v", "Nyström, k=T"),
    }
    with style() as plt:
        titles = [net.replace("mnist", "MNIST").replace("wine", "Wine") for net in nets]
        figure, axes = panels(plt, titles, height=2.9)
        for axis, net in zip(axes, nets, strict=True):
            for family, (colour, marker, label) in styles.items():
                means = []
                for size in SIZES:
                    chosen = [
                        r["nuclear"]
                        for r in rows
                        if (r["net"], r["family"], r["size"]) == (net, family, size)
                    ]
                    axis.plot([size] * len(chosen), chosen, marker, color=colour, alpha=0.25)
                    means.append(mean(chosen))
                axis.plot(SIZES, means, f"{marker}-", color=colour, label=label)
            axis.set(xscale="log", yscale="log", xlabel=_MEMORY)
            axis.set_xticks(SIZES, [str(s) for s in SIZES])
            axis.minorticks_off()
        axes[0].set_ylabel("relative error of the sketch\n" + _ERROR)
        handles, _ = axes[0].get_legend_handles_labels()
        legend_below(figure, handles=handles)
        save_png(figure, RESULTS / "sketch_accuracy.png")


def main(*, tables: bool) -> None:
    """Measure, then write the table and the figure from the rows.

    Args:
        tables: Only write table and figure of the rows that are there.
    """
    if not tables:
        measure()
    rows = [json.loads(line) for line in ROWS.read_text().splitlines()]
    text = table(rows)
    (RESULTS / "sketch_accuracy.md").write_text(text)
    draw(rows)
    print(text)
