"""What pages say that code prints, compared with what it prints here."""

from __future__ import annotations

import re

import pytest

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:e-?\d+)?")


def numbers(text: str) -> list[float]:
    """Return all numbers of a text."""
    return [float(number.replace(",", "")) for number in NUMBER.findall(text)]


def assert_alike(printed: str, page: str) -> None:
    """Compare by words, and loosely by numbers: other processors round otherwise."""
    assert NUMBER.sub("#", printed).split() == NUMBER.sub("#", page).split()
    for ours, theirs in zip(numbers(printed), numbers(page), strict=True):
        assert ours == pytest.approx(theirs, rel=0.3, abs=0.05), (printed, page)
