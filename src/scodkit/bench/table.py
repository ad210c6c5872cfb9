"""Tables from rows: the paper's, with its figures beside ours, and today's methods."""

from __future__ import annotations

import csv
import io
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from scodkit.bench.domains import DOMAINS
from scodkit.bench.measure import POOLED
from scodkit.bench.methods import METHODS, PAPER
from scodkit.bench.paper_values import PAPER_SET, PAPER_TABLE
from scodkit.bench.rows import Row, select

# two-sided 95 % points of Student's t, by number of seeds
_T = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306}
_T_MORE = 2.262  # of ten; a little wide for more
_HALF = 0.0005  # figures that round to the same are equally good


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
        point = _T.get(len(values), _T_MORE)
        spread = point * statistics.stdev(values) / math.sqrt(len(values))
    return Mean(statistics.fmean(values), spread, len(values))


def over_seeds(
    rows: Iterable[Row], figure: str, *, domain: str, method: str, ood: str
) -> Mean | None:
    """Return a figure's mean over the rows of a domain, a method and a set."""
    found = [r.get(figure) for r in select(rows, domain=domain, method=method, ood=ood)]
    return mean([value for value in found if value is not None])


def paper_table(rows: Sequence[Row]) -> list[dict[str, str]]:
    """Return the lines of the paper's table as text: ours, and the paper's figures beside.

    Args:
        rows: All result rows.

    Returns:
        One dict a line; the best AUROC of a domain is bold.
    """
    lines = []
    for domain in DOMAINS.values():
        ood = PAPER_SET.get(domain.name, POOLED)
        found = {
            method: over_seeds(rows, "auroc", domain=domain.name, method=method, ood=ood)
            for method in PAPER
        }
        best = max((f.value for f in found.values() if f), default=math.inf)
        for method, auroc in found.items():
            own = {"domain": domain.name, "method": method, "ood": ood}
            ms, forward = (over_seeds(rows, f, **own) for f in ("ms_b1", "forward_ms_b1"))
            if auroc is None or ms is None or forward is None:
                continue
            reported = PAPER_TABLE.get((domain.name, method))
            bold = "**" if auroc.value > best - _HALF else ""
            lines.append(
                {
                    "domain": domain.title,
                    "unknown": ood,
                    "method": method,
                    "seeds": str(auroc.seeds),
                    "AUROC": f"{bold}{auroc}{bold}",
                    "AUROC, paper": f"{reported.auroc:.3f}" if reported else "",
                    "AUPR": str(over_seeds(rows, "aupr", **own)),
                    "FPR95": str(over_seeds(rows, "fpr95", **own)),
                    "ms": f"{ms.value:.3g}",
                    "x forward": f"{ms.value / forward.value:.1f}",
                    "ms, paper": f"{reported.ms:.3g}" if reported else "",
                }
            )
    return lines


def methods_table(rows: Sequence[Row], figure: str = "auroc") -> list[dict[str, str]]:
    """Return one line per method, one column per domain and set of unknown inputs.

    Args:
        rows: All result rows.
        figure: Which figure of them.
    """
    columns = [
        (domain.name, ood)
        for domain in DOMAINS.values()
        for ood in dict.fromkeys(
            r["ood"] for r in select(rows, domain=domain.name) if "fpr95" in r
        )
    ]
    lines = []
    for method in METHODS:
        cells = {
            f"{domain}: {ood}": over_seeds(rows, figure, domain=domain, method=method, ood=ood)
            for domain, ood in columns
        }
        if any(cells.values()):
            text = {name: "" if cell is None else str(cell) for name, cell in cells.items()}
            lines.append({"method": method, **text})
    return lines


def markdown(lines: Sequence[dict[str, str]]) -> str:
    """Return lines as a Markdown table.

    Examples:
        >>> print(markdown([{"method": "scod", "AUROC": "0.9"}]), end="")
        | method | AUROC |
        | --- | --: |
        | scod | 0.9 |
    """
    if not lines:
        return ""
    head = list(lines[0])
    left = {"domain", "unknown", "method"}
    rule = ["---" if name in left else "--:" for name in head]
    body = [list(line.values()) for line in lines]
    return "".join("| " + " | ".join(cells) + " |\n" for cells in (head, rule, *body))


def comma_separated(lines: Sequence[dict[str, str]]) -> str:
    """Return lines as CSV, without the marks of the best."""
    if not lines:
        return ""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(lines[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows({k: v.replace("**", "") for k, v in line.items()} for line in lines)
    return text.getvalue()
