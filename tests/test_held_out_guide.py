"""The tables of docs/guides/held_out.md are what `Calibration` itself says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from scodkit import Calibration
from scodkit.errors import CalibrationError

PAGE = Path(__file__).parents[1] / "docs" / "guides" / "held_out.md"
LINES = [
    [cell.strip() for cell in line.strip("| \n").split("|")]
    for line in PAGE.read_text(encoding="utf-8").splitlines()
    if re.match(r"\| [\d,.]+( %)? \|", line)
]
LEAST = [line for line in LINES if line[0].endswith("%")]
RATES = [line for line in LINES if not line[0].endswith("%")]


def calibration(count: str | int) -> Calibration:
    return Calibration(torch.arange(float(str(count).replace(",", ""))))


def percent(cell: str) -> float:
    return float(cell.removesuffix("%")) / 100


def above(held_out: Calibration, confidence: float | None) -> int:
    limit = held_out.threshold(0.05, confidence=confidence)
    return int((held_out.scores > limit).sum())


def test_both_tables_are_found() -> None:
    assert (len(LEAST), len(RATES)) == (4, 8)


@pytest.mark.parametrize("line", LEAST, ids=lambda line: line[0])
def test_a_rate_takes_so_many_samples_and_no_fewer(line: list[str]) -> None:
    rate = percent(line[0])
    for count, confidence in zip(line[1:], (None, 0.9, 0.95, 0.99), strict=True):
        calibration(count).threshold(rate, confidence=confidence)
        with pytest.raises(CalibrationError):
            calibration(int(count) - 1).threshold(rate, confidence=confidence)


@pytest.mark.parametrize("line", RATES, ids=lambda line: line[0])
def test_rates_are_those_of_the_calibration(line: list[str]) -> None:
    held_out = calibration(line[0])
    n = held_out.num_data
    assert percent(line[1]) == pytest.approx(1 / (n + 1), abs=0.0005, rel=0.02)
    assert percent(line[2]) == pytest.approx((above(held_out, None) + 1) / (n + 1), abs=0.0005)
    assert percent(line[3]) == pytest.approx(held_out.false_alarm_bound(0.05), abs=0.0006)
    if line[4] == "refused":
        with pytest.raises(CalibrationError):
            above(held_out, 0.99)
    else:
        assert percent(line[4]) == pytest.approx(
            (above(held_out, 0.99) + 1) / (n + 1), abs=0.0006
        )


def test_the_rule_of_thumb() -> None:
    for count, rate in ((2000, 0.05), (10_000, 0.01)):
        assert calibration(count).false_alarm_bound(rate) == pytest.approx(
            1.25 * rate, rel=0.02
        )
