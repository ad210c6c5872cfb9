"""What pages say that code prints, compared with what it prints here."""

from __future__ import annotations

import re

import pytest

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:e-?\d+)?")
# of a score, in forward passes or milliseconds
TIME = re.compile(r"\d[\d.e-]* (x|ms)\b")


def numbers(text: str) -> list[float]:
    """Return all numbers of a text."""
    return [float(number.replace(",", "")) for number in NUMBER.findall(text)]


def assert_alike(printed: str, page: str) -> None:
    """Compare by words, and loosely by numbers: other processors round otherwise.

    Args:
        printed: Here.
        page: What the page shows; ``...`` once stands for any words. Times may be any.
    """
    ours, theirs = (TIME.sub(r"\1", text).split() for text in (printed, page))
    if "..." in theirs and "..." not in ours:
        before = theirs.index("...")
        after = len(theirs) - before - 1
        assert len(ours) >= before + after, (printed, page)
        ours = ours[:before] + ours[len(ours) - after :]
        theirs.remove("...")
    printed, page = " ".join(ours), " ".join(theirs)
    assert NUMBER.sub("#", printed) == NUMBER.sub("#", page)
    for own, other in zip(numbers(printed), numbers(page), strict=True):
        assert own == pytest.approx(other, rel=0.3, abs=0.05), (printed, page)
