"""Tables of one choice at a time, from rows of sweeps: layers, rank, the prior's variance."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from scodbench.domain import Domain
from scodbench.measure import POOLED
from scodbench.rows import SWEEPS_FILE, Row, select
from scodbench.tables.paper import Table
from scodbench.tables.summaries import comparable, domains_in, over_seeds

_RANKS = (1, 4, 16, 64)
_EXPONENTS = (-8, -6, -4, -2, 0, 2, 8)  # of the prior's variance, in powers of ten


def layers_table(sweeps: Sequence[Row], file: Path = SWEEPS_FILE) -> Table:
    """Return AUROC of the last linear layer, of the domain's last layers and of all.

    Args:
        sweeps: All rows of sweeps.
        file: Where they are from.
    """
    rows, lines = _pooled(sweeps, "layers"), []
    for domain, own in _by_domain(rows):
        shares = {row["share"] for row in own if row["chosen"]}  # one, or none as yet
        last = [f"{_auroc(own, share=share)} (last {share:.0%})" for share in shares]
        lines.append(
            {
                "domain": domain.title,
                "last linear layer": _auroc(own, share=0.0),
                "last layers": "".join(last),
                "all layers": _auroc(own, share=1.0),
            }
        )
    caption = f"AUROC by the layers whose weights are chosen. {_source(rows, 'layers', file)}"
    return Table(lines, caption) if lines else Table([])


def rank_table(sweeps: Sequence[Row], file: Path = SWEEPS_FILE) -> Table:
    """Return AUROC and captured curvature by rank, of the domain's largest sketch.

    Args:
        sweeps: All rows of sweeps.
        file: Where they are from.
    """
    rows, lines = _pooled(sweeps, "rank"), []
    for domain, own in _by_domain(rows):
        size = max(row["size"] for row in own)
        largest = max(row["rank"] for row in select(own, size=size))
        cells = {f"rank {rank}": _with_captured(own, size, rank) for rank in _RANKS}
        full = _with_captured(own, size, largest)
        lines.append({"domain": domain.title, **cells, "largest": f"{full} ({largest})"})
    caption = (
        "AUROC by rank, and the captured curvature; the largest rank in brackets. "
        f"{_source(rows, 'rank', file)}"
    )
    return Table(lines, caption) if lines else Table([])


def prior_table(sweeps: Sequence[Row], file: Path = SWEEPS_FILE) -> Table:
    """Return AUROC by the prior's variance.

    Args:
        sweeps: All rows of sweeps.
        file: Where they are from.
    """
    rows, lines = _pooled(sweeps, "prior"), []
    for domain, own in _by_domain(rows):
        cells = {
            f"1e{exponent}" if exponent else "1": _auroc(own, prior_variance=10.0**exponent)
            for exponent in _EXPONENTS
        }
        lines.append({"domain": domain.title, **cells})
    caption = f"AUROC by the prior's variance; 1 is the default. {_source(rows, 'prior', file)}"
    return Table(lines, caption) if lines else Table([])


def _pooled(sweeps: Sequence[Row], name: str) -> list[Row]:
    rows = select(comparable(sweeps), sweep=name, ood=POOLED)
    return [row for row in rows if row.get("auroc") is not None]


def _by_domain(rows: Sequence[Row]) -> Iterator[tuple[Domain, list[Row]]]:
    for domain in domains_in(rows):
        yield domain, list(select(rows, domain=domain.name))


def _auroc(rows: Sequence[Row], **wanted: object) -> str:
    found = over_seeds(rows, "auroc", **wanted)
    return "" if found is None else str(found)


def _with_captured(rows: Sequence[Row], size: int, rank: int) -> str:
    captured = over_seeds(rows, "captured", size=size, rank=rank)
    share = "" if captured is None else f",\N{NO-BREAK SPACE}{captured.value:.0%}"
    return _auroc(rows, size=size, rank=rank) + share


def _source(rows: Sequence[Row], name: str, file: Path) -> str:
    """Return where a table's rows are, and how wide their intervals.

    Args:
        rows: Of the sweep.
        name: Of the sweep.
        file: Where they are from.
    """
    if not rows:
        return ""
    wide = max((row["auroc_high"] - row["auroc_low"]) / 2 for row in rows)
    networks = len({row["seed"] for row in select(rows, domain=rows[0]["domain"])})
    return (
        f"All unknown sets together, {networks} network{'s' * (networks > 1)} per domain; 95 % "
        f"intervals over test inputs are ± {wide:.3f} at most. Rows "
        f"`{name}/domain/{POOLED}/...` of {file}."
    )
