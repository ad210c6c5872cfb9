"""Table of the study of projected weights: how well scores rank, beside those of whole ones."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from scodbench.measure import POOLED
from scodbench.rows import Row, select
from scodbench.sweeps.projected import (
    NONE,
    PROJECTED,
    PROJECTED_KFAC,
    PROJECTED_RANDOM,
    RANKS,
    WHOLE,
)
from scodbench.tables.paper import Line, Table
from scodbench.tables.summaries import domains_in, mean, over_seeds

_TITLES = {
    "gradient": "projected, gradients' moments",
    "kfac": "projected, KFAC's moments",
    "random": "projected at random",
}


def projected_table(rows: Sequence[Row], file: Path) -> Table:
    """Return the AUROC of whole weights, and the mean differences of projected ones from it.

    Args:
        rows: Of the sweep.
        file: Where they are from.
    """
    sweeps = (PROJECTED, PROJECTED_KFAC, PROJECTED_RANDOM)
    own = list(select(rows, sweep=sweeps, ood=POOLED))
    lines: list[Line] = []
    for domain in domains_in(own):
        found = list(select(own, domain=domain.name))
        whole = over_seeds(found, "auroc", projections=WHOLE)
        if whole is None:
            continue
        by_seed = {row["seed"]: row["auroc"] for row in select(found, projections=WHOLE)}
        lines.append(_line(domain.title, "whole", found, f"{whole.value:.4f}", WHOLE))
        for kind, rank in [(NONE, None), *((k, r) for k in _TITLES for r in RANKS)]:
            points = list(select(found, projections=kind, projection_rank=rank))
            differences = mean([p["auroc"] - by_seed[p["seed"]] for p in points])
            if differences is None:
                continue
            spread = f" ± {differences.spread:.4f}" if differences.spread is not None else ""
            title = f"{_TITLES[kind]}, r = {rank}" if rank else "no curvature"
            told = f"{differences.value:+.4f}{spread}"
            lines.append(_line(domain.title, title, points, told, kind))
    caption = (
        "AUROC of all layers at the same rank of the sketch: of whole weights, and the mean "
        "difference from it (paired by network; half of the 95 % interval over networks). "
        f"All unknown inputs of a domain together. Rows of {file}."
    )
    return Table(lines, caption)


def _line(domain: str, title: str, rows: Sequence[Row], auroc: str, kind: str) -> Line:
    own = list(select(rows, projections=kind))
    inside, captured = (over_seeds(own, name) for name in ("inside", "captured"))
    return {
        "domain": domain,
        "weights": title,
        "N": f"{own[0]['weights']:,}",
        "AUROC": auroc,
        "inside": "" if inside is None or kind == NONE else f"{inside.value:.3f}",
        "captured": "" if captured is None or kind == NONE else f"{captured.value:.3f}",
    }
