"""Do the stated rates hold on real digits? False alarms, discoveries, and drift.

Scores of the paper's MNIST 0-4 network, fitted on 5000 training digits: 5139 test digits 0-4
are split anew into held-out and new data for every repetition; digits 5-9 are the unknown.
``make bench-alarms`` writes rows to results/alarms.jsonl, a table, a figure.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from scipy import stats
from torch import Tensor

from scodbench.speed.real_nets import mnist_net
from scodbench.speed.turns import machine
from scodkit import Calibration, Monitor, predicted_class
from scodkit.alarms import DriftAlarm, OnlineDiscoveries, discoveries

RESULTS = Path("benchmarks/results")
ROWS = RESULTS / "alarms.jsonl"

HELD_OUT = 1000
Rows = Iterator[dict[str, object]]


def scored(monitor: Monitor, which: Tensor) -> tuple[Tensor, Tensor]:
    """Return scores and predicted classes."""
    found = [monitor(batch) for batch in which.split(128)]
    classes = [predicted_class(batch.output) for batch in found]
    return torch.cat([batch.score for batch in found]).double(), torch.cat(classes)


def false_alarms(known: Tensor, classes: Tensor, repetitions: int = 200) -> Rows:
    """Yield the share of alarms on new known digits, split by split."""
    new = 1000
    for repetition in range(repetitions):
        order = torch.randperm(len(known), generator=torch.Generator().manual_seed(repetition))
        held, asked = order[:HELD_OUT], order[HELD_OUT : HELD_OUT + new]
        plain = Calibration(known[held])
        grouped = Calibration(known[held], classes[held])
        for level in (0.01, 0.05, 0.1):
            above = int((known[held] > plain.threshold(level)).sum())
            band = stats.betabinom(new, above + 1, HELD_OUT - above).interval(0.99)
            alarms = plain.flag(known[asked], level)
            row = {"task": "false alarms", "level": level, "repetition": repetition}
            yield {
                **row,
                "method": "one threshold",
                "rate": float(alarms.double().mean()),
                "inside": bool(band[0] <= int(alarms.sum()) <= band[1]),
                "worst class": _worst(alarms, classes[asked]),
            }
            if level > 0.01:  # what is sure of 1 % takes more samples
                # all others: the rate itself is bounded, not that of a few
                sure = plain.flag(known[order[HELD_OUT:]], level, confidence=0.99)
                rate = float(sure.double().mean())
                yield {**row, "method": "confidence=0.99", "rate": rate}
                alarms = grouped.flag(known[asked], level, groups=classes[asked])
                yield {
                    **row,
                    "method": "by predicted class",
                    "rate": float(alarms.double().mean()),
                    "worst class": _worst(alarms, classes[asked]),
                }


def _worst(alarms: Tensor, classes: Tensor) -> float:
    return max(float(alarms[classes == c].double().mean()) for c in classes.unique())


def found_in_mixtures(known: Tensor, novel: Tensor, repetitions: int = 1000) -> Rows:
    """Yield false and true discoveries in batches of 200 with one tenth of unknown digits."""
    for repetition in range(repetitions):
        generator = torch.Generator().manual_seed(repetition)
        order = torch.randperm(len(known), generator=generator)
        calibration = Calibration(known[order[:2000]])
        batch = torch.cat(
            [
                known[order[2000:2180]],
                novel[torch.randperm(len(novel), generator=generator)[:20]],
            ]
        )
        shuffled = torch.randperm(len(batch), generator=generator)
        batch, truth = batch[shuffled], shuffled >= 180
        p_values = calibration.p_value(batch)
        stream = OnlineDiscoveries(0.1)
        methods = {
            "Benjamini-Hochberg": discoveries(p_values, 0.1),
            "online": torch.tensor([stream.push(float(p)) for p in p_values]),
        }
        for method, found in methods.items():
            yield {
                "task": "discoveries",
                "method": method,
                "level": 0.1,
                "repetition": repetition,
                "false": int((found & ~truth).sum()) / max(1, int(found.sum())),
                "power": int((found & truth).sum()) / int(truth.sum()),
            }


def drifts(known: Tensor, novel: Tensor, repetitions: int = 1000) -> Rows:
    """Yield when the martingale alarms: hardly among known digits, soon after others start."""
    for repetition in range(repetitions):
        generator = torch.Generator().manual_seed(repetition)
        order = torch.randperm(len(known), generator=generator)
        calibration = Calibration(known[order[:HELD_OUT]])
        quiet = known[order[HELD_OUT : HELD_OUT + 1000]]
        for level in (0.01, 0.05):
            alarm = DriftAlarm(calibration, false_alarm=level, seed=repetition)
            alarm.push_many(quiet)
            row = {"task": "drift", "level": level, "repetition": repetition}
            yield {**row, "method": "known digits", "alarmed": alarm.alarmed_at is not None}
            if repetition >= 200 or alarm.alarmed_at is not None:
                continue
            alarm.push_many(novel[torch.randperm(len(novel), generator=generator)[:500]])
            at = alarm.alarmed_at
            yield {**row, "method": "5-9 start", "delay": None if at is None else at - 1000}


def measure() -> None:
    """Train, fit, score, and write the rows."""
    net = mnist_net(num_data=5000, num_test=6000)
    monitor = Monitor(net.model, net.likelihood, rank=100)
    monitor.fit(net.fit_on.split(128), progress=False)
    known, classes = scored(monitor, net.known)
    novel, _ = scored(monitor, net.novel)
    with ROWS.with_suffix(".part").open("w", encoding="utf-8") as file:
        for rows in (
            false_alarms(known, classes),
            found_in_mixtures(known, novel),
            drifts(known, novel),
        ):
            for row in rows:
                file.write(json.dumps({**row, **machine("cpu")}) + "\n")
    ROWS.with_suffix(".part").replace(ROWS)


def _of(rows: list[dict[str, Any]], **wanted: object) -> list[dict[str, Any]]:
    return [row for row in rows if all(row[key] == value for key, value in wanted.items())]


def _mean(rows: list[dict[str, Any]], key: str) -> str:
    """Return the mean and its 95 % interval over repetitions."""
    values = [row[key] for row in rows]
    wide = 1.96 * statistics.stdev(values) / len(values) ** 0.5
    return f"{statistics.mean(values):.4f} ± {wide:.4f}"


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as three tables."""
    lines = [
        "| false alarms | level | found | worst class | within the 99 % band |",
        "| --- | --: | --: | --: | --: |",
    ]
    alarms = _of(rows, task="false alarms")
    for method in dict.fromkeys(row["method"] for row in alarms):
        for level in sorted({row["level"] for row in _of(alarms, method=method)}):
            own = _of(alarms, method=method, level=level)
            worst = _mean(own, "worst class") if "worst class" in own[0] else ""
            inside = [row["inside"] for row in own if "inside" in row]
            band = f"{sum(inside)} of {len(inside)}" if inside else ""
            above = sum(row["rate"] > level for row in own)
            if method == "confidence=0.99":
                band = f"(above the level: {above} of {len(own)})"
            lines.append(f"| {method} | {level} | {_mean(own, 'rate')} | {worst} | {band} |")
    lines += ["", "| discoveries | level | false | power |", "| --- | --: | --: | --: |"]
    for method in ("Benjamini-Hochberg", "online"):
        own = _of(rows, task="discoveries", method=method)
        lines.append(f"| {method} | 0.1 | {_mean(own, 'false')} | {_mean(own, 'power')} |")
    lines += [
        "",
        "| drift | level | alarms among known digits | delay after 5-9 start: median, worst |",
        "| --- | --: | --: | --: |",
    ]
    for level in (0.01, 0.05):
        quiet = _of(rows, task="drift", method="known digits", level=level)
        delays = _delays(rows, level)
        share = f"{sum(row['alarmed'] for row in quiet)} of {len(quiet)}"
        delay = f"{statistics.median(delays):.0f}, {max(delays):.0f} of {len(delays)}"
        lines.append(f"| martingale | {level} | {share} | {delay} |")
    return "\n".join(lines) + "\n"


