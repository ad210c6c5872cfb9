"""The numbers of a report as plain data, and those of two reports side by side."""

from __future__ import annotations

import math
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
import torch

from scodkit import __version__
from scodkit.metrics import Array, Curve
from scodkit.report import rates
from scodkit.report.checks import Check
from scodkit.report.findings import Findings
from scodkit.report.page import Row, Table, cell
from scodkit.report.rates import Rate
from scodkit.report.report import KIND

_THRESHOLDS = 400  # of the slider
_Z = NormalDist().inv_cdf(1 - rates.MISSES / 2)


def document(
    found: Findings,
    checks: Sequence[Check],
    promise: Sequence[Mapping[str, float]],
    errors: Sequence[Mapping[str, float]],
) -> dict[str, Any]:
    """Return all numbers of a report, every one of them finite; what is infinite is None.

    Args:
        found: What was counted.
        checks: With their verdicts.
        promise: False alarms asked for and found.
        errors: Of inputs that were kept.
    """
    report, summary = found.report, found.summary
    monitor, stream = report.monitor, report.stream
    calibration = monitor.calibration
    numbers = {
        "kind": KIND,
        "version": 1,
        "title": report.title,
        "made": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": report.command or None,
        "data": dict(report.data),
        "versions": versions(),
        "model": type(monitor.model).__name__,
        "false_alarm": report.false_alarm,
        "threshold": found.threshold,
        "fit": {
            "inputs": summary.num_data,
            "skipped": summary.skipped,
            "weights": summary.num_parameters,
            "directions": len(summary.values),
            "captured": summary.captured,
            "effective_rank": summary.effective_rank,
        },
        "held_out": None if calibration is None else calibration.num_data,
        "checks": [
            {key: getattr(check, key) for key in ("name", "verdict", "finding", "advice")}
            for check in checks
        ],
        "sets": {one.name: _of_set(found, one.name) for one in report.sets},
        "promise": promise,
        "errors": errors,
        "methods": [asdict(line) for line in report.methods],
        "stream": stream
        and {
            "scores": len(stream.scores),
            "false_alarm": stream.false_alarm,
            "changed_at": stream.changed_at,
            "alarmed_at": stream.alarmed_at,
        },
    }
    finite: dict[str, Any] = _finite(numbers)
    return finite


def versions() -> dict[str, str]:
    """Return the versions of what made the report."""
    python = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    return {"scodkit": __version__, "torch": torch.__version__, "python": python}


def by_kind(found: Findings, name: str) -> dict[str, tuple[Rate | None, Rate | None]]:
    """Return alarms and mistakes of a set by class, sorted by name."""
    kinds = np.array(found.kinds.get(name, ()), dtype=object)
    flags, losses = found.flags.get(name), found.losses.get(name)
    table = {}
    for kind in sorted(set(kinds.tolist())):
        mine = torch.from_numpy(kinds == kind)
        raised = None if flags is None else Rate(int(flags[mine].sum()), int(mine.sum()))
        wrong = None
        if losses is not None and name in found.mistakes:
            wrong = Rate(int(losses[mine].sum()), int(mine.sum()))
        table[kind] = (raised, wrong)
    return table


def _of_set(found: Findings, name: str) -> dict[str, Any]:
    one = next(one for one in found.report.sets if one.name == name)
    levels = torch.tensor([0.05, 0.5, 0.95], dtype=torch.float64)
    low, middle, high = torch.quantile(one.scores, levels, interpolation="lower").tolist()
    curves = found.curves.get(name)
    loss = found.losses.get(name)
    is_share = name in found.mistakes
    return {
        "known": one.known,
        "inputs": len(one),
        "scores": {"5 %": low, "50 %": middle, "95 %": high},
        "alarms": _counted(found.alarms.get(name)),
        "mistakes": _counted(found.mistakes.get(name)),
        "squared_error": None if loss is None or is_share else float(loss.mean()),
        "auroc": curves and _area(curves.roc),
        "aupr": curves and _area(curves.precision_recall),
        "classes": {
            kind: {"alarms": _counted(raised), "mistakes": _counted(wrong)}
            for kind, (raised, wrong) in by_kind(found, name).items()
        },
    }


def _counted(rate: Rate | None) -> dict[str, float] | None:
    if rate is None:
        return None
    low, high = rate.ends
    return {
        "count": rate.count,
        "of": rate.total,
        "value": rate.share,
        "low": low,
        "high": high,
    }


def _area(curve: Curve) -> dict[str, float]:
    return {"value": curve.area, "low": curve.area_low, "high": curve.area_high}


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): _finite(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(part) for part in value]
    return value


def thresholds(found: Findings) -> dict[str, Any] | None:
    """Return what other thresholds would do, for the slider; None without finite scores.

    Args:
        found: What was counted.
    """
    sets, own = found.report.sets, found.threshold
    if not sets:
        return None
    scores = np.unique(np.concatenate([one.scores.numpy() for one in sets]))
    scores = scores[np.isfinite(scores)]
    if not len(scores):
        return None
    places = np.linspace(0, len(scores) - 1, min(len(scores), _THRESHOLDS)).round()
    steps = np.unique(np.append(scores[places.astype(int)], [] if own is None else [own]))
    known = torch.cat([one.scores for one in found.known] or [one.scores for one in sets])
    level = np.quantile(known.numpy(), 1 - found.report.false_alarm, method="lower")
    start = int(np.searchsorted(steps, level if own is None else own).clip(max=len(steps) - 1))
    rows = []
    for one in sets:
        counts = len(one) - np.searchsorted(np.sort(one.scores.numpy()), steps, side="right")
        low, high = rates.exact_intervals(counts, len(one))
        shares = {"low": low.round(5).tolist(), "high": high.round(5).tolist()}
        row = {"name": one.name, "known": one.known, "inputs": len(one), **shares}
        rows.append({**row, "counts": counts.tolist()})
    says = None if own is None else _promised(found, steps, own)
    return {"start": start, "steps": steps.tolist(), "says": says, "sets": rows}


