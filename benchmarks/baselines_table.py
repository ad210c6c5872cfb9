"""The table of the baselines benchmark: rows in, Markdown out."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

# AUROC over the pooled unknown inputs, measured once before with the SCOD authors' code,
# laplace-torch and pytorch-ood, on one other trained network per domain
ANCHORS = {
    ("wine", "scod"): 0.914,
    ("wine", "scod_ll"): 0.911,
    ("wine", "naive"): 0.500,
    ("wine", "deep_ensemble"): 0.804,
    ("wine", "local_ensemble"): 0.930,
    ("wine", "kfac_laplace"): 0.944,
    ("wine", "kfac_laplace_glm"): 0.941,
    ("wine", "kfac_laplace_ll"): 0.947,
    ("wine", "mahalanobis"): 0.937,
    ("wine", "identity_curvature"): 0.936,
    ("rotated mnist", "scod"): 0.942,
    ("rotated mnist", "scod_ll"): 0.950,
    ("rotated mnist", "naive"): 0.500,
    ("rotated mnist", "kfac_laplace"): 0.859,
    ("rotated mnist", "kfac_laplace_glm"): 0.909,
    ("rotated mnist", "kfac_laplace_ll"): 0.749,
    ("rotated mnist", "knn"): 0.903,
    ("rotated mnist", "identity_curvature"): 0.850,
    ("binary mnist", "scod"): 0.985,
    ("binary mnist", "scod_ll"): 0.985,
    ("binary mnist", "naive"): 0.978,
    ("binary mnist", "kfac_laplace_ll"): 0.981,
    ("binary mnist", "kfac_laplace_glm"): 0.982,
    ("binary mnist", "max_softmax"): 0.978,
    ("binary mnist", "knn"): 0.960,
    ("binary mnist", "grad_norm"): 0.532,
    ("mnist 0-4", "scod"): 0.958,
    ("mnist 0-4", "scod_ll"): 0.958,
    ("mnist 0-4", "naive"): 0.955,
    ("mnist 0-4", "kfac_laplace_ll"): 0.957,
    ("mnist 0-4", "kfac_laplace_glm"): 0.959,
    ("mnist 0-4", "knn"): 0.962,
    ("mnist 0-4", "max_softmax"): 0.954,
    ("mnist 0-4", "energy"): 0.905,
}


def print_table(path: Path) -> None:
    """Print mean AUROC over seeds beside the anchors, and write the same beside the rows."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    domains = list(dict.fromkeys(row["domain"] for row in rows))
    methods = list(dict.fromkeys(row["method"] for row in rows))
    lines = [
        "AUROC over the pooled unknown inputs: mean over trained networks (least to most), and",
        "the figure measured before on one other network, where there is one.",
        "",
        "| method | " + " | ".join(domains) + " |",
        "| --- |" + " --: |" * len(domains),
    ]
    for method in methods:
        cells = [_cell(rows, domain, method) for domain in domains]
        lines.append(f"| {method} | " + " | ".join(cells) + " |")
    lines += ["", *_costs(rows, domains, methods)]
    text = "\n".join(lines) + "\n"
    path.with_suffix(".md").write_text(text, encoding="utf-8")
    print(text)


def _cell(rows: list[dict], domain: str, method: str) -> str:
    found = _column(rows, domain, method, "auroc")
    if not found:
        return ""
    text = f"{statistics.mean(found):.3f} ({min(found):.3f} to {max(found):.3f})"
    anchor = ANCHORS.get((domain, method))
    return text if anchor is None else f"{text}, before {anchor:.3f}"


def _column(rows: list[dict], domain: str, method: str, what: str) -> list[float]:
    own = (
        r for r in rows if (r["domain"], r["method"], r["ood"]) == (domain, method, "pooled")
    )
    return [row[what] for row in own]


def _costs(rows: list[dict], domains: list[str], methods: list[str]) -> list[str]:
    about = rows[0]
    lines = [
        f"Median milliseconds a sample at batch 1 / 64, and seconds of the fit, one thread of "
        f"{about['machine']} (not a quiet machine: orders of magnitude).",
        "",
        "| method | " + " | ".join(domains) + " |",
        "| --- |" + " --: |" * len(domains),
    ]
    for method in methods:
        cells = []
        for domain in domains:
            columns = [_column(rows, domain, method, w) for w in ("ms_b1", "ms_b64", "fit_s")]
            one, many, fit = (statistics.median(c) if c else None for c in columns)
            cells.append("" if one is None else f"{one:.2g} / {many:.2g}, {fit:.2g} s")
        lines.append(f"| {method} | " + " | ".join(cells) + " |")
    return lines
