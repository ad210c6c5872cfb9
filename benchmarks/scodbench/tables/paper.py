"""Tables from rows: the paper's, with its figures beside ours, and today's methods."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from scodbench.domains import DOMAINS
from scodbench.measure import POOLED
from scodbench.methods import METHODS, PAPER, TITLES
from scodbench.names import words
from scodbench.rows import ROWS_FILE, Row, select
from scodbench.tables.paper_values import PAPER_DOMAINS, PAPER_SET, PAPER_TABLE, Reported
from scodbench.tables.summaries import Mean, comparable, domains_in, over_seeds, row_ids

Line = dict[str, str]

_LOW_IS_GOOD = ("fpr95",)
_LEFT = (
    *("domain", "unknown", "method", "claim", "device", "rows", "unknown inputs of"),
    *("score", "way", "inputs", "weights", "best other method"),
)
_SPREAD = "± is half of a 95 % interval over trained networks (Student's t)"


@dataclass(frozen=True)
class Table:
    """Lines of text, all with the same columns.

    Args:
        lines: One dict a line, by the columns' names; Markdown marks what is best.
        caption: What stands above.
        notes: What stands below, a paragraph each.
        sections: In Markdown a table for each of these headings: its columns by their names in
            ``lines``, and what they are called there. None for one table.
    """

    lines: Sequence[Line]
    caption: str = ""
    notes: Sequence[str] = ()
    sections: Mapping[str, Mapping[str, str]] | None = None


def paper_table(rows: Sequence[Row], file: Path | str = ROWS_FILE) -> Table:
    """Return the paper's table: ours, and the paper's figures beside.

    Args:
        rows: All result rows.
        file: Where they are from.

    Returns:
        A line for each domain and method that has figures; the best of a domain are bold.
    """
    rows = comparable(rows)
    lines = []
    for domain in (DOMAINS[name] for name in PAPER_DOMAINS):
        ood = PAPER_SET.get(domain.name, POOLED)
        own = {
            method: list(select(rows, domain=domain.name, method=method, ood=ood))
            for method in PAPER
        }
        figures = {
            name: marked({m: over_seeds(found, name) for m, found in own.items()}, name)
            for name in ("auroc", "aupr", "fpr95")
        }
        for method, found in own.items():
            if method in figures["auroc"]:
                cells = {name: texts.get(method, "") for name, texts in figures.items()}
                reported = PAPER_TABLE.get((domain.name, method))
                prefix = f"{domain.name}/{ood}/{method}"
                about = {
                    "domain": domain.title,
                    "unknown": words(ood),
                    "method": TITLES[method],
                }
                lines.append({**about, **_paper_cells(found, cells, reported, prefix)})
    if not lines:
        return Table([])
    caption = (
        f"Each figure is the mean over the seeds of rows in {file}, whose ids begin "
        f"as said in the last column; {_SPREAD}."
    )
    rule = (
        "AUPR: ours is average precision, with both sets weighing the same (0.5 for a constant "
        "score); the paper's is by the trapezoidal rule (0.75 for a constant score), so the "
        "two are not to be compared. The paper's ms are of its authors' GPU."
    )
    return Table(lines, caption, [rule, *_without_figures(rows, PAPER)])


def _paper_cells(
    found: Sequence[Row], cells: Mapping[str, str], reported: Reported | None, prefix: str
) -> Line:
    """Return a line of the paper's table from the column of seeds on."""
    judged = [row for row in found if row.get("auroc") is not None]
    ms, forward = (over_seeds(judged, name) for name in ("ms_b1", "forward_ms_b1"))
    return {
        "seeds": str(len(judged)),
        "AUROC": cells["auroc"],
        "AUROC, paper": f"{reported.auroc:.3f}" if reported else "",
        "AUPR": cells["aupr"],
        "AUPR, paper": f"{reported.aupr:.3f}" if reported else "",
        "FPR95": cells["fpr95"],
        "ms": f"{ms.value:.3g}" if ms else "",
        "x forward": f"{ms.value / forward.value:.1f}" if ms and forward else "",
        "ms, paper": f"{reported.ms:.3g}" if reported else "",
        "device": judged[0].get("device", ""),
        "rows": f"`{row_ids(prefix, judged)}`",
    }


