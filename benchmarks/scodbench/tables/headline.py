"""The tables people look at first: all unknown inputs of a domain together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from scodbench.domain import Domain
from scodbench.measure import POOLED
from scodbench.methods import TITLES
from scodbench.names import networks
from scodbench.rows import ROWS_FILE, Row, select
from scodbench.tables.paper import Table, marked
from scodbench.tables.summaries import Mean, comparable, domains_in, over_seeds

_TO = "\N{NON-BREAKING HYPHEN}"
_SHOWN = ("fused", "scod_ll", "naive")  # beside the best of the others
_OURS = ("fused", "scod_ll")
_VARIANTS = ("scod", "scod_two_sided", "scod_frequent_directions")  # no others, either


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
            {method: over_seeds(own, "auroc", method=method) for method in TITLES},
            networks=seeds,
        )
    lines = [
        {"method": title, **{name: texts.get(method, "") for name, texts in columns.items()}}
        for method, title in TITLES.items()
        if any(method in texts for texts in columns.values())
    ]
    caption = (
        "AUROC, all unknown inputs of a domain together: mean ± half-width of the 95 % "
        "interval over independently trained networks. Headings give the largest number of "
        "networks; a cell based on fewer networks gives their number in brackets. Bold is the "
        "largest mean; where intervals overlap it need not be the best method. Empty cells: "
        "the method is not defined for that kind of output, or was not run there. "
        f"Rows `domain/{POOLED}/method/seed` of {file}."
    )
    return Table(lines, caption if lines else "")


def winners(
    rows: Sequence[Row], fused: Sequence[Row] = (), file: Path | str = ROWS_FILE
) -> Table:
    """Return a line for each domain: the best method that is not ours, and two of ours.

    Args:
        rows: All result rows.
        fused: Rows of the sweep of Fused, for domains where it was judged there only.
        file: Where the others are from.

    Returns:
        Means over trained networks, the best of a line in bold; methods that look the same
        share a cell. Domains we lose come first, the largest loss at the top.
    """
    judged = [r for r in select(comparable(rows), ood=POOLED) if r.get("auroc") is not None]
    swept = list(select(fused, study="separation", name="fused", ood=POOLED))
    lines = []
    for domain in domains_in(judged):
        own = list(select(judged, domain=domain.name))
        found = {m: list(select(own, method=m)) for m in TITLES}
        found["fused"] = found["fused"] or list(select(swept, domain=domain.name))
        means = {m: mean for m, its in found.items() if (mean := over_seeds(its, "auroc"))}
        others = means.keys() - {*_OURS, *_VARIANTS}
        ours = [means[m].value for m in _OURS if m in means]
        if others and ours:
            best = max(others, key=lambda method: means[method].value)
            lines.append((means[best].value - max(ours), _line(domain, best, found, means)))
    lines.sort(key=lambda pair: -pair[0])
    caption = (
        "AUROC, all unknown inputs of a domain together: mean ± half of the 95 % interval over "
        "trained networks; for a single network, the interval in brackets is over test inputs. "
        f"Empty: not run. Rows of {file}."
    )
    return Table([line for _, line in lines], caption if lines else "")


def _line(
    domain: Domain, best: str, found: Mapping[str, Sequence[Row]], means: Mapping[str, Mean]
) -> dict[str, str]:
    others = [m for m in means if m not in {best, *_OURS, *_VARIANTS}]
    texts = {m: _text(means[m], found[m]) for m in means}
    level = [best, *(m for m in others if texts[m] == texts[best])]
    shown = {m: means[m] for m in (*level, *_SHOWN) if m in means}
    top = max(round(mean.value, 3) for mean in shown.values())
    cells = {
        m: f"**{texts[m]}**" if round(mean.value, 3) == top else texts[m]
        for m, mean in shown.items()
    }
    seeds = [mean.seeds for mean in shown.values()]
    # "Deep Ensemble, 5" last, where its comma separates nothing
    *first, last = sorted((TITLES[method] for method in level), key=lambda name: "," in name)
    names = f"{', '.join(first)} and {last}" if first else last
    return {
        "unknown inputs of": f"{domain.title}, {networks(min(seeds), max(seeds))}",
        "best other method": f"{names} {cells[best]}",
        **{TITLES[method]: cells.get(method, "") for method in _SHOWN},
    }


def _text(mean: Mean, rows: Sequence[Row]) -> str:
    if mean.seeds == 1 and "auroc_low" in (row := rows[0]):
        return f"{mean} ({row['auroc_low']:.3f}{_TO}{row['auroc_high']:.3f})"
    return str(mean)
