"""Means over seeds, of rows that may stand side by side."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from scipy import stats

from scodbench.domain import Domain
from scodbench.domains import DOMAINS, OPTIONAL_DOMAINS
from scodbench.rows import Row, latest, select

_Group = tuple[object, object]


@dataclass(frozen=True)
class Mean:
    """A figure over seeds.

    Args:
        value: Its mean.
        spread: Half of its 95 % interval over trained networks (Student's t); None of one.
        seeds: How many.
    """

    value: float
    spread: float | None
    seeds: int

    def __str__(self) -> str:
        if self.spread is None:
            return f"{self.value:.3f}"
        return f"{self.value:.3f} ± {self.spread:.3f}"


def mean(values: Sequence[float]) -> Mean | None:
    """Return the mean of a figure over seeds, None of none.

    Examples:
        >>> print(mean([0.90, 0.92, 0.94]))
        0.920 ± 0.050
    """
    if not values:
        return None
    spread = None
    if len(values) > 1:
        point = float(stats.t.ppf(0.975, len(values) - 1))
        spread = point * statistics.stdev(values) / math.sqrt(len(values))
    return Mean(statistics.fmean(values), spread, len(values))


def over_seeds(rows: Iterable[Row], figure: str, **wanted: object) -> Mean | None:
    """Return a figure's mean over the rows with these values, None where none has it."""
    found = [row.get(figure) for row in select(rows, **wanted)]
    return mean([value for value in found if value is not None])


def comparable(rows: Iterable[Row]) -> list[Row]:
    """Return the rows that may stand side by side: the newest, of one device a domain.

    The device is the one with most rows that have figures, of several such the last; sweeps
    of a domain have theirs each.

    Args:
        rows: In the order they were written.

    Examples:
        >>> rows = [
        ...     {"domain": "wine", "seed": seed, "device": device, "auroc": 0.9}
        ...     for seed, device in ((0, "cpu"), (1, "cpu"), (0, "NVIDIA H200"))
        ... ]
        >>> [row["device"] for row in comparable(rows)]
        ['cpu', 'cpu']
    """
    rows = list(rows)
    newest = latest(rows)
    # how many rows with figures, and where the last one stands
    places: dict[_Group, dict[object, tuple[int, int]]] = defaultdict(dict)
    for place, row in enumerate(rows):
        places[_group(row)][row.get("device")] = (0, place)
    for row in newest:
        if "why" not in row:
            count, place = places[_group(row)][row.get("device")]
            places[_group(row)][row.get("device")] = (count + 1, place)
    device = {group: max(own, key=own.__getitem__) for group, own in places.items()}
    return [row for row in newest if row.get("device") == device[_group(row)]]


def _group(row: Row) -> _Group:
    return row.get("domain"), row.get("sweep")


def domains_in(rows: Sequence[Row]) -> list[Domain]:
    """Return the domains that rows are of, in the order that all tables and figures have."""
    everywhere = {**DOMAINS, **OPTIONAL_DOMAINS}
    return [d for d in everywhere.values() if any(select(rows, domain=d.name))]


def row_ids(prefix: str, rows: Iterable[Row]) -> str:
    """Return what the ids of rows begin with, all seeds in one.

    Examples:
        >>> row_ids("wine/pooled/scod", [{"seed": 2}, {"seed": 0}, {"seed": 1}, {"seed": 5}])
        'wine/pooled/scod/0-2,5'
    """
    runs: list[list[int]] = []
    for seed in sorted({row["seed"] for row in rows}):
        if runs and seed == runs[-1][-1] + 1:
            runs[-1].append(seed)
        else:
            runs.append([seed])
    texts = [f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
    return f"{prefix}/{','.join(texts)}"
