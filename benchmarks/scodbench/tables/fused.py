"""Tables of the study of `Fused`: its parts, rates, absurd inputs, failures, cost."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from scodbench.measure import POOLED
from scodbench.methods import TITLES
from scodbench.rows import Row, select
from scodbench.tables.paper import Line, Table, marked
from scodbench.tables.summaries import domains_in, over_seeds
from scodkit.likelihoods import Bernoulli, Categorical

SEPARATION, ALARMS = "separation", "false alarms"
ABSURD, FAILURES = "absurd inputs", "failures"
OTHER_WAYS = ("combination", "backward passes")


def parts_table(rows: Sequence[Row], file: Path) -> Table:
    """Return the AUROC of the fused score, each part, and all parts but one.

    Args:
        rows: Of the sweep.
        file: Where they are from.
    """
    own = list(select(rows, study=SEPARATION, ood=POOLED))
    columns: dict[str, dict[str, str]] = {}
    names: dict[str, None] = {}
    for domain in domains_in(own):
        found = list(select(own, domain=domain.name))
        singles = [n for n in dict.fromkeys(r["name"] for r in found) if " + " not in n]
        parts = [name for name in singles if name != "fused"]
        asked = {name: name for name in singles}
        if len(parts) > 2:
            for part in parts:
                asked[f"without {part}"] = " + ".join(p for p in parts if p != part)
        means = {title: over_seeds(found, "auroc", name=name) for title, name in asked.items()}
        columns[domain.title] = marked(means)
        names |= dict.fromkeys(asked)
    lines = [
        {"score": name, **{title: cells.get(name, "") for title, cells in columns.items()}}
        for name in names
    ]
    return Table(lines, f"AUROC, all unknown inputs of a domain together. Rows of {file}.")


def ways_table(rows: Sequence[Row], file: Path) -> Table:
    """Return the AUROC of other ways to the same end, beside the default.

    Args:
        rows: Of the sweep.
        file: Where they are from.
    """
    pooled = list(select(rows, ood=POOLED))
    own = list(select(pooled, study=SEPARATION, name="fused"))
    own += [row for row in pooled if row.get("study") in OTHER_WAYS]
    library = [
        {**row, "name": f"detectors, {row['name'].removeprefix('p-values, ')}"}
        for row in select(pooled, sweep="aggregations")
        if row["name"] != "fused"
    ]
    own += library
    titles = {
        "fused": "Fused: sum of standardised parts",
        **{rule: f"p-values, {rule}" for rule in ("Fisher", "Stouffer", "Simes", "smallest")},
        **{row["name"]: str(row["name"]) for row in library},
        "last layers": "Fused by backward passes, last layers",
    }
    lines: list[Line] = [{"way": title} for title in titles.values()]
    for domain in domains_in(own):
        found = list(select(own, domain=domain.name))
        cells = marked({name: over_seeds(found, "auroc", name=name) for name in titles})
        for line, name in zip(lines, titles, strict=True):
            line[domain.title] = cells.get(name, "")
    return Table(lines, f"AUROC, all unknown inputs of a domain together. Rows of {file}.")


def left_out_table(rows: Sequence[Row], file: Path) -> Table:
    """Return what a choice of parts made without a domain is worth on it.

    Of all sets of parts the one with the highest mean over the other domains of the same kind,
    classifiers or regressors, is taken.

    Args:
        rows: Of the sweep.
        file: Where they are from.
    """
    own = [r for r in select(rows, study=SEPARATION, ood=POOLED) if r["name"] != "fused"]
    lines = []
    for domain in domains_in(own):
        kind = isinstance(domain.likelihood, (Categorical, Bernoulli))
        others = [
            other
            for other in domains_in(own)
            if isinstance(other.likelihood, (Categorical, Bernoulli)) == kind
            and other.name.split("_")[0] != domain.name.split("_")[0]
        ]
        names = dict.fromkeys(row["name"] for row in select(own, domain=domain.name))

        def of(name: str, place: str) -> float:
            found = over_seeds(own, "auroc", domain=place, name=name)
            assert found is not None
            return found.value

        chosen = max(names, key=lambda name: mean(of(name, other.name) for other in others))
        default = max(names, key=lambda name: name.count(" + "))
        here, there = of(chosen, domain.name), of(default, domain.name)
        lines.append(
            {
                "domain": domain.title,
                "chosen without it": chosen,
                "AUROC": f"{here:.4f}",
                "default": f"{there:.4f}",
                "difference": f"{there - here:+.4f}",
            }
        )
    return Table(lines, f"Parts chosen on the other domains of the same kind. Rows of {file}.")


def alarms_table(rows: Sequence[Row], file: Path) -> Table:
    """Return false-alarm rates, means over networks and 200 splits each.

    Args:
        rows: Of the sweep.
        file: Where they are from.
    """
    own = list(select(rows, study=ALARMS))
    lines = []
    for domain in domains_in(own):
        found = list(select(own, domain=domain.name))
        line: Line = {"domain": domain.title, "held out": str(found[0]["held_out"])}
        for row in select(found, seed=0):
            same = list(select(found, name=row["name"]))
            rate = mean(other["mean"] for other in same)
            if row["confidence"] is None:
                line[f"{row['rate']:.0%}"] = f"{rate:.2%}"
            else:
                within = mean(other["within"] for other in same)
                line[f"{row['rate']:.0%}, surely"] = f"{rate:.2%} ({within:.0%})"
        lines.append(line)
    columns = dict.fromkeys(name for line in lines for name in line)
    lines = [{name: line.get(name, "too few") for name in columns} for line in lines]
    caption = (
        "Share of known inputs flagged, mean over 200 splits of each network's known data. "
        "'Surely' is with confidence=0.9; in brackets the share of splits whose rate was at "
        f"most the one asked for. Rows of {file}."
    )
    return Table(lines, caption)


def absurd_table(rows: Sequence[Row], file: Path) -> Table:
    """Return shares flagged at 5 %, of SCOD and of the fused score.

    Args:
        rows: Of the sweep.
        file: Where they are from.
    """
    own = list(select(rows, study=ABSURD))
    lines = []
    for name in dict.fromkeys(row["name"] for row in own):
        line: Line = {"inputs": name}
        for domain in domains_in(own):
            found = list(select(own, domain=domain.name, name=name))
            scod, fused = (mean(row[key] for row in found) for key in ("scod", "fused"))
            line[domain.title] = f"{scod:.2f} → {fused:.2f}"
        lines.append(line)
    caption = f"Share flagged at 5 % false alarms: SCOD's last layers → Fused. Rows of {file}."
    return Table(lines, caption)


def failures_table(rows: Sequence[Row], file: Path) -> Table:
    """Return areas under risk against coverage, lower is better.

    Args:
        rows: Of the sweep.
        file: Where they are from.
    """
    own = list(select(rows, study=FAILURES))
    lines = []
    for name in dict.fromkeys(row["name"] for row in own):
        line: Line = {"score": name}
        for domain in domains_in(own):
            found = list(select(own, domain=domain.name, name=name))
            known, mixed = (
                mean(row[key] for row in found) for key in ("aurc_known", "aurc_mixed")
            )
            line[f"{domain.title}: known"] = f"{1e3 * known:.2f}"
            line[f"{domain.title}: mixed"] = f"{1e3 * mixed:.0f}"
        lines.append(line)
    caption = (
        "Area under risk against coverage, in thousandths, lower is better: the mean share of "
        "mistakes among the inputs a score trusts most. On known inputs, and with all unknown "
        f"ones counted as mistakes. Rows of {file}."
    )
    return Table(lines, caption)


def cost_table(rows: Sequence[Row], file: Path) -> Table:
    """Return how many forward passes a scored prediction costs, and what it keeps.

    Args:
        rows: Of methods.
        file: Where they are from.
    """
    own = [row for row in select(rows, ood=POOLED) if row.get("ms_b64") is not None]
    lines = []
    for method, title in TITLES.items():
        found = list(select(own, method=method))
        if not found:
            continue
        line: Line = {"method": title}
        for domain in domains_in(own):
            here = list(select(found, domain=domain.name))
            line[domain.title] = ""
            if here:
                one, many = (_forwards(here, size) for size in (1, 64))
                size = mean(row["bytes"] for row in here) / 2**20
                line[domain.title] = f"{one:.1f} / {many:.1f}, {size:.1f} MiB"
        lines.append(line)
    caption = (
        "Forward passes that a scored prediction takes, at batch 1 / at batch 64, and memory "
        f"beside the network. Rows of {file}."
    )
    return Table(lines, caption)


def _forwards(rows: Sequence[Row], size: int) -> float:
    return float(mean(row[f"ms_b{size}"] / row[f"forward_ms_b{size}"] for row in rows))
