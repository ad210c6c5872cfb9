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
        "interval over independently trained networks. Their maximum number is in the column "
        "header; a cell with a number in brackets is of so many. Bold is the largest mean; "
        "where intervals overlap it need not be the best method. Empty cells: the method is "
        "not defined for that kind of output, or was not run there. "
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
        Means over trained networks; of a line the best are bold, of one network the interval
        is over test inputs. Domains we lose come first, the largest loss at the top.
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
        "trained networks; of one network, in brackets, the interval over test inputs. Rows of "
        f"{file}."
    )
    return Table([line for _, line in lines], caption if lines else "")


def _line(
    domain: Domain, best: str, found: Mapping[str, Sequence[Row]], means: Mapping[str, Mean]
) -> dict[str, str]:
    shown = {m: means[m] for m in (best, *_SHOWN) if m in means}
    top = max(round(mean.value, 3) for mean in shown.values())
    cells = {}
    for method, mean in shown.items():
        text = str(mean)
        if mean.seeds == 1 and "auroc_low" in (row := found[method][0]):
            text += f" ({row['auroc_low']:.3f}{_TO}{row['auroc_high']:.3f})"
        cells[method] = f"**{text}**" if round(mean.value, 3) == top else text
    seeds = [mean.seeds for mean in shown.values()]
    return {
        "unknown inputs of": f"{domain.title}, {networks(min(seeds), max(seeds))}",
        "best other method": f"{TITLES[best]} {cells[best]}",
        **{TITLES[method]: cells.get(method, "") for method in _SHOWN},
    }
