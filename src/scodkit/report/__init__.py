"""One page that shows a monitor at work, and its numbers."""

from scodkit.report.report import (
    MethodLine,
    Report,
    ScoredSet,
    WatchedStream,
    check_installed,
    read_numbers,
)

__all__ = [
    "MethodLine",
    "Report",
    "ScoredSet",
    "WatchedStream",
    "check_installed",
    "read_numbers",
]
