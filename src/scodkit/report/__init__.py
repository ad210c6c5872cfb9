"""One page that shows a monitor at work."""

from scodkit.report.data import MethodLine, ScoredSet, WatchedStream
from scodkit.report.report import Report, check_installed

__all__ = ["MethodLine", "Report", "ScoredSet", "WatchedStream", "check_installed"]
