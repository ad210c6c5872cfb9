"""Tables from rows of sweeps: kinds of sketches side by side, and beside no sketch at all."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from scodbench.domains import DOMAINS, OPTIONAL_DOMAINS
from scodbench.measure import POOLED
from scodbench.rows import SWEEPS_FILE, Row, select
from scodbench.tables.paper import Table, marked
from scodbench.tables.summaries import Mean, comparable, domains_in, over_seeds, row_ids

_KINDS = ("Nystrom", "FrequentDirections", "TwoSided")
CLOSE = 0.002  # of AUROC, between the sketch and the exact Fisher information


def sketch_table(sweeps: Sequence[Row], file: Path = SWEEPS_FILE) -> Table:
    """Return AUROC and captured curvature of each kind of sketch at equal memory.

    Args:
        sweeps: All rows of sweeps.
        file: Where they are from.

    Returns:
        A line for each domain and memory; the best AUROC of a line is bold.
    """
    rows = _pooled(sweeps, "sketch")
    lines = []
    for domain in domains_in(rows):
        own = list(select(rows, domain=domain.name))
        for size in sorted({row["size"] for row in own}):
            line = list(select(own, size=size))
            auroc = marked({kind: over_seeds(line, "auroc", sketch=kind) for kind in _KINDS})
            captured = {kind: over_seeds(line, "captured", sketch=kind) for kind in _KINDS}
            cells = {
                f"{kind} {name}": text
                for kind in _KINDS
                for name, text in (
                    ("AUROC", auroc.get(kind, "")),
                    ("captured", _percent(captured[kind])),
                )
            }
            ids = row_ids(f"sketch/{domain.name}/{POOLED}/{size}/*", line)
            lines.append({"domain": domain.title, "T": str(size), **cells, "rows": f"`{ids}`"})
    if not lines:
        return Table([])
    caption = (
        "Kinds of sketches that hold the same T vectors while fitting, at the rank each is "
        "meant for (Nystrom and Frequent Directions T / 2, two-sided (T - 4) / 6): AUROC over "
        "all unknown sets, and the share of the curvature that is captured. Means over the "
        f"seeds of rows in {file}, whose ids begin as said in the last column."
    )
    missing = (
        "An empty cell: with few weights Frequent Directions holds 128 vectors at least, which "
        "would not be the same memory."
    )
    return Table(lines, caption, [missing] if any("" in li.values() for li in lines) else [])


def _percent(share: Mean | None) -> str:
    return "" if share is None else f"{share.value:.1%}"


@dataclass(frozen=True)
class Fidelity:
    """How near the sketch comes to the exact Fisher information at the same rank.

    Args:
        rank: ``k``.
        auroc: Over seeds, by the sketch's name.
        differences: Of the AUROC, sketch less exact, by seed.
        ids: Of the rows.
    """

    rank: int
    auroc: Mapping[str, Mean | None]
    differences: Mapping[int, float]
    ids: str

    @property
    def largest(self) -> float:
        """The largest difference of any seed, without its sign."""
        return max(abs(difference) for difference in self.differences.values())


def fidelities(sweeps: Sequence[Row]) -> dict[str, Fidelity]:
    """Return what there is to say of sketch and exact matrix, by domain.

    Args:
        sweeps: All rows of sweeps.
    """
    rows = _pooled(sweeps, "fidelity")
    found = {}
    for domain in (one.name for one in domains_in(rows)):
        own = list(select(rows, domain=domain))
        ours, exact = (
            {row["seed"]: row["auroc"] for row in select(own, sketch=name)}
            for name in ("Nystrom", "Exact")
        )
        differences = {s: ours[s] - exact[s] for s in sorted(ours.keys() & exact.keys())}
        if differences:
            both = list(select(own, seed=tuple(differences)))
            auroc = {n: over_seeds(both, "auroc", sketch=n) for n in ("Nystrom", "Exact")}
            ids = row_ids(f"fidelity/{domain}/{POOLED}/*/{both[0]['rank']}", both)
            found[domain] = Fidelity(both[0]["rank"], auroc, differences, ids)
    return found


def fidelity_table(sweeps: Sequence[Row], file: Path = SWEEPS_FILE) -> Table:
    """Return the AUROC of the sketch beside that of the exact Fisher information.

    Args:
        sweeps: All rows of sweeps.
        file: Where they are from.
    """
    lines = [
        {
            "domain": {**DOMAINS, **OPTIONAL_DOMAINS}[domain].title,
            "k": str(found.rank),
            "AUROC, sketch": str(found.auroc["Nystrom"]),
            "AUROC, exact": str(found.auroc["Exact"]),
            "mean difference": f"{statistics.fmean(found.differences.values()):+.4f}",
            "largest": f"{found.largest:.4f}",
            f"within {CLOSE}": "yes" if found.largest <= CLOSE else "no",
            "rows": f"`{found.ids}`",
        }
        for domain, found in fidelities(sweeps).items()
    ]
    caption = (
        "The sketch (Nystrom, the domain's T) beside the exact Fisher information at the same "
        "rank k, all unknown sets: AUROC, and by how much the two differ on one network, on "
        f"average and at most. Rows of {file}."
    )
    return Table(lines, caption) if lines else Table([])


def _pooled(sweeps: Sequence[Row], name: str) -> list[Row]:
    rows = select(comparable(sweeps), sweep=name, ood=POOLED)
    return [row for row in rows if row.get("auroc") is not None]