def methods_table(
    rows: Sequence[Row], file: Path | str = ROWS_FILE, figure: str = "auroc"
) -> Table:
    """Return one line per method, one column per domain and set of unknown inputs.

    In Markdown each domain has its own table.

    Args:
        rows: All result rows.
        file: Where they are from.
        figure: Which figure of them.
    """
    rows = comparable(rows)
    judged = [row for row in rows if row.get(figure) is not None]
    columns = {}
    sections: dict[str, dict[str, str]] = {}
    for domain in domains_in(judged):
        own = list(select(judged, domain=domain.name))
        seeds = len({row["seed"] for row in own})
        section = sections[f"{domain.title} ({seeds})"] = {"method": "method"}
        for ood in dict.fromkeys(row["ood"] for row in own):
            found = {m: over_seeds(own, figure, method=m, ood=ood) for m in METHODS}
            section[f"{domain.name}: {ood}"] = words(ood)
            columns[f"{domain.name}: {ood}"] = marked(found, figure, seeds)
    lines = [
        {"method": title, **{name: texts.get(method, "") for name, texts in columns.items()}}
        for method, title in TITLES.items()
        if any(method in texts for texts in columns.values())
    ]
    if not lines:
        return Table([])
    devices = {row["domain"]: row.get("device", "") for row in judged}
    places = ", ".join(f"{domain} on {device}" for domain, device in devices.items())
    caption = (
        f"{figure.upper()}: each figure is the mean over the rows `domain/set/method/seed` of "
        f"{file} ({places}); {_SPREAD}. Headings give the largest number of networks; a cell "
        "based on fewer networks gives their number in brackets."
    )
    return Table(lines, caption, _without_figures(rows, METHODS), sections)


def marked(
    found: Mapping[str, Mean | None], figure: str = "auroc", networks: int | None = None
) -> dict[str, str]:
    """Return the means that are there as text, the best of them in bold.

    Args:
        found: By name.
        figure: Of what.
        networks: A mean of fewer than so many says of how many; None for none of them.

    Examples:
        >>> marked({"a": Mean(0.9004, None, 1), "b": Mean(0.8996, None, 1), "c": None})
        {'a': '**0.900**', 'b': '**0.900**'}
    """
    sign = -1 if figure in _LOW_IS_GOOD else 1
    # figures that look the same are equally good
    there = {name: (m, sign * round(m.value, 3)) for name, m in found.items() if m}
    best = max((value for _, value in there.values()), default=math.inf)
    texts = {}
    for name, (its, value) in there.items():
        text = f"**{its}**" if value == best else str(its)
        few = networks is not None and its.seeds < networks
        texts[name] = f"{text} ({its.seeds})" if few else text
    return texts


def _plain(cell: str) -> str:
    return re.sub(r"\*\*|`", "", cell).replace("\N{NON-BREAKING HYPHEN}", "-")


def _without_figures(rows: Iterable[Row], methods: Iterable[str]) -> list[str]:
    """Return a line for each method and reason it has no figures somewhere."""
    reasons: dict[tuple[str, str], dict[str, None]] = {}
    for method in methods:
        for row in select(rows, method=method, auroc=None):
            why = re.sub(r"^\w+Error: ", "", str(row.get("why", ""))).split(";")[0]
            reasons.setdefault((method, why), {})[row["domain"]] = None
    return [
        f"No figures for {TITLES[method]} on {', '.join(domains)}: {why}."
        for (method, why), domains in reasons.items()
    ]


def markdown(table: Table) -> str:
    """Return a table as Markdown, "" of one without lines.

    Examples:
        >>> print(markdown(Table([{"method": "scod", "AUROC": "0.9"}], "Ours.")), end="")
        Ours.
        <BLANKLINE>
        | method | AUROC |
        | --- | --: |
        | scod | 0.9 |
    """
    if not table.lines:
        return ""
    if table.sections is None:
        text = _markdown(table.lines)
    else:
        text = "\n".join(
            f"### {heading}\n\n{_markdown(_renamed(table.lines, columns))}"
            for heading, columns in table.sections.items()
        )
    above = f"{table.caption}\n\n" if table.caption else ""
    return above + text + "".join(f"\n{note}\n" for note in table.notes)


def _markdown(lines: Sequence[Line]) -> str:
    head = list(lines[0])
    rule = ["---" if name in _LEFT else "--:" for name in head]
    body = [[unbroken(cell) for cell in line.values()] for line in lines]
    return "".join("| " + " | ".join(cells) + " |\n" for cells in (head, rule, *body))


def unbroken(text: str) -> str:
    r"""Return a cell whose intervals are not broken into lines.

    Examples:
        >>> unbroken("KNN 0.993 ± 0.002 (3)").split(" ")
        ['KNN', '0.993\xa0±\xa00.002', '(3)']
    """
    return text.replace(" ± ", "\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}")


def _renamed(lines: Sequence[Line], columns: Mapping[str, str]) -> list[Line]:
    """Return these columns by other names, without lines that have only their first cell."""
    found = [{new: line[old] for old, new in columns.items()} for line in lines]
    return [line for line in found if any(list(line.values())[1:])]


def comma_separated(table: Table) -> str:
    """Return the lines of a table as CSV, without marks."""
    if not table.lines:
        return ""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(table.lines[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(
        {name: _plain(cell) for name, cell in line.items()} for line in table.lines
    )
    return text.getvalue()
