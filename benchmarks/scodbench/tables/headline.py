"""The one table people look at first: every method, every domain, all unknown inputs pooled."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from scodbench.measure import POOLED
from scodbench.methods import TITLES
from scodbench.rows import ROWS_FILE, Row, select
from scodbench.tables.paper import Table, marked
from scodbench.tables.summaries import comparable, domains_in, over_seeds


def headline(rows: Sequence[Row], file: Path | str = ROWS_FILE) -> Table:
    """Return the AUROC over all unknown inputs of a domain, a line for each method.

    Args:
        rows: All result rows.
        file: Where they are from.

    Returns:
        Means over trained networks; the best of a domain are bold.
    """
    judged = [r for r in select(comparable(rows), ood=POOLED) if r.get("auroc") is not None]
    columns = {}
    for domain in domains_in(judged):
        own = list(select(judged, domain=domain.name))
        seeds = len({row["seed"] for row in own})
        columns[f"{domain.title} ({seeds})"] = marked(
            {method: over_seeds(own, "auroc", method=method) for method in TITLES}
        )
    lines = [
        {"method": title, **{name: texts.get(method, "") for name, texts in columns.items()}}
        for method, title in TITLES.items()
        if any(method in texts for texts in columns.values())
    ]
    caption = (
        "AUROC, all unknown inputs of a domain together: mean ± half of a 95 % interval over "
        "as many trained networks as the head says, at most. Rows "
        f"`domain/{POOLED}/method/seed` of {file}."
    )
    return Table(lines, caption if lines else "")