def _promised(found: Findings, steps: Array, own: float) -> list[str]:
    """Return the rate of false alarms that each threshold promises, in words.

    Args:
        found: Of a calibrated monitor.
        steps: The thresholds.
        own: The one of the page.
    """
    calibration, wanted = found.report.monitor.calibration, found.report.false_alarm
    assert calibration is not None
    total = calibration.num_data
    words = []
    for step in steps.tolist():
        above = int((calibration.pooled > step).sum())
        rate = (above + 1) / (total + 1)
        nearest = ""
        if step == own and rates.percent(rate) != rates.percent(wanted):
            nearest = f", the nearest possible below {rates.asked(wanted)}"
        words.append(
            f", for {rates.percent(rate)} false alarms ({above} of {total} held-out inputs "
            f"score higher{nearest})"
        )
    return words


# --- Two reports ---------------------------------------------------------------------------


class _Number(NamedTuple):
    value: float
    low: float | None = None
    high: float | None = None
    is_share: bool = False

    @staticmethod
    def of(found: Mapping[str, float], is_share: bool = False) -> _Number:
        return _Number(found["value"], found["low"], found["high"], is_share)

    @property
    def words(self) -> str:
        if self.low is None or self.high is None:
            return cell(self.value).text
        if self.is_share:
            low, high = rates.percent(self.low), rates.percent(self.high)
            return f"{rates.percent(self.value)} ({low} to {high})"
        return f"{self.value:.3f} ({self.low:.3f} to {self.high:.3f})"


def compared(now: Mapping[str, Any], earlier: Mapping[str, Any]) -> Table:
    """Return a table of the numbers of two reports, with differences beyond noise marked.

    Intervals of differences are made of those of the numbers (Zou and Donner 2008), and so
    wide that among all rows of reports on equal terms one is marked in at most 5 % of cases.

    Args:
        now: Numbers of a report.
        earlier: Of another one.
    """
    numbers, others = dict(_numbers(now)), dict(_numbers(earlier))
    both = [name for name in numbers if name in others]
    tests = sum(numbers[name].low is not None for name in both)
    wider = NormalDist().inv_cdf(1 - rates.MISSES / 2 / max(1, tests)) / _Z
    rows: list[Row] = []
    for name in [*numbers, *(name for name in others if name not in numbers)]:
        mine, theirs = numbers.get(name), others.get(name)
        if mine is None or theirs is None:
            there = "only in this one" if theirs is None else "only in the other"
            rows.append((name, mine and mine.words, theirs and theirs.words, None, there))
            continue
        gap = mine.value - theirs.value
        shown = f"{100 * gap:+.1f} points" if mine.is_share else f"{gap:+.3g}"
        rows.append((name, mine.words, theirs.words, shown, _judged(mine, theirs, wider)))
    caption = (
        "Numbers of both reports, with 95 % intervals; if nothing differs, a row is marked in "
        "at most 5 % of cases"
    )
    return Table(caption, ("number", "this report", "the other", "difference", "verdict"), rows)


def _judged(mine: _Number, theirs: _Number, wider: float) -> str:
    """Return whether a difference is beyond noise, where that can be told."""
    gap = mine.value - theirs.value
    if mine.low is None or mine.high is None or theirs.low is None or theirs.high is None:
        return "the same" if gap == 0 else ""
    down = math.hypot(mine.value - mine.low, theirs.high - theirs.value)
    up = math.hypot(mine.high - mine.value, theirs.value - theirs.low)
    beyond = gap > wider * down or -gap > wider * up
    return "beyond noise" if beyond else "within noise"


def _numbers(report: Mapping[str, Any]) -> Iterator[tuple[str, _Number]]:
    """Yield the numbers that are compared, by their names."""
    for name, one in report["sets"].items():
        for what in ("alarms", "mistakes"):
            if one[what]:
                yield f"{what}, {name}", _Number.of(one[what], is_share=True)
        for what in ("auroc", "aupr"):
            if one[what]:
                yield f"{what.upper()}, {name}", _Number.of(one[what])
        if one["squared_error"] is not None:
            yield f"mean squared error, {name}", _Number(one["squared_error"])
        yield f"inputs, {name}", _Number(one["inputs"])
    single = {
        "false alarms asked for": report["false_alarm"],
        "alarm above, nats": report["threshold"],
        "captured curvature": report["fit"]["captured"],
        "inputs fitted": report["fit"]["inputs"],
        "held-out inputs": report["held_out"],
        "stream alarm at sample": (report["stream"] or {}).get("alarmed_at"),
    }
    yield from ((name, _Number(value)) for name, value in single.items() if value is not None)