def _delays(rows: list[dict[str, Any]], level: float) -> list[float]:
    started = _of(rows, task="drift", method="5-9 start", level=level)
    return [math.inf if row["delay"] is None else row["delay"] for row in started]


def draw(rows: list[dict[str, Any]]) -> None:
    """Draw how false alarms and delays are spread over repetitions."""
    from scodbench.figures.style import (
        BLUE,
        GREEN,
        ORANGE,
        legend_below,
        panels,
        save_png,
        style,
    )

    colours = {0.01: GREEN, 0.05: BLUE, 0.1: ORANGE}
    titles = (
        "False alarms\n200 splits, 1,000 new\ndigits 0-4 each",
        "Drift alarm\n200 streams, 1,000\nknown digits first",
    )
    with style() as plt:
        figure, (left, right) = panels(plt, titles, height=2.9)
        for level, colour in colours.items():
            own = _of(rows, task="false alarms", method="one threshold", level=level)
            found = [100 * row["rate"] for row in own]
            # whole numbers of alarms: the same number of them in each bin
            edges = [0.25 + 0.5 * i for i in range(-1, 32)]
            shares = [100 / len(found)] * len(found)
            left.hist(found, bins=edges, weights=shares, color=colour, alpha=0.75)
            left.axvline(100 * level, color="black", ls="--", lw=1)
        left.set(xlabel="alarms on known digits (%)\ndashed: asked for", ylabel="% of splits")
        left.set_xlim(-0.25, 15)
        for level in (0.01, 0.05):
            delays = sorted(_delays(rows, level))
            risen = [100 * (i + 1) / len(delays) for i in range(len(delays))]
            label = f"{level:.0%} false alarms, ever"
            right.step(
                [0, *delays], [0, *risen], where="post", color=colours[level], label=label
            )
        right.set(xlabel="digits 5-9 seen\nsince the change", ylabel="% of streams alarmed")
        right.set_xlim(0, 1.05 * max(max(_delays(rows, level)) for level in (0.01, 0.05)))
        legend_below(right, columns=1)
        save_png(figure, RESULTS / "alarms.png")


def main(*, tables: bool) -> None:
    """Measure, then write the table and the figure from the rows.

    Args:
        tables: Only write table and figure of the rows that are there.
    """
    if not tables:
        measure()
    rows = [json.loads(line) for line in ROWS.read_text(encoding="utf-8").splitlines()]
    text = table(rows)
    (RESULTS / "alarms.md").write_text(text, encoding="utf-8")
    draw(rows)
    print(text)
