"""What the results were to show, and whether they do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from scodbench.domains import DOMAINS
from scodbench.measure import POOLED
from scodbench.methods import TITLES
from scodbench.names import words
from scodbench.rows import Row, select
from scodbench.tables.paper import Line, Table
from scodbench.tables.summaries import Mean, comparable, over_seeds, row_ids
from scodbench.tables.sweeps import CLOSE, fidelities

# least mean AUROC of the better of SCOD and SCOD on the last layers, by domain and set
TARGETS = {
    ("rotated_mnist", POOLED): 0.94,
    ("binary_mnist", POOLED): 0.98,
    ("mnist", POOLED): 0.955,
    ("wine", POOLED): 0.91,
    ("taxinet", POOLED): 0.99,
    ("cifar10", "tinyimagenet"): 0.91,
}
_OURS = ("scod", "scod_ll")
_BETTER = " or ".join(TITLES[method] for method in _OURS)
# what SCOD on CIFAR-10's last layers is to be better than
_ORDER = ("cifar10", "tinyimagenet", "scod_ll", ("naive", "scod"))


def checks(rows: Sequence[Row], sweeps: Sequence[Row]) -> Table:
    """Return a line for each thing the results were to show.

    Args:
        rows: All result rows.
        sweeps: All rows of sweeps.

    Returns:
        The claim, its target, the figure, and whether it is met: "yes", "no" or "no rows".
    """
    rows = comparable(rows)
    lines = [*_levels(rows), *_orders(rows), *_fidelity(sweeps)]
    caption = "Claims and whether they hold: AUROC, mean over networks, of rows in results/."
    return Table(lines, caption)


def _levels(rows: Sequence[Row]) -> Iterable[Line]:
    for (domain, ood), target in TARGETS.items():
        found = {m: _auroc(rows, domain, ood, m) for m in _OURS}
        there = {method: auroc.value for method, auroc in found.items() if auroc}
        best = max(there, key=lambda method: there[method], default=None)
        claim = f"{DOMAINS[domain].title}, {words(ood)}: {_BETTER}"
        if best is None:
            yield _line(claim, f">= {target}")
        else:
            ids = _ids(rows, domain, ood, best)
            yield _line(claim, f">= {target}", there[best], there[best] >= target, ids)


def _orders(rows: Sequence[Row]) -> Iterable[Line]:
    domain, ood, better, others = _ORDER
    auroc = _auroc(rows, domain, ood, better)
    for other in others:
        claim = f"{DOMAINS[domain].title}, {words(ood)}: {TITLES[better]} minus {TITLES[other]}"
        beside = _auroc(rows, domain, ood, other)
        if auroc is None or beside is None:
            yield _line(claim, "> 0")
        else:
            ids = f"{_ids(rows, domain, ood, better)} {_ids(rows, domain, ood, other)}"
            gap = auroc.value - beside.value
            yield _line(claim, "> 0", gap, gap > 0, ids)


def _fidelity(sweeps: Sequence[Row]) -> Iterable[Line]:
    found = fidelities(sweeps)
    for domain, fidelity in found.items():
        claim = f"{DOMAINS[domain].title}: sketch and exact matrix differ, at most"
        largest = fidelity.largest
        yield _line(claim, f"<= {CLOSE}", largest, largest <= CLOSE, f"`{fidelity.ids}`")
    if not found:
        yield _line("sketch and exact matrix differ, at most", f"<= {CLOSE}")


def _line(
    claim: str, target: str, figure: float | None = None, met: bool = False, ids: str = ""
) -> Line:
    if figure is None:
        return {"claim": claim, "target": target, "figure": "", "met": "no rows", "rows": ""}
    answer = "yes" if met else "no"
    return {
        "claim": claim,
        "target": target,
        "figure": f"{figure:.4f}",
        "met": answer,
        "rows": ids,
    }


def _auroc(rows: Sequence[Row], domain: str, ood: str, method: str) -> Mean | None:
    return over_seeds(rows, "auroc", domain=domain, ood=ood, method=method)


def _ids(rows: Sequence[Row], domain: str, ood: str, method: str) -> str:
    own = select(rows, domain=domain, ood=ood, method=method)
    judged = [row for row in own if row.get("auroc") is not None]
    return f"`{row_ids(f'{domain}/{ood}/{method}', judged)}`"
